"""tuner doctor: what works on this machine?"""

from __future__ import annotations

from tuner.cli.guard import guarded
from tuner.cli.options import Show, unpacks

SHORT = "What works on this machine"
HELP = """\
What works on this machine: Python, packages, accelerators, Slurm, folders, presets.

Each line says ok, warn or fail. The exit code is 4 when something failed.
"""


@unpacks
def doctor(show: Show) -> None:
    """Examine this machine."""

    def run() -> int:
        from tuner import workflow
        from tuner.cli.publish import publish
        from tuner.report.doctor import doctor_text

        answer = workflow.doctor()
        publish(answer.record(), doctor_text, show)
        return 0 if answer.healthy else 4

    guarded(run, show)


VERB = doctor
