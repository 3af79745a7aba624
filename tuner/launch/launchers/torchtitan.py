"""torchtitan, in the three vocabularies that people run.

0.2: a TOML file and [parallelism], [training], [activation_checkpoint] keys. 0.3: a Python function that returns the configuration, and
`--section.key` flags. main: the function alone, with batches counted in tokens. Read at: 0.2.2 torchtitan/config/job_config.py; 0.3.0
torchtitan/config/configs.py, trainer.py, distributed/activation_checkpoint.py, distributed/pipeline_parallel.py; main
torchtitan/config/{parallelism,training}.py, config/README.md.
"""

from __future__ import annotations

import importlib.util
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.launch.launchers.launcher import DERIVED, Found, Launcher, Written, refuse_unspelled
from tuner.launch.launchers.tables.vocabulary import known_version, refusal, spelled
from tuner.launch.launchers.texts.documents import toml_text
from tuner.launch.launchers.texts.python_config import docstring
from tuner.launch.launchers.texts.scripts import EXPANDABLE, torchrun_script
from tuner.launch.launchers.titan import models
from tuner.launch.launchers.titan import reading as titan_reading
from tuner.launch.launchers.titan.keys import LOOPED, NAME, POLICIES, SINGLE, TABLES, VERSIONS
from tuner.plan import CP_KINDS, FULL, OFFLOADS, SCHEDULES
from tuner.plan_text import default_recompute, recompute_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.job import Job
    from tuner.plan import Plan

TOML, MODULE, SCRIPT = "train.toml", "tuner_run.py", "train.sh"
STEPS = 30

SAYS: Mapping[str, str] = {
    "tp": "parallelism.tensor_parallel_degree",
    "pp": "parallelism.pipeline_parallel_degree",
    "vpp": "parallelism.pipeline_parallel_schedule Interleaved1F1B with pipeline_parallel_layers_per_stage or the modules of each stage",
    "cp": "parallelism.context_parallel_degree",
    "ep": "parallelism.expert_parallel_degree",
    "micro_batch": "training.local_batch_size, in a pipeline parallelism.pipeline_parallel_microbatch_size; main: in tokens",
    "sequence_parallel": "parallelism.enable_sequence_parallel (0.2: always on with tensor parallelism)",
    "recompute": "activation_checkpoint: none, selective (every other matrix product), full",
    "zero": "parallelism.data_parallel_replicate_degree alone (0), with shards and fsdp_reshard_after_forward never (2), always (3)",
    "shard_group": "parallelism.data_parallel_replicate_degree times data_parallel_shard_degree",
    "schedule": "parallelism.pipeline_parallel_schedule 1F1B or GPipe",
    "embedding_layers": "parallelism.pipeline_parallel_first_stage_less_layers",
    "loss_layers": "parallelism.pipeline_parallel_last_stage_less_layers",
    "offload": "training.enable_cpu_offload",
    "tp_overlap": "compile.enable_async_tensor_parallel (0.2: parallelism.enable_async_tensor_parallel), which compiles the model",
    "dp_overlap": "always on: FSDP2 gathers the next layer's weights and reduces gradients on streams of their own",
    "cuda_graphs": "training.disable_cuda_graphs (0.2: none)",
    "cp_kind": "keys and values are gathered (all_gather); 0.2: parallelism.context_parallel_rotate_method alltoall is a ring (p2p)",
}
CANNOT: Mapping[str, str] = {
    "etp": "routed experts are not split by tensor parallelism (expert_tensor_parallel_degree left with 0.3)",
    "recompute_layers": "full recompute is of every layer; take recompute=full",
    "ep_overlap": "no option overlaps the all-to-all with another micro batch's work",
    "fallback_tp": "a replica that loses a GPU is not rebuilt with fewer tensor-parallel ranks",
    **dict.fromkeys(DERIVED, "a plan that is launched has no idle ranks"),
}


