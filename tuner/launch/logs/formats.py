"""The launchers' log formats as a table: what begins a step's record, and the figures in it with their units.

Patterns are matched against one line without colours and rank prefixes, and only where their word stands in it: a line that says nothing
costs a few look-ups. None holds nested or unbounded repetitions, so that any line costs time in proportion to its length. Where each
format is printed: Megatron-LM training.py `training_log` and common_utils.py `report_memory`; Megatron-Bridge train_utils.py
`training_log`; NeMo progress_printer.py; torchtitan metrics.py `MetricsProcessor.log`; MaxText metric_logger.py and max_utils.py;
DeepSpeed timer.py `ThroughputTimer` and pipe/engine.py; nanotron trainer.py and logging/base.py; Primus print_rank_last_patches.py. The
workload's own lines are JSON (reader.py).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.errors import nearest, one_problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tuner.launch.logs.parsed import MemoryKind

WORKLOAD = "workload"
NUMBER = r"(?P<value>[-+]?(?:\d{1,3}(?:,\d{3}){1,9}|\d{1,30})(?:\.\d{0,30})?(?:[eE][-+]?\d{1,4})?|[-+]?(?:nan|NaN|NAN|inf|Infinity))"
BINARY = {"MB": 2.0**20, "GB": 2.0**30, "MiB": 2.0**20, "GiB": 2.0**30}
THOUSANDS = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}


@dataclass(frozen=True, slots=True)
class Pattern:
    """A regular expression, and a word without which it matches nothing."""

    word: str
    regex: re.Pattern[str]

    def search(self, text: str) -> re.Match[str] | None:
        """Return the first match."""
        return self.regex.search(text) if self.word in text else None

    def matches(self, text: str) -> Iterable[re.Match[str]]:
        """Return all matches."""
        return self.regex.finditer(text) if self.word in text else ()


def pattern(word: str, regex: str = "", flags: int = 0) -> Pattern:
    """Return a pattern; without a regular expression the word itself is looked for."""
    return Pattern(word, re.compile(regex or re.escape(word), flags))


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number in a log. pattern: with the group `value` and, where the log says them, `unit` and `rank`; scale: SI units of 1; units:
    what the words of `unit` stand for, in SI.
    """

    pattern: Pattern
    scale: float = 1.0
    units: Mapping[str, float] | None = None

    def value(self, match: re.Match[str]) -> float:
        """Return the figure in SI units."""
        factor = self.units.get(match["unit"] or "", 1.0) if self.units else 1.0
        return float(match["value"].replace(",", "")) * self.scale * factor


def figure(word: str, before: str = "", scale: float = 1.0, units: Mapping[str, float] | None = None) -> Figure:
    """Return the figure behind a word, or behind a pattern with that word. Its unit is the pattern's group `unit`, or follows the number
    ("" in `units`: it may).
    """
    before = before or rf"(?<!\w){re.escape(word)}\s{{0,9}}"
    unit = ""
    if units and "(?P<unit>" not in before:
        words = "|".join(name for name in units if name)
        unit = rf"\s?(?P<unit>{words})" + ("?" if "" in units else "")
    return Figure(pattern=Pattern(word, re.compile(before + NUMBER + unit)), scale=scale, units=units)


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A launcher's log.

    starts: what begins a record of a step, best first (of several kinds in one log the best is read); its first group is the step's
    number, unless `number` says it (an empty group: only that says it); nan: what says that the loss was no number, where it is then left
    out; averaged: whether a record is the mean since the record before; settles: steps whose time means nothing, warm-up apart; memory:
    peaks by what they count, best first; stated: what it says of job and plan; marks: what only this launcher prints; hints: what logs
    without a step hold.
    """

    name: str
    starts: tuple[Pattern, ...] = ()
    seconds: tuple[Figure, ...] = ()
    tokens_per_s: tuple[Figure, ...] = ()
    samples_per_s: tuple[Figure, ...] = ()
    loss: tuple[Figure, ...] = ()
    nan: Pattern | None = None
    number: Pattern | None = None
    averaged: bool = True
    settles: int = 0
    memory: tuple[tuple[MemoryKind, Figure], ...] = ()
    stated: tuple[tuple[str, Pattern], ...] = ()
    marks: tuple[Pattern, ...]
    hints: tuple[Pattern, ...]


_ITERATION = pattern("iteration ", r"\biteration\s{1,9}(\d{1,12})\s{0,9}/\s{0,9}\d{1,12}\s{0,9}\|")
_ELAPSED = figure("elapsed time per iteration (ms):", scale=1e-3)
_NAN = pattern("number of nan iterations:", r"\bnumber of nan iterations:\s{0,9}[1-9]")
_LM_LOSS = figure("lm loss:")
_RANK = r"\[Rank (?P<rank>\d{1,7})\]"
_MEGATRON_MEMORY: tuple[tuple[MemoryKind, Figure], ...] = (
    (
        "allocated",
        figure(
            "max allocated:",
            _RANK + r"[^\[\]]{0,120}?memory \((?P<unit>MB|GB|MiB|GiB)\)[^\[\]]{0,200}?max allocated:\s{0,9}",
            units=BINARY,
        ),
    ),
    ("allocated", figure("mem-max-allocated-gigabytes:", _RANK + r"[^\[\]]{0,400}?mem-max-allocated-gigabytes:\s{0,9}", scale=1e9)),
)
_ARGUMENTS = {
    "seq_len": "seq_length",
    "gpus": "world_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "micro_batch": "micro_batch_size",
}
_MEGATRON_STATED = (
    ("global_batch", pattern("global batch size:", r"\bglobal batch size:\s{0,9}(\d{1,12})\b")),
    *((name, pattern(f"{word} ...", rf"\b{word} \.{{3,60}} (\d{{1,12}})\b")) for name, word in _ARGUMENTS.items()),
)


def _megatron(name: str, marks: tuple[Pattern, ...], hints: tuple[Pattern, ...]) -> Format:
    """Return the format of a launcher whose steps Megatron-LM's training loop prints."""
    return Format(
        name=name,
        starts=(_ITERATION,),
        seconds=(_ELAPSED,),
        loss=(_LM_LOSS,),
        nan=_NAN,
        memory=_MEGATRON_MEMORY,
        stated=_MEGATRON_STATED,
        marks=marks,
        hints=hints,
    )


