"""Files as launchers write them, kept beside the tests: `TUNER_WRITE_GOLDEN=1 pytest ...` writes them anew."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

GOLDEN = Path(__file__).parents[2] / "golden/launchers"


def check(folder: str, files: Mapping[str, str]) -> None:
    """Compare files with those that are kept: all of them, and no others."""
    root = GOLDEN / folder
    if os.environ.get("TUNER_WRITE_GOLDEN") == "1":
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
    kept = {path.relative_to(root).as_posix(): path.read_text() for path in root.rglob("*") if path.is_file()}
    assert kept == dict(files)
