"""Runs one trial's command and sees to its end: `python -m tuner.launch.supervisor FOLDER [--pipe FD]`, one process a trial.

The command has a session of its own. It is ended, with all that descends from it, at its wall limit, when its log stands still, after its
first OOM or traceback line, when the driver asks (stop.txt) or dies (the pipe closes). result.json is written before this process ends,
unless the driver died or a scheduler ends the job: then the trial counts as not run.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING

from tuner.errors import InfrastructureError
from tuner.files import write
from tuner.launch.devices import devices, wait_free
from tuner.launch.logs import LogReader
from tuner.launch.orders import LOG, SUPERVISOR, log_lines, put_aside, read_orders, save_result, stop_reason
from tuner.launch.outcome import Cut, Ending, result_of
from tuner.launch.processes import MARK, adopt_orphans, descendants, end_all, marked, reap, start_time
from tuner.launch.secrets import cut, mask
from tuner.launch.slurm_queue import job_state
from tuner.launch.trial import Result, json_text, read_trial

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.launch.devices import Device
    from tuner.launch.orders import Orders

_TICK_S = 0.1
_LOOK_S = 0.5  # between looks for stop.txt, which may lie on a shared file system
_DRAIN_S = 1.0  # what the command's last words may take to come through the pipe
_LONGEST_LINE = 2**20
_LONGEST_LOG = 256 * 2**20
ABANDONED = 70


class Abandoned(Exception):
    """The driver died, or the scheduler ends the job: no result is to be written."""


class Log:
    """log.txt as it is written: the environment's secrets blotted out, each line passed on."""

    def __init__(self, path: Path, reader: LogReader, environment: Mapping[str, str]) -> None:
        self.file: IO[bytes] = path.open("ab", buffering=0)
        self.reader, self.masked, self.cut = reader, mask(environment), cut(environment)
        self.rest = b""
        self.size = 0

    def take(self, data: bytes) -> None:
        """Take what came through the pipe; whole lines go to the file."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self._line(line + b"\n")
        if len(self.rest) > _LONGEST_LINE:
            at = self.cut(self.rest)
            self._line(self.rest[:at] + b"\n")
            self.rest = self.rest[at:]

    def close_line(self) -> None:
        """Write a line that has no end yet."""
        if self.rest:
            self._line(self.rest + b"\n")
            self.rest = b""

    def _line(self, line: bytes) -> None:
        text = self.masked(line.decode("utf-8", "replace"))
        self.reader.feed(text)
        if self.size <= _LONGEST_LOG:
            written = text.encode()
            self.size += len(written)
            self.file.write(written if self.size <= _LONGEST_LOG else b"[the log is cut here: it is too long]\n")


@dataclass(slots=True)
class Supervisor:
    """pipe: its end at EOF says that the driver is dead (None: it outlives the driver, as in a batch job)."""

    folder: Path
    orders: Orders
    pipe: int | None
    parent: int = field(default_factory=os.getppid)
    ending: bool = False  # the scheduler sent SIGTERM
    looked: float = 0.0

    def run(self) -> Result:
        """Run the command, once more after an infrastructure fault; return the result, which is in its file then."""
        trial, before = read_trial(self.folder), _restarts() if self.pipe is None else 0
        earlier: Result | None = None
        for attempt in range(before + 1, max(self.orders.attempts, before + 1) + 1):
            if attempt > before + 1:
                self._pause(self.orders.pause_s)
            put_aside(self.folder)
            ending = self._attempt(attempt) if attempt <= self.orders.attempts else _given_up(attempt)
            result = after(earlier, result_of(trial, ending, log_lines(self.folder), self.orders.launcher))
            if result.end != "ok":
                self._check_driver()  # whoever found the driver dead may have ended the command before this saw it
            if result.end in ("failed", "infrastructure") and (over := _job_over()):
                if self.pipe is None:
                    raise Abandoned  # whoever ended the job knows why: the driver asks the scheduler
                result = result.replace(end="infrastructure", reason=f"{over}: {result.reason}"[:2000])
                break
            earlier = result
            if result.end != "infrastructure":
                break
        return save_result(self.folder, result)

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and stop_reason(self.folder) is None:
            self._check_driver()
            time.sleep(_TICK_S)

    def _attempt(self, attempt: int) -> Ending:
        started = time.time()
        nodes = self.orders.nodes or _nodes()
        (self.folder / LOG).touch()
        held = wait_free(self.orders.free_s, look=self._devices) if self.orders.free_s else ""
        self._check_driver()
        if held:
            return Ending(cut="infrastructure", why=held, nodes=nodes, started=started, ended=time.time(), attempts=attempt)
        try:
            command = self._start()
        except OSError as error:
            why = f"{self.orders.argv[0]}: {error.strerror}"
            return Ending(cut="infrastructure", why=why, nodes=nodes, started=started, ended=time.time(), attempts=attempt)
        try:
            code, cut, why = self._watch(command)
        finally:
            left = self._end()
            assert command.stdout is not None  # noqa: S101 -- for the type checker: it is a pipe
            command.stdout.close()
            command.returncode = 0  # collected by reap()
        if left:
            cut, why = "infrastructure", f"processes outlive SIGKILL: {', '.join(map(str, left))}"
        return Ending(exit_code=code, cut=cut, why=why, nodes=nodes, started=started, ended=time.time(), attempts=attempt)

    def _devices(self) -> Sequence[Device]:
        self._check_driver()
        return () if stop_reason(self.folder) is not None else devices()

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603 -- the orders' command; nothing goes through a shell here
            self.orders.argv, cwd=self.orders.cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, bufsize=0,
        )  # fmt: skip

    def _watch(self, command: subprocess.Popen[bytes]) -> tuple[int | None, Cut, str]:
        """Copy output until the command ends or must be ended; return its exit code (None while it runs), the cut and why."""
        assert command.stdout is not None  # noqa: S101
        reader = LogReader(self.orders.launcher)
        log = Log(self.folder / LOG, reader, os.environ)
        try:
            return self._copy(command, command.stdout.fileno(), log, Clock(self.orders, reader))
        finally:
            log.close_line()
            log.file.close()

    def _copy(self, command: subprocess.Popen[bytes], pipe: int, log: Log, clock: Clock) -> tuple[int | None, Cut, str]:
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            code, ended_at = None, 0.0
            while True:
                ready = selector.select(_TICK_S)
                data = os.read(pipe, 65536) if ready else b""
                if ready and not data:
                    selector.unregister(pipe)
                if data:
                    log.take(data)
                    clock.heard()
                if code is None and (code := reap().get(command.pid)) is not None:
                    ended_at = time.monotonic()
                if code is not None and (not selector.get_map() or time.monotonic() - ended_at > _DRAIN_S):
                    return code, "", ""
                self._check_driver()
                cut, why = self._asked() or clock.up()
                if cut and code is None:
                    return None, cut, why
                if not selector.get_map():
                    time.sleep(_TICK_S)  # select() would not wait with nothing to wait for

    def _check_driver(self) -> None:
        """Raise Abandoned once the driver is dead."""
        if self.ending:
            raise Abandoned
        if self.pipe is None:
            return
        with selectors.DefaultSelector() as selector:
            selector.register(self.pipe, selectors.EVENT_READ)
            if os.getppid() != self.parent or (selector.select(0) and not os.read(self.pipe, 1)):
                raise Abandoned

    def _asked(self) -> tuple[Cut, str] | None:
        if time.monotonic() - self.looked < _LOOK_S:
            return None
        self.looked = time.monotonic()
        why = stop_reason(self.folder)
        return None if why is None else ("stop", why)

    def _end(self) -> list[int]:
        """End all that descends from the command, wherever it went; return what cannot be ended."""

        def find() -> Sequence[int]:
            reap()
            return sorted({*descendants(os.getpid()), *marked(self.folder)})

        left = end_all(find, self.orders.grace_s)
        reap()
        if self.orders.cleanup:
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(self.orders.cleanup, timeout=60, check=False, stdin=subprocess.DEVNULL)  # noqa: S603
        return left


class Clock:
    """When a run must be ended."""

    def __init__(self, orders: Orders, reader: LogReader) -> None:
        self.orders, self.reader = orders, reader
        self.begun = self.last = time.monotonic()
        self.fault = 0.0

    def heard(self) -> None:
        """The log grew."""
        self.last = time.monotonic()
        if not self.fault and self.reader.failure:
            self.fault = self.last

    def up(self) -> tuple[Cut, str]:
        """Return the limit that is reached, and in words; ("", "") where none is."""
        now = time.monotonic()
        if self.fault and now - self.fault >= self.orders.error_s:
            return "error", self.reader.failure.reason if self.reader.failure else ""
        if now - self.begun >= self.orders.wall_s:
            return "wall", f"its wall limit of {self.orders.wall_s:g} s"
        if now - self.last >= self.orders.quiet_s:
            return "quiet", f"no line in its log for {self.orders.quiet_s:g} s"
        return "", ""


def after(earlier: Result | None, result: Result) -> Result:
    """Return the result of a second attempt with what the first one found out, where it ended no better."""
    if earlier is None or result.end != "infrastructure":
        return result
    reason = result.reason if result.reason == earlier.reason else f"{result.reason} (first attempt: {earlier.reason})"
    failed: Result = result.replace(reason=reason[:2000], failed_nodes=tuple(dict.fromkeys(earlier.failed_nodes + result.failed_nodes)))
    return failed


def _job_over() -> str:
    """Return what became of the Slurm job that this runs in, "" while it runs: steps end before their job's script does."""
    job = os.environ.get("SLURM_JOB_ID", "")
    with contextlib.suppress(InfrastructureError):
        state = job_state(job) if job else None
        if state and (state.phase == "ended" or state.name == "COMPLETING"):
            return f"Slurm job {job} is {state.name}"
    return ""


