"""A calibration of this machine, or of the one that logs of nccl-tests came from: timings in, a file and its scores out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.cost_model.calibration import CalibrationFile, calibration_for
from tuner.cost_model.fit.__main__ import dump
from tuner.cost_model.fit.machine import errors_of, machine_calibration
from tuner.errors import one_problem
from tuner.launch.detection import find_gpu, named_cluster
from tuner.launch.logs.nccl_tests import read_nccl_log
from tuner.launch.measure import measure as measured_timings
from tuner.launch.topology import Accelerators
from tuner.load import load_spec, parse_yaml, path_of
from tuner.request import Problems, whole
from tuner.timing import read_timings, timing_lines

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cluster import Cluster
    from tuner.cost_model.fit.timings import Told
    from tuner.timing import Timing

    Progress = Callable[..., None]

BUDGET_S = 60
MEASURED = ("bf16", "fp16", "fp32")
WAYS = {"shipped": "as it ships", "level": "level fitted", "own": "own curve"}


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineAnswer:
    """A machine's calibration. text: its file; bare: errors of the hardware figures alone, by kind of operator."""

    cluster: Cluster
    timings: tuple[Timing, ...]
    told: tuple[Told, ...]
    bare: dict[str, tuple[float, float]]
    file: CalibrationFile
    text: str
    notes: tuple[str, ...]

    @property
    def lines(self) -> str:
        """The timings as the text of their file."""
        return timing_lines(self.timings)

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        return {
            "cluster": self.cluster.name,
            "gpu": self.cluster.gpu.name,
            "timings": len(self.timings),
            "operators": [_scores(told, self.bare.get(told.name)) for told in self.told],
            "coefficients": {name: entry.model_dump(mode="json") for name, entry in self.file.coefficients.items()},
            "notes": list(self.notes),
        }


def _scores(told: Told, bare: tuple[float, float] | None) -> dict[str, Any]:
    names = ("median_abs_err", "p90_abs_err")
    sides = {"hardware": bare, "shipped": told.before, "measured": told.after}
    return {"operator": told.name, "rows": told.n, "way": told.way, "words": WAYS[told.way]} | {
        side: None if pair is None else dict(zip(names, pair, strict=True)) for side, pair in sides.items()
    }


def cluster_of(timings: Sequence[Timing], named: str | None) -> Cluster:
    """Return the cluster that is meant: the one named, else that of the device the timings name, else this machine."""
    devices = sorted({t.device for t in timings if t.device})
    known = next((gpu for name in devices if (gpu := find_gpu(Accelerators(name=name, count=1)))), None)
    if named is None:
        return named_cluster(known.name if known else "local")
    cluster = named_cluster(named)
    if known is not None and known.name != cluster.gpu.name:
        raise one_problem("cluster", "", named, f"has {cluster.gpu.name}; the timings are of {devices[0]}", f"--cluster {known.name}")
    return cluster


def calibrated_machine(timings: Sequence[Timing], cluster: Cluster, name: str, source: str, notes: Sequence[str] = ()) -> MachineAnswer:
    """Return the calibration of these timings. Raises SpecError where they hold nothing that can be used."""
    shipped, bare = calibration_for("auto", cluster.gpu), calibration_for("none", cluster.gpu)
    found = machine_calibration(timings, cluster, shipped, name, source)
    text = dump(found.file, "Written by `tuner calibrate` from timings of one machine.")
    load_spec(CalibrationFile, parse_yaml(text, name), name)  # what is written can be read
    lost = [f"{count} timings {why}: left out" for why, count in found.unread.items()]
    return MachineAnswer(
        cluster=cluster,
        timings=tuple(timings),
        told=found.told,
        bare=errors_of(timings, cluster, bare),
        file=found.file,
        text=text,
        notes=(*notes, *lost),
    )


def read_and_measure(
    logs: Sequence[str],
    files: Sequence[str],
    *,
    measure: bool,
    cluster: str | None,
    precision: str | None,
    budget: Any,
    name: str,
    progress: Progress | None,
) -> MachineAnswer:
    """Return the calibration of everything that is read and measured. Raises SpecError listing what is wrong before anything is measured."""
    problems = Problems()
    seconds = problems.trying(lambda: BUDGET_S if budget is None else whole(budget, "budget", at_least=5, most=3600))
    if precision is not None and precision not in MEASURED:
        problems.add("precision", precision, f"must be one of {', '.join(MEASURED)}", "other precisions keep the shipped curves")
    if not (measure or logs or files):
        problems.add("timings", None, "are missing", "--measure, logs of nccl-tests or timings taken before")
    found: list[Timing] = []
    sources, notes = [], []
    for text in logs:
        timings, wrong = problems.trying(lambda text=text: read_nccl_log(path_of(text))) or ([], 0)  # type: ignore[misc]
        found += timings
        sources.append(f"nccl-tests ({Path(text).name})")
        notes += [f"{Path(text).name}: {wrong} rows with wrong results left out"] if wrong else []
    for text in files:
        found += problems.trying(lambda text=text: read_timings(path_of(text))) or []  # type: ignore[misc]
        sources.append(f"timings ({Path(text).name})")
    problems.raise_any()
    of = None if measure and cluster is None and not found else cluster_of(found, cluster)
    of = named_cluster("local") if of is None else of
    if measure:
        found += _measured_here(of, float(seconds or BUDGET_S), precision or "", progress)
        sources.append(f"measured by tuner calibrate --measure on {found[-1].device}, {found[-1].ranks} processes")
    if progress is not None:
        progress(f"fitting {len(found)} timings")
    return calibrated_machine(found, of, name, ", ".join(sources), notes)


def _measured_here(cluster: Cluster, budget_s: float, precision: str, progress: Progress | None) -> list[Timing]:
    """Return the timings of this machine, which must be what `cluster` says. Raises SpecError where it is not."""
    here = named_cluster("local")
    if cluster.gpu.name != here.gpu.name:
        raise one_problem(
            "cluster", "", cluster.name, f"is not this machine, which has {here.gpu.name}", "local, or --timings FILE from there"
        )
    return measured_timings(min(cluster.gpus, cluster.gpus_per_node), budget_s, precision, progress)
