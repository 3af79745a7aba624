"""What Megatron-LM's dev branch can do with replicas of two tensor-parallel degrees (nonuniform_tp.py, experimental), and who is who.

Symbols: n1 healthy and n2 reduced degree, k reduced replicas, which come first, c context-parallel ranks, R replicas. What that code does
was read at d48bd6be0a (2026-08-21), megatron/core/distributed/nonuniform_tp.py and README_NONUNIFORM_TP.md; each refusal names the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.arrays import ceil_div
from tuner.errors import Problem, SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tuner.job import Job
    from tuner.plan import Plan

SOURCE = "Megatron-LM dev branch at d48bd6be0a, megatron/core/distributed/nonuniform_tp.py"
MOST_PADDING = 64  # times the framework's own multiple of the vocabulary


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


def padded_vocab(job: Job, tp: int, multiple: int) -> int:
    """Return the vocabulary as padded to `multiple` rows a rank."""
    return -(-job.model.vocab // (multiple * tp)) * multiple * tp


def vocab_multiple(job: Job, tp: int, degree: int) -> int | None:
    """Return the least --make-vocab-size-divisible-by, of multiples of the framework's own, whose padded vocabulary divides by both degrees
    and maps from one to the other; None where none up to MOST_PADDING times does.
    """
    own = int(job.framework.padded_vocab.value)
    for multiple in range(own, MOST_PADDING * own + 1, own):
        units = padded_vocab(job, tp, multiple)
        if units % degree == 0 and mapped(units, tp, degree) == [units // tp] * degree:
            return multiple
    return None


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
    widths = {"heads": model.heads, "ffn_hidden": model.ffn_hidden}
    if vocab_multiple(job, tp, degree) is None:
        yield "ntp-padded-vocab", f"no padding of vocab = {model.vocab} maps to {tp} and {degree} ranks", "another reduced degree"
    for name, units in widths.items():
        for each in (tp, degree):
            if units % each:
                yield (
                    f"ntp-{name.removesuffix('_hidden')}",
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