def _restarts() -> int:
    """Return how often Slurm has queued this job again after a node failed or it was preempted."""
    return int(os.environ.get("SLURM_RESTART_COUNT", "0"))


def _given_up(attempt: int) -> Ending:
    why = f"its job was started {attempt} times: nodes failed under it, or it was preempted"
    return Ending(cut="infrastructure", why=why, nodes=_nodes(), started=time.time(), ended=time.time(), attempts=attempt - 1)


def _nodes() -> tuple[str, ...]:
    """Return the nodes of the Slurm job that this process runs in, or this machine."""
    names = os.environ.get("SLURM_JOB_NODELIST", "")
    if names:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            done = subprocess.run(["scontrol", "show", "hostnames", names], capture_output=True, text=True, timeout=30, check=True)  # noqa: S603, S607
            return tuple(done.stdout.split())
    return (socket.gethostname(),)


def main(arguments: Sequence[str]) -> int:
    """Supervise the trial in a folder."""
    folder = Path(arguments[0])
    pipe = int(arguments[2]) if arguments[1:2] == ["--pipe"] else None
    supervisor = Supervisor(folder, read_orders(folder), pipe)

    def told(*_: object) -> None:
        supervisor.ending = True

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    adopt_orphans()
    try:
        os.environ[MARK] = str(folder.absolute())
        supervisor._check_driver()
        own, driver = os.getpid(), supervisor.parent
        record = {"pid": own, "start": start_time(own), "driver": driver, "driver_start": start_time(driver)}
        write(folder / SUPERVISOR, json_text(record))
        supervisor.run()
    except Abandoned:
        return ABANDONED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
