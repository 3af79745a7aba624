"""A measured search against the exhaustive sweep of its space, really run.

python benchmarks/measured_search.py [--write PAGE.md] [-o FOLDER]: `tuner search -m tiny -c local --profile 8`, then every plan of that
space once, the fastest twelve twice more, and the fastest four and the pick in six rounds more, in random order, on this machine's CPUs
(about 25 minutes on 2 cores; keep it quiet). Prints the plans by their median step and where the search's pick stands. --write puts the
table between <!-- measured --> marks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tuner
from benchmarks.document import write_block
from tuner.launch.limits import refusals
from tuner.launch.runner import Setup, open_runner
from tuner.launch.trial import Trial
from tuner.plan import Plan

QUESTION: dict[str, Any] = {"model": "tiny", "cluster": "local"}
SEARCH = {**QUESTION, "framework": "tuner-workload", "space": "measured", "top": 1000, "all": True}
AGAIN, REPEATS, SHOWN = 12, 2, 10
FINALISTS, ROUNDS = 4, 6  # one run is off by up to a third here: only runs of the same round are compared with each other
STEPS, WARMUP = 8, 2


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path)
    parser.add_argument("-o", "--out", type=Path, help="folder of the runs (a temporary one)")
    parser.add_argument("--runs", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        text, _ = compare(options.out or Path(folder), options.runs)
    print(text)
    if options.write is not None:
        write_block(options.write, "measured", text.splitlines())
    return 0


def compare(folder: Path, runs: int) -> tuple[str, float]:
    """Return the table, and how much slower the search's pick is than the fastest plan of the sweep."""
    began = time.time()
    found = tuner.search(**QUESTION, profile=runs, no_cache=True, folder=folder / "search")
    took = time.time() - began
    picked = found.ranking[0].row
    answer = tuner.search(**SEARCH)
    job, plans = answer.job, [row.row.plan for row in answer.ranking if not refusals(answer.job, row.row.plan)]
    times = sweep(job, plans, picked.plan, folder / "sweep")
    order = sorted(times, key=lambda plan: median(times[plan]))
    best, pick = median(times[order[0]]), median(times[picked.plan])
    regret = pick / best - 1.0
    lines = [
        f"{runs} runs in {took:.0f} s; then all {len(plans)} plans of the space, {sum(map(len, times.values()))} runs. The pick is "
        f"{100 * regret:.1f} % slower than the fastest, {order.index(picked.plan) + 1} of {len(order)}.",
        "",
        "| place | plan | median step | slowest / fastest run | runs |",
        "|---|---|---|---|---|",
    ]
    shown = [*range(SHOWN), *range(SHOWN, len(order), 10), len(order) - 1]
    for place in sorted({*shown, order.index(picked.plan)}):
        plan = order[place]
        mine = " (the pick)" if plan == picked.plan else ""
        spread = max(times[plan]) / min(times[plan])
        lines.append(f"| {place + 1} | {short(plan)}{mine} | {1000 * median(times[plan]):.0f} ms | {spread:.2f} | {len(times[plan])} |")
    return "\n".join(lines), regret


def sweep(job: Any, plans: list[Plan], pick: Plan, folder: Path) -> dict[Plan, list[float]]:
    """Return the step seconds of each plan: all once, the fastest REPEATS times more, then the finalists and the pick round by round.
    What a folder holds is not run again.
    """
    times: dict[Plan, list[float]] = {}
    drawn = random.Random(0)
    finalists: list[Plan] = []
    for turn in range(1 + REPEATS + ROUNDS):
        fastest = sorted(times, key=lambda plan: median(times[plan]))
        if turn == 1 + REPEATS:
            finalists = list(dict.fromkeys([*fastest[:FINALISTS], pick]))
        chosen = finalists or (fastest[:AGAIN] if turn else plans)
        for plan in drawn.sample(chosen, len(chosen)):
            if (seconds := measure(job, plan, folder / f"{turn}-{plans.index(plan):03d}")) is not None:
                times.setdefault(plan, []).append(seconds)
    return times


def measure(job: Any, plan: Plan, folder: Path) -> float | None:
    """Return the median step of one run, None where it gave none."""
    kept = folder / "result.json"
    if not kept.exists():
        folder.mkdir(parents=True, exist_ok=True)
        running = open_runner("local", Setup()).start(Trial(number=0, job=job, plan=plan, folder=folder, steps=STEPS, warmup=WARMUP))
        while running.poll() is None:
            time.sleep(0.1)
    step_s: float | None = json.loads(kept.read_text())["step_s"]
    return step_s


def short(plan: Plan) -> str:
    """Return a plan in a few words."""
    fields = {f.name: getattr(plan, f.name) for f in dataclasses.fields(plan)}
    words = [f"{name} {fields[name]}" for name in ("tp", "pp", "vpp", "micro_batch", "zero")]
    return ", ".join([*words, *(["sp"] if plan.sequence_parallel else []), *(["recompute"] if plan.recompute else [])])


if __name__ == "__main__":
    sys.exit(main())
