"""`tuner validate --operators`: how far the operators' curves are from tables of measured operators (Parquet)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.cost_model.calibration import calibration_for
from tuner.cost_model.fit.score import dtypes, parts
from tuner.cost_model.fit.tables import OPERATORS, errors, find_gpu, named, read
from tuner.errors import Problem, SpecError, one_problem

if TYPE_CHECKING:
    from pathlib import Path

# Tables that are of measured kernels too, but that no curve describes.
UNSCORED = ("deepep_normal",)
NAMES = f"name it OPERATOR_GPU.parquet, as in gemm_h100_sxm.parquet; operators: {', '.join(OPERATORS)}"


def score_table(
    path: Path, calibration: str = "auto", operator: str | None = None, gpu: str | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of one file and what of it was left out; operator and GPU come from its name where they are not given."""
    if operator is None and path.stem.startswith(UNSCORED):
        return [], [{"file": path.name, "why": "no curve describes this operator"}]
    found = named(path.stem)
    operator, gpu = operator or (found and found[0]), gpu or (found and found[1])
    if not operator or not gpu:
        raise one_problem(str(path), "", path.name, "does not say operator and GPU", NAMES)
    try:
        preset = find_gpu(gpu)
    except SpecError as error:
        raise SpecError([Problem(where=str(path), path="", value=gpu, rule=p.rule, hint=p.hint) for p in error.problems]) from None
    table = read(path, operator, gpu)
    used = calibration_for(calibration, preset)
    rows = []
    for dtype, predicted, measured in parts(table, used):
        median, p90 = errors(predicted, measured)
        rows.append(
            {
                "file": path.name,
                "gpu": used.gpu,
                "operator": operator,
                "dtype": dtype,
                "n": len(measured),
                "median_abs_err": round(median, 5),
                "p90_abs_err": round(p90, 5),
                "bias": round(float(np.median(predicted / measured - 1.0)), 5),
                "calibration": " + ".join(used.layers),
            }
        )
    scored = {row["dtype"] for row in rows}
    left = [f"{dtype}: no curve describes it, or no row counts" for dtype in sorted(dtypes(table) - scored)]
    if not rows and not left:
        left = ["no row has a time"]
    return rows, [{"file": path.name, "why": why} for why in left]
