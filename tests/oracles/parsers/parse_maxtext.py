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
    """Raise what MaxText raises. The last words are for a run without devices: internal_compile is its own way to count those of another
    machine.
    """
    devices = ["internal_compile=true", f"internal_compile_num_devices={case['gpus']}", "skip_jax_distributed_system=true"]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yml"
        path.write_text(case["text"])
        pyconfig.initialize(["train", str(path), *case["arguments"], *devices, "log_config=false"])
    return ""


if __name__ == "__main__":
    answer(f"maxtext {importlib.metadata.version('maxtext')}", judge)
