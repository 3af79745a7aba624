"""tuner replay: how good would a measured search have been on a sweep that was already measured?"""

from __future__ import annotations

from typing import Annotated

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import Show, named_calibration, unpacks

STRATEGIES = ("residual", "analytic", "tpe", "gp", "random")
SHORT = "How good a measured search would have been on measured sweeps"
HELP = """\
How good a measured search would have been on sweeps that were already measured (JSONL files, one run a line).

Each series of at least five layouts (one model, cluster, batch and release; those of `validate`) is searched with --runs runs, read from
the file; layouts that failed are candidates too. The regret is how much slower the fastest layout that was run is than the
fastest of the series. A series whose second-best layout is more than 15 % behind stands apart from the means: there one layout is
all there is to find.

\b
Examples:
  tuner replay sweep.jsonl --runs 8
  tuner replay sweep.jsonl --runs 16 --strategy tpe --seed 3
  tuner replay sweep.jsonl --calibration auto --json
"""


@unpacks
def replay(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="JSONL files of measured runs", show_default=False)],
    runs: Annotated[str, typer.Option("--runs", metavar="N", help="Runs of each search")] = "8",
    strategy: Annotated[str, typer.Option("--strategy", metavar="NAME", help=", ".join(STRATEGIES))] = "residual",
    seed: Annotated[str, typer.Option("--seed", metavar="N", help="Seed of tpe, gp and random")] = "0",
    calibration: Annotated[str, named_calibration("none (default): hardware figures alone; auto, a preset or a file")] = "none",
    *,
    show: Show,
) -> None:
    """Replay searches."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import publish
        from tuner.report.replay import replay_text

        with Progress(show.quiet) as progress:
            answer = workflow.replay(files, runs=runs, strategy=strategy, seed=seed, calibration=calibration, progress=progress)
        publish(answer.record(), replay_text, show)
        return 0

    guarded(run, show)


VERB = replay
