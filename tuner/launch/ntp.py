"""The built-in workload over replicas of different tensor-parallel degree: `python -m tuner.launch.ntp --trial FOLDER`, a process a rank.

FOLDER/ntp.json says what is run (tuner/launch/nonuniform/trial.py). Torchrun starts the ranks, or the driver beside it
(`python -m tuner.launch.nonuniform.driver --trial FOLDER`), under which they outlive the death of one. Prints the lines of the built-in
workload, `tuner-versions` once and `tuner-step`, `tuner-rank` of each phase, and

tuner-reshard {"phase", "steps", "ranks"} by the first rank of each phase: of each step the seconds behind the backward in what goes before
the sum over replicas, in the sum, and behind it, each of the slowest rank that does it; of each rank the bytes that it sent and received.
tuner-failover {"lost", "degrees", "samples", "step", ...} by the first rank, when it has gone on without some: seconds from the driver's
notice until the survivors have agreed, entered new groups, and hold all weights; bytes that came from other ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import signal
import sys
import threading
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import TunerError
from tuner.launch import workload
from tuner.launch.nonuniform.layout import Cast, Lost
from tuner.launch.nonuniform.trial import NonuniformTrial, Phase, read_nonuniform, refusals, samples_of

if TYPE_CHECKING:
    import torch
    from torch.distributed.distributed_c10d import Store

    from tuner.launch.nonuniform.failover import Kept
    from tuner.launch.nonuniform.groups import Groups
    from tuner.launch.nonuniform.training import Spent, Training

FAILED = 4
NOTICE_S = 30.0  # for the driver to say who died, once an operation has failed


def main() -> int:
    """Run this rank of the trial that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(description="One rank of a run over replicas of different degree.")
    parser.add_argument("--trial", type=Path, required=True, metavar="FOLDER", help="holds ntp.json")
    try:
        trial = read_nonuniform(parser.parse_args().trial)
    except TunerError as error:
        return workload.refuse(str(error).splitlines())
    if why := [*refusals(trial), *_about_this_machine(trial)]:
        return workload.refuse(why)
    return run_rank(trial)


def _about_this_machine(trial: NonuniformTrial) -> list[str]:
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if "MASTER_ADDR" not in os.environ:
        return ["start it by torchrun: torchrun --nproc-per-node N -m tuner.launch.ntp --trial FOLDER"]
    return [] if world == trial.ranks else [f"the run needs {trial.ranks} processes, but {world} were started"]


def run_rank(trial: NonuniformTrial) -> int:
    """Run this process's rank of a trial; return the exit code."""
    from torch.distributed.rendezvous import rendezvous

    device = workload.device_of_rank()
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=trial.timeout_s)))
    if rank == 0:
        workload.say("tuner-versions " + json.dumps(workload.versions(device)))
    for number, phase in enumerate(trial.phases):
        if rank < sum(phase.degrees):
            code = Runner(trial=trial, number=number, store=store, born=rank, device=device).run()
            if code:
                return code
        _wait_for_phase(store, f"phase{number}/over", rank, len(trial.phases) > number + 1)
    return 0


def _wait_for_phase(store: Store, key: str, rank: int, more: bool) -> None:
    """Wait for the end of a phase, that those who take no part in it do not crowd the next one's start."""
    if more:
        if rank == 0:
            store.set(key, "")
        store.wait([key], timedelta(days=7))


