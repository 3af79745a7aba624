"""MaxText: its configuration of a YAML file and words key=value, without a device."""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path
from typing import Any

from lines import answer

os.environ["JAX_PLATFORMS"] = "cpu"
from maxtext.configs import pyconfig


def judge(case: dict[str, Any]) -> str:
    """Raise what MaxText raises. skip_jax_distributed_system and log_config are for a run without devices."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(case["text"])
        pyconfig.initialize(["train", str(path), *case["arguments"], "skip_jax_distributed_system=true", "log_config=false"])
    return ""


if __name__ == "__main__":
    answer(f"maxtext {importlib.metadata.version('maxtext')}", judge)
