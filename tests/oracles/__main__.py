"""python -m tests.oracles: frameworks' own parsers judge what is exported; the answer is a table (docs/oracles.md) and an exit status."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.launch.launchers.test_conformance import dealt
from tests.oracles import files
from tests.oracles.corpus import Case, Spelling, cases
from tests.oracles.environments import python_of
from tests.oracles.explained import EXPLAINED
from tests.oracles.processes import Answer, judged
from tests.oracles.scripts import Recorder
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import open_launcher
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.launch.launchers.launcher import Launcher, Written

LEAST_AGREEMENT = 0.99
SPELLINGS = {"megatron-lm": "", "torchtitan": "0.3"}  # the version of its files that the installed parser reads


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Plans of a framework, ours and theirs. agree: {(legal, accepted): plans}; explained: {(what, rule or place): plans};
    open: the disagreements that nothing explains; other: plans whose files say another plan, so that there is nothing to compare.
    """

    framework: str
    answer: Answer
    agree: Mapping[tuple[bool, bool], int]
    explained: Mapping[str, int]
    open: Sequence[tuple[Case, str]]
    other: int

    @property
    def agreement(self) -> float:
        """Share of the plans compared on the parser's own terms on which both agree."""
        both = sum(self.agree.values())
        return both / (both + len(self.open))


def compared(name: str, version: str, each: int, seed: int) -> Compared:
    """Return how the rules and the parser of a framework judge the same random plans."""
    launcher = Spelling(open_launcher(name), version)
    asked = cases(launcher, each, seed)
    with Recorder() as recorder:
        sent = [_case(recorder, launcher, case) for case in asked]
    answer = judged(python_of("torch"), {"megatron-lm": "megatron"}.get(name, name), [case for case, _ in sent])
    agree: Counter[tuple[bool, bool]] = Counter()
    explained: Counter[str] = Counter()
    unexplained: list[tuple[Case, str]] = []
    other = 0
    for case, (_, same) in zip(asked, sent, strict=True):
        verdict = answer.verdicts[case.name]
        if not same:
            other += 1
        elif (not case.rules) == verdict.accepted:
            agree[not case.rules, verdict.accepted] += 1
        elif case.rules and set(case.rules) <= set(EXPLAINED[name]):
            explained.update([" + ".join(case.rules)])
        else:
            unexplained.append((case, f"{verdict.where} {verdict.why}" if not case.rules else " + ".join(case.rules)))
    return Compared(framework=name, answer=answer, agree=agree, explained=explained, open=unexplained, other=other)


def _case(recorder: Recorder, launcher: Launcher, case: Case) -> tuple[dict[str, Any], bool]:
    """Return what a parser is sent, and whether the files say this plan (those of an illegal one may not)."""
    written = launcher.write(case.job, case.plan)
    script = written.programs[0]
    words, environment = recorder.run(written, script, MEGATRON_LM="/megatron", TORCHTITAN=str(recorder.folder))
    start = next(i for i, word in enumerate(words) if word.endswith("pretrain_gpt.py") or word == "torchtitan.train")
    sent = {"name": case.name, "gpus": case.job.gpus, "arguments": words[start + 1 :], "environment": environment}
    return sent | {"module": written.files.get("tuner_run.py", "")}, _says(launcher, written, case)


def _says(launcher: Launcher, written: Written, case: Case) -> bool:
    told = {name: text for name, text in written.files.items() if launcher.reads(name, text)}
    try:
        found = launcher.read(told)
        plan, _ = read_plan({name: value for name, value in found.plan.items() if name != "edp"}, case.job, launcher.name)
    except SpecError:
        return True
    return dealt(plan, case.job) == dealt(case.plan, case.job)


