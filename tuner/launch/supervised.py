"""The driver's side of a supervised trial: its folder, its supervisor, and what became of both."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import InfrastructureError
from tuner.files import write
from tuner.launch.orders import (
    COMMAND,
    ENVIRONMENT,
    OWN_LOG,
    RESULT,
    STOP,
    SUPERVISOR,
    TRIAL,
    Orders,
    log_lines,
    put_aside,
    save_result,
    write_orders,
)
from tuner.launch.outcome import Ending, result_of
from tuner.launch.processes import MARK, alive, end_all, marked, start_time
from tuner.launch.script import TASK, secrets_of
from tuner.launch.secrets import environment_record, mask
from tuner.launch.trial import Result, json_text, read_result

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.site import Site
    from tuner.launch.trial import Trial

ROOT = Path(__file__).resolve().parents[2]  # `python -m tuner...` finds this very package from here
_PATIENCE_S = 15.0  # beyond the orders' grace, for a supervisor to end its trial


@dataclass(slots=True)
class Supervised:
    """A trial under a supervisor on this machine. process: None where another run of the driver started it; pipe: closes with us."""

    trial: Trial
    pid: int
    started: int
    grace_s: float
    launcher: str
    process: subprocess.Popen[bytes] | None = field(default=None, repr=False)
    pipe: int = -1
    result: Result | None = None

    def poll(self) -> Result | None:
        """Return the result once the supervisor has ended, and with it every process of the trial."""
        if self.result is None and not self._lives():
            self.result = read_result(self.trial.folder) or self._lost()
            self._close()
        return self.result

    def stop(self, why: str) -> Result:
        """Ask the supervisor to end the trial; end it by force where that takes too long."""
        if result := self.poll():
            return result
        write(self.trial.folder / STOP, why)
        deadline = time.monotonic() + self.grace_s + _PATIENCE_S
        while self._lives() and time.monotonic() < deadline:
            time.sleep(0.05)
        if self._lives():
            end_all(lambda: {*marked(self.trial.folder), *([self.pid] if self._lives() else [])}, 0.0)
        if read_result(self.trial.folder) is None:
            end_all(lambda: marked(self.trial.folder), 0.0)
            ending = Ending(cut="stop", why=why, ended=time.time())
            save_result(self.trial.folder, result_of(self.trial, ending, log_lines(self.trial.folder), self.launcher))
        self.result = read_result(self.trial.folder)
        self._close()
        assert self.result is not None  # noqa: S101 -- it was just written
        return self.result

    def _lives(self) -> bool:
        return self.process.poll() is None if self.process else alive(self.pid, self.started)

    def _lost(self) -> Result:
        """Return the result of a trial whose supervisor died: nothing that it started stays behind."""
        folder = self.trial.folder
        end_all(lambda: marked(folder), 0.0)
        lines = [line for line in _text(folder / OWN_LOG).splitlines() if line.strip()]
        code = self.process.returncode if self.process else None
        why = f"its supervisor ended without a result (exit code {code}): {lines[-1] if lines else 'it said nothing'}"
        ending = Ending(cut="infrastructure", why=why, exit_code=code, ended=time.time())
        return save_result(folder, result_of(self.trial, ending, log_lines(folder), self.launcher))

    def _close(self) -> None:
        if self.process:
            self.process.wait()
        if self.pipe >= 0:
            os.close(self.pipe)
            self.pipe = -1


@dataclass(frozen=True, slots=True)
class Ended:
    """A trial that ended earlier: its result is in its folder."""

    result: Result

    def poll(self) -> Result:
        """Return the result."""
        return self.result

    def stop(self, why: str) -> Result:  # noqa: ARG002 -- the protocol's
        """Return the result: there is nothing to stop."""
        return self.result


def prepare(trial: Trial, argv: tuple[str, ...], scripts: Mapping[str, str], environment: Mapping[str, str]) -> None:
    """Write a trial's folder anew: trial.json, the scripts, command.txt, environment.json; an earlier log is put aside."""
    folder = trial.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in (RESULT, STOP, SUPERVISOR):
            (folder / name).unlink(missing_ok=True)
        put_aside(folder)
        write(folder / TRIAL, json_text(trial.record()))
        for name, text in scripts.items():
            write(folder / name, text)
        shown = "\n".join([f"{shlex.join(argv)}\n", *(f"# ---- {name}\n{text}" for name, text in scripts.items())])
        write(folder / COMMAND, mask(environment)(shown))
        write(folder / ENVIRONMENT, json_text(environment_record(environment)))
    except OSError as error:
        raise InfrastructureError(f"{folder}: cannot be written: {error.strerror}") from None


def start(trial: Trial, orders: Orders, scripts: Mapping[str, str], environment: Mapping[str, str]) -> Supervised:
    """Start a trial's supervisor. Raises InfrastructureError."""
    prepare(trial, orders.argv, scripts, environment)
    write_orders(trial.folder, orders)
    folder = trial.folder.absolute()
    theirs, ours = os.pipe()
    argv = [sys.executable, "-m", "tuner.launch.supervisor", str(folder), "--pipe", str(theirs)]
    try:
        with (folder / OWN_LOG).open("wb") as own:
            process = subprocess.Popen(  # noqa: S603 -- our own module
                argv, cwd=ROOT, env={**environment, MARK: str(folder)}, stdin=subprocess.DEVNULL, stdout=own, stderr=own,
                start_new_session=True, pass_fds=(theirs,),
            )  # fmt: skip
    except OSError as error:
        os.close(ours)
        raise InfrastructureError(f"{folder}: its supervisor cannot be started: {error.strerror}") from None
    finally:
        os.close(theirs)
    return Supervised(trial, process.pid, start_time(process.pid), orders.grace_s, orders.launcher, process, ours)


def start_here(trial: Trial, script: str, site: Site, *, launcher: str, grace_s: float, error_s: float) -> Supervised:
    """Start a script on this machine as a trial. Raises InfrastructureError."""
    folder = str(trial.folder.absolute())
    orders = Orders(
        argv=("bash", f"{folder}/{TASK}"), cwd=folder, launcher=launcher,
        wall_s=trial.wall_s, quiet_s=trial.quiet_s, grace_s=grace_s, error_s=error_s,
    )  # fmt: skip
    return start(trial, orders, {TASK: script}, {**os.environ, **secrets_of(site)})


def attach(trial: Trial, launcher: str, grace_s: float) -> Supervised | Ended | None:
    """Return what an interrupted driver left of a trial. What still runs for a dead driver is ended first."""
    if result := read_result(trial.folder):
        return Ended(result)
    patience_s = 0.0
    with contextlib.suppress(OSError, ValueError, KeyError):
        own = json.loads((trial.folder / SUPERVISOR).read_text(encoding="utf-8"))
        if alive(own["pid"], own["start"]) and alive(own["driver"], own["driver_start"]):
            return Supervised(trial, own["pid"], own["start"], grace_s, launcher)
        patience_s = _PATIENCE_S if alive(own["pid"], own["start"]) else 0.0  # it is just ending the trial itself
    left = end_all(lambda: marked(trial.folder), grace_s + patience_s)
    if left:
        raise InfrastructureError(f"{trial.folder}: processes of an earlier run outlive SIGKILL: {', '.join(map(str, left))}")
    result = read_result(trial.folder)
    return Ended(result) if result else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
