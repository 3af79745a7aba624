"""A job of replicas of two tensor-parallel degrees as files for Megatron-LM's dev branch (nonuniform_tp.py), which is experimental.

Symbols: n1 healthy and n2 reduced degree, k reduced replicas, which come first, c context-parallel ranks, R replicas. What that code does
was read at d48bd6be0a (2026-08-21), megatron/core/distributed/nonuniform_tp.py and README_NONUNIFORM_TP.md; each refusal names the rule.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.arrays import ceil_div
from tuner.errors import Problem, SpecError
from tuner.launch.launchers.launcher import Written

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tuner.job import Job
    from tuner.plan import Plan

SOURCE = "Megatron-LM dev branch at d48bd6be0a, megatron/core/distributed/nonuniform_tp.py"
CONFIG, SETUP, ARGUMENTS, BATCH, TASK, READ_ME = "ntp.json", "ntp_setup.py", "arguments.sh", "launch.sbatch", "task.sh", "README.md"


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who is who. tp: n1; degree: n2; idle: {replica: tensor-parallel slots that are not used}, of replicas 0 to k - 1; cp, replicas.
    Ranks are those of the processes that run: the reduced replicas' first, n2 to a group, then n1 to a group.
    """

    tp: int
    degree: int
    cp: int
    replicas: int
    idle: Mapping[int, tuple[int, ...]]

    @property
    def reduced(self) -> int:
        """K."""
        return len(self.idle)

    @property
    def spares(self) -> int:
        """GPUs that each tensor-parallel group of a reduced replica lacks (tp_spares)."""
        return self.tp - self.degree

    def slots(self, replica: int) -> tuple[int, ...]:
        """Tensor-parallel slots of a replica that run."""
        gone = self.idle.get(replica, ())
        return tuple(slot for slot in range(self.tp) if slot not in gone)

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the ranks of each group: tp; dp: place r of every replica that has one, of a context slice; cp: a slot's slices; tp_cp."""
        first, at = 0, {}
        for replica in range(self.replicas):
            for slice_ in range(self.cp):
                for place in range(len(self.slots(replica))):
                    at[replica, slice_, place] = first
                    first += 1
        width = [len(self.slots(replica)) for replica in range(self.replicas)]
        every = [(replica, slice_) for replica in range(self.replicas) for slice_ in range(self.cp)]
        return {
            "tp": [[at[r, c, place] for place in range(width[r])] for r, c in every],
            "dp": [[at[r, c, place] for r in range(self.replicas) if place < width[r]] for c in range(self.cp) for place in range(self.tp)],
            "cp": [[at[r, c, place] for c in range(self.cp)] for r in range(self.replicas) for place in range(width[r])],
            "tp_cp": [[at[r, c, place] for c in range(self.cp) for place in range(width[r])] for r in range(self.replicas)],
        }


def parity(failed: Mapping[int, Iterable[int]], tp: int) -> tuple[int, dict[int, tuple[int, ...]]]:
    """Return tp_spares, and {replica: slots not used}: the most failures of any replica counts for all, and others leave their highest
    healthy slots idle as well (compute_uniform_tp_spares_with_parity).
    """
    gone = {replica: sorted(set(slots)) for replica, slots in failed.items()}
    spares = max((len(slots) for slots in gone.values()), default=0)
    for slots in gone.values():
        healthy = [slot for slot in range(tp) if slot not in slots]
        slots += healthy[len(healthy) - (spares - len(slots)) :]
    return spares, {replica: tuple(sorted(slots)) for replica, slots in gone.items()}


