"""How far a trial under way is."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch.standin import trial
from tuner.launch.orders import LOG, Orders, write_orders
from tuner.launch.progress import Progress


def line(number: int, seconds: float) -> str:
    return "tuner-step " + json.dumps({"step": number, "seconds": seconds, "loss": 3.0}) + "\n"


def test_steps_as_the_log_grows(tmp_path: Path) -> None:
    progress = Progress(trial(tmp_path, warmup=1))
    assert progress.step_s() is None
    write_orders(tmp_path, Orders(argv=("true",), cwd=str(tmp_path), launcher="workload", wall_s=1.0, quiet_s=1.0))
    log = tmp_path / LOG
    assert progress.step_s() is None
    log.write_text(line(0, 9.0) + line(1, 0.5))
    assert progress.step_s() is None  # one timed step is none
    with log.open("a") as file:
        file.write(line(2, 0.7)[:25])
    assert progress.step_s() is None
    with log.open("a") as file:
        file.write(line(2, 0.7)[25:])
    assert progress.step_s() == 0.6 == progress.step_s()
    log.rename(tmp_path / "log.1.txt")  # a second attempt begins
    assert progress.step_s() == 0.6
    log.write_text(line(0, 5.0))
    assert progress.step_s() is None
    log.write_text(line(0, 5.0) + line(1, 0.25) + line(2, 0.25))
    assert progress.step_s() == 0.25
