"""A log read as it grows: lines in, steps, memory and failures out. Whole logs and logs of running trials are read by the same code."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tuner.launch.logs.formats import FORMATS, WORKLOAD, Format, format_of
from tuner.launch.logs.parsed import Parsed, Step
from tuner.launch.logs.signs import Fault, Faults

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from tuner.launch.logs.formats import Figure

LONGEST_LINE = 16_384  # what stands behind is not read
CHUNK = 2**20
MOST_STEPS = 1_000_000
COLOUR = re.compile(r"\x1b(?:\[[0-9;:?]{0,40}[ -/]{0,4}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\)|[@-Z\\-_])")
# Whose line it is: torchrun ([default3]:), PyTorch ([rank3]:), srun --label (3:), Ray, nemo-run (task/0), pods and pdsh (worker-0:).
PREFIX = re.compile(
    r"\[(?:rank|Rank |default)(?P<rank>\d{1,7})\]: ?| {0,6}(?P<label>\d{1,6}): |\(\w{1,80} pid=\d{1,9}(?:, ip=[\d.]{7,15})?\) ?"
    r"|(?P<task>[A-Za-z][\w.-]{0,80}/\d{1,6}) (?=\S|\s)|(?P<pod>[A-Za-z][\w.-]{0,80}-\d{1,6}): "
)
MOST_PREFIXES = 4
KEPT = 2  # distinct steps of a source to tell a restart from lines out of order


@dataclass(slots=True)
class Source:
    """Where one rank's lines have got to: its last two different steps, and how often it has started over."""

    recent: list[int] = field(default_factory=list)
    launch: int = 0

    def launch_of(self, number: int) -> int:
        """Return the launch that this step belongs to. One step back may be lines of several ranks out of order."""
        last = self.recent[-1] if self.recent else number
        if number < last and (len(self.recent) < KEPT or number != self.recent[-2]):
            self.launch, self.recent = self.launch + 1, []
        if number not in self.recent:
            self.recent = [*self.recent, number][-KEPT:]
        return self.launch


