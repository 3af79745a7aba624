"""Accelerate: its loader of configuration files."""

from __future__ import annotations

import importlib.metadata
import tempfile
from pathlib import Path
from typing import Any

from accelerate.commands.config.config_args import load_config_from_file
from lines import answer


def judge(case: dict[str, Any]) -> str:
    """Raise what the loader raises for a YAML file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "accelerate.yaml"
        path.write_text(case["text"])
        load_config_from_file(str(path))
    return ""


if __name__ == "__main__":
    answer(f"accelerate {importlib.metadata.version('accelerate')}", judge)
