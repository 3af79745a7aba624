"""Run the microbenchmarks on this machine: torchrun starts one process for each accelerator, or the CPU processes that stand in."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tuner.errors import InfrastructureError, SpecError
from tuner.load import load_spec, parse_json
from tuner.timing import Timing

if TYPE_CHECKING:
    from collections.abc import Callable

START_S = 120.0  # of the processes, on a busy machine, beyond the budget
STOP_S = 10.0
KEPT_LINES = 40


class Measured(NamedTuple):
    """timings: what was measured; asked: how many there would be if time and memory had sufficed."""

    timings: list[Timing]
    asked: int


def measure(processes: int, budget_s: float, precision: str = "", progress: Callable[..., None] | None = None) -> Measured:
    """Return the timings of `processes` processes on this machine; no question is begun after `budget_s` seconds of measuring.

    Raises InfrastructureError where torch is missing, or the processes fail or hang; none of them is left behind.
    """
    if importlib.util.find_spec("torch") is None:
        raise InfrastructureError("measuring needs torch: pip install 'meshtuner[profile]'")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "tuner.launch.microbench", "--budget", f"{budget_s:g}", *(["--precision", precision] if precision else [])]
    if progress is not None:
        progress("starting torch")
    with subprocess.Popen(  # noqa: S603 (our own module)
        command,
        env=_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        watch = threading.Timer(budget_s * 1.5 + START_S, _stop, (process,))
        watch.daemon = True
        watch.start()
        try:
            found, said = _read(process, progress)
            code = process.wait(timeout=STOP_S)
        except BaseException:
            _stop(process)
            raise
        finally:
            watch.cancel()
    if code or not found.timings:
        raise InfrastructureError(f"the microbenchmarks ended with exit code {code}: {_reason(said)}")
    return found


def _environment() -> dict[str, str]:
    """Return the environment of the processes: one thread each, and this package where they look for it."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths)), "PYTHONUNBUFFERED": "1"}


def _read(process: subprocess.Popen[str], progress: Callable[..., None] | None) -> tuple[Measured, deque[str]]:
    """Return the timings among the lines that the processes print, and the last of the others."""
    found: list[Timing] = []
    asked = 0
    said: deque[str] = deque(maxlen=KEPT_LINES)
    for line in process.stdout or ():
        text = line.strip()
        if not (text.startswith("{") and text.endswith("}")):
            said.append(text)
        elif text.startswith('{"done"'):
            counted = json.loads(text)
            asked = counted["of"]
            if progress is not None:
                progress("measuring operators and links:", counted["done"], counted["of"])
        else:
            with suppress(SpecError):  # a line of another program
                found.append(load_spec(Timing, parse_json(text, "microbench"), "microbench", units=False))
    return Measured(found, asked), said


def _reason(said: deque[str]) -> str:
    """Return the line that says what went wrong: the last that names an error, else the last."""
    telling = [line for line in said if "Error" in line and "ChildFailedError" not in line]
    return (telling or list(said) or ["they said nothing"])[-1][:300]


def _stop(process: subprocess.Popen[str]) -> None:
    """End torchrun, which ends its processes; then whatever of its group is left."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=STOP_S)
    except subprocess.TimeoutExpired:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
