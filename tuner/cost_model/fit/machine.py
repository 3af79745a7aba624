"""A calibration of one machine from its timings: curves where the rows suffice, and the coefficients that they speak of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner import presets
from tuner.cost_model.calibration import COLLECTIVES, DTYPE_OF, CalibrationFile, Override, layered
from tuner.cost_model.collectives import Group, collective_seconds, send_seconds
from tuner.cost_model.fit.lattice import minimise, round4
from tuner.cost_model.fit.tables import errors
from tuner.cost_model.fit.timings import FOLDS, Kind, Told, attended, closer, in_one_domain, linked, products, tell
from tuner.errors import one_problem

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tuner.cluster import Cluster
    from tuner.cost_model.calibration import Calibration
    from tuner.timing import Timing

Rows = Mapping[str, list["Timing"]]  # by what they are timings of
NOISE = 0.2  # of one timing, in its logarithm, beside what a step makes of it
DOUBT = {
    "memory_bandwidth_efficiency": 0.5, "long_stream_efficiency": 0.5, "kernel_launch_s": 1.0, "attention_backward_ratio": 0.3,
    "host_per_layer_s": 1.0, "pp_send_s": 1.5,
    "inter_node_efficiency": 0.3, "inter_node_all_to_all_efficiency": 0.4, "inter_node_hop_s": 1.5,
}  # fmt: skip
KERNELS_OF_A_LAYER = 40  # what prior.yaml says of host_per_layer_s
LARGE_SHARE = 0.25  # of the largest stream: from there on none of it stays in a cache


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFit:
    """file: the calibration; told: by kind of operator; unread: timings that nothing was made of, with why."""

    file: CalibrationFile
    told: tuple[Told, ...]
    unread: dict[str, int]


def usable(timings: Sequence[Timing]) -> list[Timing]:
    """Return the timings in the precision of most of them, of those that take the 16-bit curve (fp32 too); and those without one."""
    counts = Counter(t.precision for t in timings if DTYPE_OF.get(t.precision) == "bfloat16")
    chosen = counts.most_common(1)[0][0] if counts else ""
    return [t for t in timings if t.precision in ("", chosen)]


def machine_calibration(timings: Sequence[Timing], cluster: Cluster, base: Calibration, name: str, source: str) -> MachineFit:
    """Return the calibration of these timings of `cluster`, near `base` where they say little. Raises SpecError where none can be used."""
    known = usable(timings)
    told = [tell(kind, source) for kind in _kinds(known, cluster, base)]
    curves: dict[str, dict[str, Any]] = {}
    for found in told:
        if found.way != "shipped":
            group, key = {"gemm": ("gemm", "bfloat16"), "attention": ("attention", "gqa")}.get(found.name, ("collectives", found.name))
            curves.setdefault(group, {})[key] = found.curve
    gpus = (cluster.gpu.name,)
    with_curves = layered(base, CalibrationFile(name=name, gpus=gpus, **curves))
    overrides, more = _coefficients(known, cluster, base, with_curves, source)
    if not told and not overrides:
        raise one_problem(
            "timings", "", f"{len(timings)} rows", "hold nothing that a calibration reads", "tuner calibrate --measure writes them"
        )
    file = CalibrationFile(name=name, gpus=gpus, base="hardware", coefficients=overrides, **curves)
    return MachineFit(file=file, told=(*told, *more), unread=_unread(timings, known, cluster))


def _unread(timings: Sequence[Timing], known: Sequence[Timing], cluster: Cluster) -> dict[str, int]:
    inside = {id(t) for op in COLLECTIVES for t in in_one_domain(known, op, _inner(cluster))}
    lost = [t for t in known if t.op in COLLECTIVES and t.nodes == 1 and id(t) not in inside]
    counts = {
        "in another precision, or one without a curve to fit": len(timings) - len(known),
        "of groups wider than the innermost domain": len(lost),
    }
    return {why: n for why, n in counts.items() if n}


def _inner(cluster: Cluster) -> int:
    return cluster.domains[0].size or cluster.gpus


def _kinds(timings: Sequence[Timing], cluster: Cluster, base: Calibration) -> list[Kind]:
    """Return the kinds of operators that a curve tells."""
    gpu, kinds = cluster.gpu, []
    multiplied = [t for t in timings if t.op == "gemm"]
    forward = [t for t in timings if t.op == "attention" and not t.backward]
    if multiplied:
        kinds.append(products(multiplied, gpu, multiplied[0].precision, base.gemm["bfloat16"]))
    if forward:
        kinds.append(attended(forward, gpu, forward[0].precision, base.attention["gqa"]))
    for op in COLLECTIVES:
        if rows := in_one_domain(timings, op, _inner(cluster)):
            kinds.append(linked(op, rows, gpu, cluster.domains[0].bandwidth.value, base.collectives[op]))
    return kinds


def _by_op(timings: Sequence[Timing]) -> dict[str, list[Timing]]:
    found: dict[str, list[Timing]] = {}
    for timing in timings:
        found.setdefault(timing.op, []).append(timing)
    return found


def _coefficients(
    timings: Sequence[Timing], cluster: Cluster, base: Calibration, with_curves: Calibration, source: str
) -> tuple[dict[str, Override], list[Told]]:
    """Return the coefficients, and for each kind that they tell the errors on rows held out, a quarter at a time."""
    by_op = _by_op(timings)
    known = predictions(by_op, cluster, base)
    found: dict[str, Override] = {}
    told = []
    for kind, (fit, _) in FITS.items():
        made = fit(by_op, cluster, with_curves, source)
        if kind in known:
            shipped, seconds = known[kind]
            said, measured, of_shipped = _held_out(kind, by_op, cluster, with_curves, base)
            helps = closer(said, of_shipped, measured)
            before = errors(shipped, seconds)
            after = errors(said, measured) if helps else before
            told.append(Told(name=kind, n=len(seconds), way="level" if helps else "shipped", before=before, after=after, curve=None))
            made = made if helps else {}
        found |= made
    return found, told


def _held_out(kind: str, by_op: Rows, cluster: Cluster, base: Calibration, shipped: Calibration) -> tuple[Any, Any, Any]:
    """Return (predicted, measured, predicted as it ships) of a kind's rows, each quarter by coefficients that were fitted without it."""
    fit, ops = FITS[kind]
    said, measured, before = [], [], []
    for part in range(FOLDS):
        kept = {op: [t for i, t in enumerate(rows) if op not in ops or _fold(t, i) != part] for op, rows in by_op.items()}
        left = {op: [t for i, t in enumerate(rows) if op in ops and _fold(t, i) == part] for op, rows in by_op.items()}
        made = fit(kept, cluster, base, "held out")
        calibration = _with(base, list(made), [entry.value for entry in made.values()])
        pair = predictions(left, cluster, calibration).get(kind)
        if pair is not None:
            said.append(pair[0])
            measured.append(pair[1])
            before.append(predictions(left, cluster, shipped)[kind][0])
    return np.concatenate(said), np.concatenate(measured), np.concatenate(before)


