"""tuner check: is this launch script or configuration legal, does it fit, how far is it from the best?"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tuner.cli.guard import guarded
from tuner.cli.options import JobOptions, Show, given, unpacks

if TYPE_CHECKING:
    from tuner.checking.checked import CheckAnswer

LAUNCHES = "Launches"
SHORT = "Is a launch script legal, does it fit, how far is it from the best"
HELP = """\
Judge the launch scripts and configurations that you have, files or whole folders: which rule of its framework a launch breaks, whether
it fits in memory, how fast it is, and how much faster the best plan would be.

Megatron-LM, Megatron-Bridge, NeMo, Primus, torchtitan, MaxText, DeepSpeed, Accelerate, nanotron, the tuner's own plan.yaml, and job
files with a plan. A script goes with the configurations it names. Nothing of it is run. What the files do not say is taken from the
options (the file wins), or done as the framework does, and told; GPUs' kind is rarely in a script: -c h100.

--fix adds the edits that make it the best plan, in the launcher's own words, as a diff for `git apply`; with -o they are written there.
Exit codes, the worst launch decides: 0 ok, 2 something is missing or unreadable, 3 illegal, does not fit, or past --gap.

\b
Examples:
  tuner check pretrain.sh -c h100
  tuner check scripts/ -c h100 --gap 20% --json
  tuner check ds_config.json launch.sh -m llama3-8b -c a100 -s 8k
  tuner check pretrain.sh -c h100 --fix -o best.diff
"""


@unpacks
def check(
    paths: Annotated[
        list[str], typer.Argument(metavar="PATH...", help="Launch scripts, configurations, or folders of them", show_default=False)
    ],
    format_: Annotated[
        str | None,
        typer.Option("--format", metavar="NAME", help="What every file is, instead of what it looks like", rich_help_panel=LAUNCHES),
    ] = None,
    gap: Annotated[
        str | None,
        typer.Option("--gap", metavar="SHARE", help="The best may be faster by this much (10%)", rich_help_panel=LAUNCHES),
    ] = None,
    no_search: Annotated[
        bool, typer.Option("--no-search", help="Do not search the best plan to compare with", rich_help_panel=LAUNCHES)
    ] = False,
    fix: Annotated[
        bool, typer.Option("--fix", help="Add a diff that makes it the best plan (to -o, else printed)", rich_help_panel=LAUNCHES)
    ] = False,
    *,
    job: JobOptions,
    show: Show,
) -> None:
    """Judge launch files."""

    def run() -> int:
        from dataclasses import replace
        from functools import partial

        from tuner import workflow
        from tuner.cli.output import Progress
        from tuner.cli.publish import publish
        from tuner.report.check import check_text

        options: dict[str, Any] = {"format": format_, "gap": gap, "no_search": no_search, "fix": fix}
        with Progress(show.quiet) as progress:
            answer = workflow.check(paths, progress=progress, **options, **given(job))
        to_file = fix and show.out is not None and not show.out.lower().endswith(".json") and not show.json
        publish(answer.record(), partial(check_text, every=show.verbose > 0), replace(show, out=None) if to_file else show)
        if fix and not show.json:
            _hand_over(answer, show.out if to_file else None, show)
        return answer.exit_code

    guarded(run, show)


def _hand_over(answer: CheckAnswer, out: str | None, show: Show) -> None:
    """Write the diff to a file, or print it behind the report, where `git apply` finds it."""
    from tuner.cli.output import out_path, write_file
    from tuner.cli.publish import note
    from tuner.errors import UNSEEN

    diff = answer.diff
    if not diff:
        note("nothing to fix", show)
    elif out is not None:
        path = out_path(out)
        write_file(path, diff)
        note(f"wrote {path}: git apply {path}", show)
    else:
        safe = UNSEEN.sub(lambda m: m[0] if m[0] in "\n\t" else f"\\x{ord(m[0]):02x}", diff) if sys.stdout.isatty() else diff
        sys.stdout.write("\n" + safe)


VERB = check
