"""The space that is searched: axes of knob values, as an open-grid Plan in blocks of bounded size."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
from pydantic import Field

from tuner.cost_model.rules import enforced
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.plan import Plan
from tuner.plan_text import KNOBS, SPELLINGS, default_recompute, parse_knobs
from tuner.search.axes import coarser, default_axes
from tuner.search.limits import Limit, parse_limits
from tuner.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from tuner.arrays import Bools, Ints
    from tuner.job import Job

RUNTIME = ("tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs")  # the framework's default where the rules allow it
# Knobs that rules tie together share an axis, outer axes first.
TIED = (
    ("pp", "vpp", "pipeline_layout", "schedule"),
    ("tp", "sequence_parallel", "tp_overlap"),
    ("fallback_tp",),
    ("cp", "cp_kind"),
    ("ep", "etp", "ep_overlap"),
    ("zero", "shard_group", "dp_overlap"),
    ("micro_batch",),
    ("recompute", "offload", "cuda_graphs"),
)
_LARGEST_TIE = 1_000_000
_MESH = ("pp", "vpp", "tp", "cp", "ep", "etp", "micro_batch")  # rules tie any of these together
_LARGEST_MESH = 100_000_000
MOST_PLANS = 3_000_000  # legal plans of axes that nobody wrote: what a core sweeps in about two seconds
AXES = tuple(knob for knob in KNOBS if knob != "dp")
_LARGEST_AXIS = 100_000
Value = bool | int | str


class SpaceSpec(Spec):
    """A space as a person writes it: axes replaces the values of a knob, fix sets one, limit bounds products of knobs."""

    axes: dict[str, Annotated[list[Value], Field(min_length=1, max_length=_LARGEST_AXIS)]] = Field(default_factory=dict)
    fix: dict[str, Value] = Field(default_factory=dict)
    limit: list[str] = Field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Values of a knob, or of several that depend on each other: a word for each knob as a person writes it, and the plan fields
    that each value sets (aligned columns).
    """

    knobs: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]
    fields: Mapping[str, tuple[int, ...]]

    def __len__(self) -> int:
        return len(self.words)

    def keep(self, positions: Sequence[int]) -> Axis:
        """Return the axis with these positions only."""
        return Axis(
            knobs=self.knobs,
            words=tuple(self.words[i] for i in positions),
            fields={name: tuple(column[i] for i in positions) for name, column in self.fields.items()},
        )


def knob_axis(name: str, values: Iterable[Value], where: str) -> Axis:
    """Return the axis of a knob, each value once. Raises SpecError listing every bad value."""
    rows: dict[tuple[tuple[str, int], ...], str] = {}
    problems: list[Problem] = []
    for value in values:
        try:
            rows.setdefault(tuple(parse_knobs({name: value}, where).items()), str(value))
        except SpecError as error:
            problems += error.problems
    if problems:
        raise SpecError(problems)
    fields = [dict(row) for row in rows]
    words = tuple((word,) for word in rows.values())
    return Axis(knobs=(name,), words=words, fields={field: tuple(row[field] for row in fields) for field in fields[0]})


def _product(axes: Sequence[Axis], allowed: Bools) -> Axis:
    """Return the axis of the combinations of these axes' values that `allowed` (one dimension for each) lets through."""
    where = np.nonzero(allowed)
    fields: dict[str, tuple[int, ...]] = {}
    for a, positions in zip(axes, where, strict=True):
        fields |= {name: tuple(column[i] for i in positions.tolist()) for name, column in a.fields.items()}
    rows = zip(*(positions.tolist() for positions in where), strict=True)
    words = tuple(tuple(word for a, i in zip(axes, row, strict=True) for word in a.words[i]) for row in rows)
    return Axis(knobs=tuple(knob for a in axes for knob in a.knobs), words=words, fields=fields)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The plans of a job: the product of `axes` (outer first), inside `limits`. A knob without an axis takes the framework's
    default. thinned: knobs of which default values were left out to keep the space small.
    """

    job: Job
    axes: tuple[Axis, ...]
    limits: tuple[Limit, ...] = ()
    thinned: tuple[str, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Values on each axis."""
        return tuple(len(a) for a in self.axes)

    @property
    def size(self) -> int:
        """Plans of the product of the axes."""
        return prod(self.shape)

    def grid(self, positions: Sequence[Ints] | None = None) -> Plan:
        """Return the open-grid plan over these positions of each axis (all of them when not given)."""
        fields: dict[str, Ints] = {}
        for i, a in enumerate(self.axes):
            shape = [1] * len(self.axes)
            shape[i] = -1
            for name, column in a.fields.items():
                values = np.asarray(column, dtype=np.int64)
                fields[name] = (values if positions is None else values[positions[i]]).reshape(shape)
        return complete(self.job, fields)

    def plan_at(self, index: int) -> Plan:
        """Return the single plan at this index of the product, in Python ints."""
        fields: dict[str, int] = {}
        for a, position in zip(self.axes, np.unravel_index(index, self.shape), strict=True):
            fields |= {name: column[position] for name, column in a.fields.items()}
        return complete(self.job, fields)

    def words_at(self, index: int) -> dict[str, str]:
        """Return {knob: word} of the plan at this index of the product."""
        words: dict[str, str] = {}
        for a, position in zip(self.axes, np.unravel_index(index, self.shape), strict=True):
            words |= dict(zip(a.knobs, a.words[position], strict=True))
        return words

    def plans_at(self, indices: Sequence[int]) -> Plan:
        """Return the table of plans at these indices of the product."""
        where = np.unravel_index(np.asarray(indices, dtype=np.int64), self.shape)
        fields = {
            name: np.asarray(column, dtype=np.int64)[position]
            for a, position in zip(self.axes, where, strict=True)
            for name, column in a.fields.items()
        }
        return complete(self.job, fields)

    def masks(self, plan: Plan) -> list[Bools]:
        """Return one mask for each rule and limit that a plan of the search keeps, each over the axes it depends on."""
        from tuner.cost_model.rules import masks

        return [*masks(self.job, plan, "error", "duplicate"), *(limit.holds(self.job, plan) for limit in self.limits)]

    def allows(self, plan: Plan) -> Bools:
        """Return the mask of the plans that are legal, in their one spelling and inside the limits."""
        good: Bools = True
        for mask in self.masks(plan):
            good = good & mask
        return good


