"""DeepSpeed with a transformers model: ds_config.json, a training script and its launch line.

Read in DeepSpeed 0.19.8 (runtime/config.py, runtime/zero/config.py, runtime/tensor_parallel/config.py, module_inject/auto_ep_config.py,
module_inject/auto_ep_folding.py, runtime/sequence_parallel). What needs the model to be written for DeepSpeed (pipelines, MiCS) has no
spelling in a configuration.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem, SpecError
from tuner.hf_config import read_hf_config
from tuner.launch.launchers.hf.model import HfModel, checked_model
from tuner.launch.launchers.hf.train_scripts import DEEPSPEED as TRAIN
from tuner.launch.launchers.hf.trainer_line import LAUNCH, MODEL, SCRIPT, arguments_of, is_launch, read_line, script
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, merged, refused, unspelled
from tuner.launch.launchers.tables.vocabulary import Key, spelled, truth, understood, whole
from tuner.launch.launchers.texts.documents import mapping, nested, placed
from tuner.load import parse_json
from tuner.plan import FULL, OFFLOADS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.job import Job
    from tuner.plan import Plan

CONFIG = "ds_config.json"
_HIGHEST_STAGE = 3
_AUTO = "auto"


def _stage(value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError("must be 0, 1, 2 or 3")
    return int(value)


def _device(value: Any) -> str:
    if value not in ("none", "cpu", "nvme"):
        raise ValueError("must be none, cpu or nvme")
    return "none" if value == "none" else "optimizer"


# A table entry is written and read: what ds_config.json says of job and plan.
KEYS = (
    Key(path="train_batch_size", name="train_batch", take=whole),
    Key(path="train_micro_batch_size_per_gpu", name="micro_batch", take=whole),
    Key(path="gradient_accumulation_steps", name="accumulation", take=whole),
    Key(path="bf16.enabled", name="bf16", take=truth),
    Key(path="fp16.enabled", name="fp16", take=truth),
    Key(path="zero_optimization.stage", name="zero", take=_stage),
    Key(path="zero_optimization.overlap_comm", name="dp_overlap", take=truth),
    Key(
        path="zero_optimization.offload_optimizer.device",
        name="offload",
        put=lambda offload: "cpu" if offload == "optimizer" else None,
        take=_device,
    ),
    Key(path="tensor_parallel.autotp_size", name="tp", take=lambda size: 1 if size == 0 else whole(size)),
    Key(path="tensor_parallel.tp_overlap_comm", name="tp_overlap", take=truth),
    Key(path="sequence_parallel_size", name="cp", take=whole),
    Key(path="expert_parallel.enabled", name="experts", take=truth),
    Key(path="expert_parallel.autoep_size", name="ep", take=whole),
    Key(path="expert_parallel.preset_model", name="family"),
    Key(path="bfloat16.enabled", name="bf16", take=truth, written=False),
)
# Keys that concern neither step time nor memory as they are modelled, or only where they have another value than the default.
IDLE: dict[str, tuple[Any, ...] | None] = {
    "optimizer.type": ("Adam", "AdamW"),
    "optimizer.params.": None,
    "scheduler.": None,
    "gradient_clipping": None,
    "steps_per_print": None,
    "wall_clock_breakdown": None,
    "dump_state": None,
    "prescale_gradients": None,
    "fp16.": None,
    "tensorboard.": None,
    "wandb.": None,
    "csv_monitor.": None,
    "checkpoint.": None,
    "zero_allow_untested_optimizer": None,
    "zero_force_ds_cpu_optimizer": None,
    "zero_optimization.reduce_bucket_size": (500_000_000, 5e8, _AUTO),
    "zero_optimization.allgather_bucket_size": (500_000_000, 5e8, _AUTO),
    "zero_optimization.allgather_partitions": (True,),
    "zero_optimization.reduce_scatter": (True,),
    "zero_optimization.contiguous_gradients": (True,),
    "zero_optimization.sub_group_size": None,
    "zero_optimization.stage3_prefetch_bucket_size": (50_000_000, 5e7, _AUTO),
    "zero_optimization.stage3_param_persistence_threshold": (100_000, 1e5, _AUTO),
    "zero_optimization.stage3_max_live_parameters": (1_000_000_000, 1e9, _AUTO),
    "zero_optimization.stage3_max_reuse_distance": (1_000_000_000, 1e9, _AUTO),
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": None,
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": None,
    "zero_optimization.round_robin_gradients": (False,),
    "zero_optimization.offload_optimizer.pin_memory": None,
    "zero_optimization.offload_param.device": ("none",),
    "zero_optimization.offload_param.pin_memory": None,
    "zero_optimization.zero_hpz_partition_size": (1,),
    "zero_optimization.mics_shard_size": (-1,),
}
_MARKS = ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size")
_PIPELINE = "needs the model as a deepspeed.pipe.PipelineModule, which is code: Megatron-DeepSpeed has it"


@dataclass(frozen=True, slots=True)
class DeepSpeed:
    """ds_config.json, train.py, model/config.json and launch.sh."""

    name: str = "deepspeed"
    framework: str = "deepspeed"
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Fields of a plan that a configuration or the training script's arguments spell."""
        said = {
            "tp": "tensor_parallel.autotp_size",
            "cp": "sequence_parallel_size (Ulysses)",
            "cp_kind": "sequence_parallel_size: Ulysses exchanges by a2a, there is no other kind",
            "ep": "expert_parallel.autoep_size",
            "micro_batch": "train_micro_batch_size_per_gpu",
            "recompute": "--gradient_checkpointing of train.py",
            "zero": "zero_optimization.stage",
            "offload": "zero_optimization.offload_optimizer.device",
            "tp_overlap": "tensor_parallel.tp_overlap_comm",
            "dp_overlap": "zero_optimization.overlap_comm",
        }
        return MappingProxyType(said)

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields that have no spelling, and why."""
        return MappingProxyType(
            {
                "pp": _PIPELINE,
                "vpp": _PIPELINE,
                "schedule": _PIPELINE,
                "embedding_layers": _PIPELINE,
                "loss_layers": _PIPELINE,
                "etp": "expert_parallel.expert_tensor_parallel_size is reserved and refused above 1",
                "sequence_parallel": "AutoTP keeps whole sequences on each tensor-parallel rank",
                "recompute_layers": "transformers' gradient checkpointing recomputes all layers or none",
                "shard_group": "MiCS needs deepspeed.zero.MiCS_Init where the model is built, which is code",
                "ep_overlap": "AutoEP does not run its dispatch beside other work",
                "cuda_graphs": "there are none in training",
                "fallback_tp": "a job whose GPU failed is restarted as a whole",
                "idle_tp": "a plan that is launched has no idle ranks",
            }
        )

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return the files. Raises SpecError listing every knob, or combination of knobs, that cannot be spelled."""
        del version
        model, problems = checked_model(job, self.name)
        problems += unspelled(self, plan) + _refusals(job, plan, model)
        if problems or model is None:
            raise SpecError(problems)
        settings = _settings(job, plan, model)
        config = nested(spelled(KEYS, settings)) | {
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            "gradient_clipping": 1.0,
            "steps_per_print": 10,
        }
        return Written(
            files={
                CONFIG: json.dumps(config, indent=2) + "\n",
                MODEL: json.dumps(model.config, indent=2) + "\n",
                SCRIPT: TRAIN,
                LAUNCH: _launch(job, settings),
            },
            programs=(LAUNCH,),
            start=f"bash {LAUNCH}",
            notes=tuple(_notes(job, plan)),
        )

    def reads(self, name: str, text: str) -> bool:
        """Whether this is a ds_config.json, or a script that launches with DeepSpeed."""
        if name.endswith(".json"):
            return any(f'"{mark}"' in text[:100_000] for mark in _MARKS)
        program = is_launch(text) if name.endswith((".sh", ".slurm", ".sbatch")) else ""
        return program == "deepspeed" or (program == "torchrun" and "deepspeed" in text[:200_000])

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what ds_config.json, the launch script and a config.json say."""
        settings: list[Mapping[str, Any]] = []
        places: dict[str, str] = {}
        unknown: list[Unknown] = []
        problems: list[Problem] = []
        assumed: dict[str, str] = {}
        model: dict[str, Any] = {}
        for name, text in files.items():
            if not name.endswith(".json"):
                line = read_line(text, name)
                settings.insert(0, line.settings)  # what ds_config.json says counts
                places = line.places | places
                unknown += line.unknown
                problems += line.problems
                continue
            document = mapping(parse_json(text, name), name)
            if "model_type" in document:
                model = read_hf_config(document, name).model_dump(mode="json", exclude_defaults=True)
                continue
            told, left = _without_auto(document)
            assumed |= dict.fromkeys(left, "auto: what the trainer's arguments say")
            taken = understood(KEYS, placed(told, text, name), IDLE)
            settings.append(taken.settings)
            places |= taken.places
            unknown += taken.unknown
            problems += taken.problems
        if problems:
            raise SpecError(problems)
        return _found(merged(settings), places, tuple(unknown), assumed, model)


def _refusals(job: Job, plan: Plan, model: HfModel | None) -> list[Problem]:
    """Return what is wrong with combinations of knobs that each have a spelling."""
    found = []
    if job.precision not in ("bf16", "fp16", "fp32"):
        found.append(refused("deepspeed", "precision", job.precision, "has no spelling: bf16, fp16 and fp32 have", "precision=bf16"))
    if job.task != "pretrain":
        found.append(refused("deepspeed", "task", job.task, "is not written: train.py trains all weights", "task=pretrain"))
    if plan.cp > 1 and plan.cp_kind != 2:
        found.append(refused("deepspeed", "cp_kind", "p2p or all_gather", "Ulysses exchanges by a2a alone", "cp_kind=a2a"))
    if plan.cp > 1 and plan.tp > 1:
        rule = "AutoTP and Ulysses each take the one model-parallel group that DeepSpeed is told of"
        found.append(refused("deepspeed", "cp", plan.cp, rule, "tp=1 or cp=1"))
    if plan.offload & OFFLOADS["activations"]:
        found.append(refused("deepspeed", "offload", "activations", "cpu_checkpointing needs the model's own calls", "offload=optimizer"))
    if plan.offload & OFFLOADS["optimizer"] and plan.zero == 0:
        found.append(refused("deepspeed", "offload", "optimizer", "offload_optimizer is part of ZeRO 1 to 3", "zero=1"))
    if plan.dp_overlap and plan.zero == 0:
        found.append(refused("deepspeed", "dp_overlap", "true", "overlap_comm is part of ZeRO 1 to 3", "zero=1"))
    if plan.tp_overlap and plan.tp == 1:
        found.append(refused("deepspeed", "tp_overlap", "true", "tp_overlap_comm is part of AutoTP", "tp=2 or more"))
    if plan.recompute not in (0, FULL):
        found.append(refused("deepspeed", "recompute", "modules", "gradient checkpointing recomputes whole layers", "recompute=full"))
    if plan.ep > 1 and model is not None and not model.experts:
        rule = f"AutoEP has no preset for {model.config['model_type']}"
        found.append(refused("deepspeed", "ep", plan.ep, rule, "ep=1"))
    if plan.ep > 1 and plan.tp > 1 and plan.offload:
        found.append(refused("deepspeed", "offload", "optimizer", "is refused with AutoEP and AutoTP together", "offload=none"))
    return found


def _settings(job: Job, plan: Plan, model: HfModel) -> dict[str, Any]:
    """Return what KEYS and ARGUMENTS spell. A train_batch_size is checked against micro x steps x world, and under AutoTP that world counts
    tensor-parallel ranks too (runtime/config.py): it is left out there, for DeepSpeed to fill in.
    """
    tp, cp, ep = int(plan.tp), int(plan.cp), int(plan.ep)
    return {
        "train_batch": job.global_batch if tp == 1 else None,
        "micro_batch": int(plan.micro_batch),
        "accumulation": int(plan.microbatches(job.gpus, job.global_batch)),
        "bf16": True if job.precision == "bf16" else None,
        "fp16": True if job.precision == "fp16" else None,
        "zero": int(plan.zero),
        "dp_overlap": bool(plan.dp_overlap) if plan.zero else None,
        "offload": "optimizer" if plan.offload else "none",
        "tp": tp if tp > 1 else None,
        "tp_overlap": bool(plan.tp_overlap) if tp > 1 else None,
        "cp": cp if cp > 1 else None,
        "experts": True if ep > 1 else None,
        "ep": ep if ep > 1 else None,
        "family": model.experts if ep > 1 else None,
        "recompute": bool(plan.recompute),
        "seq_len": job.seq_len,
        "attention": job.attention,
    }


def _launch(job: Job, settings: Mapping[str, Any]) -> str:
    exports = [
        "# Blocks of memory that grow in place: what allocations of changing size leave unused stays small.",
        'export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"',
        "# Collectives that run beside products need queues of their own; 1, as Megatron-LM wants it, lines them up behind those.",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    ]
    told = arguments_of(settings, ("seq_len", "attention", "recompute"))
    command = [
        'exec torchrun --nnodes="$NNODES" --nproc-per-node="$GPUS_PER_NODE"',
        '--node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT"',
        f'{SCRIPT} --deepspeed_config {CONFIG} --model_name_or_path model --max_steps "$STEPS"',
        " ".join(told),
    ]
    return script(job, "deepspeed", exports, command)


def _notes(job: Job, plan: Plan) -> list[str]:
    notes = [
        "Checkpoints: ZeRO's are bound to their layout; ds_to_universal.py makes one that others load (checkpoint.load_universal).",
        "DeepSpeed's own launcher does as well: deepspeed --hostfile HOSTS train.py with the arguments of launch.sh.",
    ]
    if plan.zero < _HIGHEST_STAGE:
        notes.append("Each rank builds the whole model on its GPU before it is cut (zero 3 does not): that peak is not in the estimate.")
    if plan.ep > 1:
        notes.append(
            "AutoEP of DeepSpeed 0.19.8 failed with transformers 5.24 (TypeError in recording the router's logits): try another release."
        )
    if job.model.mtp_layers:
        notes.append("transformers does not build the layers of multi-token prediction: their time and memory are in the estimate alone.")
    return notes


def _without_auto(document: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the document without the values "auto" of keys that are read, and where those stood."""
    left: list[str] = []

    def cut(inner: dict[str, Any], above: str) -> dict[str, Any]:
        out = {}
        for key, value in inner.items():
            path = f"{above}{key}"
            if isinstance(value, dict):
                out[key] = cut(value, f"{path}.")
            elif value == _AUTO and any(path == known.path for known in KEYS):
                left.append(path)
            else:
                out[key] = value
        return out

    return cut(document, ""), left


