"""What the launchers on Megatron-Core have in common: settings to a Found, environment variables, notes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found
from tuner.launch.launchers.megatron import model as megatron_model
from tuner.launch.launchers.megatron import plan as megatron_plan
from tuner.launch.launchers.megatron.model import MODEL
from tuner.launch.launchers.megatron.plan import PLAN
from tuner.launch.launchers.megatron.sharding import is_fsdp
from tuner.launch.launchers.tables.settings import Ask, Values, checked_values, together, written

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.job import Job
    from tuner.launch.launchers.launcher import Unknown
    from tuner.launch.launchers.tables.settings import Dialect, Setting
    from tuner.plan import Plan

KINDS = {**megatron_model.KINDS, **megatron_plan.KINDS}
ASPECTS = (*MODEL, *PLAN)
STEPS = 50
_BLACKWELL = ("b200", "b300", "gb200", "gb300")


def settings(job: Job, plan: Plan, dialect: Dialect) -> dict[str, dict[str, Any]]:
    """Return the settings of a job and plan by group. Raises SpecError listing everything that cannot be spelled."""
    problems = megatron_model.unspelled(job, dialect)
    try:
        groups = written(ASPECTS, Ask(job=job, plan=plan, dialect=dialect))
    except SpecError as error:
        raise SpecError([*problems, *error.problems]) from None
    if problems:
        raise SpecError(problems)
    return groups


def found(
    told: Mapping[str, Setting],
    *,
    framework: str,
    otherwise: Mapping[str, Any] | None = None,
    gpus: int | None = None,
    gpus_per_node: int | None = None,
    unknown: Sequence[Unknown] = (),
    assumed: Mapping[str, str] | None = None,
    model: str = "",
) -> Found:
    """Return what settings mean. otherwise: what holds where nothing is told; model: a preset that the files name. Raises SpecError for
    values that cannot be read.
    """
    checked = checked_values(told, KINDS)
    values = Values(told=checked, otherwise=otherwise or {}, gpus=gpus)
    meaning = together([aspect.take(values) for aspect in ASPECTS])
    architecture = {"preset": model} if model else meaning.model if values.has("num_layers", "hidden_size") else {}
    why = dict(meaning.assumed)
    if model:
        kept = [name for name in meaning.model if values.has(*_names_of(name))]
        why |= {f"model.{name}": f"told beside the model {model}: read but not used" for name in kept if name not in ("vocab",)}
    return Found(
        framework=framework,
        model=architecture,
        job=meaning.job,
        plan=meaning.plan,
        gpus=gpus,
        gpus_per_node=gpus_per_node,
        unknown=(*unknown, *meaning.unknown),
        assumed={**why, **(assumed or {})},
        problems=meaning.problems,
    )


def _names_of(field: str) -> tuple[str, ...]:
    return {
        "layers": ("num_layers",),
        "hidden": ("hidden_size",),
        "ffn_hidden": ("ffn_hidden_size",),
        "heads": ("num_attention_heads",),
        "moe": ("num_experts",),
        "mtp_layers": ("mtp_num_layers",),
    }.get(field, ("",))


def environment(job: Job, plan: Plan) -> list[tuple[str, str, str]]:
    """Return (name, value, reason) of the variables that a launch needs; value "": it must not be set.

    Megatron-LM 0.19 arguments.py: tensor or context parallelism before Blackwell asserts CUDA_DEVICE_MAX_CONNECTIONS 1, FSDP asserts that
    it is not 1, and overlapped expert dispatch wants more; graphs of Transformer Engine assert NCCL_GRAPH_REGISTER 0 beside expandable
    segments.
    """
    rows = [("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "the allocator grows its segments, so that they do not fragment")]
    if plan.cuda_graphs:
        rows.append(("NCCL_GRAPH_REGISTER", "0", "CUDA graphs beside expandable segments would touch memory that is gone"))
    blackwell = job.cluster.gpu.name.startswith(_BLACKWELL)
    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    if is_fsdp(plan):
        rows.append((name, "", "FSDP needs several queues to the GPU: its gathers run beside the compute"))
    elif plan.ep_overlap:
        rows.append((name, "32", "the overlapped dispatch of experts needs several queues to the GPU"))
    elif (plan.tp > 1 or plan.cp > 1) and not blackwell:
        rows.append((name, "1", "one queue starts collectives of tensor and context parallelism before the compute that hides them"))
    return rows


def checkpoint_note(plan: Plan) -> str:
    """Return whether a checkpoint of another layout can be read."""
    if is_fsdp(plan):
        return (
            "checkpoints: fsdp_dtensor, the one format of Megatron-FSDP; it reads those of other layouts of FSDP, not those (torch_dist) "
            "of runs without it"
        )
    return (
        "checkpoints: torch_dist (the default) is resharded on load to another tp, pp, cp or ep; the optimizer's state too if it was saved "
        "with --dist-ckpt-optim-fully-reshardable, else only over dp"
    )
