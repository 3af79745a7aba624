"""What searches of a few runs find on measured sweeps: python benchmarks/replay.py [ROWS.jsonl ...] [--seeds N] [--write PAGE.md].

Without files: the public sweeps of nanotron and Hagemann in tests/published. --write puts the table between <!-- replay --> marks.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.document import write_block
from tuner.accuracy.replay import Series, Strategy, outcome, read_series

SWEEPS = ("nanotron_ultrascale", "hagemann2023_layouts")
SEARCHES: tuple[tuple[Strategy, int], ...] = (
    ("residual", 4), ("residual", 8), ("residual", 16), ("analytic", 4), ("analytic", 8),
    ("tpe", 8), ("tpe", 16), ("random", 8),
)  # fmt: skip
LARGEST = 256


def main() -> int:
    """Print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", nargs="*", type=Path)
    parser.add_argument("--seeds", type=int, default=10, help="seeds of tpe and random (10)")
    parser.add_argument("--write", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        series = read_series(options.rows or unpacked(Path(folder)))
    text = table(series, options.seeds)
    if options.write is None:
        print(text)
        return 0
    write_block(options.write, "replay", text.splitlines())
    return 0


def unpacked(folder: Path) -> list[Path]:
    """Write the public sweeps into a folder; return their files."""
    from tests.published import published

    paths = [folder / f"{name}.jsonl" for name in SWEEPS]
    for path in paths:
        path.write_text("".join(json.dumps(row) + "\n" for row in published(path.stem)), encoding="utf-8")
    return paths


def table(series: list[Series], seeds: int) -> str:
    """Return the mean and worst regret and the failed runs of each search, by what kind of series it is."""
    lines = ["| search | runs | series | mean regret | worst | failed runs | all series, mean regret |", "|---|---|---|---|---|---|---|"]
    for strategy, runs in SEARCHES:
        drawn = seeds if strategy in ("tpe", "random") else 1
        found = [outcome(one, runs, strategy, seed) for seed in range(drawn) for one in series]
        words = f"{strategy}, mean of {drawn} seeds" if drawn > 1 else strategy
        for source in dict.fromkeys(one.key["source"] for one in series):
            lines.append(f"| {words} | {runs} | {line([one for one in found if one['key']['source'] == source], drawn)} |")
        large = [one for one in found if one["key"]["gpus"] > LARGEST]
        if large:
            lines.append(f"| {words} | {runs} | more than {LARGEST} GPUs ({len(large) // drawn}) | {percent(large)} | | | |")
    return "\n".join(lines)


def line(found: list[dict[str, Any]], drawn: int) -> str:
    """Return the cells of a source: its series of up to LARGEST GPUs that are no lottery, and all of them."""
    kept = [one for one in found if one["key"]["gpus"] <= LARGEST and not one["apart"]]
    worst = max(one["regret"] for one in kept)
    failed = fmean(one["failed_runs"] for one in kept)
    name = f"{found[0]['key']['source']} ({len(kept) // drawn})"
    return f"{name} | {percent(kept)} | {100 * worst:.1f} % | {failed:.1f} | {percent(found)}"


def percent(found: list[dict[str, Any]]) -> str:
    """Return the mean regret."""
    return f"{100 * fmean(one['regret'] for one in found):.1f} %"


if __name__ == "__main__":
    sys.exit(main())
