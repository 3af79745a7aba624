"""A calibration of this machine, or of the one that logs of nccl-tests came from: timings in, a file and its scores out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cost_model.calibration import CalibrationFile, calibration_for
from tuner.cost_model.fit.__main__ import dump
from tuner.cost_model.fit.machine import errors_of, machine_calibration
from tuner.load import load_spec, parse_yaml
from tuner.timing import timing_lines

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tuner.cluster import Cluster
    from tuner.cost_model.fit.timings import Told
    from tuner.timing import Timing

WAYS = {"shipped": "as it ships", "level": "level fitted", "own": "own curve", "line": "own latency and rate"}


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
