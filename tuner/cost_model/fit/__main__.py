"""Fit every table of a folder and write the calibrations: pooled.yaml and one file for each GPU.

--hold-out and --leave-out print the errors on what was left out of the fit.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import yaml

from tuner.cost_model.calibration import COLLECTIVES, DTYPES, POOLED, CalibrationFile
from tuner.cost_model.curves import AttentionCurve, CollectiveCurve, GemmCurve, GroupedCurve
from tuner.cost_model.fit import attention, experts, gemm, links, published
from tuner.cost_model.fit.score import parts
from tuner.cost_model.fit.tables import Table, errors, find_gpu, find_link, named, read, split
from tuner.errors import TunerError, one_problem
from tuner.files import write

if TYPE_CHECKING:
    from tuner.cluster import Gpu

# GPUs that another one's curves stand for when they have no table: the same silicon with other clocks, memory or links.
RELATIVES = {
    "a100-sxm-80gb": ("a800-sxm-80gb", "a100-sxm-40gb", "a100-pcie-80gb"),
    "h100-sxm-80gb": ("h800-sxm-80gb", "h20", "h100-pcie-80gb", "h100-nvl-94gb", "h100-sxm-96gb-hbm2e-500w", "gh200"),
}
# A GPU without a table, and whose curve of each kind it takes: it has B200's tensor cores and clocks, and GB300's faster
# exponential for attention and slower growth in fp4.
B300 = "b300-sxm-288gb"


def load(folder: Path) -> dict[str, list[Table]]:
    """Return the tables of a folder by operator, in the order of their GPUs' names."""
    tables: dict[str, list[Table]] = {}
    for path in sorted(folder.glob("*.parquet")):
        found = named(path.stem)
        if found:
            tables.setdefault(found[0], []).append(read(path, *found))
    if not tables:
        raise one_problem(str(folder), "", "", "has no table of an operator", "file names are like gemm_h100_sxm.parquet")
    return tables


def fit(tables: dict[str, list[Table]], *, scored: bool = True) -> list[CalibrationFile]:
    """Return the pooled calibration and that of each GPU, relatives' included; `scored`: with errors of the slow fits held out."""
    curves: dict[str, dict[str, dict[str, Any]]] = {}

    def put(gpu: str | Gpu, kind: str, key: str, curve: GemmCurve | GroupedCurve | AttentionCurve | CollectiveCurve) -> None:
        name = POOLED if gpu == POOLED else find_gpu(gpu).name
        curves.setdefault(name, {}).setdefault(kind, {})[key] = curve
        spread = (
            f"median {curve.fit.median:.1%} p90 {curve.fit.p90:.1%}" if curve.fit.median is not None and curve.fit.p90 is not None else ""
        )
        print(f"{name:18} {kind:12} {key:14} n {curve.fit.n:6} {spread}", file=sys.stderr)

    for dtype in DTYPES:
        chosen = [rows for t in tables.get("gemm", []) if len(rows := gemm.select(t, dtype))]
        if chosen:
            put(POOLED, "gemm", dtype, gemm.fit_pooled(chosen, dtype, scored=scored))
        for t in chosen:
            put(t.gpu, "gemm", dtype, gemm.fit_gpu(t, dtype, curves[POOLED]["gemm"][dtype].power, scored=scored))
        _fit_experts(tables, dtype, curves, put)
    for key, operator, columns in (("gqa", "attention_forward", attention.gqa), ("mla", "mla_forward", attention.mla)):
        attended = [columns(t) for t in tables.get(operator, [])]
        if attended:
            put(POOLED, "attention", key, attention.fit_pooled(attended))
        for t in attended:
            put(t.gpu, "attention", key, attention.fit_gpu(t))
    for op in COLLECTIVES:
        linked = [(links.select(t, op), find_link(t.gpu)) for t in tables.get("nccl", [])]
        if linked:
            put(POOLED, "collectives", op, links.fit_pooled(linked, op))
        for t, link in linked:
            put(t.gpu, "collectives", op, links.fit_gpu(t, op, link))
    _complete_racks(curves)
    _complete_relatives(curves)
    return [_file(name, kinds) for name, kinds in sorted(curves.items())]


def _fit_experts(tables: dict[str, list[Table]], dtype: str, curves: dict[str, Any], put: Any) -> None:
    rows = [(t.gpu, experts.select(t, dtype)) for t in tables.get("moe_forward", [])]
    both = [(t, curves[find_gpu(gpu).name]["gemm"][dtype]) for gpu, t in rows if len(t) and dtype in _of(curves, gpu)]
    plain = [(t, curve.plain) for t, curve in both]
    if plain:
        put(POOLED, "grouped", dtype, experts.fit_pooled([t for t, _ in plain], [c for _, c in plain], dtype))
    for t, curve in plain:
        put(t.gpu, "grouped", dtype, experts.fit_gpu(t, curve, dtype, curves[POOLED]["grouped"][dtype]))


def _of(curves: dict[str, Any], gpu: str | Gpu) -> dict[str, Any]:
    found: dict[str, Any] = curves.get(find_gpu(gpu).name, {}).get("gemm", {})
    return found


def _complete_racks(curves: dict[str, Any]) -> None:
    """Give GB200 and GB300, measured with four GPUs, the step from four to eight that B200 shows."""
    whole = curves.get("b200-sxm-180gb", {}).get("collectives", {})
    for name in ("gb200", "gb300"):
        for op, curve in curves.get(name, {}).get("collectives", {}).items():
            if op in whole:
                curves[name]["collectives"][op] = links.with_eight(curve, whole[op], "eight GPUs as on b200-sxm-180gb")