def _found(
    settings: Mapping[str, Any],
    places: Mapping[str, str],
    unknown: tuple[Unknown, ...],
    assumed: Mapping[str, str],
    model: Mapping[str, Any],
) -> Found:
    """Return the settings as job and plan: train_batch_size = micro x accumulation x ranks that see tokens of their own."""
    plan: dict[str, Any] = {name: settings[name] for name in ("tp", "zero", "offload", "tp_overlap", "dp_overlap") if name in settings}
    told = dict(assumed)
    if settings.get("cp", 1) > 1:
        plan |= {"cp": settings["cp"], "cp_kind": "a2a"}
    if settings.get("experts", "ep" in settings) and settings.get("ep", 1) > 1:
        plan["ep"] = settings["ep"]
    if settings.get("recompute"):
        plan["recompute"] = "full"
    if settings.get("zero") == _HIGHEST_STAGE and "dp_overlap" not in settings:
        plan["dp_overlap"] = True
        told["dp_overlap"] = "zero_optimization.overlap_comm is on for stage 3 where it is not told"
    if settings.get("zero", 0) == 0 and plan.get("dp_overlap"):
        plan.pop("dp_overlap")
        told["dp_overlap"] = "overlap_comm does nothing without ZeRO"
    sizes, problems = _batch(settings, places)
    if "micro_batch" in sizes:
        plan["micro_batch"] = sizes["micro_batch"]
    job: dict[str, Any] = {name: settings[name] for name in ("seq_len", "attention") if name in settings}
    if "global_batch" in sizes:
        job["global_batch"] = sizes["global_batch"]
    both = [name for name in ("bf16", "fp16") if settings.get(name)]
    if len(both) > 1:
        problems.append(Problem(where=places["fp16"], path="fp16.enabled", value="true", rule="bf16 and fp16 exclude each other"))
    if both or {"bf16", "fp16"} & set(settings):
        job["precision"] = both[0] if both else "fp32"
    gpus = settings.get("gpus")
    each = settings.get("each") or (gpus // settings.get("nodes", 1) if gpus else None)
    return Found(
        framework="deepspeed",
        model=model,
        job=job,
        plan=plan,
        gpus=gpus,
        gpus_per_node=each,
        unknown=unknown,
        assumed=told,
        problems=tuple(problems),
    )


def _batch(settings: Mapping[str, Any], places: Mapping[str, str]) -> tuple[dict[str, int], list[Problem]]:
    """Return micro_batch and global_batch as far as they follow. DeepSpeed's world is all ranks but those that share a sequence."""
    micro, steps, whole = (settings.get(name) for name in ("micro_batch", "accumulation", "train_batch"))
    gpus, tp, cp = settings.get("gpus"), settings.get("tp", 1), settings.get("cp", 1)
    found: dict[str, int] = {} if micro is None else {"micro_batch": micro}
    if gpus is None or gpus % (tp * cp):
        if whole is not None and tp == 1:
            found["global_batch"] = whole
        return found, []
    world = gpus // cp
    if whole is not None and micro is None and whole % (world * (steps or 1)) == 0:
        found["micro_batch"] = micro = whole // (world * (steps or 1))
    if whole is not None and micro is not None and steps is None and whole % (world * micro) == 0:
        steps = whole // (world * micro)
    if micro is not None and (steps is not None or whole is None):
        made = micro * (steps or 1) * world
        if whole is not None and whole != made:
            rule = f"must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x world = {micro} x {steps} x {world} = {made}"
            return found, [Problem(where=places["train_batch"], path="train_batch_size", value=str(whole), rule=rule)]
        found["global_batch"] = made // tp
    elif whole is not None:
        rule = f"must be a multiple of train_micro_batch_size_per_gpu x world = {micro or 1} x {world}"
        return found, [Problem(where=places["train_batch"], path="train_batch_size", value=str(whole), rule=rule)]
    return found, []


def open_launcher() -> Launcher:
    """Return the launcher."""
    return DeepSpeed()
