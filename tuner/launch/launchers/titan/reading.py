"""What torchtitan's TOML files, Python configurations and command lines say. Nothing is executed: Python is read by `ast`."""

from __future__ import annotations

import ast
import math
from typing import TYPE_CHECKING, Any

from tuner.errors import Problem
from tuner.launch.launchers.launcher import Found, Unknown
from tuner.launch.launchers.tables.vocabulary import SHOWN, Said, Told, understand
from tuner.launch.launchers.texts.documents import from_toml
from tuner.launch.launchers.texts.overrides import from_script
from tuner.launch.launchers.texts.python_config import Opaque, constants_of, from_function, functions
from tuner.launch.launchers.texts.python_values import parse_python
from tuner.launch.launchers.texts.scripts import gpus_of
from tuner.launch.launchers.titan import models
from tuner.launch.launchers.titan.keys import LOOPED, NAME, POLICIES, QUIET, READ, SINGLE, TOKENS
from tuner.plan_text import default_recompute, layout_text, recompute_text

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.launchers.texts.overrides import Script
    from tuner.launch.launchers.texts.python_config import Code
    from tuner.model import Model

_CONVERTERS = {"Float8Linear": "fp8-rowwise", "MXFP8Linear": "mxfp8", "NVFP4Linear": "nvfp4"}
_FLOAT8 = {"tensorwise": "fp8", "rowwise": "fp8-rowwise", "rowwise_with_gw_hp": "fp8-rowwise"}
_BASE = "llama3_debugmodel"  # what a written module starts from


def read(files: Mapping[str, str]) -> Found:
    """Return what these files say: TOML first, then Python, then flags, each over the ones before, as torchtitan does."""
    told: dict[str, Told] = {}
    scripts: list[Script] = []
    modules: list[tuple[str, str]] = []
    picked, release = "", ""
    for name, content in files.items():
        if name.endswith(".toml"):
            told |= from_toml(content, name)
            release = "0.2"
        elif name.endswith(".py"):
            modules.append((name, content))
        else:
            script = from_script(content, name)
            scripts.append(script)
            picked = _picked(script) or picked
    extra = Said()
    model: dict[str, Any] = {}
    for name, content in modules:
        code, spec = _from_module(name, content, picked, extra)
        told |= code
        model |= spec
    for script in scripts:
        told |= _from_flags(script)
        if not modules and not model and (flavor := models.flavor_by_function(_picked(script))):
            model = _flavored(*flavor)
    said = understand(READ, told, QUIET)
    said.unknown += extra.unknown
    said.problems += extra.problems
    told_release = next((word for script in scripts if (word := script.version)), "")
    release = "main" if set(told) & TOKENS else told_release or release or ("0.3" if modules or scripts else "")
    return _found(said, release, model, scripts, extra.settings)


def _picked(script: Script) -> str:
    for index, (word, _) in enumerate(script.words[:-1]):
        if word == "--config":
            return script.words[index + 1][0]
        if word.startswith("--config="):
            return word.partition("=")[2]
    return script.variables.get("CONFIG", ("", ""))[0]


def _from_flags(script: Script) -> dict[str, Told]:
    """Return the overrides of a command line: --a.no_b means a.b = False, activation-checkpoint:full a mode."""
    found: dict[str, Told] = {}
    for path, item in script.flags().items():
        section, _, key = path.rpartition(".")
        if key.startswith("no_") and item.value is True:
            found[f"{section}.{key.removeprefix('no_')}"] = Told(value=False, where=item.where)
        else:
            found[path] = item
    for word, where in script.words:
        name, colon, policy = word.partition(":")
        if colon and name.replace("-", "_") == "activation_checkpoint":
            found["activation_checkpoint.mode"] = Told(value=policy.replace("-", "_"), where=where)
    return found


def _flavored(family: str, flavor: str) -> dict[str, Any]:
    """Return the fields of Model of a flavor, {} for one that is unknown."""
    if (family, flavor) not in models.FLAVORS:
        return {}
    return {"preset": models.FLAVORS[family, flavor], "mtp_layers": 0}


def _by_name(family: str, flavor: str) -> dict[str, Any]:
    """Return a flavor; where the module is not told, the family of the only one of this name."""
    if found := _flavored(family, flavor):
        return found
    keys = [key for key in models.FLAVORS if key[1] == flavor]
    return _flavored(*keys[0]) if len(keys) == 1 and not family.startswith("torchtitan") else {}


