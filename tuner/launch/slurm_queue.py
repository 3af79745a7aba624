"""Slurm's commands: squeue, scontrol, sinfo, sbatch, scancel. Accounting (sacct) is not needed."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tuner.errors import InfrastructureError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_TIMEOUT_S = 60.0
_WAITING = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"}
_ON_NODES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}
_DOWN = ("down", "fail", "drain", "not_responding", "unknown", "reboot", "power")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobState:
    """What squeue says of a job. name: Slurm's word ("GONE": Slurm does not know the job any more; "UNREACHABLE": it does not answer)."""

    name: str
    nodes: tuple[str, ...] = ()
    reason: str = ""

    @property
    def phase(self) -> Literal["waiting", "running", "ended", "unknown"]:
        """Where the job is in its life."""
        if self.name == "UNREACHABLE":
            return "unknown"
        return "waiting" if self.name in _WAITING else "running" if self.name in _ON_NODES else "ended"


def job_state(job: str) -> JobState:
    """Return the state of a job; never raises: a scheduler that does not answer is asked again later."""
    done = _run(["squeue", "--noheader", f"--jobs={job}", "--states=all", "--format=%T|%N|%r"])
    if done.returncode:
        return JobState(name="GONE" if "nvalid job id" in done.stderr else "UNREACHABLE")
    line = done.stdout.strip().splitlines()
    if not line:
        return JobState(name="GONE")
    name, nodes, reason = [*line[0].split("|", 2), "", ""][:3]
    return JobState(name=name, nodes=hostnames(nodes), reason=reason)


def job_named(name: str) -> str:
    """Return the id of the waiting or running job of this name, "" where there is none. Raises InfrastructureError."""
    return (_answer(["squeue", "--noheader", f"--name={name}", "--format=%A"]).split() or [""])[0]


def steps(job: str) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return id, name and nodes of a job's steps. Raises InfrastructureError."""
    lines = _answer(["squeue", "--noheader", "--steps", f"--jobs={job}", "--format=%i|%j|%N"]).splitlines()
    rows = [line.split("|") for line in lines if line.count("|") == 2]
    return [(row[0].strip(), row[1], hostnames(row[2])) for row in rows]


def hostnames(expression: str) -> tuple[str, ...]:
    """Return the nodes of an expression like n[1-3]; () where Slurm cannot expand it."""
    if not expression or not expression[0].isalnum():
        return ()
    done = _run(["scontrol", "show", "hostnames", expression])
    return tuple(done.stdout.split()) if done.returncode == 0 else ()


def down(nodes: Sequence[str]) -> tuple[str, ...]:
    """Return those of the nodes that are down, failing or drained."""
    if not nodes:
        return ()
    done = _run(["sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N|%T"])
    rows = [line.split("|") for line in done.stdout.splitlines() if "|" in line]
    return tuple(dict.fromkeys(r[0] for r in rows if r[1].lower().startswith(_DOWN) or r[1].endswith("*")))


def submit(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Run sbatch --parsable; return the job's id. Raises InfrastructureError with what Slurm says."""
    job = _answer(argv, environment).strip().splitlines()[-1].partition(";")[0]
    if not job.isdigit():
        raise InfrastructureError(f"sbatch answered {job!r}, which is no job id")
    return job


def cancel(job: str) -> None:
    """Run scancel on a job or step; that it has ended already is no error."""
    _run(["scancel", job])


def _answer(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> str:
    done = _run(argv, environment)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}").splitlines()
        raise InfrastructureError(f"{argv[0]}: {said[0]}")
    return done.stdout


def _run(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(  # noqa: S603 -- Slurm's own commands, without a shell
            list(argv), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL, env=environment,
        )  # fmt: skip
    except FileNotFoundError:
        raise InfrastructureError(f"{argv[0]} is not installed here: trials on Slurm are started where its commands are") from None
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(list(argv), 1, "", f"no answer in {_TIMEOUT_S:g} s")
