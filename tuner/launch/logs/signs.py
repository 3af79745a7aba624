"""What in a log tells that a run failed, and which of several such lines is the cause.

One rank fails and takes the others down, and a launcher sums it up: so what an accelerator ran out of comes before an exception or a lost
node, these before a broken connection (which the others see), and that before the launcher's summary. Among equals the first line
counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from tuner.errors import printable

LONGEST_REASON = 300
MOST_SOURCES = 10_000
HOST_MEMORY = "out of host memory: "
Kind = Literal["oom", "failed", "host", "machine", "peer", "summary", "cancelled", "wrapper"]
RANK: dict[Kind, int] = {"oom": 0, "failed": 1, "host": 1, "machine": 1, "peer": 2, "summary": 3, "cancelled": 4, "wrapper": 5}

# PyTorch (CUDA, ROCm, XPU, Ascend), its CUDA errors, cuBLAS and cuDNN, JAX, NCCL. PyTorch's text alone is not enough: advice quotes it.
OOM = re.compile(
    r"\bOutOfMemoryError: \S|\b(?:CUDA|HIP|XPU|NPU) out of memory\. ?Tried to allocate|\b(?:CUDA|HIP|XPU) (?:driver )?error: out of memory"
    r"|\bhipErrorOutOfMemory\b|\bcudaErrorMemoryAllocation\b|\bCU(?:BLAS|DNN|SPARSE)_STATUS_ALLOC_FAILED\b"
    r"|\bRESOURCE_EXHAUSTED: .{0,120}?(?:[Oo]ut of memory|[Rr]an out of|[Aa]ttempting to (?:reserve|allocate)|[Ff]ailed to allocate)"
    r"|\b[Cc]uda failure (?:\d{1,4} )?'out of memory'|\bNCCL WARN Failed to CUDA (?:m|c)alloc\b"
)
HOST = re.compile(
    r"\boom[_-]kill event|: task \d{1,7}: Out Of Memory\b|\b[Mm]emory cgroup out of memory\b|\bOut of memory: Killed process\b"
    r"|^(?:\w{1,80}\.){0,12}(?:\w{0,40}Array)?MemoryError\b|\bOOMKilled\b"
    r"|\bDefaultCPUAllocator: (?:can't allocate|not enough) memory|\bDUE TO MEMORY LIMIT\b"
)
MACHINE = re.compile(
    r"\bDUE TO (?:NODE FAILURE|PREEMPTION|TIME LIMIT|SYSTEM)|\b[Nn]ode failure\b|\bNODE_FAIL\b|\buncorrectable (?:NVLINK|NVLink|ECC)\b"
    r"|\b[Dd]ouble[- ][Bb]it ECC\b|\bECC error encountered\b|\bNVRM: Xid\b|\bGPU (?:is lost|has fallen off the bus)"
    r"|^srun: error: (?:Slurm job \d{1,12} has expired|Unable to (?:create step|confirm allocation|allocate resources))"
    r"|\bno CUDA-capable device\b|\bNo space left on device\b|\bDisk quota exceeded\b|\bStale file handle\b|\bRemote I/O error\b"
    r"|\[Errno 5\]|\bsystem not yet initialized\b|\bNVML: Driver/library version mismatch\b"
)
PEER = re.compile(
    r"\bWatchdog caught collective operation timeout\b|\bSome NCCL operations have failed or timed out\b|\bNCCL error\b"
    r"|\bnccl(?:Remote|System|Internal)Error\b|\bncclUnhandledCudaError\b|\b[Cc]onnection (?:reset|closed|refused)(?: by peer)?\b"
    r"|\bBroken pipe\b|\b[Tt]ransport [Rr]etry\b|\bIBV_WC_RETRY_EXC_ERR\b|\bNCCL WARN (?:NET|Net)\b.{0,200}\b(?:error|failed)\b"
    r"|\bSocket Timeout\b|\bsocket has timed out\b|\b[Hh]eartbeat (?:monitor )?timed out\b|\bRendezvous\w{0,20}Error\b"
    r"|\bDEADLINE_EXCEEDED: |\bUNAVAILABLE: .{0,120}(?:[Hh]eartbeat|[Ss]ocket|[Cc]onnect|[Tt]ask)|\bDist(?:Backend|Network|Store)Error\b"
)
CERTAIN_PEER = re.compile(r"\bWatchdog caught collective operation timeout\b")
PLAIN = re.compile(
    r"^(?:[\w./-]{1,200}\.py|torchrun|deepspeed|accelerate): error: \S|^[\w./-]{0,200}python[\d.]{0,5}: (?:can't open|No module named)"
    r"|^Fatal Python error: |\bSegmentation fault\b|\bBus error\b|^\s{0,9}what\(\):\s{1,9}\S"
    r"|^(?:\S{0,200}bash|/bin/sh|sh): .{0,200}(?:command not found|No such file or directory|Permission denied)"
)
SUMMARY = re.compile(
    r"\bSignal \d{1,3} \(SIG\w{1,10}\) received by PID\b|^\s{0,9}exitcode\s{1,9}: -?[1-9]|\bfailed \(exitcode: -?[1-9]"
    r"|^srun: error: .{0,200}: task|\b\d{1,9} (?:Killed|Aborted)\b"
)
CANCELLED = re.compile(r"^slurmstepd: error: \*\*\* .{0,200}\bCANCELLED\b")
# One of these words, in small letters, stands in every line that the patterns above match.
WORDS = (
    "error", "memory", "oom", "alloc", "exhausted", "failure", "due to", "ecc", "nvrm", "gpu is lost", "gpu has fallen", "cuda-capable",
    "no space", "quota", "stale", "errno 5", "not yet initialized", "nvml", "collective operation", "nccl", "connection", "broken pipe",
    "transport retry", "ibv_wc", "socket", "heartbeat", "rendezvous", "deadline_exceeded", "unavailable", "fault", "what():", "not found",
    "no such file", "can't open", "no module named", "denied", "signal", "exitcode", "killed", "aborted", "cancelled",
)  # fmt: skip
# Exceptions by which a launcher, a wrapper or a watchdog tells of another process's end.
SECONDARY = re.compile(
    r"(?:^|\.)(?:ChildFailedError|SignalException|KeyboardInterrupt|SystemExit|CalledProcessError|ProcessExitedException|ProcessRaisedException)\b"
)
WARNING = re.compile(r"\[W\d{3}|^W\d{4}\b|(?<!NCCL )\bWARN(?:ING)?\b|Warning:")
TRACEBACK, IGNORED_TRACEBACK = "Traceback (most recent call last)", "Exception ignored in"
LOG_LEVEL = re.compile(r"^(?:DEBUG|INFO|WARNING|WARN|ERROR|CRITICAL|FATAL)\b")
EXCEPTION = re.compile(
    r"^(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80}(?:Error|Exception|Interrupt|Exit|Failure|Timeout|Expired|Refused|Warning)(?::|$)"
)
BEHIND_FRAME = re.compile(r"^(?:[A-Za-z_]\w{0,80}\.){0,12}[A-Za-z_]\w{0,80}(?::\s|:?$)")


@dataclass(frozen=True, slots=True)
class Fault:
    """What went wrong. at_once: whether a run that says so cannot go on."""

    kind: Kind
    reason: str
    at_once: bool

    @property
    def infrastructure(self) -> bool:
        """Whether it is the machine's fault."""
        return self.kind in ("machine", "peer", "cancelled")


