"""The command line: each verb loads what it needs, calls one function of tuner.workflow, and has the result reported.

`main` is the console script. Nothing heavy (numpy, pydantic, optuna, torch) is imported before a verb runs.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Run the command line: the console script `tuner`."""
    import os
    import sys

    try:
        from tuner.cli.app import run

        code = run()
    except KeyboardInterrupt:  # also while modules are being imported
        os.write(2, b"tuner: interrupted\n")
        code = 130
    sys.exit(code)
