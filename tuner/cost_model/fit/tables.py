"""Tables of measured operators, as columns."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.errors import InfrastructureError, one_problem

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.cluster import Gpu

OPERATORS = ("gemm", "attention_forward", "mla_forward", "moe_forward", "nccl")
SOURCE = "silicon database of ai-dynamo/aiconfigurator (Apache-2.0, commit 095f58a51)"

# Which of a row's kernels the formulas for training are fitted to (`seconds`). The MLA and MoE rows mix kernels that training would
# not run (paths for short prompts, untuned Triton) with the ones it would, so there the fastest stands for it, and a factor
# `typical` leads to the median (`median`), which every table is scored against.
BASIS = {"gemm": "median", "attention_forward": "median", "mla_forward": "fastest", "moe_forward": "fastest", "nccl": "median"}

LARGEST = 1e12  # of any size in a table

# Columns that a table of each operator must have, beside median_ms and fastest_ms.
COLUMNS = {
    "gemm": ("gemm_dtype", "m", "n", "k"),
    "attention_forward": ("batch_size", "isl", "num_heads", "num_key_value_heads", "head_dim"),
    "mla_forward": ("batch_size", "isl", "num_heads"),
    "moe_forward": (
        "moe_dtype",
        "num_tokens",
        "hidden_size",
        "inter_size",
        "topk",
        "num_experts",
        "moe_tp_size",
        "moe_ep_size",
    ),
    "nccl": ("op_name", "nccl_dtype", "num_gpus", "message_size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One operator on one GPU, a preset's name or the card itself: equally long columns, `seconds` and `median` among them.

    precision: a job's, where the rows are of another than the dtype's own (fp32 rows of the 16-bit curve).
    """

    operator: str
    gpu: str | Gpu
    columns: dict[str, Any]
    precision: str = ""

    def __len__(self) -> int:
        return len(self.columns["seconds"])

    def __getitem__(self, name: str) -> Any:
        return self.columns[name]

    def where(self, mask: Any) -> Table:
        """Return the rows that `mask` selects."""
        return replace(self, columns={name: column[mask] for name, column in self.columns.items()})


# Rows with equal values of these are held out of a fit together: they are what a table that is kept back would have of its own.
KEYS = {
    "gemm": ("n", "k"),
    "attention_forward": ("num_heads", "num_key_value_heads"),
    "mla_forward": ("num_heads", "batch_size"),
    "moe_forward": ("hidden_size", "inter_size", "topk", "num_experts"),
    "nccl": ("op_name", "nccl_dtype", "num_gpus", "message_size"),
}


def split(table: Table, share: float) -> tuple[Table, Table]:
    """Return a table's rows without and with the random `share` of its keys; the draw is always the same."""
    keys = np.stack([np.unique(table[name], return_inverse=True)[1] for name in KEYS[table.operator]])
    of_row = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    count = int(of_row.max(initial=-1)) + 1
    left = (np.random.default_rng(1).permutation(count) < round(share * count))[of_row]
    return table.where(~left), table.where(left)


def named(stem: str) -> tuple[str, str] | None:
    """Return (operator, GPU as the file spells it) of a file like gemm_h100_sxm.parquet, or None for another file."""
    for operator in OPERATORS:
        match = re.fullmatch(rf"{operator}_(.+)", stem)
        if match:
            return operator, match[1]
    return None


def read(path: Path, operator: str, gpu: str) -> Table:
    """Return a Parquet file as a table of `operator` on `gpu`; rows without a positive time are left out."""
    try:
        from pyarrow import ArrowException, parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InfrastructureError("reading operator tables needs pyarrow: pip install 'meshtuner[operators]'") from None
    try:
        loaded = parquet.read_table(path)
    except FileNotFoundError:
        raise one_problem(str(path), "", path.name, "no such file", "check the path") from None
    except (ArrowException, OSError) as error:
        raise one_problem(str(path), "", "", f"is not a Parquet file: {str(error)[:100]}", "write it with pyarrow") from None
    wanted = (*COLUMNS[operator], "median_ms", "fastest_ms")
    missing = [name for name in wanted if name not in loaded.column_names]
    if missing:
        raise one_problem(str(path), missing[0], "", f"a table of {operator} needs this column", f"columns: {', '.join(wanted)}")
    columns = {name: np.asarray(loaded[name].to_pylist()) for name in wanted}
    for name in wanted:
        _check(path, name, columns[name])
    times = {"median": columns.pop("median_ms") / 1e3, "fastest": columns.pop("fastest_ms") / 1e3}
    columns |= {"seconds": times[BASIS[operator]], "median": times["median"]}
    table = Table(operator=operator, gpu=gpu, columns=columns)
    timed = [np.isfinite(columns[name]) & (columns[name] > 0) for name in ("seconds", "median")]
    return table.where(timed[0] & timed[1])


def _check(path: Path, name: str, column: Any) -> None:
    text = name.endswith(("dtype", "op_name"))
    if len(column) and column.dtype.kind not in ("U" if text else "iuf"):
        raise one_problem(str(path), name, "", "must be text" if text else "must be numbers without gaps", "write the column again")
    if not text and not name.endswith("_ms"):
        wrong = ~(np.isfinite(column * 1.0) & (column * 1.0 >= 1) & (column * 1.0 <= LARGEST))
        if wrong.any():
            row = int(np.argmax(wrong))
            raise one_problem(str(path), name, str(column[row]), f"must lie between 1 and {LARGEST:.0e} (row {row})", "correct or drop it")


def find_gpu(named: str | Gpu) -> Gpu:
    """Return the preset that a table's name means (h100_sxm is the alias h100-sxm), or the card that it states."""
    return _preset(named) if isinstance(named, str) else named


@lru_cache(maxsize=64)
def _preset(text: str) -> Gpu:
    from tuner import presets

    return presets.gpu(text.replace("_", "-"))


def find_link(named: str | Gpu) -> float:
    """Return bytes/s of the innermost domain of the fastest node preset with this GPU."""
    return _link(find_gpu(named).name)


@lru_cache(maxsize=64)
def _link(gpu: str) -> float:
    from tuner import presets

    links = [c.domains[0].bandwidth.value for c in map(presets.cluster, presets.names("clusters")) if c.gpu.name == gpu]
    if not links:
        raise one_problem("clusters", "", gpu, "is in no preset of a node")
    return max(links)


def errors(predicted: Any, measured: Any) -> tuple[float, float]:
    """Return the median and the 90th percentile of |predicted / measured - 1|."""
    error = np.abs(predicted / measured - 1.0)
    return float(np.median(error)), float(np.quantile(error, 0.9))
