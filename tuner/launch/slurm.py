"""Trials on Slurm: as steps inside one allocation (queued once), or each as a job of its own."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.cluster import nodes_of
from tuner.errors import InfrastructureError
from tuner.files import write
from tuner.launch import slurm_queue, supervised
from tuner.launch.local import MODULE
from tuner.launch.logs.formats import WORKLOAD
from tuner.launch.orders import OWN_LOG, STOP, Orders, log_lines, save_result, write_orders
from tuner.launch.outcome import Cut, Ending, result_of
from tuner.launch.script import TASK, secrets_of
from tuner.launch.site import Site
from tuner.launch.slurm_script import (
    EXIT,
    JOB,
    LAUNCH,
    TICKET,
    cancel_steps,
    job_name,
    job_script,
    launch_script,
    sbatch_options,
    trial_task,
)
from tuner.launch.trial import Result, json_text, read_result

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.launch.command import Command
    from tuner.launch.runner import Running, Setup
    from tuner.launch.trial import Trial

_PAUSE_S = 5.0
RECORD = "job.json"  # the id of a trial's job
_INFRASTRUCTURE = {
    "NODE_FAIL": "a node failed under its job",
    "BOOT_FAIL": "a node did not boot",
    "PREEMPTED": "its job was preempted",
    "CANCELLED": "its job was cancelled by somebody else",
    "DEADLINE": "its job passed the deadline",
    "GONE": "its job ended without a result, and Slurm does not know it any more",
}


@dataclass(slots=True)
class SlurmJob:
    """A trial that is a job of its own. linger_s: how long its result may take to be seen here, through a shared file system."""

    trial: Trial
    job: str
    launcher: str
    queue_s: float | None = None
    linger_s: float = 30.0
    every_s: float = 2.0
    submitted: float = field(default_factory=time.time)
    state: slurm_queue.JobState = field(default_factory=lambda: slurm_queue.JobState(name="PENDING"))
    asked: float = 0.0
    ended: float = 0.0
    result: Result | None = None

    def poll(self) -> Result | None:
        """Return the result that the job wrote, or what Slurm says of a job that wrote none."""
        self.result = self.result or read_result(self.trial.folder)
        if self.result is None:
            phase = self._ask().phase
            if phase == "waiting" and self.queue_s and time.time() - self.submitted > self.queue_s:
                slurm_queue.cancel(self.job)
                self._save("infrastructure", f"job {self.job} waited for more than {self.queue_s:g} s in the queue ({self.state.reason})")
            elif phase == "ended" and self._lingered():
                self._save(*self._said())
        return self.result

    def stop(self, why: str) -> Result:
        """Ask the supervisor in the job to end the trial; cancel the job where it does not run, or does not answer."""
        if result := self.poll():
            return result
        write(self.trial.folder / STOP, why)
        if self._ask(now=True).phase == "running" and self._answered(20.0):
            return self._save("stop", why)
        slurm_queue.cancel(self.job)
        deadline = time.monotonic() + 60
        while self._ask(now=True).phase in ("waiting", "running") and time.monotonic() < deadline:
            time.sleep(0.2)
        return self._save("stop", why)

    def _answered(self, most_s: float) -> bool:
        """Whether the supervisor wrote a result; its job ends by itself then."""
        deadline = time.monotonic() + most_s
        while read_result(self.trial.folder) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return read_result(self.trial.folder) is not None

    def _ask(self, *, now: bool = False) -> slurm_queue.JobState:
        if now or time.monotonic() - self.asked >= self.every_s:
            self.state, self.asked = slurm_queue.job_state(self.job), time.monotonic()
        return self.state

    def _lingered(self) -> bool:
        self.ended = self.ended or time.monotonic()
        return time.monotonic() - self.ended >= self.linger_s

    def _said(self) -> tuple[Cut, str]:
        """Return what became of a job that ended without a result."""
        state = self.state
        if state.name == "TIMEOUT":
            return "wall", f"Slurm's time limit of job {self.job}"
        if state.name == "OUT_OF_MEMORY":
            return "error", f"job {self.job} used more host memory than it was given"
        what = _INFRASTRUCTURE.get(state.name) or f"its job ended as {state.name} without a result: {self._last_words()}"
        failed = ", ".join(slurm_queue.down(state.nodes))
        return "infrastructure", f"job {self.job}: {what}" + (f": {failed}" if failed else "")

    def _last_words(self) -> str:
        """Return the exit code that the job's script left, and the supervisor's last line."""
        code = _text(self.trial.folder / EXIT).split()
        lines = [
            line for line in (_text(self.trial.folder / OWN_LOG) or _text(self.trial.folder / "slurm.log")).splitlines() if line.strip()
        ]
        return (f"exit code {code[1]}, " if len(code) == 2 else "") + (lines[-1] if lines else "it said nothing")

    def _save(self, cut: Cut, why: str) -> Result:
        trial, nodes = self.trial, self.state.nodes
        ending = Ending(cut=cut, why=why, nodes=nodes, started=self.submitted, ended=time.time())
        result = result_of(trial, ending, log_lines(trial.folder), self.launcher)
        if cut == "infrastructure":
            result = result.replace(failed_nodes=slurm_queue.down(nodes))
        self.result = save_result(trial.folder, result)
        return self.result


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmRunner:
    """allocation: id of the job whose nodes trials run on; "": each trial is a job of its own. command: a person's own launch command
    (None: the built-in workload, `module`); exclude: nodes to leave out; parallel: trials at once. grace_s, error_s: see Orders;
    linger_s, every_s: see SlurmJob.
    """

    site: Site = field(default_factory=Site)
    command: Command | None = None
    allocation: str = ""
    exclude: tuple[str, ...] = ()
    parallel: int = 1
    module: str = MODULE
    grace_s: float = 10.0
    error_s: float = 3.0
    linger_s: float = 30.0
    every_s: float = 2.0
    _started: list[tuple[supervised.Supervised, tuple[str, ...]]] = field(default_factory=list, repr=False, compare=False)

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return "slurm"

    def start(self, trial: Trial) -> Running:
        """Start a trial on free nodes of the allocation, or submit it. Raises SpecError, InfrastructureError."""
        trial.folder.mkdir(parents=True, exist_ok=True)
        task, per = trial_task(self.site, trial, self.command, self.module)
        return self._step(trial, task, per) if self.allocation else self._submit(trial, task, per)

    def attach(self, trial: Trial) -> Running | None:
        """Return the trial's job, if Slurm still knows it, or its result; a step in an allocation has ended with its driver."""
        if result := read_result(trial.folder):
            return supervised.Ended(result)
        if self.allocation:
            subprocess.run(cancel_steps(trial, self.allocation), check=False, timeout=60, stdin=subprocess.DEVNULL)  # noqa: S603
            return supervised.attach(trial, self._launcher, self.grace_s)
        record = _text(trial.folder / RECORD)
        job = json.loads(record)["job"] if record else slurm_queue.job_named(job_name(trial))
        if not job or slurm_queue.job_state(job).name == "GONE":
            return None
        return self._handle(trial, job)

    @property
    def _launcher(self) -> str:
        return self.command.launcher if self.command else WORKLOAD

    def _orders(self, trial: Trial, per: str, cleanup: tuple[str, ...] = (), nodes: tuple[str, ...] = ()) -> Orders:
        """Return the supervisor's orders. Whether accelerators are free is asked on each node, by its own task."""
        return Orders(
            argv=("bash", f"{trial.folder.absolute()}/{LAUNCH}"), cwd=str(trial.folder.absolute()), launcher=self._launcher,
            wall_s=trial.wall_s, quiet_s=trial.quiet_s, grace_s=self.grace_s, error_s=self.error_s,
            free_s=60.0 if per == "job" else 0.0, pause_s=_PAUSE_S, cleanup=cleanup, nodes=nodes,
        )  # fmt: skip

    def _submit(self, trial: Trial, task: str, per: str) -> SlurmJob:
        folder, ticket = trial.folder, secrets.token_hex(8)
        (folder / RECORD).unlink(missing_ok=True)
        (folder / EXIT).unlink(missing_ok=True)
        argv = ("sbatch", *sbatch_options(self.site, trial, per, (*self.exclude, *trial.exclude)), str(folder.absolute() / JOB))
        scripts = {JOB: job_script(self.site, trial, ticket), LAUNCH: launch_script(self.site, trial, per, (), ()), TASK: task}
        environment = {**os.environ, **secrets_of(self.site)}
        supervised.prepare(trial, argv, scripts, environment)
        write_orders(folder, self._orders(trial, per))
        write(folder / TICKET, ticket)
        job = slurm_queue.submit(argv, environment)
        write(folder / RECORD, json_text({"job": job}))
        return self._handle(trial, job)

    def _handle(self, trial: Trial, job: str) -> SlurmJob:
        return SlurmJob(trial, job, self._launcher, self.site.queue_s, self.linger_s, self.every_s)

    def _step(self, trial: Trial, task: str, per: str) -> supervised.Supervised:
        nodes = self._free_nodes(nodes_of(trial.job.cluster, "slurm").count, trial.exclude)
        options = (f"--jobid={self.allocation}", "--overlap")
        scripts = {LAUNCH: launch_script(self.site, trial, per, options, nodes), TASK: task}
        orders = self._orders(trial, per, cleanup=cancel_steps(trial, self.allocation), nodes=nodes)
        environment = {**os.environ, **secrets_of(self.site), "SLURM_JOB_ID": self.allocation}
        running = supervised.start(trial, orders, scripts, environment)
        self._started.append((running, nodes))
        return running

    def _free_nodes(self, count: int, exclude: tuple[str, ...]) -> tuple[str, ...]:
        """Return nodes of the allocation that are up and run no trial. Raises InfrastructureError."""
        state = slurm_queue.job_state(self.allocation)
        if state.phase != "running":
            raise InfrastructureError(f"allocation {self.allocation} is {state.name}: start a new one (salloc), or run trials as jobs")
        self._started[:] = [(running, nodes) for running, nodes in self._started if running.result is None]
        used = {node for _, nodes in self._started for node in nodes}
        used |= {node for _, name, nodes in slurm_queue.steps(self.allocation) if name.startswith("tuner-") for node in nodes}
        bad = {*self.exclude, *exclude, *slurm_queue.down(state.nodes)}
        free = [node for node in state.nodes if node not in used | bad]
        if len(free) < count:
            ruled = f", {', '.join(sorted(bad))} left out" if bad else ""
            raise InfrastructureError(
                f"allocation {self.allocation} has {len(free)} free nodes of {len(state.nodes)}{ruled}: {count} are needed"
            )
        return tuple(free[:count])


def open_runner(setup: Setup) -> SlurmRunner:
    """Return the runner for a setup: inside an allocation where there is one, unless separate jobs are asked for."""
    allocation = "" if setup.separate_jobs else setup.allocation or os.environ.get("SLURM_JOB_ID", "")
    return SlurmRunner(
        site=setup.site, command=setup.command, allocation=allocation, exclude=setup.exclude, parallel=setup.parallel,
    )  # fmt: skip


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