def _from_module(name: str, content: str, picked: str, extra: Said) -> tuple[dict[str, Told], dict[str, Any]]:
    """Return (keys, fields of Model) of a Python configuration: of the function that --config picks, of run(), or of the only one."""
    tree = parse_python(content, name)
    known = functions(tree)
    function = known.get(picked) or known.get("run") or (next(iter(known.values())) if len(known) == 1 else None)
    if function is None:
        own = models.own_model(constants_of(tree))
        if not own:
            rule = f"has {len(known)} functions that return something: which one runs?"
            extra.problems.append(Problem(where=name, path="--config", value="", rule=rule, hint=", ".join(list(known)[:8])))
        return {}, own
    code = from_function(tree, function, name)
    model = models.own_model(code.constants)
    for base in code.bases:
        flavor = models.flavor_by_function(str(base.value))
        model = model or (_flavored(*flavor) if flavor else {})
        if base.value != _BASE:
            extra.unknown.append(Unknown(name="starts from", value=str(base.value)[:SHOWN], where=base.where))
    for module, first in code.registries:
        family = module.removeprefix("torchtitan.models.") or function.name.rpartition("_")[0]
        model = _by_name(family, str(first.value)) or model
        if not model:
            extra.unknown.append(Unknown(name="model_registry", value=f"{module} {first.value}"[:SHOWN], where=first.where))
    return _plain_keys(code, extra), model


def _plain_keys(code: Code, extra: Said) -> dict[str, Told]:
    """Return the keys that are literals, with the activation checkpoint's policy as a mode; note what else stands at known keys."""
    told = dict(code.keys)
    converters = told.pop("model_registry.converters", None) or told.pop("model_converters.converters", None)
    for path in [path for path in told if path.startswith("model_registry.")]:
        item = told.pop(path)
        extra.unknown.append(Unknown(name=path, value=str(item.value)[:SHOWN], where=item.where))
    text = str(converters.value) if converters else ""
    if "converters" in code.names and text in ("", "converters"):
        text = ast.unparse(code.names["converters"])
    if precision := next((name for word, name in _CONVERTERS.items() if word in text), ""):
        # Only the tensorwise recipe has a gather in float8.
        extra.settings["precision"] = "fp8" if "enable_fsdp_float8_all_gather=True" in text else precision
    modes = {kind: mode for mode, kind in POLICIES.items()}
    if call := code.calls.get("activation_checkpoint"):
        kind = str(call.value).removesuffix(".Config").rpartition(".")[2]
        if kind in modes:
            told["activation_checkpoint.mode"] = Told(value=modes[kind], where=call.where)
        elif "activation_checkpoint.mode" not in told:
            extra.unknown.append(Unknown(name="activation_checkpoint", value=kind[:SHOWN], where=call.where))
    if off := told.pop("activation_checkpoint", None):
        told["activation_checkpoint.mode"] = Told(value="none" if off.value is None else str(off.value), where=off.where)
    known = {key.path for key in READ}
    for path in [path for path, item in told.items() if isinstance(item.value, Opaque) and path in known]:
        item = told.pop(path)
        extra.unknown.append(Unknown(name=path, value=str(item.value)[:SHOWN], where=item.where))
    return told


def _found(said: Said, release: str, model: dict[str, Any], scripts: list[Script], extra: Mapping[str, Any]) -> Found:
    gpus, each = next((counts for script in scripts if (counts := gpus_of(script))[0]), (None, None))
    assumed: dict[str, str] = {}
    family = str(said.get("family", ""))
    if "flavor" in said.settings and family != "tuner":
        model = _flavored(family, said.settings["flavor"]) or model
        if not model:
            said.ignore("flavor", "model.flavor")
    said.settings.pop("import", None)
    whole_model = models.model_of(model)
    gpus = _stated_gpus(said) or gpus
    plan: dict[str, Any] = {name: said.settings[name] for name in ("tp", "pp", "cp", "ep", "etp") if name in said.settings}
    tp, pp, cp = (plan.get(name, 1) for name in ("tp", "pp", "cp"))
    dp = _data_parallel(said, gpus, tp, pp, cp)
    plan |= _sharding(said, dp, pp, cp, assumed)
    plan |= _pipeline(said, pp, whole_model) if pp > 1 else {}
    plan |= _recompute(said, release, pp, whole_model, assumed)
    plan |= _switches(said, release, pp, plan.get("ep", 1), tp, assumed)
    if cp > 1:
        plan["cp_kind"] = "p2p" if said.get("rotate") == "alltoall" else "all_gather"
    batch, job = _batch(said, release, dp, pp, assumed)
    job |= {"precision": precision} if (precision := _precision(said, extra)) else {}
    return Found(
        framework=NAME,
        release=release,
        model=model,
        job=job,
        plan=plan | batch,
        gpus=gpus,
        gpus_per_node=each,
        unknown=tuple(said.unknown),
        assumed=assumed,
        problems=tuple(said.problems),
    )


def _stated_gpus(said: Said) -> int | None:
    """GPUs as the product of all degrees, where the shard degree is a number (world size is not in a torchtitan configuration)."""
    shard = said.get("shard", -1)
    if shard == -1:
        return None
    return int(math.prod(said.get(name, 1) for name in ("replicate", "tp", "pp", "cp")) * shard)