def _complete_relatives(curves: dict[str, Any]) -> None:
    """Add files for accelerators without tables: B300 from its siblings, others from a published level."""
    b200, gb300 = curves.get("b200-sxm-180gb"), curves.get("gb300")
    if b200 and gb300 and B300 not in curves:
        made = {kind: {key: _noted(curve, "b200-sxm-180gb") for key, curve in keys.items()} for kind, keys in b200.items()}
        made["attention"] = {key: _noted(curve, "gb300") for key, curve in gb300.get("attention", {}).items()}
        for kind in ("gemm", "grouped"):
            if "nvfp4" in gb300.get(kind, {}):
                made[kind]["nvfp4"] = _noted(gb300[kind]["nvfp4"], "gb300")
        ratios = published.B300_OVER_B200
        for dtype, curve in made["gemm"].items():
            if dtype != "nvfp4":
                made["gemm"][dtype] = published.sibling(published.at_power(curve, find_gpu(B300)), ratios.get(dtype, ratios["fp8"]))
        curves[B300] = made
    for name, levels in published.BEST.items():
        pooled = curves.get(POOLED, {}).get("gemm", {})
        scaled = {d: published.scaled(pooled[d], find_gpu(name), d, *level) for d, level in levels.items() if d in pooled}
        if name not in curves and scaled:
            curves[name] = {"gemm": scaled}


def _noted(curve: Any, other: str) -> Any:
    return curve.model_copy(update={"fit": curve.fit.model_copy(update={"source": f"curve of {other}: {curve.fit.source}"})})


def _file(name: str, kinds: dict[str, Any]) -> CalibrationFile:
    gpus = () if name == POOLED else (name,)
    return CalibrationFile(name=name, gpus=gpus, relatives=RELATIVES.get(name, ()), **kinds)


class _Dumper(yaml.SafeDumper):
    """Numbers in rows, tables as literal blocks."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


HEAD = "Written by `python -m tuner.cost_model.fit`; change the fit, not this file."


def dump(file: CalibrationFile, head: str = HEAD) -> str:
    """Return the file as YAML under a comment, without what is empty or as by default."""
    data = file.model_dump(mode="json", exclude_defaults=True)
    return f"# {head}\n" + yaml.dump(data, Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=140)


class Layered(NamedTuple):
    """The curves of one GPU on top of the pooled ones."""

    gemm: dict[str, GemmCurve]
    grouped: dict[str, GroupedCurve]
    attention: dict[str, AttentionCurve]
    collectives: dict[str, CollectiveCurve]


def held_out(kept: dict[str, list[Table]], left: list[Table]) -> list[dict[str, Any]]:
    """Return the errors on the tables `left` of the curves fitted to those `kept`."""
    files = {file.name: file for file in fit(kept, scored=False)}
    kinds, rows = Layered._fields, []
    for table in left:
        layers = [files[name] for name in (POOLED, find_gpu(table.gpu).name) if name in files]
        curves = Layered(*({k: v for layer in layers for k, v in getattr(layer, kind).items()} for kind in kinds))
        for dtype, predicted, measured in parts(table, curves):
            median, p90 = errors(predicted, measured)
            rows.append({"gpu": table.gpu, "operator": table.operator, "dtype": dtype, "n": len(measured), "median": median, "p90": p90})
    return rows


def _without(tables: dict[str, list[Table]], gpu: str) -> dict[str, list[Table]]:
    return {operator: rest for operator, found in tables.items() if (rest := [t for t in found if find_gpu(t.gpu).name != gpu])}


def _print(rows: list[dict[str, Any]]) -> None:
    for row in sorted(rows, key=lambda r: (r["operator"], r["gpu"], r["dtype"])):
        print(f"{row['operator']:18} {row['gpu']:10} {row['dtype']:10} n {row['n']:6} median {row['median']:6.1%} p90 {row['p90']:6.1%}")


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tuner.cost_model.fit", description=__doc__)
    parser.add_argument("tables", type=Path, help="folder with files like gemm_h100_sxm.parquet")
    parser.add_argument("-o", "--output", type=Path, help="folder of calibrations to write")
    parser.add_argument(
        "--hold-out", type=float, metavar="SHARE", help="print the errors on this share of the shapes of each table, left out of the fit"
    )
    parser.add_argument("--leave-out", metavar="GPU", help="print the errors of the pooled curves on this GPU, left out of the fit")
    options = parser.parse_args(arguments)
    try:
        if options.output is not None and not options.output.is_dir():
            raise one_problem("--output", "", str(options.output), "must be a folder", "make it first")
        if options.hold_out is not None and not 0 < options.hold_out < 1:
            raise one_problem("--hold-out", "", str(options.hold_out), "must lie between 0 and 1", "0.25 leaves out a quarter")
        if options.output is None and options.hold_out is None and options.leave_out is None:
            raise one_problem("--output", "", "", "is missing", "a folder, or --hold-out or --leave-out, which only print errors")
        tables = load(options.tables)
        if options.hold_out is not None:
            pairs = {operator: [split(t, options.hold_out) for t in found] for operator, found in tables.items()}
            kept = {operator: [rest for rest, _ in found] for operator, found in pairs.items()}
            _print(held_out(kept, [left for found in pairs.values() for _, left in found]))
        if options.leave_out is not None:
            gpu = find_gpu(options.leave_out).name
            left = [t for found in tables.values() for t in found if find_gpu(t.gpu).name == gpu]
            if not left:
                raise one_problem("--leave-out", "", options.leave_out, "has no table", "a GPU of the folder's files")
            _print(held_out(_without(tables, gpu), left))
        if options.output is not None:
            for file in fit(tables):
                write(options.output / f"{file.name}.yaml", dump(file))
    except TunerError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