def _fold(timing: Timing, place: int) -> int:
    """Return the quarter of a row: attention's two directions go together, others by turns."""
    if timing.op != "attention":
        return place % FOLDS
    return (timing.batch + 3 * timing.heads + timing.kv_heads + timing.length // 64 + timing.head_dim) % FOLDS


def shrunk(name: str, logs: Any, base: Calibration, source: str) -> Override:
    """Return a coefficient between its value in `base` and the mean of measured `logs`, each as sure as DOUBT and NOISE say."""
    prior, doubt = np.log(base[name]), DOUBT[name]
    spread = max(float(np.std(logs)), NOISE)
    weight = len(logs) / spread**2
    value = float(np.exp((prior / doubt**2 + weight * np.mean(logs)) / (1.0 / doubt**2 + weight)))
    own = base.coefficients[name]
    bounded = min(max(value, own.least, 1e-12), own.most)
    return Override(value=round4(bounded), source=source, n=len(logs), residual=round4(float(np.median(np.abs(logs - np.log(bounded))))))


def _streams(by_op: Rows, cluster: Cluster, base: Calibration, source: str) -> dict[str, Override]:
    """Bandwidth and launch from t = bytes / (B e) + launch; the largest streams alone tell what long sums reach."""
    rows, launches = by_op.get("stream", []), [t.seconds for t in by_op.get("launch", [])]
    found = {"kernel_launch_s": shrunk("kernel_launch_s", np.log(launches), base, source)} if launches else {}
    if not rows:
        return found
    size, seconds = (np.array([getattr(t, name) for t in rows]) for name in ("bytes", "seconds"))
    exact, large = size / cluster.gpu.hbm.value, size >= LARGE_SHARE * size.max()
    share, launch = _line(exact, seconds, launches, base)
    residual = round4(float(np.median(np.abs(np.log((exact / share + launch) / seconds)))))
    found["memory_bandwidth_efficiency"] = Override(value=round4(share), source=source, n=len(rows), residual=residual)
    found["kernel_launch_s"] = Override(value=round4(launch), source=source, n=len(rows) + len(launches), residual=residual)
    found["long_stream_efficiency"] = shrunk("long_stream_efficiency", np.log(exact[large] / seconds[large]), base, source)
    return found


def _line(exact: Any, seconds: Any, launches: Sequence[float], base: Calibration) -> tuple[float, float]:
    """Return (e, launch) of seconds = exact / e + launch, near the coefficients of `base`."""
    names = ("memory_bandwidth_efficiency", "kernel_launch_s")
    prior, doubt = np.log([base[name] for name in names]), np.array([DOUBT[name] for name in names])
    most = np.log([base.coefficients[name].most for name in names])

    def residuals(x: Any) -> Any:
        e, launch = np.exp(np.clip(np.minimum(x, most), -30.0, 30.0))
        off = np.log(exact / e + launch) - np.log(seconds)
        return np.concatenate([off / NOISE, (np.log(launch) - np.log(launches)) / NOISE, (x - prior) / doubt])

    e, launch = np.exp(np.minimum(minimise(residuals, prior.tolist(), 1.0), most))
    return float(e), float(launch)


def _backward(by_op: Rows, cluster: Cluster, base: Calibration, source: str) -> dict[str, Override]:  # noqa: ARG001
    """Backward over forward time of the same attention."""
    forward, backward = _pairs(by_op)
    if not len(forward):
        return {}
    return {"attention_backward_ratio": shrunk("attention_backward_ratio", np.log(backward / forward), base, source)}


def _pairs(by_op: Rows) -> tuple[Any, Any]:
    """Return seconds forward and backward of the shapes of attention that have both."""

    def shape(t: Timing) -> tuple[Any, ...]:
        return t.precision, t.batch, t.length, t.heads, t.kv_heads, t.head_dim

    rows = by_op.get("attention", [])
    forward = {shape(t): t.seconds for t in rows if not t.backward}
    pairs = [(forward[shape(t)], t.seconds) for t in rows if t.backward and shape(t) in forward]
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


def _host(by_op: Rows, cluster: Cluster, base: Calibration, source: str) -> dict[str, Override]:  # noqa: ARG001
    """The host's time for a layer: that of its kernels' issue."""
    logs = np.log([KERNELS_OF_A_LAYER * t.seconds for t in by_op.get("issue", [])])
    words = f"{source}; {KERNELS_OF_A_LAYER} kernels"
    return {"host_per_layer_s": shrunk("host_per_layer_s", logs, base, words)} if len(logs) else {}


def _sends(by_op: Rows, cluster: Cluster, base: Calibration, source: str) -> dict[str, Override]:
    """What a message between two ranks takes beyond the link's time, from the shorter half of the messages."""
    rows = sorted((t for t in by_op.get("p2p", []) if t.nodes == 1), key=lambda t: t.bytes)
    if not rows:
        return {}
    short = rows[: max(len(rows) // 2, 1)]
    excess = [max(t.seconds - on_link, 0.01 * t.seconds) for t, on_link in zip(short, _on_link(short, cluster, base), strict=True)]
    return {"pp_send_s": shrunk("pp_send_s", np.log(excess), base, source)}


def _on_link(rows: Sequence[Timing], cluster: Cluster, calibration: Calibration) -> list[float]:
    return [float(send_seconds(float(t.bytes), t.stride, cluster=cluster, calibration=calibration)) for t in rows]


def _between_nodes(by_op: Rows, cluster: Cluster, base: Calibration, source: str) -> dict[str, Override]:
    """Shares of the network cards' bandwidth, and the latency of a hop, from collectives that span nodes."""
    rows = [t for op in COLLECTIVES for t in by_op.get(op, []) if t.nodes > 1 and t.members > 1]
    if not rows:
        return {}
    kinds = {t.op == "all_to_all" for t in rows}
    names = [n for n, used in (("inter_node_efficiency", False), ("inter_node_all_to_all_efficiency", True)) if used in kinds]
    names.append("inter_node_hop_s")
    values = _solve(rows, cluster, base, names)
    said = np.array(_collective(rows, cluster, _with(base, names, values)))
    residual = round4(float(np.median(np.abs(np.log(said / np.array([t.seconds for t in rows]))))))
    return {n: Override(value=round4(v), source=source, n=len(rows), residual=residual) for n, v in zip(names, values, strict=True)}


def _wide(rows: Sequence[Timing], cluster: Cluster) -> Cluster:
    """Return the cluster, with as many nodes as the timings were taken on."""
    most = max(t.nodes for t in rows) * cluster.gpus_per_node
    return cluster if cluster.gpus >= most else presets.with_gpus(cluster, most)


def _with(base: Calibration, names: Sequence[str], values: Sequence[float]) -> Calibration:
    changed = {name: base.coefficients[name].model_copy(update={"value": value}) for name, value in zip(names, values, strict=True)}
    return base.model_copy(update={"coefficients": {**base.coefficients, **changed}})


def _collective(rows: Sequence[Timing], cluster: Cluster, calibration: Calibration) -> list[float]:
    wide = _wide(rows, cluster)
    groups = [Group(t.members, t.stride) for t in rows]
    asked = zip(rows, groups, strict=True)
    return [float(collective_seconds(t.op, float(t.bytes), group, cluster=wide, calibration=calibration)) for t, group in asked]


def _solve(rows: Sequence[Timing], cluster: Cluster, base: Calibration, names: Sequence[str]) -> list[float]:
    logs = np.log([t.seconds for t in rows])
    prior, doubt = np.log([base[name] for name in names]), np.array([DOUBT[name] for name in names])
    low, high = (np.log([max(getattr(base.coefficients[name], end), 1e-9) for name in names]) for end in ("least", "most"))

    def residuals(x: Any) -> Any:
        values = np.exp(np.clip(x, low, high)).tolist()
        off = (np.log(_collective(rows, cluster, _with(base, names, values))) - logs) / NOISE
        return np.concatenate([off, (x - prior) / doubt])

    found: list[float] = np.exp(np.clip(minimise(residuals, prior.tolist(), 1.0), low, high)).tolist()
    return found


FITS: dict[str, tuple[Callable[[Rows, Cluster, Calibration, str], dict[str, Override]], tuple[str, ...]]] = {
    "stream": (_streams, ("stream", "launch")),
    "attention backward": (_backward, ("attention",)),
    "host": (_host, ("issue",)),
    "p2p": (_sends, ("p2p",)),
    "between nodes": (_between_nodes, COLLECTIVES),
}


def predictions(by_op: Rows, cluster: Cluster, calibration: Calibration) -> dict[str, tuple[Any, Any]]:
    """Return (predicted, measured) seconds of what coefficients tell, by kind."""
    found: dict[str, tuple[Any, Any]] = {}
    rows = by_op.get("stream", [])
    if rows:
        said = [
            t.bytes / (cluster.gpu.hbm.value * calibration["memory_bandwidth_efficiency"]) + calibration["kernel_launch_s"] for t in rows
        ]
        found["stream"] = np.array(said), np.array([t.seconds for t in rows])
    forward, backward = _pairs(by_op)
    if len(forward):
        found["attention backward"] = calibration["attention_backward_ratio"] * forward, backward
    near = [t for t in by_op.get("p2p", []) if t.nodes == 1]
    if near:
        on_link = np.array(_on_link(near, cluster, calibration))
        found["p2p"] = on_link + calibration["pp_send_s"], np.array([t.seconds for t in near])
    far = [t for op in COLLECTIVES for t in by_op.get(op, []) if t.nodes > 1 and t.members > 1]
    if far:
        found["between nodes"] = np.array(_collective(far, cluster, calibration)), np.array([t.seconds for t in far])
    return found


def errors_of(timings: Sequence[Timing], cluster: Cluster, calibration: Calibration) -> dict[str, tuple[float, float]]:
    """Return the median and 90th percentile of |predicted / measured - 1| by kind of operator, as a calibration tells it."""
    known = usable(timings)
    kinds = {kind.name: (kind.predict(kind.base, kind.table), kind.table["seconds"]) for kind in _kinds(known, cluster, calibration)}
    return {name: errors(*pair) for name, pair in (kinds | predictions(_by_op(known), cluster, calibration)).items()}