def complete(job: Job, fields: Mapping[str, Ints]) -> Plan:
    """Return the plan with these fields and the framework's defaults for the others.

    A runtime knob (overlap, CUDA graphs) that is not given is on where it is on by default and the rules let it be.
    """
    defaults = job.framework.defaults
    spelled = {
        "vpp": defaults.vpp.value,
        "zero": defaults.zero.value,
        "pipeline_layout": defaults.pipeline_layout.value,
    }
    known = parse_knobs(spelled, f"framework {job.framework.name}") | default_recompute(defaults.recompute.value, job.model)
    given = {name: value for name, value in fields.items() if name != "dp"}
    plan = Plan(**{**known, **given})
    if "sequence_parallel" not in given:
        plan = dataclasses.replace(plan, sequence_parallel=(plan.tp > 1) * int(defaults.sequence_parallel.value))
    for knob in RUNTIME:
        if knob not in given:
            plan = dataclasses.replace(plan, **{knob: _where_allowed(job, plan, knob) if getattr(defaults, knob).value else 0})
    return plan


def _where_allowed(job: Job, plan: Plan, knob: str) -> Ints:
    """Return 1 where the rules about this knob let it be on, else 0."""
    on = dataclasses.replace(plan, **{knob: 1})
    allowed: Bools = True
    for rule in enforced(job, "error", "duplicate"):
        if knob in rule.knobs:
            allowed = allowed & rule.holds(job, on)
    return allowed * 1


def default_space(job: Job) -> Space:
    """Return the space that a search covers when nobody narrows it."""
    return build_space(job, SpaceSpec())


def build_space(
    job: Job, spec: SpaceSpec, where: str = "space", most_plans: int = MOST_PLANS, beside: Mapping[str, Sequence[Value]] | None = None
) -> Space:
    """Return the space of `spec` for `job`: the default axes, replaced, fixed and limited as it says.

    Values that no legal plan has are left out, unless no plan is legal at all; default axes are thinned until at most `most_plans`
    plans are legal. beside: further axes, which do not count for that: the others are as thin as without them.
    Raises SpecError listing every problem.
    """
    spec = SpaceSpec(axes=_spelled(spec.axes), fix=_spelled(spec.fix), limit=spec.limit)
    limits = _checked(spec, where)
    written = {**spec.axes, **{name: [value] for name, value in spec.fix.items() if name != "dp"}}
    axes: Any = default_axes(job)
    thinned: list[str] = []
    space = _space(job, {**axes, **written}, limits, where)
    steps = coarser(job, axes)
    while _more_than(space, most_plans) and (step := next(steps, None)):
        knob, axes = step
        if knob not in written:
            thinned.append(knob)
            space = _space(job, {**axes, **written}, limits, where)
    if beside:
        space = _space(job, {**axes, **written, **beside}, limits, where)
    return dataclasses.replace(_used(space), thinned=tuple(dict.fromkeys(thinned)))


