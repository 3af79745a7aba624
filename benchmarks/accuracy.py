"""How wrong the model is on published rows: tables by source, GPU, precision or kind, and the worst rows.

    python benchmarks/accuracy.py [FILES] [--calibration none|auto|NAME|FILE] [--by source|gpu|precision|framework|release|kind]
        [--left series|model|source] [--worst 10] [--ids PREFIX] [--terms] [--series] [--markdown] [--json] [--write README.md]

`--left` shows each row as foretold by a calibration that has not seen its series, its model or its source. Errors of time count
pretraining rows that their publisher did not supersede. `ran out` and `fits` say how many rows of each outcome were predicted right.
`--write FILE` puts what `tuner validate --cross` says of these rows, beside calibration auto and none, between the `<!-- accuracy -->`
marks of FILE, and the scores of each source with its series left out between its `<!-- sources -->` marks, if it has them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.document import marks, write_block
from tests.published import unpack
from tuner.accuracy import validate as v
from tuner.accuracy.cross import LEFT, told_without
from tuner.arrays import leaves
from tuner.cost_model.estimate import estimate
from tuner.errors import TunerError
from tuner.plan_text import layout_text, recompute_text

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.plan import Plan


def kind(item: v.Scored) -> str:
    """Return the kind of a row: dense, moe, mla or hybrid; its task when that is not pretraining; superseded."""
    row, model = item.row, item.row.job.model
    what = "moe+mla" if model.mla else "moe" if model.moe else "dense"
    what = "hybrid" if any(a.startswith("hybrid=") for a in row.assumed) else what
    return f"{what}{'' if row.job.task == 'pretrain' else ' ' + row.job.task}{' superseded' if row.superseded else ''}"


GROUPS: dict[str, Callable[[v.Scored], str]] = {
    "source": lambda item: item.row.source,
    "gpu": lambda item: item.row.job.cluster.gpu.name,
    "precision": lambda item: item.row.job.precision,
    "framework": lambda item: item.row.framework,
    "release": lambda item: f"{item.row.framework} {item.row.job.release}"[:40],
    "model": lambda item: item.row.job.model.name,
    "recompute": lambda item: recompute_text(int(item.row.plan.recompute)),
    "gpus": lambda item: f"{item.row.job.gpus:5d}",
    "kind": kind,
}
HEAD = ("", "n", "time n", "|err|", "p90", "bias", "cover", "tau", "regret", "mem n", "|err|", "bias", "fits", "ran out")


def percent(value: float | None) -> str:
    """Return a share as a percentage, or a dash."""
    return "-" if value is None else f"{100 * value:.1f}%"


def line(name: str, items: Sequence[v.Scored], tau: float | None, regret: float | None) -> tuple[str, ...]:
    """Return one line of the table."""
    times, memory, fit = v.time_errors(i for i in items if v.counts(i)), v.memory_errors(items), v.fit(items)
    fits, oom = fit["true_fit"] + fit["false_oom"], fit["true_oom"] + fit["false_fit"]
    return (
        name,
        str(len(items)),
        str(times["n"]),
        percent(times["median_abs_err"]),
        percent(times["p90_abs_err"]),
        percent(times["bias"]),
        percent(times["coverage90"]),
        "-" if tau is None else f"{tau:.3f}",
        percent(regret),
        str(memory["n"]),
        percent(memory["median_abs_err"]),
        percent(memory["bias"]),
        f"{fit['true_fit']}/{fits}",
        f"{fit['true_oom']}/{oom}",
    )


def lines(scored: Sequence[v.Scored], by: str) -> list[tuple[str, ...]]:
    """Return the table's lines, and one over all (tau and regret: means over sources)."""
    groups: dict[str, list[v.Scored]] = defaultdict(list)
    for item in scored:
        groups[GROUPS[by](item)].append(item)
    found = []
    for name, items in sorted(groups.items()):
        own = v.series_of(items)
        found.append(line(name, items, v.scores.mean(s["kendall_tau"] for s in own), v.scores.mean(s["regret"] for s in own)))
    whole = v.summary(scored)
    return [*found, line("all", scored, whole["mean_kendall_tau"], whole["mean_regret"])]


