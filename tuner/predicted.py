"""What an export foretells of its launch, and the script that holds a run against it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from tuner.answers import basis_of
from tuner.cost_model.estimate import estimate, peak_memory
from tuner.launch.script import command_of

if TYPE_CHECKING:
    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.launch.launchers.launcher import Written
    from tuner.plan import Plan

PREDICTION, VERIFY = "prediction.json", "verify.sh"
KINDS = ("allocated", "reserved", "device")
_STEPS = 12  # three warm up


def prediction(job: Job, plan: Plan, calibration: Calibration) -> dict[str, Any]:
    """Return what tuner.launch.verify reads: step time and memory of the fullest rank with their 90 % intervals. That of the device's
    memory holds for what the allocator counts as well, in proportion.
    """
    found = estimate(job, plan, calibration)
    peak = peak_memory(job, plan, calibration, found.worst_stage)
    spread = float(found.memory_spread)
    return {
        "name": job.model.name,
        "framework": job.framework.name,
        "basis": basis_of(calibration),
        "calibration": f"{calibration.name} #{calibration.hash}",
        "gpus": job.gpus,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "step_s": {"value": float(found.step_s), "low": float(found.low_s), "high": float(found.high_s)},
        "memory": {kind: _interval(float(getattr(peak, kind)), spread) for kind in KINDS},
    }


def _interval(value: float, spread: float) -> dict[str, float]:
    return {"value": value, "low": value / spread, "high": value * spread}


def verification(job: Job, plan: Plan, calibration: Calibration, written: Written) -> dict[str, str]:
    """Return prediction.json and verify.sh of a launch."""
    return {PREDICTION: json.dumps(prediction(job, plan, calibration), indent=2) + "\n", VERIFY: _script(written.start)}


def _script(start: str) -> str:
    return f"""\
#!/bin/bash
# Written by tuner: runs the launch for a few steps and holds its step time and memory against prediction.json. Exit code 0: inside the
# 90 % interval, 3: outside, 4: the run failed or its log tells no step time.
# With logs as arguments (of a job that a scheduler ran), those are read instead: bash {VERIFY} LOG ...
# It needs the tuner's Python package: PYTHON=/path/to/python bash {VERIFY}
set -uo pipefail
cd -- "$(dirname -- "${{BASH_SOURCE[0]}}")" || exit 2
if [ "$#" -eq 0 ]; then
    export STEPS="${{STEPS:-{_STEPS}}}"
    {command_of(start)} 2>&1 | tee verify.log
    ended=${{PIPESTATUS[0]}}
    set -- verify.log
    if [ "$ended" -ne 0 ]; then
        echo "the launch ended with exit code $ended" >&2
        "${{PYTHON:-python3}}" -m tuner.launch.verify {PREDICTION} "$@"
        exit 4
    fi
fi
exec "${{PYTHON:-python3}}" -m tuner.launch.verify {PREDICTION} "$@"
"""