def _data_parallel(said: Said, gpus: int | None, tp: int, pp: int, cp: int) -> int | None:
    """Return replicate x shard; None where the shard degree is the rest of a world that is not told."""
    replicate, shard = said.get("replicate", 1), said.get("shard", -1)
    if shard != -1:
        return int(replicate * shard)
    if gpus is None:
        return None
    if gpus % (replicate * tp * pp * cp):
        said.contradict("replicate", f"replicate*tp*pp*cp = {replicate}*{tp}*{pp}*{cp} must divide {gpus} GPUs (parallel_dims.py)")
        return None
    return gpus // (tp * pp * cp)


def _sharding(said: Said, dp: int | None, pp: int, cp: int, assumed: dict[str, str]) -> dict[str, Any]:
    """Return dp, zero and shard_group: weights are sharded over shard x cp ranks, and kept gathered where nothing reshards them."""
    replicate = said.get("replicate", 1)
    plan: dict[str, Any] = {}
    if dp is None:
        if replicate > 1:
            rule = "the shard degree is the rest of the GPUs, whose count is not told: the shard group is unknown"
            said.contradict("replicate", rule, "say how many GPUs, or set data_parallel_shard_degree")
        ranks = None
    else:
        plan["dp"] = dp
        ranks = dp * cp
        group = ranks // replicate
        if group == 1:
            return plan | {"zero": 0}
        plan["shard_group"] = 0 if group == ranks else group
    policy = said.get("reshard")
    kept = policy == "never" or (policy in (None, "default") and pp > 1)
    if policy in (None, "default") and pp > 1:
        assumed["zero"] = "fsdp_reshard_after_forward default: with a pipeline, gathered weights are kept (zero=2)"
    return plan | ({"zero": 2 if kept else 3} if kept or policy == "always" else {})


def _pipeline(said: Said, pp: int, model: Model | None) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    schedule = str(said.get("schedule", SINGLE["1f1b"]))
    single = {word.lower(): name for name, word in SINGLE.items()}
    first, last = said.get("first_less", 1), said.get("last_less", 1)
    if "first_less" in said.settings or "last_less" in said.settings:
        plan["pipeline_layout"] = layout_text(first, last)
    if schedule.lower() in single:
        plan |= {"schedule": single[schedule.lower()], "vpp": 1}
        looped = False
    elif schedule.lower() == LOOPED.lower():
        plan["schedule"] = "1f1b"
        looped = True
    else:
        said.contradict("schedule", f"is no schedule that the tuner prices: {', '.join((*SINGLE.values(), LOOPED))}")
        return plan
    stages = _stages(said, pp, first, last, looped, model)
    if looped and stages:
        plan["vpp"] = stages // pp
        if stages == pp:
            said.contradict("schedule", f"{LOOPED} needs at least two stages a rank (pipeline_parallel.py), and there is one")
    return plan


def _stages(said: Said, pp: int, first: int, last: int, looped: bool, model: Model | None) -> int:
    """Return the count of model chunks over all ranks, 0 where it cannot be told."""
    if parts := said.get("stages"):
        heads = ("lm_head", "output")
        if model and all(parts != models.dealt(model.layers, len(parts), first, last, head) for head in heads):
            said.contradict("stages", f"the tuner deals layers in equal counts, here with {layout_text(first, last)}; these are others")
        stages, name = len(parts), "stages"
    elif each := said.get("layers_per_stage"):
        if model is None:
            said.contradict("layers_per_stage", "how many stages that makes depends on the model's layers, which are not told")
            return 0
        stages, name = math.ceil((model.layers + first + last) / each), "layers_per_stage"
    else:
        return pp * (2 if looped else 1)
    if stages % pp or (stages != pp and not looped):
        said.contradict(name, f"makes {stages} stages, which must be {'a multiple of ' if looped else ''}pp = {pp} (pipeline_parallel.py)")
        return 0
    return stages


