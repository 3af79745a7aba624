"""Runs of replicas of different degree, compared with one process: `python -m tests.launch.ntp_worker CASES ANSWERS`.

The reference is the whole model in one process, the whole global batch at once, torch's own AdamW and no collective. Ranks are forked for
each count of ranks, and each checks what it holds.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import sys
import traceback
from dataclasses import dataclass, field
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.launch.layouts import _LLAMA
from tuner import presets
from tuner.job import Job
from tuner.launch import ntp
from tuner.launch.engine.experts import Routing
from tuner.launch.engine.mesh import Group
from tuner.launch.engine.optimizer import BETAS, DECAY, EPSILON, RATE
from tuner.launch.engine.parts import parts_of
from tuner.launch.engine.recompute import Recompute
from tuner.launch.engine.tensor_parallel import TensorParallel
from tuner.launch.engine.training import DATA_SEED
from tuner.launch.engine.transformer import Setting, Stage
from tuner.launch.nonuniform import driver, reshard
from tuner.launch.nonuniform.groups import Groups, entered, leave
from tuner.launch.nonuniform.layout import Cast
from tuner.launch.nonuniform.training import Training
from tuner.launch.nonuniform.trial import Loss, NonuniformTrial, Phase, refusals
from tuner.model import Model
from tuner.plan import Plan

STEPS = 3
WHOLE = {name: getattr(reshard.Bucket, name) for name in ("begin", "arrive", "finish", "end")}
HANGS_S = 60
# No bias of keys: its gradient is nothing but rounding, which AdamW makes as large as any other.
MODELS: dict[str, dict[str, Any]] = {
    "groups": {"heads": 8, "kv_heads": 4, "ffn_hidden": 22, "vocab": 37},
    "split": {"heads": 8, "kv_heads": 2, "ffn_hidden": 23, "vocab": 37, "tied_embeddings": True, "qk_norm": True, "qkv_bias": True},
    "gpt": {"heads": 6, "kv_heads": 6, "ffn_hidden": 26, "vocab": 40, "gated_mlp": False, "tied_embeddings": True, "norm": "layer",
            "output_bias": True, "mlp_bias": True, "positions": "learned", "max_positions": 48},
    "wide": {"heads": 16, "kv_heads": 8, "ffn_hidden": 45, "vocab": 61},
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Replicas, their samples, and how they run. broken: what is left out on purpose; lost: (rank, step, point) of killed ranks."""

    degrees: tuple[int, ...]
    samples: tuple[int, ...]
    model: str = "groups"
    arithmetic: str = "fp64"
    micro_batch: int = 2
    sequence_parallel: bool = False
    clip: float = 0.0
    overlap: bool = True
    broken: str = ""
    lost: tuple[tuple[int, int, str], ...] = ()
    steps: int = STEPS

    def __str__(self) -> str:
        words = ["+".join(map(str, self.degrees)), "samples " + "+".join(map(str, self.samples))]
        for f in dataclasses.fields(self):
            value = getattr(self, f.name)
            if f.name not in ("degrees", "samples") and value != f.default:
                words.append(f.name if value is True else "in phases" if value is False else f"{f.name} {value}")
        return ", ".join(words)

    @property
    def trial(self) -> NonuniformTrial:
        """What the ranks run."""
        ranks = sum(self.degrees)
        job = Job(
            model=Model(**_LLAMA | {"layers": 2, "name": self.model} | MODELS[self.model]),
            cluster=presets.cluster("h100x8").replace(gpus=ranks),
            framework=presets.framework("generic"),
            seq_len=31,
            global_batch=sum(self.samples),
            precision="fp32",
            attention="flash",
        )
        return NonuniformTrial(
            job=job,
            phases=(Phase(degrees=self.degrees, samples=self.samples, steps=self.steps, overlap=self.overlap),),
            micro_batch=self.micro_batch,
            arithmetic=self.arithmetic,
            sequence_parallel=self.sequence_parallel,
            clip=self.clip,
            timeout_s=30.0,
            lost=tuple(Loss(rank=rank, step=step, point=point) for rank, step, point in self.lost),
        )

    @property
    def reference(self) -> str:
        """What tells the same training in one process from others."""
        return f"{self.model} {sum(self.samples)} {self.clip} {self.steps}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Of each step: loss, norm, whole gradients and whole parameters behind it, by key."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, torch.Tensor]] = field(default_factory=list)
    parameters: list[dict[str, torch.Tensor]] = field(default_factory=list)


