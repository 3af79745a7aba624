"""Measured runs of one framework as columns, and as the CSV that a calibration file has of them."""

from __future__ import annotations

import csv
import io
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from pydantic import field_validator

from tuner.plan import FULL
from tuner.spec import Spec

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.arrays import Floats, Ints

# The knobs that the correction sees: field of Plan, and how one of its values becomes a coordinate.
KNOBS: tuple[tuple[str, Callable[[int], float]], ...] = (
    ("tp", math.log2),
    ("pp", math.log2),
    ("vpp", math.log2),
    ("cp", math.log2),
    ("ep", math.log2),
    ("micro_batch", math.log2),
    ("recompute", lambda bits: 2.0 * (bits > 0)),
    ("recompute", lambda bits: 2.0 * (bits & FULL > 0)),
    ("sequence_parallel", lambda flag: 2.0 * flag),
    ("zero", float),
)
SCALING = 0.125  # of a doubling for each doubling of GPUs
OUTSIDE = 3.0  # doublings between a job inside one NVLink domain and one beyond it
FIELDS = tuple(dict.fromkeys(name for name, _ in KNOBS))
JOB_COLUMNS = ("hidden", "layers", "seq_len", "gpus", "global_batch", "domain", "moe", "mla")
COLUMNS = ("id", "gpu", "release", "precision", *JOB_COLUMNS, *FIELDS, "log_error", "noise", "weight", "reach")


class Runs(NamedTuple):
    """Measured runs as columns: names, (n, 8) job features, (n, 10) knobs, log(measured / predicted); the standard deviation of a run
    of its source, how many times its variance this one has (1; more where its neighbours contradict it), and how many standard
    deviations hold 90 % of the runs of that source whose series was left out.
    """

    ids: tuple[str, ...]
    gpu: Any
    release: Any
    precision: Any
    job: Any
    knobs: Any
    log_error: Any
    noise: Any
    weight: Any
    reach: Any

    @property
    def variance(self) -> Any:
        """Variance of each run's own noise."""
        return self.weight * self.noise * self.noise


class MeasuredRuns(Spec):
    """The runs of one framework as its calibration file has them: CSV of COLUMNS."""

    runs: str

    @field_validator("runs")
    @classmethod
    def _readable(cls, text: str) -> str:
        read_runs(text)
        return text


# What each column of numbers may hold.
WHOLE = {**dict.fromkeys(JOB_COLUMNS[:6], (1, 10**9)), "moe": (0, 1), "mla": (0, 1)}
WHOLE |= {**dict.fromkeys(FIELDS[:6], (1, 10**6)), "recompute": (0, 2**16), "sequence_parallel": (0, 1), "zero": (0, 3)}
REAL = {"log_error": (-5.0, 5.0), "noise": (1e-3, 5.0), "weight": (1.0, 1e6), "reach": (0.05, 50.0)}
MOST_RUNS = 4_000  # their covariance is factored whenever the calibration is used


def read_runs(text: str) -> Runs:
    """Return the runs of a CSV. Raises ValueError naming the line, the column, the value and the rule of the first thing that is wrong."""
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ValueError(f"is not CSV: {error}") from None
    if not rows or len(rows) < 2:
        raise ValueError(f"must be CSV: the columns {','.join(COLUMNS)}, then a line for each run")
    for place, name in enumerate(COLUMNS):
        if rows[0][place : place + 1] != [name]:
            found = rows[0][place][:40] if place < len(rows[0]) else "nothing"
            raise ValueError(f"must be CSV whose column {place + 1} is {name}, not {found!r}")
    if len(rows) > MOST_RUNS + 1:
        raise ValueError(f"has {len(rows) - 1} runs; at most {MOST_RUNS} are taken")
    for line, row in enumerate(rows):
        if len(row) != len(COLUMNS):
            raise ValueError(f"line {line + 1}: has {len(row)} values for {len(COLUMNS)} columns")
    columns = dict(zip(COLUMNS, zip(*rows[1:], strict=True), strict=True))
    numbers = {name: np.array([_number(value, i, name) for i, value in enumerate(columns[name])]) for name in COLUMNS[4:]}
    fields = {name: numbers[name].astype(np.int64) for name in FIELDS}
    return Runs(
        ids=columns["id"],
        gpu=np.array(columns["gpu"]),
        release=np.array(columns["release"]),
        precision=np.array([width(value) for value in columns["precision"]]),
        job=np.stack(job_axes(*(numbers[name] for name in JOB_COLUMNS)), axis=-1),
        knobs=np.stack([coordinates(fields[name], at) for name, at in KNOBS], axis=-1),
        log_error=numbers["log_error"],
        noise=numbers["noise"],
        weight=numbers["weight"],
        reach=numbers["reach"],
    )


def width(precision: str) -> str:
    """Return a precision, the two 16-bit ones as one: they run at the same speed."""
    return "bf16" if precision == "fp16" else precision


def _number(text: str, row: int, name: str) -> float:
    least, most = WHOLE.get(name) or REAL[name]
    kind = "a whole number" if name in WHOLE else "a number"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not least <= value <= most or (name in WHOLE and value != math.floor(value)):
        raise ValueError(f"line {row + 2}: {name} must be {kind} from {least:g} to {most:g}, not {text[:40]!r}")
    return value


def job_axes(hidden: Any, layers: Any, seq_len: Any, gpus: Any, global_batch: Any, domain: Any, moe: Any, mla: Any) -> tuple[Any, ...]:
    """Return the job's coordinates: sizes in doublings; more GPUs than an NVLink domain holds are OUTSIDE doublings away from fewer,
    experts two and MLA one.

    The batch counts by GPU, and GPUs by SCALING: a job that grows with its batch does the same work on each GPU, and what it loses is for
    the formulas to say. Runs of other sizes would be taken for a slope and carried on far beyond them.
    """
    sizes = (np.log2(1.0 * size) for size in (hidden, layers, seq_len))
    each = np.log2(1.0 * global_batch / gpus)
    return (*sizes, SCALING * np.log2(1.0 * gpus), each, OUTSIDE * (gpus > domain), 2.0 * moe, 1.0 * mla)


def coordinates(field: Ints, at: Callable[[int], float]) -> Floats:
    """Return a knob's coordinate for each value of a field; computed once a distinct value, so that a grid and a plan agree to the bit."""
    values, where = np.unique(field, return_inverse=True)
    return np.array([at(value) for value in values.tolist()])[where].reshape(np.shape(field))


def runs_text(rows: Sequence[Sequence[Any]]) -> str:
    """Return the CSV of rows in the order of COLUMNS."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(rows)
    return out.getvalue()


def runs_lines(text: str) -> list[list[str]]:
    """Return the rows of a CSV of runs, without its head."""
    return list(csv.reader(io.StringIO(text)))[1:]


def joined(first: Runs, second: Runs) -> Runs:
    """Return the runs of both."""
    ids = (*first.ids, *second.ids)
    return Runs(ids, *(np.concatenate([getattr(of, name) for of in (first, second)]) for name in Runs._fields[1:]))
