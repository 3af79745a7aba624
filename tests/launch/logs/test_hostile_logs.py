"""No log raises, whatever bytes it has, and none takes long."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.jobs import llama_job
from tuner.launch.logs import FORMATS, LogReader, Parsed, launcher_of, reader, signs, timed
from tuner.launch.logs.reader import LONGEST_LINE

LOGS = sorted((Path(__file__).parents[2] / "fixtures/logs").glob("*.log"))
GOOD = [line for path in LOGS for line in path.read_text(errors="replace").splitlines()]
PIECES = st.sampled_from(
    [*GOOD, "Traceback (most recent call last):", "\x1b[31m", "\r", "\n", "[rank0]: ", "tuner-step {", "tuner-rank {}"]
)
TEXTS = st.lists(PIECES | st.text(max_size=40) | st.from_regex(r"iteration +\d{1,15}/ \d+ \| [a-z() :\d.eE+-]{0,40}"), max_size=12)


def whole(launcher: str, data: bytes) -> Parsed:
    log = LogReader(launcher)
    log.write(data)
    log.close()
    return log.parsed()


@settings(deadline=None, max_examples=200)
@given(data=st.binary(max_size=400), launcher=st.sampled_from(list(FORMATS)))
def test_no_bytes_raise(data: bytes, launcher: str) -> None:
    parsed = whole(launcher, data)
    timed(parsed, llama_job())
    launcher_of(data.decode(errors="replace").splitlines())


@settings(deadline=None, max_examples=200)
@given(pieces=TEXTS, launcher=st.sampled_from(list(FORMATS)), size=st.integers(1, 200))
def test_no_text_raises_and_its_cuts_do_not_matter(pieces: list[str], launcher: str, size: int) -> None:
    data = "".join(pieces).encode("utf-8", "replace")
    parsed = whole(launcher, data)
    assert list(parsed.steps) == sorted(parsed.steps, key=lambda step: step.number)
    assert all(step.seconds is None or 0 < step.seconds < float("inf") for step in parsed.steps)
    assert all(0 < value < float("inf") for value in parsed.memory_bytes.values())
    timing = timed(parsed, llama_job(), warmup=0)
    assert timing is None or timing.step_s > 0
    log = LogReader(launcher)
    for at in range(0, len(data), size):
        log.write(data[at : at + size])
    log.close()
    assert repr(log.parsed()) == repr(parsed)  # NaN is not equal to itself


@pytest.mark.parametrize("launcher", FORMATS)
def test_a_huge_line_is_bounded(launcher: str) -> None:
    log = LogReader(launcher)
    for _ in range(64):
        log.write(b"x" * 2**20)  # no end of line
        assert len(log.rest) <= 2**15
    log.write(b"\ncompleted step: 1, seconds: 2.0, \n")
    assert log.progress == (launcher == "maxtext")


NASTY = (
    "step: 1 loss: ", "iteration 1/2 | ", "[Rank 1] memory (MB) ", "RESOURCE_EXHAUSTED: ", "UNAVAILABLE: ", "a.b.", "1,", "[", " ",
    "tuner-step {", '{"a":', "mesh dp_shard=", "Traceback (most recent call last)", "NCCL WARN NET ", "global_step=1, RunningAvg",
)  # fmt: skip


@pytest.mark.parametrize("word", NASTY)
@pytest.mark.parametrize("launcher", FORMATS)
def test_of_a_long_line_the_beginning_is_read(word: str, launcher: str) -> None:
    long = word * (4 * LONGEST_LINE // len(word))
    cut, whole_line = LogReader(launcher), LogReader(launcher)
    cut.feed(long[:LONGEST_LINE])
    whole_line.feed(long)
    assert cut.parsed() == whole_line.parsed()
    assert launcher_of([long]) == launcher_of([long[:LONGEST_LINE]])


def test_no_pattern_repeats_without_bound() -> None:
    """Bounded repetitions, none inside another: a line costs time in proportion to its length."""
    regexes = [value.pattern for value in (*vars(signs).values(), reader.COLOUR, reader.PREFIX) if isinstance(value, re.Pattern)]
    for form in FORMATS.values():
        figures = [*form.seconds, *form.tokens_per_s, *form.samples_per_s, *form.loss, *(figure for _, figure in form.memory)]
        patterns = [*form.starts, *form.marks, *form.hints, *(stated for _, stated in form.stated), *(f.pattern for f in figures)]
        regexes += [pattern.regex.pattern for pattern in patterns]
    assert len(regexes) > 80
    for regex in regexes:
        bare = re.sub(r"\\.|\[[^\]]+\]", "x", regex)  # without escapes and classes
        assert not re.search(r"[*+]|\{\d+,\}", bare), regex


def test_deep_json_is_no_step() -> None:
    log = LogReader("workload")
    log.feed("tuner-step " + "[" * 10_000)
    log.feed('tuner-step {"step": true, "seconds": "a"} tuner-step {"step": 3, "seconds": 1e400, "loss": {}} tuner-rank {"rank": -1}')
    log.feed('tuner-step {"step": 1' + "0" * 5000 + ', "seconds": 1.0}')
    parsed = log.parsed()
    assert [(step.number, step.seconds, step.loss) for step in parsed.steps] == [(3, None, None)]
