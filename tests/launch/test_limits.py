"""What the built-in workload says it does not run."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.launch.layouts import Layout
from tests.launch.test_engine import LAYOUTS
from tests.terminal import ROOT
from tuner.job import Job
from tuner.launch.limits import refusals
from tuner.model import Mla
from tuner.plan import Plan


def job_on(ranks: int, model: str = "llama", **changes: Any) -> Job:
    job = Layout(ranks=ranks, knobs="tp=1", model=model).job
    changed: Job = job.replace(**changes) if changes else job
    return changed


@pytest.mark.parametrize(
    ("model", "knobs", "says"),
    [
        ("llama", {"tp": 8}, "tp = 8 must divide heads = 4"),
        ("llama", {"pp": 3}, "tp*pp*cp = 1*3*1 must divide gpus = 8"),
        ("llama", {"micro_batch": 2}, "micro_batch*dp = 2*8 must divide global_batch = 8"),
        ("llama", {"tp": 4, "cp": 2, "cp_kind": 2}, "tp*cp = 4*2 must divide heads = 4 and kv_heads = 2 where cp_kind is a2a"),
        ("llama", {"cp": 8, "sequence_parallel": 1, "tp": 1, "offload": 1}, "offload: the workload has none"),
        ("llama", {"tp_overlap": 1}, "tp_overlap: the workload has none"),
        ("llama", {"cuda_graphs": 1}, "cuda_graphs: the workload has none"),
        ("llama", {"ep": 2}, "llama has no experts"),
        ("llama", {"zero": 3}, "dp_overlap = 0: FSDP2"),
        ("llama", {"shard_group": 3, "zero": 1}, "shard_group = 3 needs zero > 0 and must divide dp*cp = 8"),
        ("llama", {"vpp": 2}, "vpp = 2 needs pp > 1"),
        ("llama", {"pp": 8}, "pp*vpp = 8*1 chunks need a layer each (4"),
        ("llama", {"pp": 4, "schedule": 3}, "schedule = zb-2p"),
        ("llama", {"pp": 2, "vpp": 2, "schedule": 1}, "schedule = gpipe holds one chunk a stage"),
        ("llama", {"pp": 4, "micro_batch": 2}, "microbatches = 2 must be at least pp = 4"),
        ("llama", {"pp": 4, "schedule": 2, "recompute": 128}, "torch's split backward recomputes once for every weight"),
        ("llama", {"pp": 4, "schedule": 2, "dp_overlap": 1}, "does not say when a gradient is whole"),
        ("llama", {"recompute": 32}, "recompute = moe names a part that llama does not have"),
        ("llama", {"recompute": 16}, "recompute = mla_up_proj names a part"),
        ("llama", {"pp": 2, "vpp": 2, "recompute": 128, "recompute_layers": 1}, "each of vpp = 2 chunks recomputes the same number"),
        ("moe", {"ep": 8}, "ep = 8 must divide experts = 4"),
        ("moe", {"tp": 2, "etp": 2, "sequence_parallel": 1}, "etp = 2: the workload does not cut single experts"),
        ("moe", {"tp": 2}, "a mixture of experts needs sequence_parallel"),
        ("moe", {"zero": 1, "shard_group": 2}, "shards a mixture of experts over all its replicas"),
        ("odd", {"cp": 2}, "context parallelism has no sliding window"),
    ],
)
def test_a_plan_is_refused_with_its_numbers(model: str, knobs: dict[str, int], says: str) -> None:
    assert any(says in line for line in refusals(job_on(8, model), Plan(**knobs)))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"precision": "fp8"}, "precision = fp8: the workload computes in bf16 or fp32"),
        ({"task": "lora"}, "task = lora: the workload runs pretrain alone"),
    ],
)
def test_a_job_is_refused(changes: dict[str, Any], says: str) -> None:
    assert refusals(job_on(8, **changes), Plan()) == [says]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"mla": Mla(kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)},
            "llama has mla, which the workload does not build",
        ),
        ({"mtp_layers": 1}, "llama has mtp_layers"),
        ({"positions": "alibi"}, "llama has positions = alibi"),
        ({"norms_per_layer": 3}, "llama has norms_per_layer = 3"),
        ({"qk_norm_whole": True}, "llama has qk_norm_whole"),
    ],
)
def test_a_model_is_refused(changes: dict[str, Any], says: str) -> None:
    job = job_on(8)
    assert refusals(job.replace(model=job.model.replace(**changes)), Plan())[0].startswith(says)


def test_microbatches_of_a_short_step_count() -> None:
    assert refusals(job_on(4), Plan(pp=4)) == []
    assert refusals(job_on(4), Plan(pp=4), microbatches=3) == ["microbatches = 3 must be at least pp = 4 (torch's Schedule1F1B)"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_what_runs_is_not_refused(layout: Layout) -> None:
    assert refusals(layout.job, layout.plan, layout.microbatches) == []


def test_limits_need_no_torch() -> None:
    code = "import sys, tuner.launch.limits, tuner.launch.short_steps, tuner.launch.workload; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