def _recompute(said: Said, release: str, pp: int, model: Model | None, assumed: dict[str, str]) -> dict[str, Any]:
    """Return the recompute knob. 0.2's selective_ac_option (2 unless told) recomputes every N-th layer whole; "op", and selective since
    0.3, save every other matrix product, whose nearest modules are the framework preset's.
    """
    mode = said.get("recompute", "selective" if release == "0.2" else None)
    option = str(said.get("option", "2"))
    if mode is None:
        return {}
    if mode in ("none", "full"):
        return {"recompute": mode}
    if mode == "memory_budget":
        said.contradict("recompute", "lets the compiler choose what is recomputed: not priced", "none, selective or full")
        return {}
    if (release == "0.2" or "option" in said.settings) and option != "op":
        if not option.isdigit() or int(option) < 1 or len(option) > 4:
            said.contradict("option", 'must be "op" or the distance of recomputed layers')
            return {}
        if int(option) == 1:
            return {"recompute": "full"}
        if model is None:
            name = "option" if "option" in said.settings else "recompute"
            why = f"every {option}. layer: how many that is depends on the model, which is not told"
            said.unknown.append(Unknown(name="selective_ac_option", value=why, where=said.places.get(name, "")))
            return {}
        count = math.ceil(model.layers / pp / int(option))
        assumed["recompute"] = f"every {option}. layer is {count} of a stage's"
        return {"recompute": f"full:{count}"}
    if model is None:
        return {}  # the framework's default is this
    assumed["recompute"] = "every other matrix product is saved; the nearest set of modules"
    fields = default_recompute(models.SELECTIVE, model)
    return {"recompute": recompute_text(fields["recompute"])}


def _switches(said: Said, release: str, pp: int, ep: int, tp: int, assumed: dict[str, str]) -> dict[str, Any]:
    plan: dict[str, Any] = {}
    if "sp" in said.settings and tp > 1:
        plan["sequence_parallel"] = said.settings["sp"]
    elif tp > 1:
        plan["sequence_parallel"] = True
        assumed["sequence_parallel"] = "on, as torchtitan does with tensor parallelism"
    plan["offload"] = "optimizer" if said.get("cpu_offload") else "none"
    if "async_tp" in said.settings:
        plan["tp_overlap"] = said.settings["async_tp"] and tp > 1
        if said.settings["async_tp"] and said.get("compile") is False:
            said.contradict("async_tp", "needs compile.enable with the model among compile.components (configs.py)")
    if release in ("0.3", "main"):
        graphs = not said.get("no_graphs", False)
        plan["cuda_graphs"] = graphs
        if "no_graphs" not in said.settings:
            assumed["cuda_graphs"] = "on: 0.3 captures the step unless training.disable_cuda_graphs"
        if graphs and pp > 1 and release == "0.3":
            said.contradict("no_graphs", "CUDA graphs exclude pipelines in 0.3 (trainer.py)", "set training.disable_cuda_graphs")
        if graphs and ep > 1:
            said.contradict("no_graphs", "CUDA graphs exclude the standard expert-parallel dispatcher (trainer.py)")
    return plan


def _batch(said: Said, release: str, dp: int | None, pp: int, assumed: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return (knobs, job fields) of the batch, in sequences."""
    seq_len = said.get("seq_len", 2048)
    if "seq_len" not in said.settings:
        assumed["seq_len"] = "2048, torchtitan's default"
    job: dict[str, Any] = {"seq_len": seq_len}
    if release == "main":
        tokens = said.get("tokens_micro", 16_384)
        name = "tokens_micro"
        count = said.get("pp_microbatches", 1) if pp > 1 else 1
        step = said.get("tokens_step", -1)
        if tokens % seq_len or (step > 0 and step % seq_len):
            said.contradict(name, f"the tuner counts whole sequences, of {seq_len} tokens")
            return {}, job
        micro, local, total = tokens // seq_len, tokens // seq_len * count, step // seq_len if step > 0 else -1
    else:
        local, total, name = said.get("local", 8), said.get("global", -1), "local"
        micro = said.get("micro", 1) if pp > 1 else local
        if local % micro:
            said.contradict("micro", f"pipeline_parallel_microbatch_size = {micro} must divide local_batch_size = {local} (trainer.py)")
            return {}, job
    if name not in said.settings:
        assumed["micro_batch"] = f"{micro}, torchtitan's default" + (" pipeline_parallel_microbatch_size" if pp > 1 else "")
    if dp is not None:
        job["global_batch"] = total if total > 0 else local * dp
        if total > 0 and total % (local * dp):
            said.contradict(
                "global" if release != "main" else "tokens_step", f"must be a multiple of local batch*dp = {local}*{dp} (trainer.py)"
            )
        elif total > local * dp and pp > 1:
            assumed["bubble"] = f"the pipeline drains {total // (local * dp)} times a step; it is priced as once"
    elif total > 0:
        job["global_batch"] = total
    return {"micro_batch": micro}, job


def _precision(said: Said, extra: Mapping[str, Any]) -> str:
    for name in said.get("converters", []):
        if "float8" in name:
            return _FLOAT8.get(said.get("float8", ""), "fp8")
        if name in ("mx", "quantize.linear.mx"):
            return "mxfp8"
    if "precision" in extra:
        return str(extra["precision"])
    if said.get("dtype") == "bfloat16":
        said.ignore("dtype", "training.dtype")
    if said.get("param") == "float32":
        return "fp32"
    return "bf16" if "param" in said.settings else ""
