"""What is measured and read of a machine, and the calibration that it gives: `tuner calibrate --measure`, --nccl-log and --timings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.accuracy.machine import calibrated_machine
from tuner.errors import one_problem
from tuner.launch.detection import find_gpu, named_cluster
from tuner.launch.logs.nccl_tests import read_nccl_log
from tuner.launch.measure import measure as measured_timings
from tuner.launch.topology import Accelerators
from tuner.load import path_of
from tuner.timing import read_timings
from tuner.values import Problems, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.accuracy.machine import MachineAnswer
    from tuner.cluster import Cluster
    from tuner.launch.measure import Measured
    from tuner.timing import Timing

    Progress = Callable[..., None]

BUDGET_S = 60
MEASURED = ("bf16", "fp16", "fp32")


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
    """Return the calibration of all that is read and measured. Raises SpecError with all that is wrong before anything is measured."""
    problems = Problems()
    seconds = problems.trying(lambda: BUDGET_S if budget is None else whole(budget, "--budget", at_least=5, most=3600))
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
        measured = _measured_here(of, float(seconds or BUDGET_S), precision or "", progress)
        found += measured.timings
        missed = measured.asked - len(measured.timings)
        notes += [f"{missed} of {measured.asked} measurements left out: the time was up (--budget) or memory was short"] if missed else []
        sources.append(f"measured by tuner calibrate --measure on {found[-1].device}, {found[-1].ranks} processes")
    if progress is not None:
        progress(f"fitting {len(found)} timings")
    return calibrated_machine(found, of, name, ", ".join(sources), notes)


def _measured_here(cluster: Cluster, budget_s: float, precision: str, progress: Progress | None) -> Measured:
    """Return the timings of this machine, which must be what `cluster` says. Raises SpecError where it is not."""
    here = named_cluster("local")
    if cluster.gpu.name != here.gpu.name:
        raise one_problem(
            "cluster", "", cluster.name, f"is not this machine, which has {here.gpu.name}", "local, or --timings FILE from there"
        )
    return measured_timings(min(cluster.gpus, cluster.gpus_per_node), budget_s, precision, progress)
