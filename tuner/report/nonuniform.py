"""What nonuniform tensor-parallel steps took, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.table import Column, Table, hidden_note
from tuner.report.words import labelled, percent, seconds

if TYPE_CHECKING:
    from tuner.report.table import Page

KINDS = (("uniform", "uniform"), ("nonuniform", "nonuniform"))
PARTS = (("before_s", "reshard before the sum"), ("sum_s", "sum over replicas"), ("after_s", "reshard after it"))


def nonuniform_text(record: dict[str, Any], page: Page) -> str:
    """Return the steps side by side, what resharding takes and hides, and what it moves beside the formula."""
    size = f"seq {record['seq_len']}, global batch {record['global_batch']}, micro batches of {record['micro_batch']}"
    lines = labelled(
        "run", f"{record['model']}, {size}; {record['processes']} processes on {record['cores']} cores, torch {record['torch']}", page
    )
    if "failover" in record:
        return "\n".join([*lines, *_lost(record, page)])
    rows = [record[name] for name, _ in KINDS]
    steps = Table(
        [
            Column("replicas", [name for _, name in KINDS], left=True),
            Column("tp", ["+".join(map(str, row["degrees"])) for row in rows]),
            Column("samples", ["+".join(map(str, row["samples"])) for row in rows]),
            Column("step", [seconds(row["step_s"]) for row in rows]),
            Column("fastest-slowest", [f"{seconds(row['fastest_s'])}-{seconds(row['slowest_s'])}" for row in rows], rank=1),
            Column("steps", [str(row["steps"]) for row in rows], rank=2),
        ]
    )
    lines += ["", *steps.lines(page), *hidden_note(steps, page), ""]
    parts = [record["reshard"][name] for name, _ in PARTS]
    table = Table(
        [
            Column("part of a step", [name for _, name in PARTS], left=True),
            Column("alone", [seconds(one["total_s"]) for one in parts]),
            Column("waited for", [seconds(one["exposed_s"]) for one in parts]),
            Column("hidden", [seconds(one["hidden_s"]) for one in parts]),
        ]
    )
    lines += [*table.lines(page), ""]
    alone = f"each part for itself behind the backward ({seconds(record['in_phases']['step_s'])} a step)"
    lines += labelled("alone", f"{alone}; waited for: where hooks start it in the backward, with the wait for slower ranks", page)
    lines += ["", *_moved(record, page), ""]
    lines += labelled("parity", f"losses of both differ by at most {record['losses_apart']:.1g} of their value", page)
    slower = record["nonuniform"]["step_s"] / record["uniform"]["step_s"] - 1.0
    words = f"the nonuniform step took {percent(slower)} % longer" if slower > 0 else f"the nonuniform step took {percent(-slower)} % less"
    return "\n".join([*lines, *labelled("time", words + _shared(record), page)])


def _shared(record: dict[str, Any]) -> str:
    """Return what the times are worth, "" where each rank has an accelerator."""
    over = record["cpu"] and record["processes"] > record["cores"]
    return f"; {record['processes']} processes share {record['cores']} cores here, so this says nothing of GPUs" if over else ""


def _lost(record: dict[str, Any], page: Page) -> list[str]:
    found = record["failover"]
    ranks, before, left = ("+".join(map(str, found[name])) for name in ("lost", "degrees", "degrees_left"))
    samples = "+".join(map(str, found["samples_left"]))
    killed = f"rank {ranks} in the midst of step {found['in_step']} (SIGKILL): tp {before} goes on as tp {left}, with samples {samples}"
    times = f"{seconds(found['restored_s'])} behind the driver's notice: survivors agreed after {seconds(found['agreed_s'])}, were in new "
    times += f"groups after {seconds(found['entered_s'])}, and then had the weights and moments of the new layout"
    moved = f"{found['moved_bytes'] / 1e3:,.1f} kB between ranks; no checkpoint, no process started again; steps repeated: "
    parity = f"losses differ from those of the same run without the kill by at most {record['losses_apart']:.1g} of their value"
    return [
        *labelled("killed", killed, page),
        *labelled("went on", times + _shared(record), page),
        *labelled("moved", moved + str(found["steps_repeated"]), page),
        *labelled("parity", parity, page),
    ]


def _moved(record: dict[str, Any], page: Page) -> list[str]:
    rows = record["ranks"]
    columns = [
        Column("rank", [str(row["rank"]) for row in rows]),
        Column("of tp", [str(row["degree"]) for row in rows]),
        Column("is", ["spare" if row["spare"] else "core" for row in rows], left=True),
        Column("sends kB", [f"{row['before_sent'] / 1e3:,.1f}" for row in rows]),
        Column("takes kB", [f"{row['before_received'] / 1e3:,.1f}" for row in rows]),
        Column("even shards kB", [f"{row['formula'] / 1e3:,.1f}" for row in rows]),
        Column("gets back kB", [f"{row['after_received'] / 1e3:,.1f}" for row in rows], rank=1),
    ]
    note = (
        "even shards: P e / n1 of a spare, (n1 - n2) / n2 as much of a core (arXiv 2504.06095); a spare also gets replicated gradients back"
    )
    table = Table(columns)
    return [*table.lines(page), *hidden_note(table, page), *labelled("", note, page)]
