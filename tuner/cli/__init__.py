"""The command line: each verb loads what it needs, calls one function of tuner.workflow, and has the result reported.

`main` is the console script. Nothing heavy (numpy, pydantic, optuna, torch) is imported before a verb runs.
"""

from __future__ import annotations

from tuner.cli.app import app, main

__all__ = ["app", "main"]
