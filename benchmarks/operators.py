"""How far the shipped curves are from tables of measured operators.

    python benchmarks/operators.py gemm_h100_sxm.parquet nccl_h100_sxm.parquet [--calibration auto|none|NAME|FILE] [--json]

A file's name says operator and GPU (gemm, attention_forward, mla_forward, moe_forward, nccl; then the GPU), or --operator and
--gpu do. Scored are products with m >= 256 and collectives above 1 MB, all rows of the others, against median_ms (MLA and MoE:
fastest_ms, which the curves describe). Reading Parquet needs the extra `operators`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.calibration import COLLECTIVES, DTYPES, calibration_for
from tuner.cost_model.fit import attention, experts, gemm, links
from tuner.cost_model.fit.tables import BASIS, OPERATORS, Table, errors, find_gpu, find_link, named, read
from tuner.errors import TunerError, one_problem

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tuner.cost_model.calibration import Calibration

Scored = tuple[str, Any, Any]


def predictions(table: Table, calibration: Calibration) -> Iterator[Scored]:
    """Yield (dtype or collective, predicted, measured) for the parts of a table."""
    if table.operator == "gemm":
        for dtype in DTYPES:
            rows = table.where((table["gemm_dtype"] == dtype) & (table["m"] >= gemm.SCORED_M))
            if len(rows):
                yield dtype, gemm.predict(calibration.gemm[dtype], rows, dtype), rows["seconds"]
    elif table.operator == "moe_forward":
        for dtype in DTYPES:
            rows = experts.select(table, dtype)
            plain = calibration.gemm[dtype].model_copy(update={"correction": None})
            if len(rows):
                yield dtype, experts.predict(calibration.grouped[dtype], plain, rows, dtype), rows["seconds"]
    elif table.operator == "nccl":
        yield from _collectives(table, calibration)
    else:
        kind, columns = ("gqa", attention.gqa) if table.operator == "attention_forward" else ("mla", attention.mla)
        rows = columns(table)
        yield "bfloat16", attention.predict(calibration.attention[kind], rows), rows["seconds"]


def _collectives(table: Table, calibration: Calibration) -> Iterator[Scored]:
    parts = []
    for op in COLLECTIVES:
        rows = links.select(table, op)
        rows = rows.where(rows["bytes"] > links.SCORED_BYTES)
        if len(rows):
            predicted = links.predict(calibration.collectives[op], op, rows, find_link(table.gpu))
            parts.append((predicted, rows["seconds"]))
            yield op, predicted, rows["seconds"]
    if len(parts) > 1:
        yield "all", np.concatenate([p for p, _ in parts]), np.concatenate([m for _, m in parts])


def score(path: Path, *, operator: str | None, gpu: str | None, calibration: str) -> list[dict[str, Any]]:
    """Return one row for each dtype or collective of a file."""
    found = named(path.stem)
    operator, gpu = operator or (found and found[0]), gpu or (found and found[1])
    if not operator or not gpu:
        raise one_problem(
            str(path), "", "", "does not say operator and GPU", "name it like gemm_h100_sxm.parquet, or give --operator and --gpu"
        )
    table = read(path, operator, gpu)
    used = calibration_for(calibration, find_gpu(gpu))
    rows = []
    for part, predicted, measured in predictions(table, used):
        median, p90 = errors(predicted, measured)
        rows.append(
            {
                "file": path.name,
                "gpu": used.gpu,
                "operator": operator,
                "dtype": part,
                "n": len(measured),
                "median_abs_err": round(median, 5),
                "p90_abs_err": round(p90, 5),
                "bias": round(float(np.median(predicted / measured - 1.0)), 5),
                "against": BASIS[operator],
                "calibration": " + ".join(used.layers),
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table as Lines

    lines = Lines(title="Curves against measured operators")
    for column in ("file", "GPU", "dtype", "n", "median |err|", "p90 |err|", "bias", "against", "calibration"):
        lines.add_column(column, justify="right" if "err" in column or column in ("n", "bias") else "left")
    for row in rows:
        shares = [f"{100 * row[key]:.1f} %" for key in ("median_abs_err", "p90_abs_err", "bias")]
        lines.add_row(row["file"], row["gpu"], row["dtype"], str(row["n"]), *shares, row["against"], row["calibration"])
    Console(width=None if sys.stdout.isatty() else 160).print(lines)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--operator", choices=OPERATORS)
    parser.add_argument("--gpu", help="preset or alias of the GPU, where the file's name does not say it")
    parser.add_argument("--calibration", default="auto", help="none, auto, a name or a file (default: auto)")
    parser.add_argument("--json", action="store_true", help="print rows as JSON")
    options = parser.parse_args(arguments)
    try:
        rows = [
            row
            for path in options.files
            for row in score(path, operator=options.operator, gpu=options.gpu, calibration=options.calibration)
        ]
    except TunerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
