"""Hugging Face Accelerate with FSDP2: accelerate.yaml (parallelism_config and fsdp_config), a training script and its launch line.

Read in accelerate 1.15 (parallelism_config.py, utils/dataclasses.py, utils/fsdp_utils.py, commands/launch.py, commands/config). Its
context parallelism is PyTorch's ring attention: "alltoall" hands keys and values to the next rank, "allgather" gathers them
(torch/distributed/tensor/experimental/_context_parallel). Sequences by Ulysses are DeepSpeed's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import yaml

from tuner.cluster import nodes_of
from tuner.errors import Problem, SpecError
from tuner.hf_config import read_hf_config
from tuner.launch.launchers.hf.model import HfModel, checked_model
from tuner.launch.launchers.hf.train_scripts import ACCELERATE as TRAIN
from tuner.launch.launchers.hf.trainer_line import LAUNCH, MODEL, SCRIPT, arguments_of, is_launch, read_line, script
from tuner.launch.launchers.launcher import Found, Launcher, Unknown, Written, merged, refused, unspelled
from tuner.launch.launchers.tables.vocabulary import Key, spelled, truth, understood, whole
from tuner.launch.launchers.texts.documents import from_yaml, mapping, nested
from tuner.load import parse_json
from tuner.plan import CP_KINDS, FULL, OFFLOADS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.job import Job
    from tuner.plan import Plan

CONFIG = "accelerate.yaml"
_RING = {"alltoall": "p2p", "allgather": "all_gather"}
_FSDP, _DDP, _ONE, _DEEPSPEED = "FSDP", "MULTI_GPU", "NO", "DEEPSPEED"
_STRATEGIES = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2, "NO_SHARD": 0, "HYBRID_SHARD": 3, "HYBRID_SHARD_ZERO2": 2}
_PRECISIONS = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "no": "fp32"}


def _one_of(words: Mapping[str, Any]) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        word = "no" if value is False else str(value)  # YAML takes no for false
        if word not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return words[word]

    return read


def _reshard(value: Any) -> Any:
    """A truth value with fsdp_version 2, a sharding strategy with 1."""
    return _STRATEGIES[str(value).upper()] if str(value).upper() in _STRATEGIES else 3 if truth(value) else 2


def _stage(value: Any) -> int:
    if isinstance(value, bool) or value not in (0, 1, 2, 3):
        raise ValueError("must be 0, 1, 2 or 3")
    return int(value)


def _device(value: Any) -> bool:
    if value not in ("none", "cpu", "nvme"):
        raise ValueError("must be none, cpu or nvme")
    return bool(value != "none")


_SIZES = "parallelism_config.parallelism_config_"
KEYS = (
    Key(path="distributed_type", name="kind"),
    Key(path="mixed_precision", name="precision", put=lambda name: "no" if name == "fp32" else name, take=_one_of(_PRECISIONS)),
    Key(path="num_machines", name="nodes", take=whole),
    Key(path="num_processes", name="gpus", take=whole),
    Key(path="fsdp_config.fsdp_version", name="version", take=whole),
    Key(path="fsdp_config.fsdp_reshard_after_forward", name="zero", put=lambda zero: zero == 3, take=_reshard),
    Key(path="fsdp_config.fsdp_activation_checkpointing", name="checkpointing", take=truth),
    Key(path="fsdp_config.fsdp_offload_params", name="offload", take=truth),
    Key(path="fsdp_config.fsdp_transformer_layer_cls_to_wrap", name="layer"),
    Key(path=f"{_SIZES}dp_replicate_size", name="replicate", take=whole),
    Key(path=f"{_SIZES}dp_shard_size", name="shard", take=whole),
    Key(path=f"{_SIZES}tp_size", name="tp", take=whole),
    Key(path=f"{_SIZES}cp_size", name="cp", take=whole),
    Key(
        path=f"{_SIZES}cp_comm_strategy",
        name="cp_kind",
        put=lambda kind: next(word for word, ours in _RING.items() if ours == kind),
        take=_one_of(_RING),
    ),
    Key(path=f"{_SIZES}sp_size", name="sp", take=whole, written=False),
    Key(path="fsdp_config.fsdp_sharding_strategy", name="strategy", take=lambda value: str(value).upper(), written=False),
    Key(path="deepspeed_config.zero_stage", name="stage", take=_stage, written=False),
    Key(path="deepspeed_config.gradient_accumulation_steps", name="accumulation", take=whole, written=False),
    Key(path="deepspeed_config.offload_optimizer_device", name="offload", take=_device, written=False),
)
IDLE: dict[str, tuple[Any, ...] | None] = {
    "compute_environment": None,
    "debug": None,
    "downcast_bf16": None,
    "enable_cpu_affinity": None,
    "gpu_ids": None,
    "machine_rank": None,
    "main_process_ip": None,
    "main_process_port": None,
    "main_training_function": None,
    "rdzv_backend": None,
    "same_network": None,
    "use_cpu": (False,),
    "tpu_env": None,
    "tpu_use_cluster": None,
    "tpu_use_sudo": None,
    "fsdp_config.fsdp_auto_wrap_policy": ("TRANSFORMER_BASED_WRAP",),
    "fsdp_config.fsdp_backward_prefetch": ("BACKWARD_PRE", "BACKWARD_PREFETCH"),
    "fsdp_config.fsdp_backward_prefetch_policy": ("BACKWARD_PRE",),
    "fsdp_config.fsdp_cpu_ram_efficient_loading": None,
    "fsdp_config.fsdp_forward_prefetch": (False,),
    "fsdp_config.fsdp_state_dict_type": None,
    "fsdp_config.fsdp_sync_module_states": None,
    "fsdp_config.fsdp_use_orig_params": None,
    f"{_SIZES}cp_backend": ("torch",),
    f"{_SIZES}sp_backend": ("deepspeed",),
    "deepspeed_config.zero3_init_flag": None,
    "deepspeed_config.zero3_save_16bit_model": None,
    "deepspeed_config.gradient_clipping": None,
    "deepspeed_config.deepspeed_multinode_launcher": None,
    "deepspeed_config.offload_param_device": ("none",),
}
_MARKS = ("distributed_type:", "fsdp_config:", "parallelism_config:", "deepspeed_config:")
_NO_PIPELINE = "Accelerate has no pipeline parallelism in training"
_NO_EXPERTS = "Accelerate has no expert parallelism of its own"


@dataclass(frozen=True, slots=True)
class Accelerate:
    """accelerate.yaml, train.py, model/config.json and launch.sh."""

    name: str = "accelerate"
    framework: str = "accelerate"
    versions: tuple[str, ...] = ()

    @property
    def says(self) -> Mapping[str, str]:
        """Fields of a plan that the configuration or the training script's arguments spell."""
        said = {
            "tp": "parallelism_config_tp_size",
            "cp": "parallelism_config_cp_size",
            "cp_kind": "parallelism_config_cp_comm_strategy: alltoall is the ring (p2p), allgather all_gather",
            "micro_batch": "--per_device_train_batch_size of train.py",
            "recompute": "fsdp_activation_checkpointing (without FSDP --gradient_checkpointing of train.py)",
            "zero": "distributed_type MULTI_GPU for 0; fsdp_reshard_after_forward false for 2, true for 3",
            "shard_group": "parallelism_config_dp_shard_size x parallelism_config_cp_size",
            "offload": "fsdp_offload_params",
            "dp_overlap": "always on: FSDP2 prefetches, DDP reduces by buckets",
        }
        return MappingProxyType(said)

    @property
    def cannot(self) -> Mapping[str, str]:
        """Fields that have no spelling, and why."""
        return MappingProxyType(
            {
                "pp": _NO_PIPELINE,
                "vpp": _NO_PIPELINE,
                "schedule": _NO_PIPELINE,
                "embedding_layers": _NO_PIPELINE,
                "loss_layers": _NO_PIPELINE,
                "ep": _NO_EXPERTS,
                "etp": _NO_EXPERTS,
                "ep_overlap": _NO_EXPERTS,
                "sequence_parallel": "transformers' plans keep whole sequences on each tensor-parallel rank",
                "recompute_layers": "every wrapped layer is recomputed, or none",
                "tp_overlap": "TorchTensorParallelConfig.enable_async_tp is ignored",
                "cuda_graphs": "there are none without torch.compile",
                "fallback_tp": "a job whose GPU failed is restarted as a whole",
                "idle_tp": "a plan that is launched has no idle ranks",
            }
        )

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return the files. Raises SpecError listing every knob, or combination of knobs, that cannot be spelled."""
        del version
        model, problems = checked_model(job, self.name)
        problems += unspelled(self, plan) + _refusals(job, plan)
        if problems or model is None:
            raise SpecError(problems)
        settings = _settings(job, plan, model)
        document = {"compute_environment": "LOCAL_MACHINE", **nested(spelled(KEYS, settings)), "rdzv_backend": "static", "use_cpu": False}
        if plan.zero:
            document["fsdp_config"] |= {
                "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "fsdp_cpu_ram_efficient_loading": True,
                "fsdp_state_dict_type": "SHARDED_STATE_DICT",
            }
        return Written(
            files={
                CONFIG: yaml.safe_dump(document, sort_keys=False),
                MODEL: json.dumps(model.config, indent=2) + "\n",
                SCRIPT: TRAIN,
                LAUNCH: _launch(job, settings),
            },
            programs=(LAUNCH,),
            start=f"bash {LAUNCH}",
            notes=tuple(_notes(job, plan)),
        )

    def reads(self, name: str, text: str) -> bool:
        """Whether this is a configuration of Accelerate, or a script that launches with it."""
        if name.endswith((".yaml", ".yml")):
            return any(line.startswith(_MARKS) for line in text[:100_000].splitlines())
        return name.endswith((".sh", ".slurm", ".sbatch")) and is_launch(text) == "accelerate"

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what the configuration, the launch script and a config.json say."""
        settings: list[Mapping[str, Any]] = []
        places: dict[str, str] = {}
        unknown: list[Unknown] = []
        problems: list[Problem] = []
        model: dict[str, Any] = {}
        for name, text in files.items():
            if name.endswith(".json"):
                model = _model(parse_json(text, name), name)
            elif name.endswith((".yaml", ".yml")):
                taken = understood(KEYS, from_yaml(text, name), IDLE)
                settings.insert(0, taken.settings)
                places = taken.places | places
                unknown += taken.unknown
                problems += taken.problems
            else:
                line = read_line(text, name)
                settings.append(line.settings)  # the command line wins
                places |= line.places
                unknown += line.unknown
                problems += line.problems
        if problems:
            raise SpecError(problems)
        return _found(merged(settings), places, tuple(unknown), model)


