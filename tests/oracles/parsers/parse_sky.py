"""SkyPilot: a task of a YAML file."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

import sky
from lines import answer


def judge(case: dict[str, Any]) -> str:
    """Raise what SkyPilot raises for a task's file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.yaml"
        path.write_text(case["text"])
        sky.Task.from_yaml(str(path))
    return ""


if __name__ == "__main__":
    answer(f"skypilot {importlib.metadata.version('skypilot')}", judge)
