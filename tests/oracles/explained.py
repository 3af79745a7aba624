"""Rules that a framework's parser does not have, and why ours refuses nonetheless: found later, on GPUs, or without a meaning."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_NO_PART = "a part that the model does not have is ignored; a plan that names it means something else than it says"
EXPLAINED: Mapping[str, Mapping[str, str]] = {
    "megatron-lm": {
        "moe-tp-sp": "raised by moe_layer.py when the model is built",
        "recompute-parts": _NO_PART,
        "full-layers": "more layers than a stage has are all of them, which is spelled full: a message names the bound, no check does",
        "dense-experts": "a dense model's expert degrees are not written",
        "zero-pp-megatron": (
            "its check is of --use-torch-fsdp2; --use-megatron-fsdp with stages is parsed, and no release documents that it trains"
        ),
    },
    "torchtitan": {
        "dense-experts": "an expert degree is ignored where there are no experts; a plan with one means something else than it says",
        "experts-ep": "raised when the experts' weights are distributed",
        "ep-tp": "raised when tokens are dispatched (pull 4794)",
        "chunks": "stages that are named module by module are taken as they are, the empty ones too, and fail when the model is cut",
    },
}