@dataclass(slots=True)
class LogReader:
    """Takes a launcher's log as it comes: `write` bytes as they are read from a file, or `feed` single lines, then `parsed`.

    failure: the first thing with which a run cannot go on (out of memory, an exception, a lost node), as soon as its line has come;
    progress: how many different steps were logged so far. kind: which of the format's starts of records is read.
    """

    launcher: str
    format: Format = field(init=False)
    faults: Faults = field(default_factory=Faults)
    steps: dict[int, Step] = field(default_factory=dict)
    memory: dict[str, dict[int, float]] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    compute_s: dict[int, float] = field(default_factory=dict)
    sources: dict[str, Source] = field(default_factory=dict)
    launch: int = 0
    kind: int = 0
    rest: bytes = b""

    def __post_init__(self) -> None:
        self.format = format_of(self.launcher)
        self.kind = len(self.format.starts)

    @property
    def failure(self) -> Fault | None:
        """What the run cannot go on with, None so far."""
        return self.faults.first

    @property
    def progress(self) -> int:
        """How many different steps were logged so far."""
        return len(self.steps)

    def write(self, data: bytes) -> None:
        """Take the next bytes of the log, which may end within a line."""
        *whole, self.rest = re.split(rb"[\r\n]+", self.rest + data)
        for line in whole:
            self.feed(line.decode("utf-8", "replace"))
        self.rest = self.rest[:LONGEST_LINE]

    def close(self) -> None:
        """Take what is left behind the last line's end: a line that was cut off."""
        rest, self.rest = self.rest, b""
        if rest:
            self.feed(rest.decode("utf-8", "replace"), cut=True)

    def feed(self, line: str, *, cut: bool = False) -> None:
        """Take a line. cut: it may end within a number, so that a figure at its very end is none."""
        parts = re.split(r"[\r\n]+", line) if "\r" in line or "\n" in line else [line]
        for i, part in enumerate(parts):
            if part:
                self._line(plain(part), cut and i == len(parts) - 1)

    def _line(self, line: str, cut: bool) -> None:
        text, source, rank = without_prefix(line)
        if self.format.name == WORKLOAD:
            self._json(text, source)
        else:
            self._records(text, source, cut)
            self._peaks(text, rank, cut)
            for name, pattern in self.format.stated:
                if (match := pattern.search(text)) and not (cut and match.end() == len(text)):
                    self.stated[name] = int(match[1])
        self.faults.read(text, source)

    def _records(self, text: str, source: str, cut: bool) -> None:
        """Take the steps of a line: each record ends where the next begins."""
        found = [(m.start(), kind, m) for kind, start in enumerate(self.format.starts) for m in start.matches(text)]
        found.sort(key=lambda item: item[:2])
        for (at, kind, match), following in zip(found, [*(item[0] for item in found[1:]), len(text)], strict=False):
            record = text[at:following]
            number = self._number(match, record)
            if number is not None and kind <= self.kind:
                if kind < self.kind:  # DeepSpeed's timer counts from 0 in each launch, Megatron's lines beside it do not
                    self.kind, self.launch, self.steps, self.sources = kind, 0, {}, {}
                self._step(step_of(self.format, number, record, cut and following == len(text)), source)

    def _number(self, start: re.Match[str], record: str) -> int | None:
        said = self.format.number.search(record) if self.format.number else None
        number = said[1] if said else start[1]
        return int(number) if number else None

    def _step(self, step: Step, source: str) -> None:
        """Keep a step: a record of the same launch completes it, one of a later launch replaces it."""
        of = self.sources.setdefault(source, Source())
        launch = of.launch_of(step.number)
        if launch > self.launch:
            self.launch, self.faults = launch, Faults()  # what ended the launch before is no news of this one
        known = self.steps.get(step.number)
        if known is None and len(self.steps) >= MOST_STEPS:
            return
        if known is not None and known.launch == launch:
            new = {f.name: value for f in dataclasses.fields(step) if (value := getattr(step, f.name)) is not None}
            self.steps[step.number] = dataclasses.replace(known, **new | {"launch": launch})
        elif known is None or known.launch < launch:
            self.steps[step.number] = dataclasses.replace(step, launch=launch)

    def _peaks(self, text: str, rank: int, cut: bool) -> None:
        for kind, figure in self.format.memory:
            for match in figure.pattern.matches(text):
                if not (cut and match.end() == len(text)):
                    whose = int(match["rank"]) if "rank" in match.re.groupindex else rank
                    self._peak(kind, whose, figure.value(match))

    def _peak(self, kind: str, rank: int, value: float) -> None:
        if math.isfinite(value) and value > 0:
            peaks = self.memory.setdefault(kind, {})
            peaks[rank] = max(peaks.get(rank, 0.0), value)

    def _json(self, text: str, source: str) -> None:
        """Take the workload's records: a word and an object of JSON."""
        for record in objects_of(text, "tuner-step "):
            if (number := count(record.get("step"))) is not None:
                seconds, loss, held = positive(record.get("seconds")), number_of(record.get("loss")), count(record.get("microbatches"))
                self._step(Step(number=number, seconds=seconds, loss=loss, microbatches=held), source)
        for record in objects_of(text, "tuner-rank "):
            self._rank(record)
        for record in objects_of(text, "tuner-versions "):
            self.versions |= {str(name)[:80]: str(value)[:200] for name, value in record.items()}

    def _rank(self, record: dict[str, Any]) -> None:
        rank = count(record.get("rank"))
        if rank is None:
            return
        for kind, key in (("allocated", "max_allocated_bytes"), ("device", "host_peak_bytes")):
            if (value := positive(record.get(key))) is not None:
                self._peak(kind, rank, value)
        if (seconds := positive(record.get("compute_s"))) is not None:
            self.compute_s[rank] = seconds

    def parsed(self) -> Parsed:
        """Return what the log says so far."""
        order = dict.fromkeys([kind for kind, _ in self.format.memory] or ["allocated", "device"])
        kind: Any = next((kind for kind in order if self.memory.get(kind)), "device")
        cause = self.faults.cause
        return Parsed(
            launcher=self.launcher,
            steps=tuple(self.steps[number] for number in sorted(self.steps)),
            memory_bytes=dict(sorted(self.memory.get(kind, {}).items())),
            memory_kind=kind,
            oom=cause is not None and cause.kind == "oom",
            error="" if cause is None else cause.reason,
            infrastructure=cause is not None and cause.infrastructure,
            stated=dict(self.stated),
            versions=dict(self.versions),
            compute_s=dict(sorted(self.compute_s.items())),
        )


