"""DeepSpeed: its configuration class, for a pretended number of data-parallel ranks."""

from __future__ import annotations

import importlib.metadata
import json
import os
from types import SimpleNamespace
from typing import Any

from lines import answer

os.environ["DS_ACCELERATOR"] = "cpu"
from deepspeed.runtime import config


def judge(case: dict[str, Any]) -> str:
    """Raise what DeepSpeedConfig raises."""
    # Shim: it asks its communication for the ranks, and there are none.
    config.dist = SimpleNamespace(get_rank=lambda: 0, get_world_size=lambda group=None: case["ranks"])
    ranks = SimpleNamespace(get_data_parallel_world_size=lambda: case["ranks"])
    config.DeepSpeedConfig(json.loads(case["text"]), mpu=ranks)
    return ""


if __name__ == "__main__":
    answer(f"deepspeed {importlib.metadata.version('deepspeed')}", judge)