def _spelled(by_knob: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with short names of knobs (mb, sp) written out."""
    return {SPELLINGS.get(name, name): value for name, value in by_knob.items()}


def _checked(spec: SpaceSpec, where: str) -> tuple[Limit, ...]:
    """Return the limits of a space, a fixed dp among them. Raises SpecError listing every problem of names, values and limits."""
    problems = [
        Problem(where=where, path=f"{part}.{name}"[:80], value="", rule="is no knob of a plan", hint=nearest(name[:80], KNOBS))
        for part, names in (("axes", spec.axes), ("fix", spec.fix))
        for name in names
        if name not in (KNOBS if part == "fix" else AXES)
    ]
    problems += [
        Problem(where=where, path=f"axes.{name}", value="", rule="is fixed as well", hint="name it under axes or under fix")
        for name in spec.axes
        if name in spec.fix
    ]
    for name, values in (*spec.axes.items(), *((name, [value]) for name, value in spec.fix.items() if name != "dp")):
        if name in AXES:
            problems += _problems(partial(knob_axis, name, values, where))
    texts = [*spec.limit, *(f"dp=={spec.fix[name]}" for name in ("dp",) if name in spec.fix)]
    problems += _problems(partial(parse_limits, texts, where))
    if problems:
        raise SpecError(problems)
    return parse_limits(texts, where)


def _problems(of: Callable[[], object]) -> list[Problem]:
    try:
        of()
    except SpecError as error:
        return list(error.problems)
    return []


def _space(job: Job, values: Mapping[str, Iterable[Value]], limits: tuple[Limit, ...], where: str) -> Space:
    axes = tuple(_possible(job, knob_axis(name, column, where)) for name, column in values.items())
    lengths = {a.knobs[0]: len(a) for a in axes if a.knobs[0] in _MESH}
    if prod(lengths.values()) > _LARGEST_MESH:
        counts = " x ".join(f"{n} of {name}" for name, n in lengths.items() if n > 1)
        raise one_problem(where, "axes", None, f"{counts} are more than {_LARGEST_MESH:,} meshes", "name fewer values, or fix a knob")
    return _tied(_limited(Space(job=job, axes=axes, limits=limits), where))


def _possible(job: Job, axis: Axis) -> Axis:
    """Return the axis of a knob without values that no plan of this job has; all of them where none is possible."""
    divided = {"tp": job.gpus, "pp": job.gpus, "cp": job.gpus, "micro_batch": job.global_batch}
    if job.model.moe:
        divided["ep"] = job.model.moe.experts
    (knob,) = axis.knobs
    if knob not in divided:
        return axis
    return axis.keep([i for i, n in enumerate(axis.fields[knob]) if divided[knob] % n == 0]) or axis


def _more_than(space: Space, most: int) -> bool:
    """Return whether more than `most` plans are legal, counting no further than that."""
    from tuner.search.blocks import blocks

    legal = 0
    for block in blocks(space):
        legal += int(np.count_nonzero(block.allowed)) * (prod(block.shape) // max(np.size(block.allowed), 1))
        if legal > most:
            return True
    return False


def _limited(space: Space, where: str) -> Space:
    """Return the space (of one knob an axis) with limits on a single axis applied to its values, and the others kept as masks."""
    axes, kept = list(space.axes), []
    by_name = {a.knobs[0]: i for i, a in enumerate(axes)}
    for limit in space.limits:
        names = set(limit.knobs)
        if len(names) != 1 or not names <= set(by_name):
            kept.append(limit)
            continue
        i = by_name[names.pop()]
        columns = {name: np.asarray(column) for name, column in axes[i].fields.items()}
        good = np.broadcast_to(limit.holds(space.job, Plan(**columns)), len(axes[i]))
        if not good.any():
            words = ", ".join(word for (word,) in axes[i].words[:12])
            problem = Problem(
                where=where, path="limit", value=limit.text, rule=f"leaves no value of {axes[i].knobs[0]}", hint=f"of {words}"
            )
            raise SpecError([problem])
        axes[i] = axes[i].keep(np.flatnonzero(good).tolist())
    return dataclasses.replace(space, axes=tuple(axes), limits=tuple(kept))


def _tied(space: Space) -> Space:
    """Return the space (of one knob an axis) with the axes of tied knobs joined, without combinations that a rule forbids whatever
    the other knobs are.
    """
    masks: list[Bools] = [np.asarray(mask) for mask in space.masks(space.grid())]
    masks = [mask.reshape((1,) * (len(space.axes) - mask.ndim) + mask.shape) for mask in masks]
    joined = []
    for knobs in TIED:
        here = [i for i, a in enumerate(space.axes) if a.knobs[0] in knobs]
        shape = tuple(len(space.axes[i]) for i in here)
        if prod(shape) > _LARGEST_TIE:
            joined += [space.axes[i] for i in here]
            continue
        others = tuple(i for i in range(len(space.axes)) if i not in here)
        allowed = np.ones(shape, dtype=bool)
        for mask in masks:
            allowed = allowed & mask.any(axis=others)  # the axes that are left are those of `here`, in order
        if here:
            axes = [space.axes[i] for i in here]
            joined.append(_product(axes, allowed if allowed.any() else np.ones(shape, dtype=bool)))
    return dataclasses.replace(space, axes=tuple(joined))


def _used(space: Space) -> Space:
    """Return the space without values that no legal plan has; unchanged when it has no legal plan at all."""
    from tuner.search.blocks import values_in_use

    used = values_in_use(space)
    if any(not positions for positions in used):
        return space
    return dataclasses.replace(space, axes=tuple(a.keep(positions) for a, positions in zip(space.axes, used, strict=True)))


def read_space(job: Job, data: Any, where: str) -> Space:
    """Return the space of a loaded YAML document. Raises SpecError."""
    from tuner.load import load_spec

    spec: SpaceSpec = load_spec(SpaceSpec, data, where)
    return build_space(job, spec, where)
