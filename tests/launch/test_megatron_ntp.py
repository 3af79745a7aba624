"""The export of a nonuniform tensor-parallel job to Megatron-LM's dev branch: its layout, its rules, its files on a real Slurm."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tuner
from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tests.services import missing
from tests.slurm.cluster import slurm
from tuner import presets
from tuner.errors import SpecError
from tuner.job import Job
from tuner.launch.megatron_ntp import Layout, layout_of, mapped, parity, refusals, vocab_multiple, wrong_gradients
from tuner.launch.megatron_ntp_files import write
from tuner.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.launch.launchers.launcher import Written


def small(heads: int = 24, gpus: int = 16, **changes: Any) -> Job:
    """A GPT of 24 heads on nodes of 8 GPUs: 8 -> 6 deals its heads evenly."""
    cluster = presets.cluster("h100x16").replace(gpus=gpus)
    return gpt_job(gpt(layers=4, hidden=64 * heads, heads=heads), cluster=cluster, global_batch=16, **changes)


def exported(job: Job, plan: Plan, failed: dict[int, tuple[int, ...]], degree: int | None = None) -> Written:
    return write(job, plan, layout_of(job, plan, degree, failed))


def rules(job: Job, plan: Plan, degree: int) -> set[str]:
    return {problem.path for problem in refusals(job, plan, degree)}


def test_packed_groups_by_hand() -> None:
    """Ranks 0 and 1 are TP2, ranks 2 to 5 TP4: the layout of the upstream end-to-end test."""
    groups = Layout(tp=4, degree=2, cp=1, replicas=2, idle={0: (2, 3)}).groups()
    assert groups["tp"] == [[0, 1], [2, 3, 4, 5]]
    assert groups["dp"] == [[0, 2], [1, 3], [4], [5]]
    assert groups["cp"] == [[0], [1], [2], [3], [4], [5]] and groups["tp_cp"] == groups["tp"]


def test_groups_of_two_context_slices_by_hand() -> None:
    groups = Layout(tp=2, degree=1, cp=2, replicas=2, idle={0: (1,)}).groups()  # slices of one rank: 0, 1; of two: 2 3, 4 5
    assert groups["tp"] == [[0], [1], [2, 3], [4, 5]]
    assert groups["dp"] == [[0, 2], [3], [1, 4], [5]]
    assert groups["cp"] == [[0, 1], [2, 4], [3, 5]]
    assert groups["tp_cp"] == [[0, 1], [2, 3, 4, 5]]


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(2, 5), st.data())
def test_every_rank_is_in_one_group_of_each_kind(tp: int, cp: int, replicas: int, data: st.DataObject) -> None:
    lost = data.draw(st.integers(1, tp - 1))
    reduced = data.draw(st.integers(1, replicas - 1))
    layout = Layout(tp=tp, degree=tp - lost, cp=cp, replicas=replicas, idle={i: tuple(range(lost)) for i in range(reduced)})
    world = cp * (reduced * (tp - lost) + (replicas - reduced) * tp)
    for every in layout.groups().values():
        assert sorted(rank for ranks in every for rank in ranks) == list(range(world))


def test_other_replicas_idle_as_many_from_their_highest_slots() -> None:
    assert parity({0: [2, 5], 1: [1]}, 8) == (2, {0: (2, 5), 1: (1, 7)})  # the example in its docstring
    assert parity({3: [7], 1: [6, 7, 0]}, 8) == (3, {3: (5, 6, 7), 1: (0, 6, 7)})
    assert parity({}, 8) == (0, {})


@pytest.mark.parametrize(
    ("units", "tp", "degree", "left"),
    [
        (24, 8, 6, [3] * 6), (28672, 8, 7, [3584] * 7), (53248, 8, 7, [6656] * 7), (24, 8, 4, [3] * 4),  # run upstream: right
        (64, 8, 7, [8, 9, 9, 9, 9, 9, 3]), (32768, 8, 7, [4096, *[4097] * 5, 4091]),  # run upstream: 3 to 9, and unequal
        (128, 32, 30, None), (128, 32, 28, None), (64, 64, 62, None), (8, 8, 7, None),  # run upstream: IndexError
    ],
)  # fmt: skip
def test_the_mapping_as_upstream_computes_it(units: int, tp: int, degree: int, left: list[int] | None) -> None:
    assert mapped(units, tp, degree) == left


def test_rules_by_id() -> None:
    plan = Plan(tp=8)
    assert rules(small(), plan, 6) == set()
    assert rules(small(), plan, 7) == {"ntp-heads", "ntp-ffn", "ntp-kv-heads", "ntp-map"}
    assert "ntp-pp" in rules(small(gpus=32), Plan(tp=8, pp=2), 6)
    assert "ntp-distributed-optimizer" in rules(small(), Plan(tp=8, zero=1), 6)
    assert {"ntp-experts", "ntp-mla"} <= rules(moe_job(), Plan(tp=8), 6)
    assert "ntp-degree" in rules(small(), plan, 8) and "ntp-degree" in rules(small(), plan, 0)
    assert "ntp-dp" in rules(small(gpus=8), plan, 6)
    assert "ntp-node" in rules(small(heads=48), Plan(tp=16), 12)
    assert "ntp-kv-heads" in rules(llama_job(), plan, 6)  # 8 groups on 6 ranks


def test_the_vocabulary_is_padded_so_that_both_degrees_divide_it() -> None:
    multiple = vocab_multiple(small(), 8, 6)
    assert multiple == 384  # 128 x 3: the padded vocabulary is a multiple of 8 x 384 = 3072 = 6 x 512
    assert "--make-vocab-size-divisible-by 384" in exported(small(), Plan(tp=8), {0: (3, 5)}).files["arguments.sh"]


def test_files_say_what_failed_and_what_is_wrong() -> None:
    written = exported(small(gpus=32), Plan(tp=8), {2: (1,), 0: (3, 5)})
    told = json.loads(written.files["ntp.json"])
    assert (told["tp_base"], told["tp_spares"], told["num_reduced_tp_dp_ranks"]) == (8, 2, 2)
    assert told["non_active_ranks_per_dp"] == {"0,0,0": [3, 5], "1,0,0": [1, 7]}  # reduced replicas come first
    assert written.files["ntp.json"].count("\n") < 500 and len(told["groups"]["tp"]) == 4
    ast.parse(written.files["ntp_setup.py"])
    read_me = written.files["README.md"]
    assert "EXPERIMENTAL" in read_me and "parity" in read_me and "row-parallel" in read_me
    words = " ".join(wrong_gradients(llama_job(), Plan(tp=8, sequence_parallel=1)))
    assert all(part in words for part in ("Grouped-query", "Gated MLP", "Sequence parallelism", "TypeError"))


@pytest.mark.parametrize(
    ("plan", "failed", "words"),
    [
        ("tp=8,fallback_tp=6", "0:1,0:2,0:3", "lost 3 GPUs, which leaves 5"),
        ("tp=8", "9:1", "must name one of 2 replicas"),
        ("tp=8", "0:8", "a slot below tp = 8"),
        ("tp=8", "0-1", "must be REPLICA:SLOT"),
        ("tp=8", "0:1,0:2,1:0,1:1", "every replica lost GPUs"),
        ("tp=8", None, "is missing"),
    ],
)
def test_bad_input_is_refused_with_a_way_out(plan: str, failed: str | None, words: str) -> None:
    question = {"model": "gpt3-175b", "cluster": "h100x16", "seq_len": 2048, "global_batch": 16}
    with pytest.raises(SpecError, match=words):
        tuner.export("megatron-lm-ntp", **question, plan=plan + ",zero=0", failed=failed)


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    for name, text in exported(small(), Plan(tp=8), {0: (3, 5)}).files.items():
        if name.endswith((".sh", ".sbatch")):
            (tmp_path / name).write_text(text)
            done = subprocess.run(["shellcheck", "-x", tmp_path / name], capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout


def test_a_heterogeneous_job_gives_every_process_its_rank_and_gpu(tmp_path: Path) -> None:
    """Three nodes of 4: one with two of its GPUs gone. The training script is a stand-in that prints what it was given."""
    cluster = presets.cluster("h100x16").replace(gpus=12, gpus_per_node=4)
    job = gpt_job(gpt(layers=4, hidden=512, heads=8), cluster=cluster, global_batch=12)
    for name, text in exported(job, Plan(tp=4), {1: (0, 3)}).files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = "import os,sys\nprint('rank', *(os.environ[n] for n in ('RANK', 'WORLD_SIZE', 'CUDA_VISIBLE_DEVICES')), len(sys.argv))\n"
    (tmp_path / "pretrain.py").write_text(script)
    with slurm(nodes=3, gpus=4) as started:
        started.run("sbatch", "--wait", f"--chdir={tmp_path}", "--output=out.txt", f"--export=ALL,PRETRAIN={tmp_path / 'pretrain.py'}",
                    str(tmp_path / "launch.sbatch"))  # fmt: skip
    lines = [line.split() for line in (tmp_path / "out.txt").read_text().splitlines() if line.startswith("rank")]
    assert sorted((int(rank), int(gpu)) for _, rank, _, gpu, _ in lines) == [(0, 1), (1, 2), *((2 + i, i % 4) for i in range(8))]
    assert {(world, int(count) > 20) for _, _, world, _, count in lines} == {("10", True)}
