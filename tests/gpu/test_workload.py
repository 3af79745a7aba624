"""The workload on a GPU: NCCL, 16 bits, and memory figures that mean something."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.layouts import Layout, torchrun
from tests.launch.test_workload import lines
from tuner.launch.trial import TRIAL, Trial, json_text

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="no NVIDIA GPU on this machine")
WIDE = {"layers": 8, "hidden": 1024, "ffn_hidden": 4096, "heads": 16, "kv_heads": 4, "head_dim": 64, "vocab": 8192}


def run_on_gpu(folder: Path, knobs: str) -> dict[str, Any]:
    """Return the only rank's figures, with the losses of its steps, of a model wide enough that activations count."""
    layout = Layout(ranks=1, knobs=knobs, precision="bf16")
    job = layout.job.replace(model=layout.job.model.replace(**WIDE), seq_len=1024)
    folder.mkdir()
    trial = Trial(number=1, job=job, plan=layout.plan, folder=folder, steps=4, warmup=1)
    (folder / TRIAL).write_text(json_text(trial.record()))
    done = torchrun(1, "tuner.launch.workload", "--trial", str(folder))
    assert done.returncode == 0, done.stdout + done.stderr
    (rank,) = lines(done.stdout, "tuner-rank")
    (versions,) = lines(done.stdout, "tuner-versions")
    assert {"cuda", "nccl", "device"} <= set(versions)
    return rank | {"losses": [step["loss"] for step in lines(done.stdout, "tuner-step")]}


def test_recompute_saves_memory_and_changes_no_loss(tmp_path: Path) -> None:
    kept = run_on_gpu(tmp_path / "kept", "micro_batch=8")
    again = run_on_gpu(tmp_path / "again", "micro_batch=8,recompute=full")
    assert 0 < again["max_allocated_bytes"] < 0.7 * kept["max_allocated_bytes"]
    assert kept["max_allocated_bytes"] <= kept["max_reserved_bytes"]
    assert again["losses"] == pytest.approx(kept["losses"], rel=1e-3)
    assert kept["losses"][-1] < kept["losses"][0]


def test_too_much_is_torchs_own_error(tmp_path: Path) -> None:
    layout = Layout(ranks=1, knobs="micro_batch=4096", precision="bf16", global_batch=4096)
    job = layout.job.replace(model=layout.job.model.replace(**WIDE | {"vocab": 128256}), seq_len=4096)
    trial = Trial(number=1, job=job, plan=layout.plan, folder=tmp_path, steps=2, warmup=1)
    (tmp_path / TRIAL).write_text(json_text(trial.record()))
    done = torchrun(1, "tuner.launch.workload", "--trial", str(tmp_path))
    assert done.returncode != 0
    assert "torch.OutOfMemoryError: CUDA out of memory" in done.stdout + done.stderr
