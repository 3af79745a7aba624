"""A published row to change in tests, and what it is read as."""

import copy

from tuner.accuracy.fields import Skipped
from tuner.accuracy.rows import Reader
from tuner.measurement import Measurement

# Narayanan et al. 2021 (arXiv 2104.04473), Megatron-LM README: GPT-3 175B on 1,024 A100, 140 TFLOP/s, "around 32 seconds".
GPT = {
    "id": "narayanan2021-175b",
    "source": {"title": "Narayanan et al. 2021", "where": "arXiv 2104.04473"},
    "framework": "megatron-lm",
    "task": "pretrain",
    "model": {
        "name": "gpt-175b",
        "layers": 96,
        "hidden": 12288,
        "ffn_hidden": 49152,
        "heads": 96,
        "kv_heads": 96,
        "head_dim": 128,
        "vocab": 51200,
        "seq_len": 2048,
        "gated_mlp": False,
        "tied_embeddings": True,
    },
    "cluster": {
        "gpu": "a100-sxm-80gb",
        "gpus": 1024,
        "gpus_per_node": 8,
        "nvlink_domain": 8,
        "inter_node": "8x200Gb/s HDR InfiniBand per node (Selene)",
    },
    "config": {"tp": 8, "pp": 8, "micro_batch": 1, "global_batch": 1536, "recompute": "full", "precision": "fp16"},
    "flops_convention": "hardware",
    "measured": {"tflops_per_gpu": 140.0},
}


def changed(base=GPT, **sections):
    """Return a copy of a row with keys of its sections changed; a value of ... removes the key."""
    row = copy.deepcopy(base)
    for name, change in sections.items():
        if not isinstance(change, dict) or not isinstance(row.get(name), dict):
            row[name] = change
            continue
        for key, value in change.items():
            if value is ...:
                row[name].pop(key, None)
            else:
                row[name][key] = value
    return row


def read(row, stem="file"):
    found = Reader().row(row, stem)
    assert isinstance(found, Measurement), found
    return found


def skipped(row):
    found = Reader().row(row, "file", 7)
    assert isinstance(found, Skipped), found
    return found.why
