"""How far a trial under way has come, read off its log as it grows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.launch.logs import LogReader, timed
from tuner.launch.orders import LOG, read_orders

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
        data = self._news()
        if data and self.reader is not None:
            self.reader.write(data)
            timing = timed(self.reader.parsed(), self.trial.job, warmup=self.trial.warmup)
            self.median_s = timing.step_s if timing is not None and timing.steps >= 2 else None
        return self.median_s

    def _news(self) -> bytes:
        """Return what the log has grown by; a log that was put aside for a second attempt is followed anew."""
        path = self.trial.folder / LOG
        try:
            size = path.stat().st_size
            if self.reader is None or size < self.read:
                self.reader, self.read, self.median_s = LogReader(read_orders(self.trial.folder).launcher), 0, None
            with path.open("rb") as file:
                file.seek(self.read)
                data = file.read(size - self.read)
        except FileNotFoundError:  # not begun, or between two attempts
            return b""
        self.read += len(data)
        return data
