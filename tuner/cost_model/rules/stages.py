"""Rules of pipelines: how layers and micro batches are dealt to stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.cost_model.rules.rule import (
    ALWAYS,
    DEEPSPEED,
    MEGATRON,
    NANOTRON,
    TORCHTITAN,
    ZERO_BUBBLE,
    Rule,
    chunk_units,
    divides,
    implies,
    unit_text,
    units,
)
from tuner.plan import SCHEDULES

if TYPE_CHECKING:
    from tuner.arrays import Bools, Ints
    from tuner.job import Job
    from tuner.plan import Plan

_NAMES = {code: name for name, code in SCHEDULES.items()}


def _microbatches(job: Job, plan: Plan) -> Ints:
    return plan.microbatches(job.gpus, job.global_batch)


def _rounds(job: Job, plan: Plan) -> Ints:
    """An interleaved schedule of torch goes round max(1, microbatches // pp) times, with as many micro batches each time."""
    rounds = _microbatches(job, plan) // plan.pp
    return rounds + (rounds < 1)


def _chunks(job: Job, plan: Plan) -> Bools:
    """Each of the pp*vpp chunks holds a unit, and the first and last hold what the embedding and the loss count as.

    nanotron deals blocks by their cost: a costly head takes the last stage alone, and those before it may hold nothing.
    """
    chunks, largest = plan.pp * plan.vpp, chunk_units(job, plan)
    smallest = units(job, plan) // chunks
    if NANOTRON in job.framework.rules:
        return smallest >= 1
    return (smallest >= 1) & (plan.embedding_layers <= largest) & (plan.loss_layers <= smallest)


def _chunks_say(job: Job, row: Plan) -> str:
    chunks = row.pp * row.vpp
    total = units(job, row)
    if total < chunks:
        return f"pp*vpp = {row.pp}*{row.vpp} chunks need a layer each, and {unit_text(job, row)}"
    return (
        f"the embedding counts as {row.embedding_layers} layers and the loss as {row.loss_layers}, but a chunk holds "
        f"{total // chunks} ({unit_text(job, row)} over pp*vpp = {row.pp}*{row.vpp})"
    )


def _schedule_rule(family: str, names: tuple[str, ...], source: str) -> Rule:
    """A family runs these schedules, and the zero-bubble ones where the framework is a fork that adds them."""

    def known(job: Job) -> tuple[str, ...]:
        return (*names, "zb-1p", "zb-2p") if ZERO_BUBBLE in job.framework.rules else names

    def holds(job: Job, plan: Plan) -> Bools:
        good: Bools = False
        for name in known(job):
            good = good | (plan.schedule == SCHEDULES[name])
        return good

    return Rule(
        id=f"schedule-{family}",
        families=(family,),
        source=source,
        knobs=("schedule",),
        holds=holds,
        says=lambda job, row: f"schedule = {_NAMES[row.schedule]}: {job.framework.name} has {', '.join(known(job))}",
    )


STAGES = (
    Rule(
        id="chunks",
        families=(ALWAYS,),
        source="Megatron-LM transformer_block.py get_num_layers_to_build (not enough layers in the first or last stage)",
        knobs=("pp", "vpp"),
        holds=_chunks,
        says=_chunks_say,
    ),
    Rule(
        id="layers-pp-vpp",
        families=(MEGATRON,),
        source="Megatron-LM arguments.py:945-997; transformer_config.py:2230-2414 (each stage % vpp; embedding and loss may count)",
        knobs=("vpp", "pp", "embedding_layers", "loss_layers"),
        holds=lambda job, plan: divides(plan.pp * plan.vpp, units(job, plan)),
        says=lambda job, row: f"pp*vpp = {row.pp}*{row.vpp} must divide {unit_text(job, row)}",
    ),
    Rule(
        id="vpp-pp",
        families=(ALWAYS,),
        source="Megatron-LM arguments.py:1000-1012; schedules.py:2182",
        knobs=("vpp", "pp"),
        holds=lambda job, plan: implies(plan.vpp > 1, plan.pp > 1),
        says=lambda job, row: f"vpp = {row.vpp} needs pp > 1",
    ),
    Rule(
        id="vpp-microbatches",
        families=(MEGATRON,),
        source="Megatron-LM schedules.py:1159-1180 (groups of pp micro batches, the default)",
        knobs=("vpp", "micro_batch"),
        holds=lambda job, plan: implies(plan.vpp > 1, divides(plan.pp, _microbatches(job, plan))),
        says=lambda job, row: f"pp = {row.pp} must divide microbatches = {_microbatches(job, row)} where vpp = {row.vpp} > 1",
    ),
    Rule(
        id="schedule-vpp",
        families=(ALWAYS,),
        source="interleaving is a 1F1B schedule (arXiv 2104.04473); ZB-1p, ZB-2p (arXiv 2401.10241) and GPipe hold one chunk a stage",
        knobs=("vpp", "schedule"),
        holds=lambda job, plan: (plan.vpp == 1) | (plan.schedule == SCHEDULES["1f1b"]),
        says=lambda job, row: f"schedule {_NAMES[row.schedule]} holds one chunk a stage, so vpp = {row.vpp} must be 1",
    ),
    _schedule_rule(MEGATRON, ("1f1b",), "Megatron-LM schedules.py get_forward_backward_func (1F1B, interleaved where vpp > 1)"),
    _schedule_rule(DEEPSPEED, ("1f1b",), "DeepSpeed runtime/pipe/schedule.py TrainSchedule"),
    _schedule_rule(NANOTRON, ("1f1b", "gpipe"), "nanotron config/parallelism_config.py pp_engine: 1f1b or afab"),
    Rule(
        id="vpp-single",
        families=(DEEPSPEED, NANOTRON),
        source="DeepSpeed runtime/pipe/module.py and nanotron parallel/pipeline_parallel hold one chunk a stage",
        knobs=("vpp",),
        holds=lambda job, plan: plan.vpp == 1,
        says=lambda job, row: f"vpp = {row.vpp}: {job.framework.name} has no interleaved schedule",
    ),
    Rule(
        id="microbatches-pp",
        families=(TORCHTITAN,),
        source="torch distributed/pipelining/schedules.py PipelineScheduleSingle (a looped schedule takes fewer)",
        knobs=("micro_batch", "pp"),
        holds=lambda job, plan: implies(plan.vpp == 1, _microbatches(job, plan) >= plan.pp),
        says=lambda job, row: f"microbatches = {_microbatches(job, row)} must be at least pp = {row.pp}",
    ),
    Rule(
        id="microbatches-rounds",
        families=(TORCHTITAN,),
        source="torch distributed/pipelining/schedules.py ScheduleInterleaved1F1B (number_of_rounds)",
        knobs=("micro_batch", "pp"),
        holds=lambda job, plan: implies(plan.vpp > 1, divides(_rounds(job, plan), _microbatches(job, plan))),
        says=lambda job, row: (
            f"microbatches = {_microbatches(job, row)} must divide into {_rounds(job, row)} rounds of at least pp = {row.pp}"
        ),
    ),
    Rule(
        id="microbatches-stages",
        families=(TORCHTITAN,),
        severity="warning",
        source="torchtitan pipeline_parallel.py:305",
        knobs=("micro_batch", "vpp"),
        holds=lambda job, plan: _microbatches(job, plan) >= plan.pp * plan.vpp,
        says=lambda job, row: f"microbatches = {_microbatches(job, row)} are fewer than the stages, pp*vpp = {row.pp}*{row.vpp}",
    ),
    Rule(
        id="bubble",
        families=(ALWAYS,),
        severity="warning",
        source="Narayanan 2021 (arXiv 2104.04473) section 2.2: the bubble is (pp - 1) / microbatches",
        knobs=("micro_batch", "pp"),
        holds=lambda job, plan: _microbatches(job, plan) >= plan.pp,
        says=lambda job, row: f"microbatches = {_microbatches(job, row)} < pp = {row.pp}: some stage idles for most of the step",
    ),
    Rule(
        id="tied-pp",
        families=(TORCHTITAN,),
        source="torchtitan decoder.py:170",
        knobs=("pp",),
        holds=lambda job, plan: plan.pp == 1 if job.model.tied_embeddings else True,
        says=lambda job, row: f"pp = {row.pp}: {job.model.name} ties its embeddings, which needs pp = 1",
    ),
)