def _model(document: Any, name: str) -> dict[str, Any]:
    model: dict[str, Any] = read_hf_config(mapping(document, name), name).model_dump(mode="json", exclude_defaults=True)
    return model


def _refusals(job: Job, plan: Plan) -> list[Problem]:
    """Return what is wrong with combinations of knobs that each have a spelling."""
    me, found = "accelerate", []
    dp, cp, group = int(plan.dp(job.gpus)), int(plan.cp), int(plan.shard_group)
    if job.precision not in ("bf16", "fp16", "fp32"):
        rule = "is not written: fp8 needs a backend and its recipe (fp8_config)"
        found.append(refused(me, "precision", job.precision, rule, "precision=bf16"))
    if job.task != "pretrain":
        found.append(refused(me, "task", job.task, "train.py trains all weights", "task=pretrain"))
    if plan.zero == 1:
        found.append(refused(me, "zero", 1, "FSDP shards gradients with the optimizer", "zero=0, 2 or 3"))
    if plan.zero == 0 and (plan.tp > 1 or cp > 1):
        found.append(refused(me, "zero", 0, "tensor and context parallelism need FSDP beside them", "zero=3"))
    if plan.zero and dp * cp == 1:
        found.append(
            refused(me, "zero", plan.zero, "there is one data-parallel rank: FSDP has nothing to shard over", "zero=0, or a lower tp")
        )
    if plan.zero and group and (group % cp or group // cp == 1 < dp):
        rule = "must be a multiple of cp, and more than cp: FSDP shards over dp_shard_size x cp_size"
        found.append(refused(me, "shard_group", group, rule, f"shard_group={2 * cp}"))
    if cp > 1 and plan.cp_kind == CP_KINDS["a2a"]:
        found.append(refused(me, "cp_kind", "a2a", "its ring attention hands on or gathers keys and values", "cp_kind=p2p"))
    if plan.recompute not in (0, FULL):
        found.append(refused(me, "recompute", "modules", "checkpointing recomputes whole layers", "recompute=full"))
    if plan.offload & OFFLOADS["activations"]:
        found.append(refused(me, "offload", "activations", "only inputs of recomputed layers can be offloaded", "offload=optimizer"))
    if plan.offload & OFFLOADS["optimizer"] and not plan.zero:
        found.append(refused(me, "offload", "optimizer", "fsdp_offload_params is FSDP's", "zero=3"))
    if not plan.dp_overlap and dp * cp > 1:
        found.append(refused(me, "dp_overlap", "false", "neither FSDP2 nor DDP can be told not to overlap", "dp_overlap=true"))
    return found


def _settings(job: Job, plan: Plan, model: HfModel) -> dict[str, Any]:
    """Return what KEYS and ARGUMENTS spell."""
    dp, tp, cp = int(plan.dp(job.gpus)), int(plan.tp), int(plan.cp)
    shard = (int(plan.shard_group) or dp * cp) // cp
    settings: dict[str, Any] = {
        "kind": _FSDP if plan.zero else _DDP if job.gpus > 1 else _ONE,
        "precision": job.precision,
        "nodes": nodes_of(job.cluster, "accelerate").count,
        "gpus": job.gpus,
        "micro_batch": int(plan.micro_batch),
        "accumulation": int(plan.microbatches(job.gpus, job.global_batch)),
        "seq_len": job.seq_len,
        "attention": job.attention,
        "recompute": bool(plan.recompute) and not plan.zero,
    }
    if plan.zero:
        settings |= {
            "version": 2,
            "zero": int(plan.zero),
            "checkpointing": bool(plan.recompute),
            "offload": bool(plan.offload),
            "layer": model.layer,
            "replicate": dp // shard,
            "shard": shard,
            "tp": tp,
            "cp": cp,
            "cp_kind": {code: kind for kind, code in CP_KINDS.items()}[int(plan.cp_kind)] if cp > 1 else None,
        }
    return settings


def _launch(job: Job, settings: Mapping[str, Any]) -> str:
    exports = [
        "# Blocks of memory that grow in place: what allocations of changing size leave unused stays small.",
        'export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"',
        "# FSDP's collectives run beside products and need queues of their own; 1, as Megatron-LM wants it, lines them up behind those.",
        "unset CUDA_DEVICE_MAX_CONNECTIONS",
    ]
    told = arguments_of(settings, ("seq_len", "micro_batch", "accumulation", "attention", "recompute"))
    command = [
        f"exec accelerate launch --config_file {CONFIG}",
        '--num_machines "$NNODES" --num_processes "$((NNODES * GPUS_PER_NODE))" --machine_rank "$NODE_RANK"',
        '--main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT"',
        f'{SCRIPT} --model_name_or_path model --max_steps "$STEPS"',
        " ".join(told),
    ]
    return script(job, "accelerate", exports, command)


def _notes(job: Job, plan: Plan) -> list[str]:
    notes = [
        "Checkpoints: with fsdp_state_dict_type SHARDED_STATE_DICT they are PyTorch's distributed ones, which load into another layout."
        if plan.zero
        else "Checkpoints are those of one rank: they load into another layout.",
    ]
    if plan.tp > 1:
        notes.append(
            "Tensor parallelism: transformers cuts weights as it reads them, so model/ must hold some: python train.py --write_weights "
            "--max_seq_length 1 --per_device_train_batch_size 1 writes random ones. How a plan is passed changes between its releases "
            "(tp_plan, DistributedConfig): build_model does as accelerate's examples/fsdp2/nd_parallel.py."
        )
    if job.model.mtp_layers:
        notes.append("transformers does not build the layers of multi-token prediction: their time and memory are in the estimate alone.")
    return notes


def _found(settings: Mapping[str, Any], places: Mapping[str, str], unknown: tuple[Unknown, ...], model: Mapping[str, Any]) -> Found:
    """Return the settings as job and plan: global batch = micro x accumulation x data-parallel ranks."""
    plan: dict[str, Any] = {}
    assumed: dict[str, str] = {}
    problems: list[Problem] = []
    kind = settings.get("kind", _FSDP)
    tp, cp, gpus = settings.get("tp", 1), settings.get("cp", 1), settings.get("gpus")
    plan |= {"tp": tp} if tp > 1 else {}
    plan |= {"cp": cp, "cp_kind": settings.get("cp_kind", "all_gather")} if cp > 1 else {}
    if cp > 1 and "cp_kind" not in settings:
        assumed["cp_kind"] = "parallelism_config_cp_comm_strategy is allgather where it is not told"
    if settings.get("sp", 1) > 1:
        cp = settings["sp"]
        plan |= {"cp": cp, "cp_kind": "a2a"}
        if "cp" in settings and settings["cp"] > 1:
            rule = "excludes parallelism_config_cp_size above 1"
            problems.append(Problem(where=places["sp"], path="parallelism_config_sp_size", value=str(settings["sp"]), rule=rule))
    ranks = gpus // (tp * cp) if gpus and gpus % (tp * cp) == 0 else None
    plan |= _sharded(settings, kind, ranks, cp, assumed)
    if settings.get("offload"):
        plan["offload"] = "optimizer"
    if settings.get("checkpointing") or settings.get("recompute"):
        plan["recompute"] = "full"
    if "micro_batch" in settings:
        plan["micro_batch"] = settings["micro_batch"]
    sizes = settings.get("replicate", 1) * settings.get("shard", 1) * tp * cp
    if gpus and {"replicate", "shard"} & set(settings) and sizes != gpus and settings.get("sp", 1) == 1:
        rule = f"must be the product of dp_replicate_size, dp_shard_size, tp_size and cp_size = {sizes}"
        problems.append(Problem(where=places["gpus"], path="num_processes", value=str(gpus), rule=rule))
    if settings.get("version") == 1 and {"replicate", "shard", "tp", "cp"} & set(settings):
        rule = "must be 2 where there is a parallelism_config"
        problems.append(Problem(where=places["version"], path="fsdp_config.fsdp_version", value="1", rule=rule))
    job: dict[str, Any] = {name: settings[name] for name in ("seq_len", "attention", "precision") if name in settings}
    if job.get("precision", "fp32") == "fp32" and (settings.get("bf16") or settings.get("fp16")):
        job["precision"] = "bf16" if settings.get("bf16") else "fp16"
    if ranks and "micro_batch" in settings:
        job["global_batch"] = settings["micro_batch"] * settings.get("accumulation", 1) * ranks
    return Found(
        framework="deepspeed" if kind == _DEEPSPEED else "accelerate",
        model=model,
        job=job,
        plan=plan,
        gpus=gpus,
        gpus_per_node=gpus // settings["nodes"] if gpus and "nodes" in settings else None,
        unknown=unknown,
        assumed=assumed,
        problems=tuple(problems),
    )


def _sharded(settings: Mapping[str, Any], kind: str, ranks: int | None, cp: int, assumed: dict[str, str]) -> dict[str, Any]:
    """Return zero, shard_group and dp_overlap."""
    if kind == _DEEPSPEED:
        return {"zero": settings["stage"]} if "stage" in settings else {}
    if kind in (_DDP, _ONE):
        return {"zero": 0, "dp_overlap": kind == _DDP}
    if kind != _FSDP:
        return {}
    strategy = settings.get("strategy", "")
    zero = settings.get("zero", _STRATEGIES.get(strategy, 3))
    if "zero" not in settings and not strategy:
        assumed["zero"] = "fsdp_reshard_after_forward is true, or FULL_SHARD, where it is not told"
    found: dict[str, Any] = {"zero": zero, "dp_overlap": True}
    if zero and ranks and settings.get("replicate", 1) > 1 and settings.get("shard", 1) > 1:
        found["shard_group"] = settings["shard"] * cp
    if zero and strategy.startswith("HYBRID") and settings.get("gpus") and settings.get("nodes", 1) > 1:
        found["shard_group"] = settings["gpus"] // settings["nodes"]
        assumed["shard_group"] = f"{strategy} shards inside a node"
    return found


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Accelerate()
