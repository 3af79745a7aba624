"""How far a trial under way has come, read off its log as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.launch.logs import LogReader, timed
from tuner.launch.orders import LOG, ORDERS, read_orders

if TYPE_CHECKING:
    from tuner.launch.trial import Trial


@dataclass(slots=True)
class Progress:
    """Follows a trial's log. read: bytes so far."""

    trial: Trial
    reader: LogReader | None = None
    read: int = 0
    median_s: float | None = field(default=None)

    def step_s(self) -> float | None:
        """Return the median seconds of the timed steps so far, None while there are fewer than two."""
        path = self.trial.folder / LOG
        if self.reader is None:
            if not (self.trial.folder / ORDERS).exists():
                return None
            self.reader = LogReader(read_orders(self.trial.folder).launcher)
        size = path.stat().st_size if path.exists() else 0
        if size > self.read:
            with path.open("rb") as file:
                file.seek(self.read)
                data = file.read(size - self.read)
            self.read += len(data)
            self.reader.write(data)
            timing = timed(self.reader.parsed(), self.trial.job, warmup=self.trial.warmup)
            self.median_s = timing.step_s if timing is not None and timing.steps >= 2 else None
        return self.median_s