@dataclass(slots=True, kw_only=True)
class Runner:
    """A rank in one phase. born: its rank as it was started; members: those of all present ranks, in the order of their present ranks."""

    trial: NonuniformTrial
    number: int
    store: Store
    born: int
    device: torch.device
    generation: int = 0
    training: Training | None = None
    members: list[int] = field(default_factory=list)
    cast: Cast = field(init=False)
    spent: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Begin with all ranks."""
        self.cast = Cast.of(self.phase.degrees)
        self.members = list(range(self.cast.ranks))

    @property
    def phase(self) -> Phase:
        """What is run."""
        return self.trial.phases[self.number]

    @property
    def name(self) -> str:
        """Of the present generation of groups, as the store and the driver know it."""
        return f"phase{self.number}.{self.generation}"

    @property
    def rank(self) -> int:
        """Present rank."""
        return self.members.index(self.born)

    def run(self) -> int:
        """Run all steps of the phase, on the ranks that are left; return the exit code."""
        from tuner.launch.nonuniform.groups import leave

        gc.disable()  # a collection in the middle of a step would be measured
        self._enter(self.phase.samples)
        while (failure := self._attempt()) is not None:
            why = self._recover(failure)
            if why:
                workload.say(f"tuner-failed: {why}")
                return FAILED
        self.training = None
        leave()
        return 0

    def _enter(self, samples: tuple[int, ...]) -> Groups:
        from tuner.launch.nonuniform.groups import entered
        from tuner.launch.nonuniform.training import Training

        groups = entered(self.store, self.name, self.cast, self.rank, self.device, self.trial.timeout_s)
        _watch(self.store, f"{self.name}/lost", groups)
        self.training = Training(self.trial, samples, groups, self._fate())
        return groups

    def _fate(self) -> Any:
        """Return what kills this rank at its point, None where it is to live."""
        mine = [loss for loss in self.trial.lost if loss.rank == self.born]
        if not mine:
            return None

        def die(point: str) -> None:
            if self.training is not None and any((loss.point, loss.step) == (point, self.training.done + 1) for loss in mine):
                os.kill(os.getpid(), signal.SIGKILL)

        return die

    def _attempt(self) -> Exception | None:
        """Run steps until all are done (None) or an operation fails."""
        from torch.distributed import DistError

        training = self.training
        assert training is not None  # noqa: S101
        try:
            while training.done < self.phase.steps:
                self._step(training)
            self._tell(training)
        except (RuntimeError, DistError) as error:
            return error.with_traceback(None)
        return None

    def _step(self, training: Training) -> None:
        start = workload.together(self.device)
        spent = training.step(overlap=self.phase.overlap)
        seconds = workload.together(self.device) - start
        if self.rank == 0:
            record = {"step": training.done, "seconds": round(seconds, 6), "loss": round(training.loss, 9), "norm": round(training.norm, 9)}
            workload.say("tuner-step " + json.dumps({"phase": self.number, **record}))
        self.spent.append(_slowest(spent, training.groups))
        gc.collect(1)

    def _tell(self, training: Training) -> None:
        """Print what moved, and this rank's memory."""
        import torch

        from tuner.launch.engine.collectives import gathered

        groups, moved = training.groups, [[0, 0], [0, 0]]
        for bucket in training.buckets:
            for i, direction in enumerate(("before", "after")):
                moved[i] = [a + b for a, b in zip(moved[i], bucket.moved[direction], strict=True)]
        shared = sum(m.parameter.numel() for m in training.members() if m.part.axis is not None)
        rows = gathered(torch.tensor([[*moved[0], *moved[1], shared]], device=self.device), groups.world).tolist()
        memory = workload.memory(self.device)
        workload.say("tuner-rank " + json.dumps({"phase": self.number, "rank": self.rank, "born": self.born, **memory}))
        if self.rank == 0:
            names = ("before_sent", "before_received", "after_sent", "after_received", "shared_parameters")
            ranks = [self._place(rank) | dict(zip(names, row, strict=True)) for rank, row in enumerate(rows)]
            steps = [dict(zip(("backward_s", "before_s", "sum_s", "after_s"), row, strict=True)) for row in self.spent]
            workload.say("tuner-reshard " + json.dumps({"phase": self.number, "steps": steps, "ranks": ranks}))
        workload.together(self.device)

    def _place(self, rank: int) -> dict[str, Any]:
        replica, slot = self.cast.place(rank)
        return {"rank": rank, "replica": replica, "degree": self.cast.degrees[replica], "spare": slot >= self.cast.cores}

    def _recover(self, failure: Exception) -> str:
        """Go on without the ranks that the driver names; return why not, "" where it does. See failover.py."""
        import torch.distributed as dist

        from tuner.launch.nonuniform.failover import Split, kept, settle

        noticed, training = time.time(), self.training
        assert training is not None  # noqa: S101
        try:
            self.store.wait([f"{self.name}/lost"], timedelta(seconds=NOTICE_S if self.trial.lost else 1.0))
        except dist.DistError:
            return f"rank {self.born}: {str(failure).splitlines()[0]}"
        said = json.loads(self.store.get(f"{self.name}/lost"))
        survivors = [born for born in self.members if born not in said["ranks"]]
        try:
            settle(self.store, f"{self.name}/standing", training, self.born, survivors, self.trial.timeout_s)
            old = kept(training)
            agreed = time.time()
            self.training, training = None, None  # they hold groups, which end with whoever holds them
            return self._go_on(old, [self.members.index(born) for born in said["ranks"]], said["seen"], noticed, agreed)
        except (Lost, Split, RuntimeError, dist.DistError) as error:
            return f"rank {self.born} could not go on without {said['ranks']}: {str(error).splitlines()[0]}"

    def _go_on(self, old: Kept, lost: list[int], seen: float, noticed: float, agreed: float) -> str:
        import torch

        from tuner.launch.engine.collectives import gathered
        from tuner.launch.nonuniform.failover import taken_over
        from tuner.launch.nonuniform.groups import leave

        leave()
        gone = [self.members[rank] for rank in lost]
        self.cast, _ = self.cast.without(lost)
        self.members = [born for born in self.members if born not in gone]
        self.generation += 1
        samples = samples_of(self.trial.job.global_batch, self.cast.degrees)
        groups = self._enter(samples)
        entered = time.time()
        assert self.training is not None  # noqa: S101
        moved = taken_over(old, lost, self.training, groups)
        workload.together(self.device)
        moved = int(gathered(torch.tensor([moved], device=self.device), groups.world).sum())
        if self.rank == 0:
            times = {"noticed_s": noticed, "agreed_s": agreed, "entered_s": entered, "restored_s": time.time()}
            record = {"lost": gone, "degrees": self.cast.degrees, "samples": samples, "step": self.training.done, "moved_bytes": moved}
            workload.say("tuner-failover " + json.dumps(record | {name: round(at - seen, 6) for name, at in times.items()}))
        return ""


def _slowest(spent: Spent, groups: Groups) -> list[float]:
    """Return the seconds of the rank that spends most in each part: in what goes before and behind the sum, of those that have any."""
    import torch

    from tuner.launch.engine.collectives import gathered

    reshards = groups.degree > groups.cast.cores
    row = [
        spent.backward_s,
        spent.before_s if reshards else 0.0,
        spent.sum_s if not groups.spare else 0.0,
        spent.after_s if reshards else 0.0,
    ]
    rows = gathered(torch.tensor([row], dtype=torch.float64, device=groups.device), groups.world)
    return [round(value, 6) for value in rows.amax(0).tolist()]


def _watch(store: Store, key: str, groups: Groups) -> None:
    """End all waits of these groups once the driver says that some of their ranks are lost, and this process once the store is gone."""
    from tuner.launch.nonuniform.groups import interrupt

    own = store.clone()  # type: ignore[attr-defined]

    def look() -> None:
        import torch.distributed as dist

        while True:
            try:
                own.wait([key], timedelta(hours=1))
            except dist.DistStoreError:
                continue
            except Exception:  # the driver, or torchrun, has ended
                os._exit(FAILED)
            interrupt(groups)
            return

    threading.Thread(target=look, daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
