"""From what a person writes to specs and plans: numbers as text, ranges, job files, defaults that are named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import tuner
from tuner import presets
from tuner.errors import PlanError, SpecError
from tuner.plan import FULL, Plan
from tuner.plan_defaults import complete
from tuner.request import JOB_KEYS, SEARCH_KEYS, read_job, read_request
from tuner.values import fraction, gpu_counts, knobs, money, quantity, read_ramp_up, whole

GPT3: dict[str, Any] = {"model": "gpt3-175b", "cluster": "a100x1024", "seq_len": 2048, "global_batch": 1536}


@pytest.mark.parametrize(
    ("text", "value"), [("8k", 8192), ("8K", 8192), ("1M", 2**20), ("8,192", 8192), (8192, 8192), (8192.0, 8192), (" 16 ", 16)]
)
def test_whole_numbers(text: Any, value: int) -> None:
    assert whole(text, "seq_len", thousand=1024) == value


@pytest.mark.parametrize("text", ["8kk", "k", "-8", "8.5", "", "0", True, 1.5, "1e3", "9" * 20, "8,19", float("inf"), None, [8]])
def test_whole_numbers_refuse(text: Any) -> None:
    with pytest.raises(SpecError, match="whole number"):
        whole(text, "seq_len", thousand=1024)


def test_quantities_and_money() -> None:
    assert quantity("70 GB", "max_memory", "bytes") == 70e9
    assert quantity("30d", "deadline", "seconds") == 30 * 86400
    assert quantity("15T", "tokens", "tokens") == 15e12
    assert (money("$2.50", "price"), money(3, "price")) == (2.5, 3.0)
    for bad in ("70", "70 Gb", "-1 GB", "nan GB", "0 GB"):
        with pytest.raises(SpecError):
            quantity(bad, "max_memory", "bytes")
    for bad in ("free", "-1", "nan", "inf", True):
        with pytest.raises(SpecError):
            money(bad, "price")


@pytest.mark.parametrize(
    ("text", "value"), [("20%", 0.2), ("20 %", 0.2), ("0.2", 0.2), (0.2, 0.2), ("100%", 1.0), (1, 1.0), ("0.5%", 0.005)]
)
def test_fractions(text: Any, value: float) -> None:
    assert fraction(text, "max_p_oom") == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize("text", ["0", "-5%", "101%", "nan", "inf", "x", "%", "", True, None, "0.2 %%"])
def test_fractions_refuse(text: Any) -> None:
    with pytest.raises(SpecError, match="must be a probability"):
        fraction(text, "max_p_oom")


def test_a_bare_percentage_is_offered_with_its_sign() -> None:
    with pytest.raises(SpecError, match="did you mean 20%"):
        fraction("20", "max_p_oom")


def test_a_job_file_says_all_and_max_p_oom(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("model: tiny\ncluster: h100x8\nseq_len: 128\nglobal_batch: 64\nmax_p_oom: 20%\nall: true\ntop: 2\n")
    answer = tuner.search(job=str(path))
    assert not answer.distinct
    assert answer.space["max_p_oom"] == 0.2
    assert tuner.search(job=str(path), all=False, max_p_oom="10%").distinct


def test_counts_of_gpus() -> None:
    assert gpu_counts(64) == (64,)
    assert gpu_counts("1..8") == (1, 2, 4, 8)
    assert gpu_counts("16..40") == (16, 24, 32, 40)
    assert gpu_counts("256..1024:256") == (256, 512, 768, 1024)
    many = gpu_counts("8..8192")
    assert (many[0], many[-1]) == (8, 8192)
    assert len(many) < 64
    assert {8 * n for n in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 512, 640, 768, 896, 1024)} <= set(many)
    for bad in ("8..4", "12..14", "0..8", "8..16:0", "8..9999999999", "8..80000:8", "8..", "9..15"):
        with pytest.raises(SpecError):
            gpu_counts(bad)


def test_ramp_up() -> None:
    expected = {"start": 32, "increment": 32, "samples": 48828125}
    assert read_ramp_up("32,32,48828125") == read_ramp_up("32 32 48828125") == read_ramp_up(expected) == expected
    with pytest.raises(SpecError, match="START,BY,SAMPLES"):
        read_ramp_up("32,32")


def test_ramp_up_makes_the_run_longer() -> None:
    plain, ramped = (tuner.estimate(**GPT3, plan="tp=8,pp=8", tokens="300B", ramp_up=ramp).run for ramp in (None, "32,32,12207031"))
    assert plain is not None
    assert ramped is not None
    assert ramped.days > plain.days


def test_a_run_is_its_steps() -> None:
    answer = tuner.estimate(**GPT3, plan="tp=8,pp=8", tokens="300B", price=2)
    assert answer.run is not None
    steps = 300e9 / (1536 * 2048)  # 95,367 steps
    assert answer.run.days == pytest.approx(steps * answer.cost.step_s / 86400)
    assert answer.run.gpu_hours == pytest.approx(answer.run.days * 24 * 1024)
    assert answer.run.cost == pytest.approx(2 * answer.run.gpu_hours)


def test_knobs_from_texts_lists_and_mappings() -> None:
    assert knobs("tp=8,pp=2", "fix") == knobs(["tp=8", "pp=2"], "fix") == knobs({"tp": 8, "pp": 2}, "fix") == {"tp": 8, "pp": 2}
    with pytest.raises(SpecError, match="stands twice"):
        knobs(["tp=8", "tp=4"], "fix")


def test_a_plan_takes_the_frameworks_defaults_and_names_them() -> None:
    job = read_job(read_request(GPT3, keys=JOB_KEYS))
    plan, assumed = complete(job, {"tp": 8, "pp": 8, "recompute": FULL})
    assert (plan.tp, plan.pp, plan.recompute) == (8, 8, FULL)
    assert set(assumed) == {"zero", "vpp", "pipeline_layout", "sequence_parallel"}
    assert complete(job, {})[1] == ("recompute", "zero")
    moe = read_job(read_request({"model": "mixtral-8x7b", "cluster": "h100x64", "seq_len": 4096, "global_batch": 64}, keys=JOB_KEYS))
    assert complete(moe, {"tp": 4, "ep": 8})[0].etp == 4  # Megatron-LM: --expert-tensor-parallel-size defaults to tp
    assert complete(moe, {"tp": 4, "ep": 8, "etp": 1})[0].etp == 1


def test_a_plan_that_no_mesh_has_is_refused() -> None:
    job = read_job(read_request(GPT3, keys=JOB_KEYS))
    for fields in ({"tp": 3}, {"tp": 2048}, {"tp": 8, "dp": 4}):
        with pytest.raises(PlanError):
            complete(job, fields)
    assert complete(job, {"tp": 8, "pp": 8, "dp": 16})[0] == complete(job, {"tp": 8, "pp": 8})[0]


def test_the_persons_plan_is_estimated_the_same_everywhere() -> None:
    plan = "tp=8,pp=8,recompute=full"
    current = tuner.search(**GPT3, current=plan, fix=["tp=8", "cp=1", "offload=none"]).current
    assert current is not None
    assert current.ranked.row.step_s == tuner.estimate(**GPT3, plan=plan).cost.step_s


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_job_file_holds_what_the_command_line_would(tmp_path: Path) -> None:
    name = write(tmp_path / "job.yaml", "model: gpt3-175b\ncluster: a100x1024\nseq_len: 2048\nglobal_batch: 1536\ntop: 3\nfix: [tp=8]\n")
    assert read_job(read_request({"job": name}, keys=JOB_KEYS)) == read_job(read_request(GPT3, keys=JOB_KEYS))
    request = read_request({"job": name, "global_batch": "512"}, keys=(*JOB_KEYS, *SEARCH_KEYS))
    assert (request.global_batch, request.top, request.fix) == ("512", "3", ["tp=8"])


def test_files_are_looked_for_beside_the_job_file(tmp_path: Path) -> None:
    text = (presets.configs_dir() / "models/tiny.yaml").read_text()
    write(tmp_path / "mine.yaml", text.replace("name: tiny\n", "name: mine\n"))
    name = write(tmp_path / "job.yaml", "model: mine.yaml\ncluster: h100x8\nseq_len: 128\nglobal_batch: 8\n")
    assert read_job(read_request({"job": name}, keys=JOB_KEYS)).model.name == "mine"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("modle: x", "did you mean model"),
        ("top: true", "text or a number"),
        ("model: {layers: 3}", "text or a number"),
        ("deadline: 30", "unit"),
    ],
)
def test_a_job_file_is_read_strictly(line: str, words: str, tmp_path: Path) -> None:
    name = write(tmp_path / "job.yaml", f"cluster: h100x8\nseq_len: 128\nglobal_batch: 8\n{line}\n")
    with pytest.raises(SpecError, match=words):
        tuner.search(job=name, **({} if "model" in line else {"model": "tiny"}), tokens="1B")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cluster": "h100x64", "gpus": 128}, "contradicts"),
        ({"gpus": "8..16"}, "needed|missing|tokens"),
        ({"price": 2}, "needs tokens"),
        ({"deadline": "30d"}, "tokens"),
        ({"trials": 5}, "means nothing"),
        ({"lora_rank": 8}, "task lora"),
        ({"space": "nope"}, "no such space"),
        ({"limit": ["tp<1"]}, "leaves no value"),
        ({"precision": "mxfp8"}, "has no mxfp8"),
        ({"strategy": "tpe", "gpus": "8..16", "tokens": "1B"}, "cannot compare"),
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any], words: str) -> None:
    question = {"model": "tiny", "cluster": "h100", "seq_len": 128, "global_batch": 64} | options
    with pytest.raises(SpecError, match=words):
        tuner.search(**question)


def test_every_job_preset_is_answered_with_believable_figures() -> None:
    for name in presets.names("jobs"):
        answer = tuner.search(job=name, top=3)
        assert answer.feasible, name
        for plan in answer.ranking:
            assert 0.0 < plan.row.mfu < 0.8, (name, plan.row)
            assert plan.row.low_s < plan.row.step_s < plan.row.high_s
            assert plan.row.p_oom < 0.05


def test_the_deadline_chooses_the_cheapest_count_that_meets_it() -> None:
    question = {"model": "llama3-8b", "cluster": "h100", "seq_len": 8192, "global_batch": 512, "tokens": "100B", "space": "plain-3d"}
    days = {count["gpus"]: count["days"] for count in tuner.search(**question, gpus="64..256:64").counts}
    assert days[192] is None  # no data-parallel degree of 192 GPUs divides the batch
    assert days[64] > days[128] > days[256]
    answer = tuner.search(**question, gpus="64..256:64", deadline=(days[64] + days[128]) / 2 * 86400)
    assert [count["meets_deadline"] for count in answer.counts] == [False, True, False, True]
    hours = {count["gpus"]: count["gpu_hours"] for count in answer.counts if count["meets_deadline"]}
    assert answer.job.gpus == min(hours, key=lambda gpus: hours[gpus])
    too_short = tuner.search(**question, gpus="64..128:64", deadline=days[256] * 86400 / 2)
    assert not too_short.feasible
    assert "the fastest, 128 GPUs" in too_short.why_nothing


def test_why_nothing_names_the_rule_or_the_stage() -> None:
    nothing = tuner.search(model="llama3-70b", cluster="h100x8", seq_len=8192, global_batch=64, fix={"tp": 3})
    assert not nothing.feasible
    assert "[heads-tp]" in nothing.why_nothing
    full = tuner.search(model="llama3-405b", cluster="h100x8", seq_len=8192, global_batch=64, fix={"tp": 8, "offload": "none"})
    assert not full.feasible
    assert "stage 0 needs" in full.why_nothing


def test_the_current_plan_may_be_a_plan() -> None:
    answer = tuner.search(model="tiny", cluster="h100x8", seq_len=128, global_batch=64, current=Plan(tp=2, pp=2, vpp=2))
    assert answer.current is not None
    assert answer.current.assumed == ()
    assert answer.current.gain is not None


def test_a_range_may_stand_beside_a_counted_cluster_that_it_holds() -> None:
    question = {"model": "tiny", "seq_len": 128, "global_batch": 64, "tokens": "1B", "fix": ["offload=none"]}
    counted, kind = (tuner.search(cluster=cluster, gpus="8..16", **question) for cluster in ("h100x16", "h100"))
    assert [count["gpus"] for count in counted.counts] == [8, 16]
    assert counted.record()["ranking"] == kind.record()["ranking"]
    with pytest.raises(SpecError, match="contradicts"):
        tuner.search(cluster="h100x64", gpus="8..16", **question)