def step_of(form: Format, number: int, record: str, cut: bool) -> Step:
    """Return the step of a record. cut: a figure at the record's very end is none."""

    def read(figures: Iterable[Figure], check: Callable[[float], float | None]) -> float | None:
        for figure in figures:
            match = figure.pattern.search(record)
            if match and not (cut and match.end() == len(record)):
                return check(figure.value(match))
        return None

    loss = read(form.loss, float)
    if loss is None and form.nan and form.nan.search(record):
        loss = math.nan
    return Step(
        number=number,
        seconds=read(form.seconds, positive),
        tokens_per_s=read(form.tokens_per_s, positive),
        samples_per_s=read(form.samples_per_s, positive),
        loss=loss,
    )


def plain(line: str) -> str:
    """Return the part of a line that is read, without colours."""
    start = line[:LONGEST_LINE]
    return COLOUR.sub("", start) if "\x1b" in start else start


def without_prefix(line: str) -> tuple[str, str, int]:
    """Return a line without what tells whose it is, that prefix, and the rank (-1 where it names none)."""
    at, rank = 0, -1
    for _ in range(MOST_PREFIXES):
        match = PREFIX.match(line, at)
        if match is None:
            break
        at = match.end()
        named = match["rank"] or (match["label"] if rank < 0 else None)
        rank = rank if named is None else int(named)
    return line[at:], line[:at], rank


def objects_of(text: str, word: str) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects that stand behind a word in a line; what is cut off is left out."""
    at = text.find(word)
    while at >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, at + len(word))
        except (ValueError, RecursionError):
            value, end = None, at + len(word)
        if isinstance(value, dict):
            yield value
        at = text.find(word, end)


def number_of(value: object) -> float | None:
    """Return a number of JSON as a float (also NaN), None for anything else."""
    if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1000):
        return float(value)
    return None


def count(value: object) -> int | None:
    """Return a whole number of JSON that a step or a rank can have, None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**12 else None


def positive(value: object) -> float | None:
    """Return a number above 0 that something measured can be, None for anything else."""
    number = number_of(value)
    return number if number is not None and math.isfinite(number) and number > 0 else None


def parse_log(lines: Iterable[str], launcher: str) -> Parsed:
    """Return what a log says. Lines may keep their ends; a last line without one, where others have it, was cut off. Raises SpecError
    for a launcher that is not known.
    """
    reader = LogReader(launcher)
    ended = False
    for line in lines:
        ends = line.endswith(("\n", "\r"))
        reader.feed(line, cut=ended and not ends)
        ended = ended or ends
    return reader.parsed()


def read_log(path: Path, launcher: str) -> Parsed:
    """Return what the log in a file says. Raises OSError, and SpecError for a launcher that is not known."""
    reader = LogReader(launcher)
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            reader.write(data)
    reader.close()
    return reader.parsed()


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a log file, of each so much as is read. Raises OSError."""
    rest = b""
    with path.open("rb") as file:
        while data := file.read(CHUNK):
            *whole, rest = re.split(rb"[\r\n]+", rest + data)
            yield from (line.decode("utf-8", "replace") for line in whole)
            rest = rest[:LONGEST_LINE]
    yield rest.decode("utf-8", "replace")


def launcher_of(lines: Iterable[str]) -> str | None:
    """Return whose log this is: by what only that launcher prints, else by the packages that it names; None where nothing tells."""
    order = list(FORMATS.values())
    marked, hinted = len(order), len(order)
    for line in lines:
        text = without_prefix(plain(line))[0]
        marked = next((i for i in range(marked) if any(p.search(text) for p in order[i].marks)), marked)
        hinted = next((i for i in range(hinted) if any(p.search(text) for p in order[i].hints)), hinted)
        if marked == 0:
            break
    found = hinted if marked == len(order) else marked
    return order[found].name if found < len(order) else None
