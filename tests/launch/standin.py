"""What tests put in the place of real clusters: a small job, an interpreter that starts fake.py where torchrun is asked for, waiting."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.jobs import gpt, gpt_job
from tuner import presets
from tuner.launch.trial import Trial
from tuner.plan import Plan

if TYPE_CHECKING:
    from tuner.launch.runner import Running
    from tuner.launch.trial import Result

FAKE = Path(__file__).with_name("fake.py")
LIMIT_S = 60.0


def small_job(gpus: int = 4, gpus_per_node: int = 4) -> Any:
    cluster = presets.cluster("a100x8").replace(gpus=gpus, gpus_per_node=gpus_per_node)
    return gpt_job(gpt(layers=4, hidden=256, heads=4), cluster=cluster, seq_len=128, global_batch=16)


def trial(folder: Path, **changes: Any) -> Trial:
    fields: dict[str, Any] = {"number": 1, "job": small_job(), "plan": Plan(tp=2), "folder": folder, "wall_s": 40.0, "quiet_s": 30.0}
    return Trial(**(fields | changes))


def interpreter(folder: Path) -> str:
    """Return a program that is Python, but runs fake.py instead of torchrun."""
    path = folder / "python"
    python, fake = shlex.quote(sys.executable), shlex.quote(str(FAKE))
    path.write_text(f'#!/bin/bash\n[ "$2" = torch.distributed.run ] || exec {python} "$@"\nexec {python} {fake} --trial "${{@: -1}}"\n')
    path.chmod(0o755)
    return str(path)


def ended(running: Running, limit_s: float = LIMIT_S) -> Result:
    """Poll until there is a result."""
    deadline = time.monotonic() + limit_s
    while (result := running.poll()) is None:
        assert time.monotonic() < deadline, "the trial does not end"
        time.sleep(0.05)
    return result


def until(done: Any, limit_s: float = LIMIT_S) -> Any:
    """Wait until `done()` is true; return what it is."""
    deadline = time.monotonic() + limit_s
    while not (value := done()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return value
