"""What Megatron-LM's dev branch can do with replicas of two tensor-parallel degrees (nonuniform_tp.py, experimental), and who is who.

Symbols: n1 healthy and n2 reduced degree, k reduced replicas, which come first, c context-parallel ranks, R replicas. What that code does
was read at d48bd6be0a (2026-08-21), megatron/core/distributed/nonuniform_tp.py and README_NONUNIFORM_TP.md; each refusal names the rule.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.arrays import ceil_div
from tuner.cost_model.rules.rule import ALWAYS, MEGATRON
from tuner.cost_model.rules.shards import SHARDS
from tuner.errors import Problem, SpecError
from tuner.launch.megatron_ntp_arguments import unspelled

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from tuner.job import Job
    from tuner.plan import Plan

NAME = "megatron-lm-ntp"
SOURCE = "Megatron-LM dev branch at d48bd6be0a, megatron/core/distributed/nonuniform_tp.py"
# Rules that both degrees must keep; the vocabulary is padded so that they do.
DIVISIONS = tuple(r for r in SHARDS if r.severity == "error" and {ALWAYS, MEGATRON} & set(r.families) and r.id != "vocab-tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Who is who. tp: n1; degree: n2; idle: {replica: tensor-parallel slots that are not used}, of replicas 0 to k - 1; cp, replicas.
    Ranks are those of the processes that run: the reduced replicas' first, n2 to a group, then n1 to a group. origin: the number that each
    replica had while all was well, where its GPUs are (empty: the same).
    """

    tp: int
    degree: int
    cp: int
    replicas: int
    idle: Mapping[int, tuple[int, ...]]
    origin: tuple[int, ...] = ()

    @property
    def reduced(self) -> int:
        """K."""
        return len(self.idle)

    @property
    def spares(self) -> int:
        """GPUs that each tensor-parallel group of a reduced replica lacks (tp_spares)."""
        return self.tp - self.degree

    @property
    def world(self) -> int:
        """Processes that run."""
        return self.cp * (self.reduced * self.degree + (self.replicas - self.reduced) * self.tp)

    def was(self, replica: int) -> int:
        """Return the number that a replica had before."""
        return self.origin[replica] if self.origin else replica

    def slots(self, replica: int) -> tuple[int, ...]:
        """Tensor-parallel slots of a replica that run."""
        gone = self.idle.get(replica, ())
        return tuple(slot for slot in range(self.tp) if slot not in gone)

    def places(self) -> list[tuple[int, int, int, int]]:
        """Return (replica, context slice, place in its tensor-parallel group, slot) of each rank."""
        return [
            (replica, slice_, place, slot)
            for replica in range(self.replicas)
            for slice_ in range(self.cp)
            for place, slot in enumerate(self.slots(replica))
        ]

    def groups(self) -> dict[str, list[list[int]]]:
        """Return the ranks of each group. tp; dp: place r of every replica that has one, of one context slice; dp_cp: of all slices, over
        which gradients are reduced; cp: the slices of a place; tp_cp.
        """
        at = {(replica, slice_, place): rank for rank, (replica, slice_, place, _) in enumerate(self.places())}
        width = [len(self.slots(replica)) for replica in range(self.replicas)]
        slices, replicas = range(self.cp), range(self.replicas)
        have = [[r for r in replicas if place < width[r]] for place in range(max(width))]
        return {
            "tp": [[at[r, c, place] for place in range(width[r])] for r in replicas for c in slices],
            "dp": [[at[r, c, place] for r in members] for c in slices for place, members in enumerate(have)],
            "dp_cp": [[at[r, c, place] for r in members for c in slices] for place, members in enumerate(have)],
            "cp": [[at[r, c, place] for c in slices] for r in replicas for place in range(width[r])],
            "tp_cp": [[at[r, c, place] for c in slices for place in range(width[r])] for r in replicas],
        }

    def uniform(self) -> Layout:
        """Return the same GPUs with every replica at n2: healthy ones leave their highest slots idle."""
        highest = tuple(range(self.degree, self.tp))
        return dataclasses.replace(self, idle={replica: self.idle.get(replica, highest) for replica in range(self.replicas)})


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
    extra rank off the pieces' ends, one at a time in turn. All keep K / n1, as they must, where n1 and n2 both divide K: then the pieces
    are equal, and the (n1 - n2) K / n1 = K - n2 K / n1 units that are taken are a multiple of n2.
    """
    size = ceil_div(units, degree)
    pieces = [min(size, units - start) for start in range(0, units, size)]
    if len(pieces) < degree:
        return None
    taken = (tp - degree) * (units // tp)
    left = [piece - taken // degree - (i < taken % degree) for i, piece in enumerate(pieces)]
    return left if min(left) >= 0 else None


def padded_vocab(job: Job, tp: int, multiple: int) -> int:
    """Return the vocabulary as padded to `multiple` rows a rank."""
    return -(-job.model.vocab // (multiple * tp)) * multiple * tp


def vocab_multiple(job: Job, tp: int, degree: int) -> int:
    """Return m of --make-vocab-size-divisible-by for which n2 divides m n1, so that both degrees divide any padded vocabulary: the least
    multiple of the framework's own m, of its half, its quarter, ..., whichever first pads by at most a fiftieth more than usual.
    """
    own, apart = int(job.framework.padded_vocab.value), degree // math.gcd(tp, degree)
    usual = padded_vocab(job, tp, own)
    multiples = (math.lcm(own >> halved, apart) for halved in range(own.bit_length()))
    return next((multiple for multiple in multiples if 50 * padded_vocab(job, tp, multiple) <= 51 * usual), apart)


def refusals(job: Job, plan: Plan, degree: int) -> list[Problem]:
    """Return why that implementation cannot run this job at n1 and n2, each with its rule's id: rules of its own (ntp-*), and those of
    Megatron-LM's shards, which both degrees must keep.
    """
    if plan.tp == 1:
        found = [("ntp-degree", "tp is 1: there is no lower degree to go on at", "a plan with tp of 2 or more")]
    elif not 1 <= degree < plan.tp:
        found = [("ntp-degree", f"the reduced degree {degree} must be from 1 to {plan.tp - 1}", f"below tp = {plan.tp}")]
    else:
        found = [*_structure(job, plan, degree), *_divisions(job, plan, degree), *unspelled(job, plan)]
    return [Problem(where=NAME, path=rule, value="", rule=text, hint=hint) for rule, text, hint in found]


def _structure(job: Job, plan: Plan, degree: int) -> Iterable[tuple[str, str, str]]:
    model = job.model
    if MEGATRON not in job.framework.rules:
        yield "ntp-framework", f"framework = {job.framework.name}: it is a part of Megatron-LM", "--framework megatron-lm"
    if plan.pp > 1:
        yield "ntp-pp", f"pp = {plan.pp}: its process groups take a replica for tp*cp ranks, which leaves pipelines out", "pp=1"
    if plan.zero > 0:
        text = f"zero = {plan.zero}: side gradients of a healthy rank belong to no parameter of it, but to one of a reduced rank"
        yield "ntp-distributed-optimizer", text, "zero=0"
    if plan.sequence_parallel and degree == 1:
        yield "ntp-sequence-parallel", "sequence_parallel needs a reduced degree above 1", "sequence_parallel=false"
    if plan.dp(job.gpus) < 2:
        yield "ntp-dp", "there is one replica: no healthy one is left to reduce gradients with", "fewer tp, or more GPUs"
    if job.task != "pretrain":
        yield "ntp-task", f"task = {job.task}: its training script is derived from pretrain_gpt.py", "--task pretrain"
    if model.moe is not None:
        yield "ntp-experts", f"{model.name} has experts, which are no units of it (it maps ffn_hidden)", "a dense model"
    if model.mla is not None:
        yield "ntp-mla", f"{model.name} has latent attention, whose compressed projections have no heads to map", "plain attention"
    if model.mtp_layers:
        yield "ntp-mtp", f"{model.name} has {model.mtp_layers} MTP layers, whose projections it does not map", "a model without"


def _divisions(job: Job, plan: Plan, degree: int) -> Iterable[tuple[str, str, str]]:
    found = list(_undivided(job, plan, degree))
    lower = (n for n in range(degree - 1, 0, -1) if not list(_undivided(job, plan, n)) and not (plan.sequence_parallel and n == 1))
    fits = next((f"fallback_tp={n}" for n in lower), "another tp") if found else ""
    for words in dict.fromkeys(text.partition(": ")[0] for _, text in found):  # one cause, one problem
        same = {text.partition(": ")[2]: rule for rule, text in found if text.startswith(f"{words}: ")}
        names = list(dict.fromkeys(same.values()))
        said = [text for text, rule in same.items() if rule != "ntp-map" or names == ["ntp-map"]]  # it follows from the others
        yield ", ".join(names), f"{words}: {'; '.join(said)}", fits + (", or sequence_parallel=false" if names == ["seq-sp"] else "")
    model, tp = job.model, int(plan.tp)
    if model.kv_heads < tp and tp % model.kv_heads == 0:
        text = f"kv_heads = {model.kv_heads} are copied for {tp} ranks, and less often for {degree}: the shards of QKV do not add up"
        yield "ntp-kv-copies", text, f"tp={model.kv_heads} or less"
    rows = (model.heads + 2 * model.kv_heads) * model.qk_head_dim
    if rows % model.heads:
        text = f"it cuts the {rows} rows of QKV ({model.heads} heads + 2 * {model.kv_heads} kv_heads) by heads, which do not divide them"
        yield "ntp-qkv", text, "a model whose heads divide 2*kv_heads*head_dim"


def _undivided(job: Job, plan: Plan, degree: int) -> Iterable[tuple[str, str]]:
    """Yield what the degrees do not divide, and where the mapping from one to the other is wrong."""
    tp = int(plan.tp)
    for each, words in ((tp, "healthy"), (degree, "reduced")):
        row = dataclasses.replace(plan, tp=each)
        for rule in DIVISIONS:
            if not rule.holds(job, row):
                yield rule.id, f"{words} replicas: {rule.says(job, row)}"
    for name, units in {"heads": job.model.heads, "ffn_hidden": job.model.ffn_hidden}.items():
        left = mapped(units, tp, degree)
        if units % tp == 0 and left != [units // tp] * degree:
            found = "fails (fewer pieces than ranks)" if left is None else f"leaves {min(left)} to {max(left)} on a rank, not {units // tp}"
            yield "ntp-map", f"reduced replicas: the mapping of {name} = {units} from {tp} to {degree} ranks {found}"


def defects(job: Job, plan: Plan) -> list[tuple[str, str]]:
    """Return what is known to go wrong in this job there, worst first, and how that is known: "run" (on CPUs, synthetic gradients, with
    what stands in the way replaced) or "read" (in the source).
    """
    model = job.model
    found = [
        (
            "run",
            "DDP raises TypeError with tp_spares > 0: `param_layout` is given twice, by DDP and by the buffer. The way out, which "
            "pretrain_ntp.py takes: drop `param_layout` from the keywords of NonuniformTPParamAndGradBuffer.__init__.",
        ),
        (
            "run",
            "Gradients of row-parallel weights (attention output, MLP down) come out wrong on every rank: a core rank's flat buffer is "
            "[main | side], which is not the row-major order of the reduced replica's [out, in/n2], so unrelated weights are averaged.",
        ),
        ("run", "Replicated parameters (norms, row-parallel biases) of the extra ranks of healthy replicas are never averaged."),
        (
            "read",
            "Weights: a healthy rank must hold the units that its mapping gives it, which are not contiguous. Nothing there deals "
            "weights so, neither new ones nor a checkpoint's; new ones also differ between degrees, as each rank seeds its own shard.",
        ),
    ]
    if model.kv_heads != model.heads:
        text = f"Grouped-query attention ({model.heads} heads, {model.kv_heads} groups): fused QKV is cut by heads, across groups."
        found.append(("read", text))
    if model.gated_mlp:
        found.append(("read", "Gated MLP: fc1 holds [gate | up] of a rank, so the rows that move are all of `up`."))
    if plan.sequence_parallel:
        found.append(("read", "Sequence parallelism: gradients of norms are summed within a replica only."))
    if plan.cp > 1:
        found.append(("read", "Context parallelism: no test upstream has run it with two degrees."))
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
    origin = (*sorted(idle), *(replica for replica in range(replicas) if replica not in idle))  # reduced replicas come first
    renumbered = dict(enumerate(idle[replica] for replica in sorted(idle)))
    return Layout(tp=tp, degree=tp - wanted, cp=int(plan.cp), replicas=replicas, idle=renumbered, origin=origin)
