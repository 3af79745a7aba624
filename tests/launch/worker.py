"""One rank of a group of processes that runs layouts one after the other: `python -m tests.launch.worker LAYOUTS ANSWERS`."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.launch.layouts import Layout
from tuner.launch.engine import collectives, optimizer
from tuner.launch.engine.experts import Routing
from tuner.launch.engine.training import Training
from tuner.launch.limits import refusals

STEPS = 3
HANGS_S = 60  # far above what a layout takes: the traceback of one that hangs names the place


def trained(layout: Layout) -> dict[str, Any]:
    """Return the losses of the first steps, and the norm of the parameters behind them."""
    refused = refusals(layout.job, layout.plan, layout.microbatches)
    if refused:
        return {"error": f"refused: {refused}"}
    routing = Routing(balanced=layout.routing == "balanced")
    training = Training(layout.job, layout.plan, torch.device("cpu"), microbatches=layout.microbatches, routing=routing)
    turns, losses = [int(count) for count in layout.turns.split(",") if count], []
    for step in range(STEPS):
        if turns:
            training.hold(turns[step % len(turns)])
        losses.append(training.mean_loss(training.step(training.batch(step))))
    return {"losses": losses, "norm": training.parameter_norm()}


def break_it(what: str) -> None:
    """Leave out one collective, to see that the comparison would notice."""
    if what == "tp backward":
        collectives.copy = lambda x, group: x
    elif what == "gradient sum":
        optimizer.Bucket.launch = lambda self: None
    elif what == "partial norms":
        optimizer.collectives.summed = lambda x, group: x


def main() -> None:
    wanted, answers = Path(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group("gloo")
    for fields in json.loads(wanted.read_text()):
        layout = Layout(**fields)
        faulthandler.dump_traceback_later(HANGS_S, exit=True)
        break_it(layout.broken)
        try:
            record = trained(layout)
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)  # the others wait in a collective: torchrun ends them
        if dist.get_rank() == 0:
            with answers.open("a") as file:
                file.write(json.dumps({"layout": str(layout), **record}) + "\n")
    faulthandler.cancel_dump_traceback_later()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
