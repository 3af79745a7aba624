"""`tuner search --export`: one question, each format's files of the best plan that it can launch."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tuner
from tests.launch.launchers.plans import job_of, legal_plans
from tests.terminal import run
from tuner.cost_model.calibration import load_calibration
from tuner.cost_model.estimate import estimate
from tuner.cost_model.rules import broken
from tuner.errors import SpecError
from tuner.exporting import Exported
from tuner.found import SearchAnswer
from tuner.launch.launchers.launcher import open_launcher
from tuner.plan import CP_KINDS, Plan
from tuner.search.space import SpaceSpec
from tuner.spelling import spellable
from tuner.translation import moved

SIX = ("megatron-lm", "megatron-bridge", "torchtitan", "maxtext", "deepspeed", "nemo")
QUESTION: dict[str, Any] = {"model": "llama3-8b", "cluster": "h100x16", "seq_len": 8192, "global_batch": 64}
OPTIONS = ("-m", "llama3-8b", "-c", "h100x16", "-s", "8k", "-b", "64")


@pytest.fixture(scope="module")
def answer() -> SearchAnswer:
    return tuner.search(**QUESTION, export=(*SIX, "accelerate", "nanotron", "primus", "neutral"))


def formats(answer: SearchAnswer) -> dict[str, Exported]:
    assert answer.exported is not None
    return dict(answer.exported.formats)


def test_every_format_has_a_plan_that_its_framework_runs(answer: SearchAnswer) -> None:
    assert answer.exported is not None and not answer.exported.refused
    assert len(formats(answer)) == 10
    for name, one in formats(answer).items():
        assert one.legal and not one.too_large and one.place is not None
        assert not [rule.id for rule, _ in broken(one.job, one.plan) if rule.severity == "error"]
        launcher = open_launcher(name)
        assert one.job.framework.name == (launcher.framework if name != "neutral" else "megatron-lm")
        version = launcher.versions[-1] if launcher.versions else ""
        assert launcher.write(one.job, one.plan, version).files.items() <= one.written.files.items()
        cost = estimate(one.job, one.plan, load_calibration("auto", one.job))
        assert one.step_s == float(cost.step_s) and float(cost.p_oom) < 0.05


def test_the_best_plan_is_written_where_the_format_can(answer: SearchAnswer) -> None:
    best = answer.ranking[0].row.plan
    for name in ("megatron-lm", "primus", "neutral"):
        one = formats(answer)[name]
        assert one.plan == best and one.place is not None and (one.place.rank, one.place.why) == (1, ())


def test_another_plan_is_never_written_silently(answer: SearchAnswer) -> None:
    best = answer.ranking[0].row.plan
    listed = [one.row.plan for one in answer.ranking]
    others = {name: one for name, one in formats(answer).items() if one.place is not None and one.place.rank != 1}
    assert {"torchtitan", "deepspeed", "accelerate", "nanotron"} <= set(others)
    for name, one in others.items():
        assert one.place is not None and one.place.why
        refused = {problem.path for problem in one.place.why}
        launcher, version = open_launcher(name), (open_launcher(name).versions or ("",))[-1]
        if "" not in refused:  # a knob is to blame: the launcher says so itself
            with pytest.raises(SpecError):
                launcher.write(one.job, moved(best, one.job, SpaceSpec()), version)
        if one.place.rank is not None:
            assert one.plan == moved(listed[one.place.rank - 1], one.job, SpaceSpec())
        else:
            assert one.place.ahead is not None and one.place.ahead >= 0


@pytest.mark.parametrize("name", ["deepspeed", "accelerate", "torchtitan", "nanotron", "maxtext"])
def test_no_plan_that_the_format_can_write_is_faster(name: str, answer: SearchAnswer) -> None:
    """Against random legal plans of its own framework: those that fit, and that it writes, are no faster (by more than a listed plan
    may be slower).
    """
    one, launcher = formats(answer)[name], open_launcher(name)
    calibration = load_calibration("auto", one.job)
    plans = legal_plans(launcher.framework, "llama3-8b", count=400, seed=3, cannot=frozenset(launcher.cannot))
    held = [moved(plan, one.job, SpaceSpec()) for plan in plans]
    cost = estimate(one.job, Plan.table(held), calibration)
    faster = np.flatnonzero((cost.step_s * 1.005 < one.step_s) & (cost.p_oom < 0.05))
    for index in faster.tolist():
        if [rule for rule, _ in broken(one.job, held[index]) if rule.severity != "warning"]:
            continue
        with pytest.raises(SpecError):
            launcher.write(one.job, held[index], (launcher.versions or ("",))[-1])
    assert (cost.p_oom < 0.05).any()


def test_how_many_plans_are_ahead_is_counted_over_the_whole_search() -> None:
    """With every plan of a small space listed, the count is the number of rows above."""
    space = SpaceSpec(
        fix={"vpp": 1, "cp": 1, "recompute": "full", "pipeline_layout": "even", "offload": "none", "zero": 1, "micro_batch": 1}
    )
    question = {**QUESTION, "space": space, "all": True, "top": 1000}
    every = tuner.search(**question)
    small = tuner.search(**{**question, "top": 1}, export="nanotron")
    one = formats(small)["nanotron"]
    assert one.place is not None
    own = moved(one.plan, small.job, space)
    step = float(estimate(small.job, own, small.calibration).step_s)
    if one.place.rank is None:
        assert one.place.ahead == sum(row.row.step_s < step for row in every.ranking)
    else:
        assert one.place.rank == 1
    assert len(every.ranking) == every.space["fit"]


def test_a_knob_that_the_person_fixed_is_not_given_up() -> None:
    answer = tuner.search(**QUESTION, fix="pp=2", export="deepspeed,megatron")
    assert answer.exported is not None
    assert list(answer.exported.formats) == ["megatron-lm"] and answer.exported.exit_code == 2
    assert any("no plan of this search" in problem.rule for problem in answer.exported.refused["deepspeed"])
    assert any(problem.path == "pp" for problem in answer.exported.refused["deepspeed"])


def test_a_model_that_a_format_has_no_words_for_is_refused_by_name() -> None:
    answer = tuner.search(model="gpt2-xl", cluster="a100x8", seq_len=1024, global_batch=256, export="torchtitan,megatron")
    assert answer.exported is not None
    assert [problem.path for problem in answer.exported.refused["torchtitan"]] == ["model"]


def test_limits_hold_for_every_format() -> None:
    answer = tuner.search(**QUESTION, limit=["tp<=2", "micro_batch==1"], max_memory="60 GB", export="deepspeed,nanotron,torchtitan")
    for one in formats(answer).values():
        assert one.plan.tp <= 2 and one.plan.micro_batch == 1 and one.memory_bytes <= 60e9


def test_other_objectives() -> None:
    lean = formats(tuner.search(**QUESTION, objective="memory", export="deepspeed"))["deepspeed"]
    fast = formats(tuner.search(**QUESTION, export="deepspeed"))["deepspeed"]
    assert lean.memory_bytes < fast.memory_bytes
    robust = tuner.search(**QUESTION, objective="goodput", export="megatron-lm")
    assert formats(robust)["megatron-lm"].plan.fallback in (0, formats(robust)["megatron-lm"].plan.tp)


def test_what_cannot_be_wrapped_is_written_all_the_same() -> None:
    answer = tuner.search(**QUESTION, export="megatron,kubernetes,slurm")
    assert answer.exported is not None and set(answer.exported.refused) == {"kubernetes"}
    files = formats(answer)["megatron-lm"].written.files
    assert "job.sbatch" in files and "pretrain.sh" in files


def test_the_question_is_read_before_the_search() -> None:
    for export, site in (("megatrom", None), ("megatron,slurm", "none.yaml"), ("slurm", None)):
        with pytest.raises(SpecError):
            tuner.search(**QUESTION, export=export, site=site)
    assert run("search", *OPTIONS, "--export", "megatron").returncode == 2


def test_replicas_of_two_degrees_are_no_matter_of_a_search() -> None:
    answer = tuner.search(**QUESTION, export="ntp,megatron")
    assert answer.exported is not None and "GPUs that failed" in answer.exported.refused["megatron-lm-ntp"][0].rule


def test_a_format_with_one_kind_of_context_parallelism_gets_it() -> None:
    """torchtitan gathers keys and values; the search looks at p2p and a2a where nobody says more. 131,072 tokens need the cut."""
    long = {"model": "llama3-8b", "cluster": "h100x32", "seq_len": 131072, "global_batch": 16}
    one = formats(tuner.search(**long, export="torchtitan"))["torchtitan"]
    assert one.plan.cp > 1 and one.plan.cp_kind == CP_KINDS["all_gather"]


def test_knobs_that_nobody_named_are_as_the_new_framework_has_them() -> None:
    plan = Plan(tp=2, sequence_parallel=1, zero=1)
    job = job_of("megatron-bridge", "llama3-8b")
    assert moved(plan, job, SpaceSpec()).dp_overlap == 1
    assert moved(plan, job, SpaceSpec(fix={"dp_overlap": False})).dp_overlap == 0
    assert moved(plan, job, SpaceSpec()).zero == 1


def test_the_space_of_a_format_leaves_out_what_it_cannot_say() -> None:
    job = job_of("accelerate", "llama3-8b")
    spec = spellable(SpaceSpec(fix={"vpp": 2}), job, open_launcher("accelerate").cannot)
    assert spec.fix["pp"] == 1 and spec.fix["vpp"] == 2 and spec.fix["pipeline_layout"] == "even"
    assert not any(":" in str(value) for value in spec.axes["recompute"])


def test_files_and_words_of_the_command_line(tmp_path: Path) -> None:
    done = run("search", *OPTIONS, "--export", "megatron,torchtitan,maxtext,deepspeed,slurm", "-o", str(tmp_path), COLUMNS="120")
    assert done.returncode == 0, done.stderr
    best = tmp_path / "best"
    assert {path.name for path in best.iterdir()} == {"megatron-lm", "torchtitan", "maxtext", "deepspeed"}
    assert all((folder / name).is_file() for folder in best.iterdir() for name in ("job.sbatch", "verify.sh", "prediction.json"))
    kept = json.loads((tmp_path / "search.json").read_text())["export"]["formats"]
    assert kept["megatron-lm"]["place"] == {"rank": 1, "ahead": None, "why": []}
    assert kept["deepspeed"]["place"]["why"] and kept["deepspeed"]["tokens_per_s_per_gpu"] > 0
    assert "tuner: deepspeed: not the best plan but " in done.stderr and "wrote" in done.stderr
    assert re.search(r"^not 1 .*: ", done.stdout, re.MULTILINE)
    assert re.search(r"\(rank 1 takes [\d.]+ s as megatron-lm\)", " ".join(done.stdout.split()))
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_a_job_file_may_ask_for_the_files(tmp_path: Path) -> None:
    assert run("search", *OPTIONS, "--export", "megatron", "-o", str(tmp_path / "one")).returncode == 0
    job = str(tmp_path / "one/job.yaml")
    again = run("search", "--job", job, "-o", str(tmp_path / "two"))
    assert again.returncode == 0 and (tmp_path / "two/best/megatron-lm/pretrain.sh").is_file()
    nowhere = run("search", "--job", job)
    assert nowhere.returncode == 0 and "the best plan's files are not written: -o DIR" in nowhere.stderr


def test_json_is_the_twins() -> None:
    ours = json.loads(json.dumps(tuner.search(**QUESTION, export="deepspeed,torchtitan").record(), allow_nan=False))
    theirs = json.loads(run("search", *OPTIONS, "--export", "deepspeed,torchtitan", "--json").stdout)
    assert theirs["export"] == ours["export"]