SCHEDULER = ("srun: ", "slurmstepd: ")  # its lines come in between those of a task


@dataclass(slots=True)
class Faults:
    """Reads lines for what went wrong. first: the first fault with which a run cannot go on; cause: the line to blame."""

    first: Fault | None = None
    cause: Fault | None = None
    inside: dict[str, str] = field(default_factory=dict)

    def read(self, text: str, source: str) -> None:
        """Take a line without colours and prefix; source: the prefix, which tells whose line it is."""
        before = self.inside.get(source, "")
        fault = self._exception(text, source, before)
        if fault is None and not before.startswith("ignored") and not (before and text[:1].isspace()):
            fault = plain_fault(text)  # what a frame quotes of its source is none
        if fault is None:
            return
        if self.cause is None or RANK[fault.kind] < RANK[self.cause.kind]:
            self.cause = fault
        if fault.at_once and self.first is None:
            self.first = fault

    def _exception(self, text: str, source: str, before: str) -> Fault | None:
        """Return the fault that an exception's line tells, which ends a traceback of the same source. before: "" outside of one, "frame"
        or "other" behind a line of it or of another rank, "ignored" and "ignored frame" in one that Python goes on after.
        """
        if text.startswith(SCHEDULER):
            return None
        if TRACEBACK in text or text.startswith(IGNORED_TRACEBACK):
            if len(self.inside) < MOST_SOURCES:
                self.inside[source] = "ignored" if TRACEBACK not in text else "ignored frame" if before == "ignored" else "frame"
            return None
        if not before or not text.strip() or text.startswith(SCHEDULER):
            return None
        if text[:1].isspace():
            self.inside[source] = "frame" if before == "other" else before
            return None
        if not (EXCEPTION.search(text) or (before == "frame" and BEHIND_FRAME.search(text) and not LOG_LEVEL.search(text))):
            self.inside[source] = "other" if before == "frame" else before
            return None
        del self.inside[source]
        return None if before.startswith("ignored") else exception_fault(text)


def reason_of(text: str) -> str:
    """Return a line as a reason: short, with nothing in it that steers a terminal."""
    return printable(" ".join(text.split())[:LONGEST_REASON])


def sure_fault(text: str) -> Fault | None:
    """Return the fault of a line that means the same wherever it stands."""
    if OOM.search(text):
        return Fault("oom", reason_of(text), True)
    if HOST.search(text):
        return Fault("host", HOST_MEMORY + reason_of(text), True)
    return Fault("machine", reason_of(text), True) if MACHINE.search(text) else None


def exception_fault(text: str) -> Fault:
    """Return the fault of an exception's line."""
    if (sure := sure_fault(text)) is not None:
        return sure
    if SECONDARY.search(text):
        return Fault("wrapper", reason_of(text), True)
    return Fault("peer" if PEER.search(text) else "failed", reason_of(text), True)


def plain_fault(text: str) -> Fault | None:
    """Return the fault that a line tells by itself, None where it tells none. A warning tells none."""
    small = text.lower()
    if not any(word in small for word in WORDS) or WARNING.search(text):
        return None
    if (sure := sure_fault(text)) is not None:
        return sure
    if PEER.search(text):
        return Fault("peer", reason_of(text), CERTAIN_PEER.search(text) is not None)
    if PLAIN.search(text):
        return Fault("failed", reason_of(text).removeprefix("what(): "), True)
    if SUMMARY.search(text):
        return Fault("summary", reason_of(text), False)
    return Fault("cancelled", reason_of(text), False) if CANCELLED.search(text) else None
