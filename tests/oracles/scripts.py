"""What a written script hands to torchrun: it is run with a stand-in that records its words and its environment."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tuner.launch.launchers.launcher import Written

_STAND_IN = '#!/bin/sh\nprintf "%s\\0" "$@" >"$RECORD/words"\nenv -0 >"$RECORD/environment"\n'


class Recorder:
    """A folder whose torchrun records. Use as a context manager."""

    def __enter__(self) -> Recorder:
        self._folder = tempfile.TemporaryDirectory(prefix="oracles-")
        self.folder = Path(self._folder.name)
        stand_in = self.folder / "torchrun"
        stand_in.write_text(_STAND_IN)
        stand_in.chmod(0o755)
        return self

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()

    def run(self, written: Written, script: str, **variables: str) -> tuple[list[str], dict[str, str]]:
        """Return the words behind the program (a path or -m module) and the environment that torchrun was started with."""
        for name, text in written.files.items():
            path = self.folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        environment = {"PATH": f"{self.folder}:{os.environ['PATH']}", "RECORD": str(self.folder), "HOME": str(self.folder), **variables}
        subprocess.run(["bash", script], cwd=self.folder, env=environment, check=True, capture_output=True, timeout=30)
        words = (self.folder / "words").read_text().split("\0")[:-1]
        told = (self.folder / "environment").read_text().split("\0")[:-1]
        return words, dict(line.split("=", 1) for line in told)
