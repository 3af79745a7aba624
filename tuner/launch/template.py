"""Templates of a person's commands and files: {tp}, {trial_dir}, {sequence_parallel?--sequence-parallel}."""

from __future__ import annotations

import json
import re
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tuner.cluster import nodes_of
from tuner.errors import Problem, SpecError, nearest
from tuner.plan import FULL
from tuner.plan_text import plan_record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.trial import Trial

# "$" starts what belongs to the shell; "{{name}}" stands for "{name}"; any other brace stands for itself.
_MARK = re.compile(r"\$\{[^{}]*\}|\{\{(?P<literal>[A-Za-z_]\w*)\}\}|\{(?P<name>[A-Za-z_]\w*)(?:\?(?P<text>[^{}]*))?\}")
_PLAIN = re.compile(r"[A-Za-z0-9_./:+@%=,-]+")
_TRIAL = ("gpus", "nodes", "gpus_per_node", "trial_dir", "plan_file", "steps", "warmup", "seq_len", "global_batch", "microbatches",
          "precision", "model", "number", "interleaved", "recompute_full", "recompute_selective", "recompute_layers")  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A placeholder in a text: its span, name, the text that stands for it where it is true (None: its own value), and the quote
    that is open there ("" outside quotes).
    """

    start: int
    end: int
    name: str
    text: str | None
    quote: str


def values(trial: Trial) -> dict[str, Any]:
    """Return what placeholders stand for: the plan's knobs as words and numbers, and the trial's own facts."""
    job, plan = trial.job, trial.plan
    folder = trial.folder.absolute()
    full = bool(int(plan.recompute) & FULL)
    nodes = nodes_of(job.cluster, "command")
    facts = {
        "gpus": job.gpus, "nodes": nodes.count, "gpus_per_node": nodes.each,
        "trial_dir": str(folder), "plan_file": str(folder / PLAN), "steps": trial.steps, "warmup": trial.warmup, "number": trial.number,
        "seq_len": job.seq_len, "global_batch": job.global_batch, "precision": job.precision, "model": job.model.name,
        "microbatches": trial.microbatches or int(plan.microbatches(job.gpus, job.global_batch)), "interleaved": int(plan.vpp) > 1,
        "recompute_full": full, "recompute_selective": bool(plan.recompute) and not full, "recompute_layers": int(plan.recompute_layers),
    }  # fmt: skip
    return plan_record(plan, job.gpus) | facts


PLAN = "plan.yaml"


def names() -> list[str]:
    """Return the placeholders that there are."""
    from tuner.plan import Plan

    return sorted({*plan_record(Plan(), 1), *_TRIAL})


def check(text: str, where: str, path: str) -> list[Problem]:
    """Return what is wrong with the placeholders of a template: unknown names."""
    known, unknown = names(), []
    for place in _places(text, quotes=False):
        if place.name not in known:
            hint = f"{nearest(place.name, known)}; write {{{{{place.name}}}}} for the text itself"
            unknown.append(Problem(where=where, path=path, value="{" + place.name + "}", rule="is no placeholder", hint=hint))
    return unknown


def fill_command(text: str, facts: Mapping[str, Any], where: str) -> str:
    """Return a shell command with each value quoted. Raises SpecError for a value that needs quotes within quotes of the command."""

    def put(place: _Place) -> str:
        value = _word(facts[place.name])
        if place.quote and not _PLAIN.fullmatch(value):
            rule = f"{{{place.name}}} stands within {place.quote}, where its value cannot be quoted safely"
            raise SpecError([Problem(where=where, path="command", value=repr(value)[:80], rule=rule, hint="put it outside of the quotes")])
        return shlex.quote(value)

    return _fill(text, facts, put, quotes=True)


def fill_file(text: str, facts: Mapping[str, Any], name: str, where: str) -> str:
    """Return a file's content: plain values as they are, others as JSON strings in YAML and JSON, quoted in shell scripts."""

    def put(place: _Place) -> str:
        value = _word(facts[place.name])
        if _PLAIN.fullmatch(value):
            return value
        if name.endswith((".yaml", ".yml", ".json")) and not place.quote:
            return json.dumps(value, ensure_ascii=False)
        if name.endswith(".sh") and not place.quote:
            return shlex.quote(value)
        rule = f"{{{place.name}}} cannot be written into {name} safely"
        raise SpecError([Problem(where=where, path=f"files.{name}", value=repr(value)[:80], rule=rule, hint="use plain letters in paths")])

    return _fill(text, facts, put, quotes=True)


def _fill(text: str, facts: Mapping[str, Any], put: Any, *, quotes: bool) -> str:
    out, at = [], 0
    for place in _places(text, quotes=quotes):
        out.append(_literal(text[at : place.start]))
        out.append(put(place) if place.text is None else place.text if _true(facts[place.name]) else "")
        at = place.end
    return "".join([*out, _literal(text[at:])])


def _places(text: str, *, quotes: bool) -> list[_Place]:
    found = []
    for match in _MARK.finditer(text):
        if match["name"]:
            quote = _open_quote(text[: match.start()]) if quotes else ""
            found.append(_Place(start=match.start(), end=match.end(), name=match["name"], text=match["text"], quote=quote))
    return found


def _literal(text: str) -> str:
    return _MARK.sub(lambda m: "{" + m["literal"] + "}" if m["literal"] else m[0], text)


def _open_quote(text: str) -> str:
    """Return the quote that is open after this much of a shell text."""
    quote, skip = "", False
    for letter in text:
        if skip:
            skip = False
        elif letter == "\\" and quote != "'":
            skip = True
        elif quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"`":
            quote = letter
    return quote


def _true(value: Any) -> bool:
    return value not in (False, 0, "", "none", "even")


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