def main() -> int:
    """Run all parsers. Returns 1 where one refuses what it should take, or the agreement is below the bar."""
    options = argparse.ArgumentParser(prog="python -m tests.oracles", description=__doc__)
    options.add_argument("--each", type=int, default=64, help="legal plans of each of four models, and as many illegal (default 64)")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--write", type=Path, help="file of the report")
    options.add_argument("--framework", choices=[*SPELLINGS], action="append", help="compare plans of this one alone (no other files)")
    told = options.parse_args()
    start = time.monotonic()
    with ThreadPoolExecutor(2) as pool:
        python_of("torch")
        runs = [pool.submit(compared, name, SPELLINGS[name], told.each, told.seed) for name in told.framework or SPELLINGS]
        checked = [] if told.framework else files.all_checks()
        results = [run.result() for run in runs]
    text = report(results, checked, told.seed, time.monotonic() - start)
    print(text)
    if told.write:
        told.write.write_text(text)
    wrong = [row for row in checked if row.wrong] or [result for result in results if result.agreement < LEAST_AGREEMENT]
    return 1 if wrong else 0


def report(results: Sequence[Compared], checked: Sequence[files.Checked], seed: int, seconds: float) -> str:
    """Return docs/oracles.md."""
    lines = [
        _HEAD.format(seed=seed),
        "| parser | plans | both take | both refuse | agreement | explained | says another plan | s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        total = sum(r.agree.values()) + len(r.open) + sum(r.explained.values()) + r.other
        lines.append(
            f"| {r.answer.version} | {total} | {r.agree.get((True, True), 0)} | {r.agree.get((False, False), 0)} | {r.agreement:.1%} | "
            f"{sum(r.explained.values())} | {r.other} | {r.answer.seconds:.0f} |"
        )
    lines += ["", "## Plans that the rules refuse and a parser takes", "", "| framework | rules | plans | why |", "|---|---|---|---|"]
    for r in results:
        for rules, count in sorted(r.explained.items()):
            why = "; ".join(EXPLAINED[r.framework][rule] for rule in rules.split(" + "))
            lines.append(f"| {r.framework} | {rules} | {count} | {why} |")
    lines += ["", "## Disagreements that nothing explains", ""]
    groups: dict[tuple[str, str], list[Case]] = defaultdict(list)
    for r in results:
        for case, why in r.open:
            groups[r.framework, ("rules pass, parser: " if not case.rules else "parser takes, rules: ") + why[:200]].append(case)
    lines += [f"- {name}: {why} ({len(found)} plans, the first {found[0].name})" for (name, why), found in groups.items()] or ["None."]
    lines += [
        "",
        "## Files of the ten jobs in tests/launch/launchers/jobs.py",
        "",
        "| parser | files taken | spoilt files refused | wrong | s |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {c.version} | {c.taken} | {c.refused} | {'; '.join(c.wrong) or 'none'} | {c.seconds:.0f} |" for c in checked]
    return "\n".join(lines) + f"\n\nThe whole run took {seconds:.0f} s with the environments in place.\n"


_HEAD = """\
# What the frameworks' own parsers say

`make test-oracles` writes this page (seed {seed}). It installs the parsers into `.oracles/` (about 3.8 GB, once) and asks them; `make test`
needs none of it. What is asked: scripts are run with a stand-in for torchrun, so that a parser gets the very words and environment that a
framework would.

Megatron-LM: `parse_args`, `validate_args`, the micro-batch calculator, `TransformerConfig`, `initialize_model_parallel` over PyTorch's fake
process group. torchtitan: `ConfigManager`, `Trainer`'s constructor up to where it wraps the model, the dealing of layers to stages and the
pipeline schedule's constructor, over the same. Stand-ins for GPUs are listed in `tests/oracles/parsers`. "Taken" means that names and
these rules hold, not that it runs on GPUs.

Plans are random: half pass our rules, half are made from those by changing one to three knobs until an error rule breaks. Left out of the
comparison, and counted: plans that the rules refuse alone for reasons that a parser does not look at ("explained", listed below), and
illegal plans whose files say another plan (a knob has no spelling beside the others, so a parser never sees it).
"""

if __name__ == "__main__":
    sys.exit(main())
