"""A round-numbered GPU, cluster and calibration, so that times can be worked out by hand."""

from __future__ import annotations

from typing import Any

from tuner.cluster import Cluster, Domain, Gpu, Sourced
from tuner.cost_model.calibration import Calibration, Coefficient
from tuner.cost_model.curves import AttentionCurve, CollectiveCurve, Fit, GemmCurve, Grid, GroupedCurve, Tile
from tuner.cost_model.fit.residuals import START

FIT = Fit(source="by hand")
ONE = Grid(axes=((1.0, 2.0),), values="1 1")
ZERO_LATENCY = Grid(axes=((1.0, 2.0),), values="1e-12 1e-12")


def _said(value: Any) -> Sourced[Any]:
    return Sourced(value=value, source="by hand")


GPU = Gpu(
    name="round",
    vendor="test",
    peak={"bf16": _said(100e12), "fp8": _said(200e12), "tf32": _said(50e12)},
    memory=_said(80e9),
    hbm=_said(1e12),
    power=_said(100.0),
    sms=_said(100),
)
CLUSTER = Cluster(
    name="round",
    gpu=GPU,
    gpus=1024,
    gpus_per_node=8,
    domains=(
        Domain(name="node", size=8, bandwidth=_said(400e9), latency=_said(1e-6)),
        Domain(name="fabric", size=None, bandwidth=_said(25e9), latency=_said(2e-6)),
    ),
)


def gemm_curve(**changes: Any) -> GemmCurve:
    """Half the peak on tiles of 128 x 128, half the HBM bandwidth, whole waves, no prologue."""
    fields: dict[str, Any] = {
        "launch_s": 1e-6,
        "tiles": (Tile(m=128, n=128, efficiency=0.5),),
        "prologue_k": 0.0,
        "partial_wave": 1.0,
        "memory": 0.5,
        "fit": FIT,
    }
    return GemmCurve(**(fields | changes))


def calibration(*, gemm: GemmCurve | None = None, latency: Grid = ZERO_LATENCY, **coefficients: float) -> Calibration:
    """Every curve flat; coefficients 1 but what is given."""
    values = {
        "memory_bandwidth_efficiency": 1.0,
        "kernel_launch_s": 0.0,
        "inter_node_efficiency": 1.0,
        "inter_node_all_to_all_efficiency": 1.0,
        "inter_node_hop_s": 0.0,
    } | coefficients
    curve = gemm or gemm_curve()
    flash = AttentionCurve(
        launch_s=1e-6,
        efficiency=Grid(axes=((64.0, 128.0),), values="0.5 0.5"),
        half_length=Grid(axes=((64.0, 128.0),), values="1e-9 1e-9"),
        block=128,
        partial_wave=1.0,
        memory=0.5,
        fit=FIT,
    )
    flat = CollectiveCurve(latency=latency, efficiency=Grid(axes=((2.0, 8.0), (1.0, 2.0)), values="1 1 1 1"), fit=FIT)
    ops = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    grouped = GroupedCurve(factor=Grid(axes=((1.0, 2.0), (1.0, 2.0)), values="2 2 2 2"), fit=FIT)
    return Calibration(
        kernel=START,
        memory_kernel=START,
        name="flat",
        coefficients={n: Coefficient(value=v, prior=v, words="by hand", source="default") for n, v in values.items()},
        gemm=dict.fromkeys(("bfloat16", "fp8", "fp8_block", "nvfp4"), curve),
        grouped=dict.fromkeys(("bfloat16", "fp8", "fp8_block", "nvfp4"), grouped),
        attention={"gqa": flash, "mla": flash},
        collectives=dict.fromkeys(ops, flat),
    )
