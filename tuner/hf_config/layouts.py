"""Which layers of a Hugging Face model attend to a window and which are mixtures of experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tuner.hf_config.config import Config, Flag

_FULL = ("full_attention", "attention", "global", "global_attention", "full")
_SLIDING = ("sliding_attention", "sliding_window_attention", "local", "local_attention", "sliding")

_PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "num_experts_per_token", "moe_k", "moe_topk", "num_selected_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowKeys:
    """How a family says which layers slide when it has no `layer_types`.

    mode: "never"; "always" where sliding_window is set; "flag": use_sliding_window, from layer max_window_layers on;
    "period": all but every `period`-th layer. size: the window when the key is absent.
    """

    mode: str = "never"
    size: int | None = None
    period: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeKeys:
    """How a family describes its experts.

    ffn: key of an expert's width; shared_size: key of the shared experts' whole width; shared_count: keys of their number, each
    as wide as a routed expert; optional: without experts the model is dense.
    """

    ffn: tuple[str, ...] = ("moe_intermediate_size", "expert_ffn_dim")
    shared_size: tuple[str, ...] = ()
    shared_count: tuple[str, ...] = ()
    shared_gate: bool = False
    router_bias: Flag = False
    expert_bias: bool = False
    optional: bool = False


def window(c: Config, keys: WindowKeys, layers: int) -> dict[str, int] | None:
    """Return the fields of SlidingWindow, or None when every layer attends to all tokens."""
    types = c.sequence("layer_types", layers)
    size = c.integer("sliding_window", "sliding_window_size", "window_size", default=0, least=0)
    if not size and not c.states("sliding_window"):
        size = keys.size or 0
    if types is not None:
        _refuse_other_types(c, types)
        c.get("use_sliding_window", "max_window_layers", *_PATTERN)
        sliding = [kind in _SLIDING for kind in types]
    else:
        sliding = _by_family(c, keys, layers, size)
    longest = c.get("max_position_embeddings")
    if not any(sliding) or (isinstance(longest, int) and size >= longest):
        return None
    if not size:
        c.add("sliding_window", "", "is missing, though layers slide")
    return {"size": max(size, 1), "full_every": _period(c, sliding)}


def _by_family(c: Config, keys: WindowKeys, layers: int, size: int) -> list[bool]:
    if keys.mode == "flag":
        first = c.integer("max_window_layers", default=0, least=0)
        return [c.flag(("use_sliding_window", False)) and i >= first for i in range(layers)]
    if keys.mode == "never" and size:
        raise c.refusal("sliding_window", "sliding windows of this family")
    if keys.mode == "period" and size:
        return [(i + 1) % _stated_period(c, keys) != 0 for i in range(layers)]
    return [keys.mode == "always" and size > 0] * layers


def _stated_period(c: Config, keys: WindowKeys) -> int:
    """A number, or letters like LLLG (EXAONE)."""
    stated = c.get(*_PATTERN)
    if isinstance(stated, str):
        if stated.strip("L") != "G":
            raise c.refusal("sliding_window_pattern", "irregular patterns of sliding windows")
        return len(stated)
    return c.integer(*_PATTERN, default=keys.period)


def _refuse_other_types(c: Config, types: list[Any]) -> None:
    foreign = sorted({str(kind)[:40] for kind in types if kind not in _FULL + _SLIDING})
    if foreign:
        raise c.refusal("layer_types", f"layers of type {', '.join(foreign[:4])}")


def _period(c: Config, sliding: list[bool]) -> int:
    """Return full_every for a periodic pattern; one that is shifted counts when it has as many full layers."""
    if all(sliding):
        return 0
    full = [i for i, slides in enumerate(sliding) if not slides]
    for period in range(2, len(sliding) + 1):
        shifted = full == list(range(full[0], len(sliding), period))
        if shifted and len(full) == len(sliding) // period:
            return period
    raise c.refusal("layer_types" if "layer_types" in c.data else "sliding_window", "irregular patterns of sliding windows")


def moe(c: Config, keys: MoeKeys, layers: int) -> dict[str, Any] | None:
    """Return the fields of Moe, or None for a dense model of a family that allows it."""
    experts_names = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
    if keys.optional and c.get(*experts_names) in (None, 0, 1):
        c.get(*_TOP_K, *keys.ffn, *keys.shared_size, *keys.shared_count)  # without experts these say nothing
        return None
    experts = _uniform(c, *experts_names)
    top_k = _uniform(c, *_TOP_K)
    width = _uniform(c, *keys.ffn)
    shared = _uniform(c, *keys.shared_size, least=0, default=0) if keys.shared_size else 0
    shared += width * _uniform(c, *keys.shared_count, least=0, default=0) if keys.shared_count else 0
    first, every = _placement(c, layers)
    return {
        "experts": experts,
        "top_k": top_k,
        "expert_ffn_hidden": width,
        "shared_expert_ffn_hidden": shared,
        "shared_expert_gate": keys.shared_gate and shared > 0,
        "first_dense_layers": first,
        "every": every,
        "router_bias": c.flag(keys.router_bias),
        "expert_bias": keys.expert_bias,
    }


def _uniform(c: Config, *names: str, least: int = 1, default: int | None = None) -> int:
    """Return a number, or the one value of a list that repeats it for every layer."""
    value = c.get(*names)
    if isinstance(value, list):
        if len({str(entry) for entry in value}) > 1:
            key = next(n for n in names if c.data.get(n) is not None)
            raise c.refusal(key, "experts that differ from layer to layer")
        c.data = c.data | {names[0]: value[0] if value else None}
    return c.integer(*names, least=least, default=default)


def _placement(c: Config, layers: int) -> tuple[int, int]:
    """Return (first_dense_layers, every) from whichever keys the family places its experts with."""
    sparse = _sparse_layers(c, layers)
    key = next(
        (k for k in ("moe_layer_freq", "mlp_layer_types", "decoder_sparse_step", "moe_layer_interval") if k in c.data), "num_experts"
    )
    for every in range(1, layers + 1):
        first = 0 if every > 1 else (sparse.index(True) if True in sparse else layers)
        if sparse == [i >= first and (i + 1) % every == 0 for i in range(layers)]:
            return first, every
    raise c.refusal(key, "irregular patterns of expert layers")


def _sparse_layers(c: Config, layers: int) -> list[bool]:
    kinds = c.sequence("mlp_layer_types", layers)
    first = c.integer("first_k_dense_replace", "moe_layer_start_index", default=0, least=0)
    last = c.integer("moe_layer_end_index", default=-1, least=-1)
    dense = c.get("mlp_only_layers") or []
    step = c.integer("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step", default=1)
    if isinstance(c.get("moe_layer_freq"), list):
        frequencies = c.sequence("moe_layer_freq", layers) or [1] * layers
        return [bool(f) for f in frequencies]
    frequency = c.integer("moe_layer_freq", default=1)
    if kinds is not None:
        return [kind == "sparse" for kind in kinds]
    if not isinstance(dense, list):
        c.add("mlp_only_layers", dense, "must be a list of layers")
        dense = []
    end = layers - 1 if last == -1 else last
    return [first <= i <= end and i % frequency == 0 and (i + 1) % step == 0 and i not in dense for i in range(layers)]
