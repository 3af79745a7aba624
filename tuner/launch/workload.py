"""The built-in workload: `python -m tuner.launch.workload --trial FOLDER`, one process a rank, started by torchrun.

Prints `tuner-versions {...}` once, `tuner-step {"step", "seconds", "loss", "microbatches"}` by rank 0 (seconds from barrier to barrier:
forward, backward, collectives and optimizer; loss: the mean over the step's sequences, in nats; microbatches: of one replica), and at the
end by every rank `tuner-rank {"rank", "max_allocated_bytes", "max_reserved_bytes", "host_peak_bytes", "compute_s"}` (null on CPUs, where
torch counts no allocations; compute_s: seconds of a fixed product that every rank runs alone, which tells a slow device). A plan that it
cannot run ends with `tuner-refused: WHY` lines and exit code 2.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import TunerError
from tuner.launch.limits import refusals
from tuner.launch.trial import Trial, read_trial
from tuner.plan import CP_KINDS

if TYPE_CHECKING:
    import torch

    from tuner.launch.engine.training import Training

REFUSED = 2


def main() -> int:
    """Run the trial that the command line names; return the exit code."""
    options = _options()
    try:
        trial = read_trial(options.trial)
    except TunerError as error:
        return refuse(str(error).splitlines())
    why = [*dict.fromkeys(line for count in _counts(trial) for line in refusals(trial.job, trial.plan, count)), *_about_this_machine(trial)]
    if why:
        return refuse(why)
    return _run(trial, balanced=options.routing == "balanced")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="One rank of a trial of the built-in workload; start it by torchrun.")
    parser.add_argument("--trial", type=Path, required=True, metavar="FOLDER", help="holds trial.json")
    parser.add_argument(
        "--routing", choices=("balanced", "learned"), default="balanced",
        help="tokens to experts in turn, as in published throughput runs, or as the router scores them",
    )  # fmt: skip
    return parser.parse_args()


def _counts(trial: Trial) -> tuple[int, ...]:
    """Return the counts of micro batches that steps hold in turn (0: those of the job's global batch)."""
    return trial.short or (trial.microbatches,)


def own_rank() -> int:
    """Return this process's rank, as it was started."""
    return int(os.environ.get("RANK", "0"))


def refuse(why: list[str]) -> int:
    """Say why a trial is not run; return the exit code."""
    if own_rank() == 0:
        for line in why:
            say(f"tuner-refused: {line}")
    return REFUSED


def say(line: str) -> None:
    """Print a line to stdout in one write, so that ranks' lines do not mix."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _about_this_machine(trial: Trial) -> list[str]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "MASTER_ADDR" not in os.environ:
        return ["start it by torchrun: torchrun --nproc-per-node N -m tuner.launch.workload --trial FOLDER"]
    if world != trial.job.gpus:
        return [f"the job has {trial.job.gpus} accelerators, but torchrun started {world} processes"]
    return []


def _about_gpus(trial: Trial) -> list[str]:
    ring = trial.plan.cp > 1 and trial.plan.cp_kind == CP_KINDS["p2p"]
    if ring and trial.job.precision == "fp32":
        return [f"cp = {trial.plan.cp} with cp_kind = p2p in fp32: fused attention on GPUs, which the ring merges, takes 16 bits"]
    return []


def _run(trial: Trial, *, balanced: bool) -> int:
    import torch
    import torch.distributed as dist

    from tuner.launch.engine.experts import Routing
    from tuner.launch.engine.training import Training

    device = device_of_rank()
    if device.type == "cuda" and (why := _about_gpus(trial)):
        return refuse(why)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        if own_rank() == 0:
            say("tuner-versions " + json.dumps(versions(device)))
        counts = _counts(trial)
        training = Training(trial.job, trial.plan, device, microbatches=counts[0], routing=Routing(balanced=balanced))
        gc.disable()  # a collection in the middle of a step would be measured
        for step in range(trial.steps):
            if len(counts) > 1:
                training.hold(counts[step % len(counts)])
            _train(training, step, device)
        say("tuner-rank " + json.dumps({"rank": dist.get_rank(), **memory(device), "compute_s": _compute_seconds(trial, device)}))
        torch.distributed.barrier()
    finally:
        dist.destroy_process_group()
    return 0


def device_of_rank() -> torch.device:
    """Return the accelerator of this rank, or the CPU."""
    import torch

    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _train(training: Training, step: int, device: torch.device) -> None:
    batch = training.batch(step)
    start = together(device)
    part = training.step(batch)
    seconds = together(device) - start
    loss = training.mean_loss(part)
    if own_rank() == 0:
        record = {"step": step + 1, "seconds": round(seconds, 6), "loss": round(loss, 6), "microbatches": training.microbatches}
        say("tuner-step " + json.dumps(record))
    gc.collect(1)


def together(device: torch.device) -> float:
    """Return the time at which every rank has come here with its device idle."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    torch.distributed.barrier()
    return time.perf_counter()


def memory(device: torch.device) -> dict[str, int | None]:
    """Return this rank's peaks of memory, in bytes."""
    import torch

    cuda = device.type == "cuda"
    return {
        "max_allocated_bytes": torch.cuda.max_memory_allocated(device) if cuda else None,
        "max_reserved_bytes": torch.cuda.max_memory_reserved(device) if cuda else None,
        "host_peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _compute_seconds(trial: Trial, device: torch.device) -> float:
    """Return the median seconds of five products of the model's width, in the rank's own time on a CPU."""
    import torch

    from tuner.launch.engine.transformer import compute_type

    model, dtype = trial.job.model, compute_type(trial.job.precision)
    x = torch.ones(min(trial.job.seq_len, 4096), model.hidden, device=device, dtype=dtype)
    w = torch.ones(model.hidden, model.ffn_hidden, device=device, dtype=dtype)
    clock, times = (time.perf_counter if device.type == "cuda" else time.thread_time), []
    for _ in range(5):
        start = clock()
        x @ w
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(clock() - start)
    return round(sorted(times)[2], 9)


def versions(device: torch.device) -> dict[str, Any]:
    """Return what runs: versions of packages and the device."""
    import torch

    from tuner import __version__

    found = {"tuner": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    if device.type == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        found |= {"cuda": str(torch.version.cuda), "nccl": nccl, "device": torch.cuda.get_device_name(device)}
    return found


if __name__ == "__main__":
    CODE = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CODE)  # all is said: gloo's threads, torn down with the interpreter, now and then abort a run that ended well
