"""Jobs that many tests share."""

from __future__ import annotations

from typing import Any

from tuner import presets
from tuner.cost_model.calibration import Calibration, load_calibration
from tuner.job import Job
from tuner.model import Mla, Model, Moe


def gpt(*, layers: int, hidden: int, heads: int, vocab: int = 51200, **changes: Any) -> Model:
    """A GPT of the Megatron papers: multi-head attention, an MLP of 4h, dropout, tied embeddings."""
    return Model(
        name=f"gpt-{layers}x{hidden}",
        layers=layers,
        hidden=hidden,
        ffn_hidden=4 * hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        vocab=vocab,
        gated_mlp=False,
        tied_embeddings=True,
        norm="layer",
        biases=True,
        dropout=True,
        positions="learned",
        **changes,
    )


def gpt_job(model: Model | None = None, **changes: Any) -> Job:
    """GPT-3 175B on 1,024 A100 with the unfused attention of its time, unless changed."""
    fields: dict[str, Any] = {
        "model": model or gpt(layers=96, hidden=12288, heads=96),
        "cluster": presets.cluster("a100x1024"),
        "framework": presets.framework("megatron-lm"),
        "seq_len": 2048,
        "global_batch": 1536,
        "attention": "unfused",
    }
    return Job(**(fields | changes))


def llama_job(**changes: Any) -> Job:
    """Llama-3 70B on 64 H100, unless changed."""
    fields: dict[str, Any] = {
        "model": presets.model("llama3-70b"),
        "cluster": presets.cluster("h100x64"),
        "framework": presets.framework("megatron-lm"),
        "seq_len": 8192,
        "global_batch": 512,
    }
    return Job(**(fields | changes))


def moe_job(**changes: Any) -> Job:
    """A small mixture of experts with latent attention, leading dense layers, shared experts and an MTP layer, on 256 H100."""
    model = Model(
        name="moe-small",
        layers=27,
        hidden=2048,
        ffn_hidden=10944,
        heads=16,
        kv_heads=16,
        head_dim=128,
        vocab=102400,
        mla=Mla(q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
        moe=Moe(experts=64, top_k=6, expert_ffn_hidden=1408, shared_expert_ffn_hidden=2816, first_dense_layers=1),
        mtp_layers=1,
    )
    fields: dict[str, Any] = {
        "model": model,
        "cluster": presets.cluster("h100x256"),
        "framework": presets.framework("megatron-lm"),
        "seq_len": 4096,
        "global_batch": 1024,
    }
    return Job(**(fields | changes))


def calibration_of(job: Job, text: str = "none") -> Calibration:
    """The calibration of a job (hardware presets alone unless named)."""
    return load_calibration(text, job)
