"""Rules of Hugging Face Accelerate: what its parallelism_config and FSDP2 have no switch for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import ACCELERATE, Rule, implies, replicas
from tuner.plan import CP_KINDS

if TYPE_CHECKING:
    from tuner.arrays import Bools
    from tuner.job import Job
    from tuner.plan import Plan

_SOURCE = "huggingface/accelerate parallelism_config.py"


def _meshed(job: Job, plan: Plan) -> Bools:
    """FSDP shards over dp_shard x cp, and tensor and context parallelism need it beside them."""
    return implies((plan.tp > 1) | (plan.cp > 1), (plan.zero > 0) & (replicas(job, plan) * plan.cp > 1))


def _overlapped(job: Job, plan: Plan) -> Bools:
    return implies(replicas(job, plan) * plan.cp > 1, plan.dp_overlap > 0) & (plan.tp_overlap == 0) & (plan.cuda_graphs == 0)


ACCELERATED = (
    Rule(
        id="accelerate-mesh",
        families=(ACCELERATE,),
        source=_SOURCE,
        knobs=("pp", "ep", "etp"),
        holds=lambda job, plan: (plan.pp == 1) & (plan.ep == 1) & (plan.etp == 1),
        says=lambda job, row: (
            f"pp = {row.pp}, ep = {row.ep}, etp = {row.etp} must be 1: {job.framework.name} has tp, cp and data parallelism"
        ),
    ),
    Rule(
        id="accelerate-fsdp",
        families=(ACCELERATE,),
        source=f"{_SOURCE} __post_init__ and _validate_accelerator",
        knobs=("zero", "tp", "cp"),
        holds=_meshed,
        says=lambda job, row: (
            f"tp = {row.tp} or cp = {row.cp} above 1 needs zero = 2 or 3 (zero = {row.zero}) over dp*cp > 1 ({row.dp(job.gpus)}*{row.cp})"
        ),
    ),
    Rule(
        id="accelerate-cp",
        families=(ACCELERATE,),
        source="torch/distributed/tensor/experimental/_context_parallel: keys and values go round, or are gathered",
        knobs=("cp_kind",),
        holds=lambda job, plan: implies(plan.cp > 1, plan.cp_kind != CP_KINDS["a2a"]),
        says=lambda job, row: f"cp_kind = a2a: the ring attention of {job.framework.name} has p2p and all_gather",
    ),
    Rule(
        id="accelerate-sp",
        families=(ACCELERATE,),
        source="huggingface/transformers distributed/configuration_utils.py enable_sequence_parallel: not wired up",
        knobs=("sequence_parallel",),
        holds=lambda job, plan: plan.sequence_parallel == 0,
        says=lambda job, row: "sequence_parallel: transformers keeps whole sequences on each tensor-parallel rank",
    ),
    Rule(
        id="accelerate-overlap",
        families=(ACCELERATE,),
        source="huggingface/accelerate utils/dataclasses.py TorchTensorParallelConfig; PyTorch FSDP2 and DDP overlap always",
        knobs=("dp_overlap", "tp_overlap", "cuda_graphs"),
        holds=_overlapped,
        says=lambda job, row: (
            f"dp_overlap = {row.dp_overlap}, tp_overlap = {row.tp_overlap}, cuda_graphs = {row.cuda_graphs}: data-parallel overlap "
            "cannot be switched off, the others not on"
        ),
    ),
)
