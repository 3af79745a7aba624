"""Running the command line as a person does: in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
TINY = ("--model", "tiny", "--cluster", "h100x8", "--seq", "128", "--global-batch", "64")
LLAMA = ("--model", "llama3-70b", "--cluster", "h100x64", "--seq", "8192", "--global-batch", "512")


def run(*arguments: str, cwd: Path | None = None, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Run `tuner ...` with its output in pipes."""
    clean = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "FORCE_COLOR")}
    return subprocess.run(
        [sys.executable, "-c", "from tuner.cli import main; main()", *arguments],
        capture_output=True,
        text=True,
        input=stdin,
        cwd=cwd,
        timeout=120,
        check=False,
        env=clean | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"} | env,
    )