# In the order in which they are asked whose log it is: what others print as well comes last.
FORMATS: dict[str, Format] = {
    form.name: form
    for form in (
        Format(
            name=WORKLOAD,
            averaged=False,
            marks=(pattern("tuner-", r"^tuner-(?:step|rank|versions) \{"),),
            hints=(pattern("tuner/launch/workload"), pattern("tuner.launch.workload")),
        ),
        Format(
            name="primus",
            starts=(_ITERATION,),
            seconds=(_ELAPSED,),
            tokens_per_s=(figure("tokens per GPU (tokens/s/GPU):"), figure("tokens/s/GPU inst/harmonic mean:")),
            loss=(_LM_LOSS,),
            nan=_NAN,
            memory=(
                ("device", figure("rocm max mem", r"rank-(?P<rank>\d{1,7}) rocm max mem usage/usage_ratio:\s{0,9}", units=BINARY)),
                ("device", figure("hip mem usage/free/total/usage_ratio:", units=BINARY)),
                *_MEGATRON_MEMORY,
            ),
            stated=_MEGATRON_STATED,
            marks=(
                pattern("hip mem usage/free/total"),
                pattern("elapsed time per", r"elapsed time per iteration \(ms\):\s{0,9}[\d.]{1,20}/\d"),
                pattern("[rank-", r"\[rank-\d{1,7}/\d{1,7}\].{0,80}iteration "),
            ),
            hints=(pattern("rimus", r"\b[pP]rimus[/.]"),),
        ),
        _megatron(
            "megatron-bridge",
            marks=(pattern("MODEL_TFLOP/s/GPU"), pattern("Step Time : ")),
            hints=(pattern("megatron/bridge"), pattern("megatron.bridge")),
        ),
        Format(
            name="deepspeed",
            starts=(
                _ITERATION,
                pattern("steps:", r"\bsteps:\s{0,9}(\d{1,12})(?=\s{1,9}loss:)"),
                pattern("RunningAvg", r"\bglobal_step=(\d{1,12}), RunningAvg"),
            ),
            seconds=(figure("iter time (s):"), _ELAPSED),
            samples_per_s=(figure("CurrSamplesPerSec="),),
            loss=(_LM_LOSS, figure("loss:")),
            nan=_NAN,
            memory=(
                ("allocated", figure("MaxMemAllocated=", units=BINARY)),
                ("allocated", figure("Max_MA ", units=BINARY)),
                *_MEGATRON_MEMORY,
            ),
            stated=_MEGATRON_STATED,
            marks=(pattern("RunningAvgSamplesPerSec="), pattern("iter time (s):")),
            hints=(pattern("deepspeed", r"\bdeepspeed[/.]"), pattern("[launch.py:")),
        ),
        Format(
            name="nemo",
            starts=(
                pattern("Training epoch ", r"\bTraining epoch \d{1,9}, iteration (\d{1,12})/\d{1,12}"),
                pattern("Epoch ", r"\bEpoch \d{1,9}:()"),  # a progress bar, whose own count is of batches
            ),
            number=pattern("global_step", r"\bglobal_step[:=]\s{0,9}(\d{1,12})(?:\.0{1,9})?\b"),
            seconds=(figure("train_step_timing in s:"), figure("train_step_timing in s=")),
            tokens_per_s=(figure("tokens_per_sec_per_gpu:"),),
            loss=(figure("reduced_train_loss:"), figure("reduced_train_loss=")),
            averaged=False,
            memory=(
                ("allocated", figure("max_memory_allocated:")),
                ("device", figure("peak_memory_usage:")),
                *_MEGATRON_MEMORY,
            ),
            stated=(("global_batch", pattern("global_batch_size: ", r"\bglobal_batch_size: (\d{1,12})\b")),),
            marks=(pattern("train_step_timing in s"),),
            hints=(pattern("nemo", r"\bnemo[/.](?:collections|lightning|core)\b"),),
        ),
        Format(
            name="torchtitan",
            starts=(pattern("step:", r"(?<!validate )\bstep:\s{0,9}(\d{1,12})\s{1,9}(?=loss:)"),),
            tokens_per_s=(figure("tps:"),),
            loss=(figure("loss:"),),
            memory=(
                (
                    "reserved",
                    figure("memory:", r"(?<!validate )\bstep:\s{0,9}\d{1,12}\s{1,9}loss:.{0,120}?\bmemory:\s{0,9}", units=BINARY),
                ),
            ),
            stated=tuple(
                (name, pattern("dp_shard=", rf"\bmesh\b(?=.{{0,200}}\bdp_shard=).{{0,300}}?\b{name}=(\d{{1,7}})\b"))
                for name in ("tp", "pp", "cp", "ep")
            ),
            marks=(pattern("tps:", r"(?<!validate )\bstep:\s{0,9}\d{1,12}\s{1,9}loss:.{0,120}\btps:"),),
            hints=(pattern("[titan]"), pattern("torchtitan", r"\btorchtitan[/.]")),
        ),
        Format(
            name="maxtext",
            starts=(pattern("completed step:", r"\bcompleted step:\s{0,9}(\d{1,12})\b"),),
            seconds=(figure("seconds:"),),
            tokens_per_s=(figure("Tokens/s/device:"),),
            loss=(figure("loss:"),),
            averaged=False,
            settles=3,  # dispatch is asynchronous: step 1 is timed before it ran, and step 2 pays for it
            memory=(("device", figure("Total memory size:", units=BINARY)),),
            stated=(
                ("seq_len", pattern("max_target_length", r"\bConfig param max_target_length: (\d{1,12})\b")),
                ("global_batch", pattern("global_batch_size_to", r"\bConfig param global_batch_size_to_train_on: (\d{1,12})\b")),
            ),
            marks=(pattern("completed step:", r"\bcompleted step:\s{0,9}\d"),),
            hints=(pattern("axtext", r"\b[mM]axtext[/.]"), pattern("MaxText", r"\bMaxText[/.]")),
        ),
        Format(
            name="nanotron",
            starts=(pattern("iteration:", r"\biteration:\s{0,9}(\d{1,12})\s{0,9}/\s{0,9}\d{1,12}"),),
            seconds=(figure("time_per_iteration_ms:", r"\b(?:elapsed_)?time_per_iteration_ms:\s{0,9}", scale=1e-3, units=THOUSANDS),),
            tokens_per_s=(figure("tokens_per_sec_per_gpu:", units=THOUSANDS),),
            loss=(figure("lm_loss:", units=THOUSANDS),),
            averaged=False,
            memory=(("allocated", figure("Peak allocated", r"\bPeak allocated:?\s{0,9}", units=BINARY)),),
            marks=(pattern("time_per_iteration_ms:"),),
            hints=(pattern("nanotron", r"\bnanotron[/.]"),),
        ),
        _megatron(
            "megatron-lm",
            marks=(pattern("elapsed time per", r"\biteration\s{1,9}\d{1,12}\s{0,9}/.{0,120}elapsed time per iteration \(ms\):"),),
            hints=(pattern("megatron", r"\bmegatron[/.](?:core|training|legacy)\b"),),
        ),
    )
}


def format_of(launcher: str) -> Format:
    """Return a launcher's format. Raises SpecError for a name that none has."""
    if launcher not in FORMATS:
        raise one_problem("launcher", "", launcher, f"must be one of {', '.join(FORMATS)}", nearest(launcher[:40], FORMATS))
    return FORMATS[launcher]
