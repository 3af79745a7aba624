"""How far the shipped curves are from tables of measured operators.

    python benchmarks/operators.py gemm_h100_sxm.parquet nccl_h100_sxm.parquet [--calibration auto|none|NAME|FILE] [--json]

The same as `tuner validate --operators`, with the bias and the calibration, and --operator and --gpu for files whose name does not say
them (gemm, attention_forward, mla_forward, moe_forward, nccl; then the GPU). Reading Parquet needs the extra `operators`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from tuner.accuracy.operators import score_table
from tuner.cost_model.fit.tables import OPERATORS
from tuner.errors import TunerError


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a table."""
    from rich.console import Console
    from rich.table import Table as Lines

    lines = Lines(title="Curves against measured operators")
    for column in ("file", "GPU", "dtype", "n", "median |err|", "p90 |err|", "bias", "calibration"):
        lines.add_column(column, justify="right" if "err" in column or column in ("n", "bias") else "left")
    for row in rows:
        shares = [f"{100 * row[key]:.1f} %" for key in ("median_abs_err", "p90_abs_err", "bias")]
        lines.add_row(row["file"], row["gpu"], row["dtype"], str(row["n"]), *shares, row["calibration"])
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
        scored = [score_table(path, options.calibration, options.operator, options.gpu) for path in options.files]
    except TunerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    rows = [row for found, _ in scored for row in found]
    for _, left in scored:
        for item in left:
            print(f"{item['file']}: {item['why']}", file=sys.stderr)
    if options.json:
        print(json.dumps(rows, indent=1))
    else:
        show(rows)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