def mapped(units: int, tp: int, degree: int) -> list[int] | None:
    """Return how many units ntp_map leaves each of the n2 core ranks, None where it fails.

    It cuts the units by torch.chunk into n2 pieces of ceil(K / n2), which may be fewer than n2, and takes int(K / n1) units for each
    extra rank off the pieces' ends, one at a time in turn.
    """
    size = ceil_div(units, degree)
    pieces = [min(size, units - start) for start in range(0, units, size)]
    taken = (tp - degree) * (units // tp)
    if len(pieces) < degree and taken > len(pieces):
        return None
    left = [piece - taken // degree - (i < taken % degree) for i, piece in enumerate(pieces)]
    return left if len(left) == degree and min(left) >= 0 else None


def refusals(job: Job, plan: Plan, degree: int) -> list[Problem]:
    """Return why that implementation cannot run this job at n1 and n2, each with its rule's id."""
    return [
        Problem(where="megatron-lm-ntp", path=rule, value="", rule=text, hint=hint)
        for rule, text, hint in (*_structure(job, plan, degree), *_divisions(job, plan, degree))
    ]


def _structure(job: Job, plan: Plan, degree: int) -> Iterable[tuple[str, str, str]]:
    tp, node = int(plan.tp), job.cluster.gpus_per_node
    if not 1 <= degree < tp:
        yield "ntp-degree", f"the reduced degree {degree} must be from 1 to {tp - 1}", f"below tp = {tp}"
        return
    if plan.pp > 1:
        yield "ntp-pp", f"pp = {plan.pp}: its process groups take a replica for tp*cp ranks, which leaves pipelines out", "pp=1"
    if job.model.moe is not None:
        yield "ntp-experts", f"{job.model.name} has experts, which are no units of it (it maps ffn_hidden)", "a dense model"
    if job.model.mla is not None:
        yield (
            "ntp-mla",
            f"{job.model.name} has latent attention, whose compressed projections have no heads to map",
            "a model with plain attention",
        )
    if plan.zero > 0:
        yield (
            "ntp-distributed-optimizer",
            f"zero = {plan.zero}: side gradients of a healthy rank belong to no parameter of it, but to one of a reduced rank",
            "zero=0",
        )
    if plan.dp(job.gpus) < 2:
        yield "ntp-dp", "there is one replica: no healthy one is left to reduce gradients with", "fewer tp, or more GPUs"
    if tp > node or node % tp:
        yield (
            "ntp-node",
            f"tp = {tp} does not divide the {node} GPUs of a node, so its tasks cannot be counted by node",
            f"a divisor of {node}",
        )


def _divisions(job: Job, plan: Plan, degree: int) -> Iterable[tuple[str, str, str]]:
    model, tp = job.model, int(plan.tp)
    if not 1 <= degree < tp:
        return
    pad = job.framework.padded_vocab.value
    widths = {"heads": model.heads, "ffn_hidden": model.ffn_hidden, "padded vocab": ceil_div(model.vocab, pad * tp) * pad * tp}
    for name, units in widths.items():
        for each in (tp, degree):
            if units % each:
                yield (
                    f"ntp-{name.replace('_hidden', '').replace(' ', '-')}",
                    f"{name} = {units} must divide by {each}",
                    _divisors(units, tp),
                )
    if any(model.kv_heads % each and each % model.kv_heads for each in (tp, degree)):
        yield "ntp-kv-heads", f"kv_heads = {model.kv_heads} must divide by {tp} and {degree}, or divide them", _divisors(model.kv_heads, tp)
    for name, units in widths.items():
        if units % tp == 0 and mapped(units, tp, degree) != [units // tp] * degree:
            left = mapped(units, tp, degree)
            found = "fails (fewer pieces than ranks)" if left is None else f"leaves {min(left)} to {max(left)} on a rank, not {units // tp}"
            yield "ntp-map", f"its mapping of {name} = {units} from {tp} to {degree} ranks {found}", _mappable(units, tp)


def _divisors(units: int, tp: int) -> str:
    fits = [n for n in range(1, tp) if units % n == 0]
    return f"reduced degrees that divide it: {', '.join(map(str, fits))}" if fits else "another tp"


def _mappable(units: int, tp: int) -> str:
    fits = [n for n in range(1, tp) if mapped(units, tp, n) == [units // tp] * n]
    return f"it maps to {', '.join(map(str, fits))}" if fits else "another tp"


def wrong_gradients(job: Job, plan: Plan) -> list[str]:
    """Return what is known to go wrong in this job there, worst first; README.md of the export lists it."""
    model = job.model
    found = [
        "DDP raises TypeError (param_layout given twice): drop `param_layout` from the keywords that reach the parent of "
        "NonuniformTPParamAndGradBuffer.",
        "Gradients of row-parallel weights (attention output, MLP down) come out wrong on every rank: the flat buffer's rows are not "
        "those of the reduced replica's shard.",
        "Replicated parameters (norms) of the extra ranks of healthy replicas are never averaged.",
    ]
    if model.kv_heads != model.heads:
        found.append(f"Grouped-query attention ({model.heads} heads, {model.kv_heads} groups): fused QKV is cut by heads, across groups.")
    if model.gated_mlp:
        found.append("Gated MLP: fc1 holds [gate | up] of a rank, so the rows that move are all of `up`.")
    if plan.sequence_parallel:
        found.append("Sequence parallelism: gradients of norms are summed within a replica only.")
    return found


def layout_of(job: Job, plan: Plan, degree: int | None, failed: Mapping[int, Sequence[int]]) -> Layout:
    """Return the layout for these failures ({replica: slots}); degree: None, or at most what the failures leave.

    Raises SpecError: unknown replicas or slots, none failed, more failures than the degree allows.
    """
    tp, replicas = int(plan.tp), int(plan.dp(job.gpus))
    problems = [
        Problem(where="failed", path="", value=f"{replica}:{slot}", rule=f"must name one of {replicas} replicas and a slot below tp = {tp}")
        for replica, slots in failed.items()
        for slot in slots
        if not (0 <= replica < replicas and 0 <= slot < tp)
    ]
    if not failed or not all(failed.values()):
        problems.append(Problem(where="failed", path="", value="", rule="names no GPU", hint="REPLICA:SLOT, like 0:3"))
    if problems:
        raise SpecError(problems)
    spares, idle = parity(failed, tp)
    if degree is not None and spares > tp - degree:
        rule = f"a replica lost {spares} GPUs, which leaves {tp - spares}"
        raise SpecError([Problem(where="fallback-tp", path="", value=str(degree), rule=rule, hint=f"{tp - spares} or less")])
    wanted = spares if degree is None else tp - degree
    if wanted > spares:
        some = min(idle)
        healthy = [slot for slot in range(tp) if slot not in idle[some]]
        _, idle = parity({**idle, some: (*idle[some], *healthy[len(healthy) - (wanted - spares) :])}, tp)
    renumbered = dict(enumerate(idle[replica] for replica in sorted(idle)))  # reduced replicas come first
    return Layout(tp=tp, degree=tp - wanted, cp=int(plan.cp), replicas=replicas, idle=renumbered)


def write(job: Job, plan: Plan, layout: Layout) -> Written:
    """Return the files of the export. Raises SpecError listing every rule of that implementation that the job breaks."""
    problems = refusals(job, plan, layout.degree)
    groups_a_node = max(job.cluster.gpus_per_node // layout.tp, 1)
    if layout.reduced * layout.cp % groups_a_node:
        rule = f"{layout.reduced * layout.cp} reduced groups do not fill nodes of {groups_a_node}, whose tasks are counted by node"
        problems.append(Problem(where="megatron-lm-ntp", path="ntp-node", value="", rule=rule, hint=f"a multiple of {groups_a_node}"))
    if layout.reduced >= layout.replicas:
        problems.append(
            Problem(
                where="megatron-lm-ntp",
                path="ntp-reduced",
                value="",
                rule="every replica lost GPUs: none is healthy",
                hint="a smaller tp for all",
            )
        )
    if problems:
        raise SpecError(problems)
    files = {
        CONFIG: json.dumps(_config(layout), indent=2) + "\n",
        SETUP: _SETUP,
        ARGUMENTS: _arguments(job, plan, layout),
        TASK: _task(job, layout),
        BATCH: _batch(job, layout, groups_a_node),
        READ_ME: _read_me(job, plan, layout),
    }
    return Written(
        files=files, programs=(TASK, BATCH), start=f"sbatch {BATCH}", notes=("experimental: run the parity check of README.md first",)
    )


def _config(layout: Layout) -> dict[str, object]:
    """Return ntp.json: the fields of NonuniformTPConfig, and the groups by rank."""
    idle = {f"{replica},{slice_},0": list(slots) for replica, slots in layout.idle.items() for slice_ in range(layout.cp)}
    return {
        "tp_base": layout.tp,
        "tp_spares": layout.spares,
        "num_reduced_tp_dp_ranks": layout.reduced,
        "non_active_ranks_per_dp": idle,
        "context_parallel": layout.cp,
        "replicas": layout.replicas,
        "groups": layout.groups(),
    }


def _arguments(job: Job, plan: Plan, layout: Layout) -> str:
    """Return arguments.sh: what parallelism and batch are; the architecture's and data's flags are the person's own."""
    flags = {
        "--tensor-model-parallel-size": str(layout.tp),
        "--pipeline-model-parallel-size": "1",
        "--context-parallel-size": str(layout.cp),
        "--micro-batch-size": str(int(plan.micro_batch)),
        "--global-batch-size": str(job.global_batch),
        "--seq-length": str(job.seq_len),
        "--num-layers": str(job.model.layers),
        "--hidden-size": str(job.model.hidden),
        "--ffn-hidden-size": str(job.model.ffn_hidden),
        "--num-attention-heads": str(job.model.heads),
    }
    if job.model.kv_heads != job.model.heads:
        flags |= {"--group-query-attention": "", "--num-query-groups": str(job.model.kv_heads)}
    flags |= {"--sequence-parallel": ""} if plan.sequence_parallel else {}
    flags |= {"--bf16": ""} if job.precision != "fp32" else {}
    flags |= {"--overlap-grad-reduce": "", "--ddp-bucket-size": "100000000"}  # the path that hides resharding; few large buckets
    lines = [f"  {shlex.quote(name)}{' ' + shlex.quote(value) if value else ''}" for name, value in flags.items()]
    head = [
        f"# {job.model.name} (of these flags; add tokenizer and data). tp is that of healthy replicas.",
        "# shellcheck shell=bash disable=SC2034",
    ]
    return "\n".join([*head, "ARGUMENTS=(", *lines, ")", ""])


def _task(job: Job, layout: Layout) -> str:
    """Return task.sh: one process, with its rank over both parts of the job and its GPU."""
    per_node = max(job.cluster.gpus_per_node // layout.tp, 1)
    table = "\n".join(f"  {shlex.quote(' '.join(map(str, gpus)))}" for gpus in _gpus_of_nodes(layout, per_node))
    ranks = layout.reduced * layout.cp * layout.degree
    world = ranks + (layout.replicas - layout.reduced) * layout.cp * layout.tp
    return f"""#!/bin/bash
# One rank. Part 0 of the job runs the reduced replicas, part 1 the healthy ones.
set -euo pipefail
cd "$(dirname "$0")"
PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
USED=(  # GPUs of each node of part 0
{table}
)
export WORLD_SIZE={world} LOCAL_RANK=$SLURM_LOCALID
if [ "$SLURM_JOB_ID" = "$PART_0" ]; then
  read -r -a gpus <<<"${{USED[$SLURM_NODEID]}}"
  export RANK=$SLURM_PROCID CUDA_VISIBLE_DEVICES=${{gpus[$SLURM_LOCALID]}}
else
  export RANK=$(({ranks} + SLURM_PROCID)) CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
fi
LOCAL_RANK=0
# One queue, so that reductions keep the order in which resharding launches them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# shellcheck source=/dev/null
source ./{ARGUMENTS}
exec python3 "${{PRETRAIN:?your copy of pretrain_gpt.py, which calls ntp_setup.py}}" "${{ARGUMENTS[@]}}" "$@"
"""


def _gpus_of_nodes(layout: Layout, per_node: int) -> list[list[int]]:
    """Return the GPUs in use on each node of part 0, which holds `per_node` groups."""
    groups = [layout.slots(replica) for replica in range(layout.reduced) for _ in range(layout.cp)]
    nodes = [groups[start : start + per_node] for start in range(0, len(groups), per_node)]
    return [[place * layout.tp + slot for place, slots in enumerate(node) for slot in slots] for node in nodes]


def _batch(job: Job, layout: Layout, per_node: int) -> str:
    """Return launch.sbatch: a heterogeneous job, as the parts have different counts of processes a node."""
    node = job.cluster.gpus_per_node
    parts = [
        (layout.reduced * layout.cp // per_node, per_node * layout.degree),
        (ceil_div((layout.replicas - layout.reduced) * layout.cp, per_node), per_node * layout.tp),
    ]
    (few, few_tasks), (many, many_tasks) = parts
    return f"""#!/bin/bash
#SBATCH --job-name=ntp
#SBATCH --nodes={few}
#SBATCH --ntasks-per-node={few_tasks}
#SBATCH --gpus-per-node={node}
#SBATCH hetjob
#SBATCH --nodes={many}
#SBATCH --ntasks-per-node={many_tasks}
#SBATCH --gpus-per-node={node}
# Part 0: the nodes with failed GPUs, {layout.degree} of {layout.tp} in each group; name them with --nodelist. Part 1: whole nodes.
set -euo pipefail
cd "$(dirname "$0")"
PART_0=$SLURM_JOB_ID_HET_GROUP_0
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
export PART_0 MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"
srun --het-group=0,1 --kill-on-bad-exit=1 ./{TASK} "$@"
"""


_SETUP = '''\
"""Nonuniform tensor parallelism of Megatron-LM's dev branch, from ntp.json: call these from a copy of pretrain_gpt.py. EXPERIMENTAL.

1. start() in place of torch.distributed.init_process_group and initialize_model_parallel;
2. map_parameters(model, padded_vocab) when the model is built (with the tensor-parallel size of this rank's group, see degree());
3. wrap(...) in place of DistributedDataParallel.
"""

import json
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed.nonuniform_tp import NonuniformTPConfig, NonuniformTPDistributedDataParallel, ntp_init, ntp_map

TOLD = json.loads((Path(__file__).parent / "ntp.json").read_text())
FIELDS = ("tp_base", "tp_spares", "num_reduced_tp_dp_ranks")
IDLE = {tuple(map(int, key.split(","))): slots for key, slots in TOLD["non_active_ranks_per_dp"].items()}
CONFIG = NonuniformTPConfig(**{name: TOLD[name] for name in FIELDS}, non_active_ranks_per_dp=IDLE)


def start():
    """Make the process groups by hand: ranks are packed, so neither initialize_model_parallel nor the helper of nonuniform_tp fits."""
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    for name, every in TOLD["groups"].items():
        for ranks in every:  # every rank makes every group, in this order
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                _take(name, group, ranks)
    alone = None
    for other in range(torch.distributed.get_world_size()):
        group = torch.distributed.new_group([other])
        alone = group if other == rank else alone
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = alone
    parallel_state._PIPELINE_GLOBAL_RANKS = [rank]


def _take(name, group, ranks):
    if name == "tp":
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = parallel_state._MODEL_PARALLEL_GROUP = group
        parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = parallel_state._MODEL_PARALLEL_GLOBAL_RANKS = ranks
    elif name == "dp":
        parallel_state._DATA_PARALLEL_GROUP = parallel_state._DATA_PARALLEL_GROUP_WITH_CP = group
        parallel_state._DATA_PARALLEL_GLOBAL_RANKS = ranks
    elif name == "cp":
        parallel_state._CONTEXT_PARALLEL_GROUP, parallel_state._CONTEXT_PARALLEL_GLOBAL_RANKS = group, ranks
    else:
        parallel_state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = group


def degree():
    """Return the tensor-parallel size of this rank's replica: what its TransformerConfig must say."""
    return parallel_state.get_tensor_model_parallel_world_size()


def map_parameters(model, padded_vocab):
    """Attach the mapping between both degrees to the parameters of a GPTModel."""
    for layer in model.decoder.layers:
        ntp_init(layer, CONFIG)
    for module in (getattr(model.embedding, "word_embeddings", None), getattr(model, "output_layer", None)):
        if module is not None:
            ntp_map(module, CONFIG, padded_vocab)


def wrap(config, ddp_config, model, pg_collection=None):
    """Return the model in the data-parallel wrapper that reshards gradients."""
    return NonuniformTPDistributedDataParallel(
        config=config, ddp_config=ddp_config, module=model, pg_collection=pg_collection, ntp_config=CONFIG
    )
'''


def _read_me(job: Job, plan: Plan, layout: Layout) -> str:
    idle = "\n".join(f"| {replica} | {', '.join(map(str, slots))} |" for replica, slots in layout.idle.items())
    wrong = "\n".join(f"- {text}" for text in wrong_gradients(job, plan))
    return f"""# {job.model.name} at tensor-parallel degrees {layout.tp} and {layout.degree} on Megatron-LM's dev branch

EXPERIMENTAL. {layout.reduced} of {layout.replicas} replicas run at {layout.degree} of {layout.tp} GPUs.
Source of what is said here: {SOURCE}.

| replica | slots not used |
|---|---|
{idle}

`{CONFIG}` has NonuniformTPConfig and every process group by rank; `{SETUP}` makes them and wraps the model; `{BATCH}` is a Slurm
heterogeneous job, as replicas have different counts of processes; `{ARGUMENTS}` has the parallelism, the batch and the sizes of the
model: add tokenizer and data. There is no command-line flag for this: PRETRAIN names your copy of pretrain_gpt.py, which calls
`{SETUP}` at the three places that it names.

    PRETRAIN=/path/to/pretrain_ntp.py sbatch {BATCH}

## Known to be wrong there

{wrong}

No upstream test compares gradients. Its one end-to-end test (6 GPUs, TP2 and TP4, one layer) looks at whether the loss is finite.

## Before anything else: parity

Train a model of one or two layers in fp32 for three steps, once with these files and once with all replicas at tp {layout.degree} (no
failures, same seed and global batch, dropout off). Losses must agree to 1e-5 and the norms of every parameter's gradient to 1e-4. They will
not, until the defects above are mended. `tuner profile --ntp` runs the same layouts with the tuner's own engine, which passes that test.
"""