@dataclass(frozen=True, slots=True)
class Torchtitan:
    """train.toml and train.sh (0.2), tuner_run.py and train.sh (0.3, main)."""

    name: str = NAME
    framework: str = NAME
    versions: tuple[str, ...] = VERSIONS

    @property
    def says(self) -> Mapping[str, str]:
        """How each knob is spelled."""
        return SAYS

    @property
    def cannot(self) -> Mapping[str, str]:
        """Why a knob has no spelling."""
        return CANNOT

    def write(self, job: Job, plan: Plan, version: str = "") -> Written:
        """Return the files. Without a version, the vocabulary is that of the torchtitan beside this Python; raises SpecError naming the
        versions where there is none.
        """
        refuse_unspelled(self, plan)
        version = known_version(NAME, version or installed_version(), VERSIONS)
        settings = _settings(job, plan, version)
        files = _WRITERS[version](job, settings)
        return Written(files=files, programs=(SCRIPT,), start=f"./{SCRIPT}", notes=_notes(job, plan, version))

    def reads(self, name: str, text: str) -> bool:
        """Whether the file is a torchtitan TOML, configuration module or launch script."""
        start = text[:200_000]
        if name.endswith(".toml"):
            return "[parallelism]" in start or ("[training]" in start and "[model]" in start)
        if name.endswith(".py"):
            return "torchtitan" in start and "def " in start
        script = name.endswith((".sh", ".slurm", ".sbatch", ".bash")) or text.startswith("#!")
        return script and ("torchtitan" in start or "run_train.sh" in start)

    def read(self, files: Mapping[str, str]) -> Found:
        """Return what these files say: TOML first, then Python, then flags, each over the ones before, as torchtitan does."""
        return titan_reading.read(files)


def installed_version(root: Path | None = None) -> str:
    """Return the vocabulary of the torchtitan that is installed (`root`: its folder), read from its sources without importing it; "" where
    there is none, or none that is known.
    """
    if root is None:
        spec = importlib.util.find_spec(NAME)
        places = list(spec.submodule_search_locations or ()) if spec else []
        if not places:
            return ""
        root = Path(places[0])
    sources = "".join(
        (root / "config" / name).read_text("utf-8", "replace")
        for name in ("configs.py", "training.py")
        if (root / "config" / name).is_file()
    )
    if "num_tokens_per_microbatch_per_dp_rank" in sources:
        return "main"
    if "local_batch_size" in sources:
        return "0.3"
    return "0.2" if (root / "config" / "job_config.py").is_file() else ""


def _settings(job: Job, plan: Plan, version: str) -> dict[str, Any]:
    """Return the settings of a plan. Raises SpecError listing every knob that this version cannot spell."""
    dp, count = max(int(plan.dp(job.gpus)), 1), int(plan.microbatches(job.gpus, job.global_batch))
    tp, pp, cp, vpp, mb = (int(n) for n in (plan.tp, plan.pp, plan.cp, plan.vpp, plan.micro_batch))
    refused: dict[str, tuple[Any, str]] = {}
    replicate, shard = _data_axes(plan, dp, refused)
    if version == "0.2" and replicate > 1 and shard * cp == 1 and tp * pp > 1:
        refused["zero"] = (0, "0.2 replicates (DDP) only without tensor and pipeline parallelism")
    _check_runtime(job, plan, version, refused)
    policy = _policy(job, plan, refused)
    _check_model(job, plan, version, refused)
    recipe = _recipe(job, version, refused)
    if refused:
        raise refusal(NAME, refused)
    settings: dict[str, Any] = {
        "replicate": replicate,
        "shard": shard,
        "reshard": "never" if plan.zero == 2 else "always",
        "tp": tp,
        "pp": pp,
        "cp": cp,
        "ep": int(plan.ep),
        "cpu_offload": bool(plan.offload),
        "dtype": "float32",
        "param": "float32" if job.precision == "fp32" else "bfloat16",
        "compile": bool(plan.tp_overlap),
        "async_tp": bool(plan.tp_overlap),
        "recompute": policy,
        "option": "op" if policy == "selective" else None,
        "sp": bool(plan.sequence_parallel) if tp > 1 else None,
        "no_graphs": not plan.cuda_graphs,
        "rotate": ("alltoall" if plan.cp_kind == CP_KINDS["p2p"] else "allgather") if cp > 1 else None,
        "seq_len": job.seq_len,
        "local": mb * count if pp > 1 else mb,
        "micro": mb if pp > 1 else None,
        "global": job.global_batch,
        "tokens_micro": mb * job.seq_len,
        "tokens_step": job.global_batch * job.seq_len,
        "pp_microbatches": count if pp > 1 else None,
        "converter": recipe,
    }
    if pp > 1:
        first, last = int(plan.embedding_layers), int(plan.loss_layers)
        looped = vpp > 1
        settings |= {
            "schedule": LOOPED if looped else SINGLE["gpipe" if plan.schedule == SCHEDULES["gpipe"] else "1f1b"],
            "first_less": first,
            "last_less": last,
        }
        total = job.model.layers + first + last
        each = math.ceil(total / (pp * vpp))
        if looped and math.ceil(total / each) == pp * vpp:
            settings["layers_per_stage"] = each
        elif looped:  # torchtitan would round to another count of stages
            settings["stages"] = models.dealt(job.model.layers, pp * vpp, first, last, "output" if version == "0.2" else "lm_head")
    return settings