def reference(case: Case) -> Trained:
    """Train the whole model in this process in float64."""
    trial, found = case.trial, Trained()
    job, alone = trial.job, Group(ranks=(0,), index=0, handle=None)
    groups = Groups(device=torch.device("cpu"), cast=Cast.of((1,)), rank=0, replica=0, slot=0, world=alone, tp=alone, before=alone,
                    after=alone, peers=alone)  # fmt: skip
    tp = TensorParallel(group=alone, sequence=False)
    setting = Setting(
        job=job, plan=Plan(), mesh=groups.mesh(), tp=tp, recompute=Recompute.of(Plan()), routing=Routing(), dtype=torch.float64
    )
    stage, named = Stage(range(job.model.layers), setting, first=True, last=True), {}
    for owner, name, part in list(parts_of(stage)):
        named[part.key] = torch.nn.Parameter(part.draw(groups.device).double())
        owner.register_parameter(name, named[part.key])
    optimizer = torch.optim.AdamW(named.values(), lr=RATE, betas=BETAS, eps=EPSILON, weight_decay=DECAY, fused=False)
    for step in range(case.steps):
        generator = torch.Generator().manual_seed(DATA_SEED + step)
        drawn = torch.rand((job.global_batch, job.seq_len + 1), generator=generator) ** 3 * job.model.vocab
        tokens = drawn.long().clamp_(max=job.model.vocab - 1)
        loss = torch.nn.functional.cross_entropy(stage(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].t().flatten())
        loss.backward()
        found.gradients.append({key: p.grad.clone() for key, p in named.items() if p.grad is not None})
        norm = torch.nn.utils.clip_grad_norm_(named.values(), case.clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()
        found.losses.append(loss.item())
        found.norms.append(norm.item())
        found.parameters.append({key: p.detach().clone() for key, p in named.items()})
    return found


def break_it(what: str) -> None:
    """Leave out one part, to see that the comparison would notice; all others are as they were."""
    for name, original in WHOLE.items():
        setattr(reshard.Bucket, name, original)
    if what == "order":
        reshard.Bucket.arrive = partialmethod(_in_turned_order, reshard.Bucket.arrive)
        reshard.Bucket.finish = partialmethod(_in_turned_order, reshard.Bucket.finish, first=True)
    elif what == "way back":
        reshard.Bucket.end = lambda self: None
    elif what == "partial sums":
        reshard.Bucket.begin = partialmethod(_without_partial, reshard.Bucket.begin)


def _in_turned_order(self: reshard.Bucket, original: Any, *, first: bool = False) -> None:
    """Sum the units that came to a core in another order than the sync layout's, which is undone before they go back."""
    if not first:
        original(self)
    if not self.groups.spare:
        for member in self.members:
            member.sums[member.kept :] = member.sums[member.kept :].flip(0)
    if first:
        original(self)


def _without_partial(self: reshard.Bucket, begin: Any) -> None:
    self.partial = self.sums[:0]
    begin(self)


def differences(training: Training, wanted: Trained, step: int) -> dict[str, float]:
    """Return the largest absolute difference of gradients and of parameters behind a step, over what this rank holds."""
    found = {"gradients": 0.0, "parameters": 0.0}
    for member in training.members():
        key, cut = member.part.key, member.part.cut
        pairs = {"gradients": (member.gradient(), wanted.gradients), "parameters": (training.masters[key].detach(), wanted.parameters)}
        for name, (ours, theirs) in pairs.items():
            off = (ours.double() - cut(theirs[step][key])).abs().max().item() if ours.numel() else 0.0
            found[name] = max(found[name], off)
    return found


def compared(case: Case, index: int, store: dist.Store, rank: int, wanted: Trained) -> dict[str, float]:
    """Run a case as one of its ranks; return the largest differences over all steps."""
    groups = entered(store, f"case{index}", Cast.of(case.degrees), rank, torch.device("cpu"), HANGS_S)
    training = Training(case.trial, case.samples, groups)
    worst = {"gradients": 0.0, "parameters": 0.0, "losses": 0.0, "norms": 0.0}
    for step in range(case.steps):
        training.step(overlap=case.overlap)
        off = differences(training, wanted, step) | {
            "losses": abs(training.loss - wanted.losses[step]), "norms": abs(training.norm - wanted.norms[step])
        }  # fmt: skip
        worst = {name: max(worst[name], off[name]) for name in worst}
    del training
    del groups
    leave()
    return worst


def run_cases(cases: list[Case], references: dict[str, Trained], answers: Path) -> int:
    """Be one rank of all these cases, one after the other."""
    store, rank, _ = next(dist.rendezvous("env://"))
    for index, case in enumerate(cases):
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        if rank >= sum(case.degrees):
            continue
        break_it(case.broken)
        try:
            record: dict[str, Any] = {"worst": compared(case, index, store, rank, references[case.reference])}
        except BaseException:
            record = {"error": traceback.format_exc()[-4000:]}
        with answers.open("a") as file:
            file.write(json.dumps({"case": str(case), "rank": rank, **record}) + "\n")
        if "error" in record:
            return 1
    return 0


class Checked(ntp.Runner):
    """A rank of a run that loses some: it compares what it holds at the end."""

    def _tell(self, training: Training) -> None:
        case, wanted, answers = CHECKED[0]
        off = differences(training, wanted, case.steps - 1)
        with answers.open("a") as file:
            file.write(json.dumps({"case": str(case), "rank": self.born, "degrees": self.cast.degrees, "worst": off}) + "\n")
        super()._tell(training)


CHECKED: list[tuple[Case, Trained, Path]] = []


def run_lost(case: Case, wanted: Trained, answers: Path) -> int:
    """Run a case that loses ranks."""
    CHECKED[:] = [(case, wanted, answers)]
    ntp.Runner = Checked
    return driver.drive(sum(case.degrees), partial(ntp.run_rank, case.trial), goes_on=True)


def main() -> None:
    wanted, answers = Path(sys.argv[1]), Path(sys.argv[2])
    cases = [Case(**{k: _tuples(v) for k, v in fields.items()}) for fields in json.loads(wanted.read_text())]
    refused = {str(case): refusals(case.trial) for case in cases}
    assert not any(refused.values()), refused
    references: dict[str, Trained] = {}
    for case in cases:
        if case.reference not in references:
            references[case.reference] = reference(case)
    whole = [case for case in cases if not case.lost]
    if whole:
        driver.drive(max(sum(case.degrees) for case in whole), partial(run_cases, whole, references, answers))
    for case in cases:
        if case.lost:
            code = run_lost(case, references[case.reference], answers)
            with answers.open("a") as file:
                file.write(json.dumps({"case": str(case), "rank": -1, "code": code}) + "\n")


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


if __name__ == "__main__":
    main()