def show(rows: Sequence[tuple[str, ...]], *, markdown: bool) -> None:
    """Print lines under the head."""
    if markdown:
        print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
        for row in rows:
            print("| " + " | ".join(row) + " |")
        return
    widths = [max(len(row[i]) for row in (HEAD, *rows)) for i in range(len(HEAD))]
    for row in (HEAD, *rows):
        print("  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))))


def plan_text(plan: Plan) -> str:
    """Return a plan in one short line."""
    text = f"t{plan.tp} p{plan.pp} v{plan.vpp} c{plan.cp} e{plan.ep} mb{plan.micro_batch} z{plan.zero} sp{plan.sequence_parallel}"
    overlap = f"ov{plan.tp_overlap}{plan.dp_overlap}{plan.ep_overlap} g{plan.cuda_graphs} off{plan.offload}"
    layout = layout_text(int(plan.embedding_layers), int(plan.loss_layers))
    return f"{text} {recompute_text(int(plan.recompute), int(plan.recompute_layers))} {overlap} {layout}"


def describe(item: v.Scored, calibration: Any, *, terms: bool) -> None:
    """Print a row: measured and predicted, the plan, and on demand the parts of the step."""
    row, said, job = item.row, item.said, item.row.job
    off = "     -" if row.step_s is None else f"{said.step_s / row.step_s - 1:+6.1%}"
    memory = "-" if row.memory_bytes is None else f"{row.memory_bytes / 1e9:.1f}"
    measured = "-" if row.step_s is None else f"{row.step_s:.3f}"
    held = f"mem {said.memory_bytes / 1e9:6.1f} of {memory:>6} GB"
    print(f"{off} {said.step_s:8.3f} of {measured:>8} s  {held} p_oom {said.p_oom:.2f} {row.outcome}")
    batch = f"{job.gpus} GPUs, batch {job.global_batch} x {job.seq_len}"
    print(f"       {row.id}\n       {batch} {job.precision} {job.attention}  {plan_text(row.plan)}")
    if terms:
        step = estimate(job, row.plan, calibration(job)).step
        print("       " + "  ".join(f"{name} {float(value):.3f}" for name, value in leaves(step).items()))


def summary_table(summaries: dict[str, dict[str, Any]]) -> list[str]:
    """Return summaries of `tuner validate` as Markdown, a column each."""

    def row(name: str, cell: Callable[[dict[str, Any]], str]) -> str:
        return " | ".join([f"| {name}", *(cell(each) for each in summaries.values())]) + " |"

    def errors(kind: str) -> Callable[[dict[str, Any]], str]:
        return lambda s: f"{percent(s[kind]['median_abs_err'])}, {percent(s[kind]['p90_abs_err'])}"

    def share(right: str, wrong: str) -> Callable[[dict[str, Any]], str]:
        return lambda s: f"{s['fit'][right]:,} of {s['fit'][right] + s['fit'][wrong]:,}"

    return [
        "| | " + " | ".join(summaries) + " |",
        "|---|" + "---|" * len(summaries),
        row("step time: median error, 90th percentile", errors("time")),
        row("without nanotron's sweep", errors("clean_time")),
        row("inside the 90 % range", lambda s: percent(s["time"]["coverage90"])),
        row("half of that range (median), without nanotron", lambda s: percent(s["clean_time"]["half_width90"])),
        row("order of layouts: Kendall's tau", lambda s: number(s["mean_kendall_tau"])),
        row("regret: predicted fastest against fastest", lambda s: percent(s["mean_regret"])),
        row("memory: median error, 90th percentile", errors("memory")),
        row("runs that fitted, predicted to fit", share("true_fit", "false_oom")),
        row("runs out of memory, predicted so", share("true_oom", "false_fit")),
    ]


def number(value: float | None) -> str:
    """Return a rank correlation, or a dash."""
    return "-" if value is None else f"{value:.2f}"


def clean(item: v.Scored) -> bool:
    """Whether a row is of a source whose levels mean something: nanotron's sweep has two kinds of runs under one name."""
    return item.row.source != "nanotron_ultrascale"


def scores_of(items: Sequence[v.Scored]) -> dict[str, Any]:
    """Return the summary of rows, with the errors of time of the clean ones."""
    return v.summary(items) | {"clean_time": v.time_errors(i for i in items if v.counts(i) and clean(i))}


HEADINGS = {
    "series": "told without its series",
    "model": "without its model",
    "source": "without its source",
    "auto": "with all (`auto`)",
    "none": "data sheets (`none`)",
}


def blocks(files: Sequence[Path]) -> dict[str, list[str]]:
    """Return the blocks of a document by name: what `tuner validate --cross` says of these files."""
    scored, skipped = v.score_files(list(files), "auto")
    told: dict[str, list[v.Scored]] = {**told_without(scored, v.calibrations("auto"))}
    told |= {"auto": scored, "none": v.score_files(list(files), "none")[0]}
    timed, series = v.time_errors(i for i in scored if v.counts(i))["n"], len(v.series_of(scored))
    head = (
        f"{len(scored):,} public runs scored ({timed:,} step times, {series} series of layouts), {len(skipped):,} skipped (they do not "
        "state enough)."
    )
    table = summary_table({heading: scores_of(told[name]) for name, heading in HEADINGS.items()})
    names = [name.replace("|err|", "error") for name in HEAD]
    sources = [f"| {' | '.join(row)} |" for row in (names, *lines(told["series"], "source"))]
    return {"accuracy": [head, "", *table], "sources": [sources[0], "|" + "---|" * len(HEAD), *sources[1:]]}


def write_summary(path: Path, files: Sequence[Path]) -> None:
    """Write the blocks of a document that it has marks for; it must have the first."""
    made = blocks(files)
    write_block(path, "accuracy", made["accuracy"])
    if marks("sources")[0] in path.read_text(encoding="utf-8"):
        write_block(path, "sources", made["sources"])


def main() -> None:
    """Read, predict and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="JSONL files (the public runs in tests/published where none is named)")
    parser.add_argument("--calibration", default="auto")
    parser.add_argument("--by", choices=GROUPS, default="source")
    parser.add_argument("--left", choices=LEFT, help="foretell each row without what it names")
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("--ids", default=None, metavar="PREFIX", help="only rows whose id starts so; prints each")
    parser.add_argument("--terms", action="store_true", help="with --worst or --ids: the parts of the step")
    parser.add_argument("--series", action="store_true", help="one line for each series")
    parser.add_argument("--markdown", action="store_true")
    parser.add_argument("--json", action="store_true", help="the summary as JSON")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the summary into the accuracy block of a document")
    args = parser.parse_args()
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        args.files = args.files or unpack(Path(folder))
        run(args, started)


def run(args: argparse.Namespace, started: float) -> None:
    """Do what the arguments ask."""
    if args.write is not None:
        try:
            write_summary(args.write, args.files)
        except (TunerError, OSError) as error:
            sys.exit(str(error))
        return
    try:
        scored, skipped = v.score_files(args.files, args.calibration)
    except TunerError as error:
        sys.exit(str(error))
    if args.left is not None:
        scored = told_without(scored, v.calibrations(args.calibration))[args.left]
    seconds = time.perf_counter() - started
    calibration = v.calibrations(args.calibration)
    if args.ids is not None:
        scored = [item for item in scored if item.row.id.startswith(args.ids)]
        for item in scored:
            describe(item, calibration, terms=args.terms)
    if args.json:
        print(json.dumps(v.summary(scored), indent=1))
        return
    show(lines(scored, args.by), markdown=args.markdown)
    if args.series:
        for one in v.series_of(scored):
            key = " ".join(str(value) for value in one["key"].values() if value is not None)
            tau = "-" if one["kendall_tau"] is None else f"{one['kendall_tau']:.3f}"
            print(f"n {one['n']:4d}  tau {tau:>6}  regret {percent(one['regret']):>7}  {key}")
    if args.worst:
        timed = [item for item in scored if item.row.step_s is not None and v.counts(item)]
        timed.sort(key=lambda item: -abs(item.said.step_s / (item.row.step_s or 1.0) - 1.0))
        for item in timed[: args.worst]:
            describe(item, calibration, terms=args.terms)
    print(f"{len(scored)} rows scored, {len(skipped)} skipped, {seconds:.1f} s, calibration {args.calibration}", file=sys.stderr)


if __name__ == "__main__":
    try:
        main()
    except BrokenPipeError:  # the reader (head, less) had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