def _data_axes(plan: Plan, dp: int, refused: dict[str, tuple[Any, str]]) -> tuple[int, int]:
    """Return (replicate, shard): weights are sharded over shard x cp ranks."""
    cp, group = int(plan.cp), int(plan.shard_group)
    if plan.zero == 0:
        if cp > 1:
            refused["zero"] = (0, "weights are always sharded over context-parallel ranks; take zero=3")
        return dp, 1
    if plan.zero == 1:
        refused["zero"] = (1, "FSDP2 shards weights, gradients and optimizer together; take zero=2 or 3")
    if dp * cp == 1:
        refused["zero"] = (plan.zero, "there are no data- or context-parallel ranks to shard over")
    if not group:
        return 1, dp
    if group % cp or dp % (group // cp):
        refused["shard_group"] = (
            group,
            f"must be cp = {cp} times a divisor of dp = {dp}: data_parallel_shard_degree times cp",
        )
        return 1, dp
    return dp * cp // group, group // cp


def _check_runtime(job: Job, plan: Plan, version: str, refused: dict[str, tuple[Any, str]]) -> None:
    """Note the runtime knobs that this version cannot spell."""
    if plan.tp > 1 and not plan.sequence_parallel and version == "0.2":
        refused["sequence_parallel"] = ("false", "0.2 always shards sequences with tensor parallelism")
    if plan.offload & OFFLOADS["activations"]:
        refused["offload"] = ("activations", "only weights, gradients and optimizer are offloaded, together; take offload=optimizer")
    if plan.schedule not in (SCHEDULES["1f1b"], SCHEDULES["gpipe"]):
        refused["schedule"] = ("zero-bubble", "torch's zero-bubble schedules place other stages; take 1f1b or gpipe")
    if not plan.dp_overlap and int(plan.dp(job.gpus)) * plan.cp > 1:
        refused["dp_overlap"] = ("false", "FSDP2 always overlaps; take dp_overlap=true")
    kinds = {name for name, code in CP_KINDS.items() if code == plan.cp_kind}
    allowed = {"p2p", "all_gather"} if version == "0.2" else {"all_gather"}
    if plan.cp > 1 and not kinds & allowed:
        refused["cp_kind"] = ("".join(kinds), f"{version} has {' and '.join(sorted(allowed))} alone")
    if plan.cuda_graphs:
        reason = {"0.2": "0.2 has no CUDA graphs"}.get(version) or (
            "0.3 captures no pipeline"
            if version == "0.3" and plan.pp > 1
            else "the standard token dispatcher of expert parallelism synchronises with the host"
            if plan.ep > 1
            else ""
        )
        if reason:
            refused["cuda_graphs"] = ("true", reason)


def _policy(job: Job, plan: Plan, refused: dict[str, tuple[Any, str]]) -> str:
    selective = default_recompute(models.SELECTIVE, job.model)["recompute"]
    if plan.recompute == 0:
        return "none"
    if plan.recompute & FULL:
        return "full"
    if plan.recompute != selective:
        told = recompute_text(int(plan.recompute))
        refused["recompute"] = (told, f"selective means {recompute_text(selective)}; take that, none or full")
    return "selective"


def _check_model(job: Job, plan: Plan, version: str, refused: dict[str, tuple[Any, str]]) -> None:
    flavor, model = models.flavor_of(job.model), job.model
    if flavor is None and (why := models.unbuildable(model)):
        refused["model"] = (model.name, f"torchtitan's models do not have {why}")
    elif version == "0.2" and plan.pp > 1 and (flavor[0] if flavor else "" if models.llama_like(model) else "qwen3") == "qwen3":
        refused["pp"] = (plan.pp, "0.2 does not split its Qwen3 models, on which this architecture is built, into stages")
    if job.task != "pretrain":
        refused["task"] = (job.task, "only pre-training is written")
    if job.attention != "flash":
        refused["attention"] = (job.attention, "torchtitan has fused attention alone")


def _recipe(job: Job, version: str, refused: dict[str, tuple[Any, str]]) -> str:
    """Return the converter of a quantised precision, "" for none: a float8 recipe of 0.2, or the constructor of 0.3 and main."""
    recipes = {
        "0.2": {"fp8": "tensorwise", "fp8-rowwise": "rowwise", "mxfp8": "mx"},
        "0.3": {
            "fp8-rowwise": 'Float8LinearConverter.Config(recipe_name="rowwise")',
            "mxfp8": "MXFP8LinearConverter.Config()",
            "nvfp4": 'NVFP4LinearConverter.Config(fqns=["layers"])',
        },
    }["0.2" if version == "0.2" else "0.3"]
    if job.precision in ("bf16", "fp32"):
        return ""
    if job.precision not in recipes:
        refused["precision"] = (job.precision, f"{version} trains in bf16, fp32, {', '.join(recipes)}")
    return recipes.get(job.precision, "")


def _write_toml(job: Job, settings: dict[str, Any]) -> dict[str, str]:
    flavor = models.flavor_of(job.model)
    own = {} if flavor else {"import": MODULE.removesuffix(".py")}
    recipe = settings["converter"]
    quantised = {"converters": ["quantize.linear.mx" if recipe == "mx" else "quantize.linear.float8"]} if recipe else {}
    float8 = {"float8": recipe} if recipe and recipe != "mx" else {}
    named = {"family": flavor[0] if flavor else "tuner", "flavor": flavor[1] if flavor else "run"}
    document = spelled(TABLES["0.2"], settings | own | named | quantised | float8)
    document |= {
        "model.hf_assets_path": "./tests/assets/tokenizer",
        "training.dataset": "c4_test",
        "training.steps": STEPS,
        "metrics.log_freq": 1,
    }
    ordered = dict(sorted(document.items(), key=lambda item: _SECTIONS.index(item[0].rpartition(".")[0])))
    files = {TOML: toml_text(ordered), SCRIPT: _script(job, "0.2", ['--job.config_file "$here/train.toml"'])}
    return files if flavor else files | {MODULE: models.module_0_2(job.model)}


_SECTIONS = ("experimental", "model", "metrics", "training", "parallelism", "activation_checkpoint", "compile", "quantize.linear.float8")


def _write_flags(job: Job, settings: dict[str, Any]) -> dict[str, str]:
    in_code = {"stages": settings.pop("stages", None)}
    policy = settings.pop("recompute")
    values = spelled(TABLES["0.3"], settings) | {"training.steps": STEPS, "metrics.log_freq": 1}
    flags = [_flag(path, value) for path, value in values.items()]
    words = [f"--module {MODULE.removesuffix('.py')} --config run", *flags, f"activation-checkpoint:{policy}"]
    code = [f"config.{path} = {value!r}" for path, value in spelled(TABLES["0.3"], in_code).items()]
    return {MODULE: _module(job, settings["converter"], code, "0.3"), SCRIPT: _script(job, "0.3", words)}


def _flag(path: str, value: Any) -> str:
    section, _, key = path.rpartition(".")
    if isinstance(value, bool):
        return f"--{section}.{key}" if value else f"--{section}.no_{key}"
    return f"--{path} {shlex.quote(str(value))}"


def _write_code(job: Job, settings: dict[str, Any]) -> dict[str, str]:
    policy = settings.pop("recompute")
    values = spelled(TABLES["main"], settings) | {"training.steps": STEPS, "metrics.log_freq": 1}
    code = [f"config.{path} = {value!r}" for path, value in values.items()]
    code.append("config.activation_checkpoint = " + ("None" if policy == "none" else f"{POLICIES[policy]}.Config()"))
    words = [f"--module {MODULE.removesuffix('.py')} --config run"]
    return {MODULE: _module(job, settings["converter"], code, "main"), SCRIPT: _script(job, "main", words)}


_WRITERS: Mapping[str, Callable[[Job, dict[str, Any]], dict[str, str]]] = {"0.2": _write_toml, "0.3": _write_flags, "main": _write_code}


def _module(job: Job, converter: str, code: list[str], version: str) -> str:
    """Return the module with run(), which starts from torchtitan's debug configuration and sets model, loss and `code`."""
    flavor = models.flavor_of(job.model)
    imports, source = ("", "") if flavor else models.builder(job.model, job.seq_len)
    converters = [f"{converter[:-1]}{', ' if converter[-2] != '(' else ''}model_compile_enabled=False)"] if converter else []
    spec = f'model_registry("{flavor[1]}", converters=converters)' if flavor else "own_spec(converters)"
    lines = [
        docstring(f"{job.model.name} on {job.gpus} GPUs, for torchtitan {version}: --module tuner_run --config run."),
        "",
        *([imports] if imports else []),
        "from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss",
        *([f"from torchtitan.components.quantization import {converter.partition('.')[0]}"] if converter else []),
        *(["from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC"] if version == "main" else []),
        *([f"from torchtitan.models.{flavor[0]} import model_registry"] if flavor else []),
        "from torchtitan.models.common.config_utils import decoder_vocab_size",
        "from torchtitan.models.llama3.config_registry import llama3_debugmodel",
        "from torchtitan.trainer import Trainer",
        "",
        *([source] if source else []),
        "",
        "def run() -> Trainer.Config:",
        "    config = llama3_debugmodel()  # for its data, tokenizer and optimizer; all that costs time is set below",
        f"    converters = [{', '.join(converters)}]",
        f"    config.model_spec = {spec}",
        "    vocab = decoder_vocab_size(config.model_spec)",
        "    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab))",
        *(f"    {line}" for line in code),
        "    return config",
    ]
    return "\n".join(lines) + "\n"


def _script(job: Job, version: str, words: list[str]) -> str:
    variables = [("PYTORCH_CUDA_ALLOC_CONF" if version == "0.2" else "PYTORCH_ALLOC_CONF", "expandable_segments:True", EXPANDABLE)]
    variables.append(("CUDA_DEVICE_MAX_CONNECTIONS", "", "one hardware queue would serialise FSDP's gathers and reductions with compute"))
    before = [
        "# The tokenizer and the data of a throughput run (c4_test) lie in torchtitan's own checkout.",
        'cd "${TORCHTITAN:?set TORCHTITAN to the folder of a torchtitan checkout}"',
        'export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"',
    ]
    return torchrun_script(job, f"torchtitan {version}, written by tuner", variables, before, ["-m torchtitan.train", *words], version)


def _notes(job: Job, plan: Plan, version: str) -> tuple[str, ...]:
    notes = [
        "checkpoints are torch.distributed.checkpoint: torchtitan loads one that was written in another layout and reshards it",
        "set TORCHTITAN to a checkout; data are the c4_test sample and the test tokenizer that lie there",
    ]
    if plan.offload:
        notes.append("training.enable_cpu_offload also keeps weights and gradients on the host: slower than offload=optimizer is priced")
    if plan.cp > 1 and version != "0.2":
        notes.append("later commits of main also want a ContextParallelTransform of the model for context parallelism")
    if models.flavor_of(job.model) is None:
        notes.append(f"{job.model.name} is no flavor of torchtitan: {MODULE} builds it from its blocks (Qwen3's or Llama 3's)")
    if job.ramp_up:
        notes.append("the batch ramp-up is not written: torchtitan has none")
    if version == "main":
        notes.append("main moves: names were read in August 2026; an attribute that no longer exists raises when run() is called")
    return tuple(notes)


def open_launcher() -> Launcher:
    """Return the launcher."""
    return Torchtitan()
