"""Searches whose runs are proxies: what runs, once, and what is told of the plans."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import tuner
from tests.jobs import calibration_of
from tests.search.small import small_job
from tuner.cost_model.estimate import estimate
from tuner.errors import SpecError
from tuner.files import write
from tuner.launch.orders import save_result
from tuner.launch.supervised import Ended
from tuner.launch.trial import Result, Trial, json_text, read_result, read_trial
from tuner.plan import Plan
from tuner.profiling.ledger import read
from tuner.profiling.proxies import LEDGER, ProxyRunner
from tuner.profiling.standing import noise, standings
from tuner.report.search import search_text
from tuner.report.table import Page
from tuner.search.beliefs import Ran
from tuner.search.candidates import Candidates

SLOWER = 1.4  # than the model says


@dataclass
class Machine:
    """A runner whose answers are the model's, times SLOWER, of exactly what it was asked for."""

    name: str = "local"
    parallel: int = 1
    end: Any = "ok"
    calibration: str = "none"
    asked: list[Trial] = field(default_factory=list)

    def start(self, trial: Trial) -> Ended:
        self.asked.append(trial)
        write(trial.folder / "trial.json", json_text(trial.record()))
        step_s = SLOWER * float(estimate(trial.job, trial.plan, calibration_of(trial.job, self.calibration)).step_s)
        ok = {"step_s": step_s, "spread_s": 0.0, "steps": 5, "memory_bytes": 1e9}
        timed: dict[str, Any] = ok if self.end == "ok" else {"reason": "no room"}
        now = time.time()
        return Ended(save_result(trial.folder, Result(end=self.end, started=now - 30.0, ended=now, versions={}, **timed)))

    def attach(self, trial: Trial) -> Ended | None:
        result = read_result(trial.folder)
        return Ended(result) if result else None


PLANS = (Plan(tp=8, zero=1), Plan(tp=8, pp=2), Plan(tp=4, pp=2, zero=1), Plan(tp=8, pp=2, vpp=2))


def runner_of(folder: Path, machine: Machine, **changes: Any) -> ProxyRunner:
    job = small_job()
    fields: dict[str, Any] = {"inner": machine, "job": job, "plans": PLANS, "calibration": calibration_of(job), "software": "s"}
    return ProxyRunner(**fields | changes).of_search("study", folder)


def trial_of(folder: Path, number: int, plan: Plan) -> Trial:
    path = folder / "trials" / str(number)
    path.mkdir(parents=True)
    return Trial(number=number, job=small_job(), plan=plan, folder=path)


def test_a_proxy_runs_once_and_tells_every_plan_of_it(tmp_path: Path) -> None:
    machine, job = Machine(), small_job()
    runner, known = runner_of(tmp_path, machine), calibration_of(job)
    for number, plan in enumerate((PLANS[1], PLANS[3], PLANS[2])):
        result = runner.start(trial_of(tmp_path, number, plan)).poll()
        assert result is not None
        assert result.step_s == pytest.approx(SLOWER * float(estimate(job, plan, known).step_s))
        assert (result.end, result.memory_bytes, result.extrapolated) == ("ok", None, runner.spreads[1])
        assert result.ended - result.started == pytest.approx(0.0 if number == 1 else 30.0, abs=1.0)
    assert [trial.plan for trial in machine.asked] == [Plan(tp=8), Plan(tp=4, zero=1)]  # pp 2 and pp 2 x vpp 2 are the same in small
    assert {trial.job.gpus for trial in machine.asked} == {8}
    assert [entry.plan["tp"] for entry in read(tmp_path / LEDGER)] == [8, 4]
    assert read_trial(tmp_path / "trials/1").plan == Plan(tp=8)  # also where it was known


def test_what_a_proxy_measured_is_shared_between_searches(tmp_path: Path) -> None:
    shared, machine = tmp_path / "shared.jsonl", Machine()
    for name in ("one", "two"):
        runner = runner_of(tmp_path / name, machine, shared=shared)
        assert runner.start(trial_of(tmp_path / name, 0, PLANS[1])).poll() is not None
    assert len(machine.asked) == 1
    other = runner_of(tmp_path / "three", machine, shared=shared, software="another torch")
    assert other.start(trial_of(tmp_path / "three", 0, PLANS[1])).poll() is not None
    assert len(machine.asked) == 2


def test_a_fault_of_the_machine_is_not_kept(tmp_path: Path) -> None:
    machine = Machine(end="infrastructure")
    runner = runner_of(tmp_path, machine)
    assert runner.start(trial_of(tmp_path, 0, PLANS[1])).poll().end == "infrastructure"  # type: ignore[union-attr]
    machine.end = "ok"
    assert runner.start(trial_of(tmp_path, 1, PLANS[1])).poll().end == "ok"  # type: ignore[union-attr]
    assert len(machine.asked) == 2


def test_a_run_that_a_dead_driver_left_is_taken_over(tmp_path: Path) -> None:
    machine = Machine()
    trial = trial_of(tmp_path, 0, PLANS[1])
    first = runner_of(tmp_path, machine).start(trial).poll()
    (tmp_path / LEDGER).unlink()  # it died before it kept the result
    again = runner_of(tmp_path, machine).attach(trial)
    assert again is not None
    assert again.poll() == first
    assert len(read(tmp_path / LEDGER)) == 1
    assert runner_of(tmp_path, machine).attach(trial_of(tmp_path, 1, PLANS[2])) is None


def test_times_of_another_calibration_are_not_taken(tmp_path: Path) -> None:
    runner = runner_of(tmp_path, Machine())
    known = calibration_of(small_job())
    other = dataclasses.replace(runner, calibration=known.replace(kernel=known.kernel.replace(offset=known.kernel.offset + 0.01)))
    assert runner.told != other.told


def test_what_is_believed_of_a_proxy_is_less_sure_and_says_nothing_of_memory() -> None:
    of = Candidates.of(small_job(), PLANS, calibration_of(small_job()))
    beliefs, step_s = of.beliefs(), float(of.step_s[1]) * SLOWER
    before, own, proxy = (beliefs.given(ran) for ran in ([], [Ran(1, "ok", step_s)], [Ran(1, "ok", step_s, own=0.2)]))
    assert own.deviation[1] < proxy.deviation[1] < before.deviation[1]
    assert before.log_s[2] < proxy.log_s[2] < own.log_s[2]
    assert proxy.fits == pytest.approx(before.fits)
    assert (own.fits >= before.fits).all()
    assert (beliefs.given([Ran(1, "oom")]).fits < before.fits).any()


def test_a_proxied_plan_stands_as_one() -> None:
    of = Candidates.of(small_job(), PLANS, calibration_of(small_job()))
    result = Result(end="ok", step_s=float(of.step_s[1]), spread_s=0.0, steps=5, extrapolated=0.15)
    assert noise(result) == pytest.approx(math.hypot(0.15, 0.005))
    found = {one.index: one for one in standings(of, [Ran(1, "ok", result.step_s, own=0.15)], {1: result})}
    assert [found[i].basis for i in range(4)] == ["calibrated", "proxy", "calibrated", "calibrated"]
    assert found[1].fits < 1.0
    wide = found[1].widened(0.3)
    half = math.log(found[1].high_s / found[1].low_s) / 2
    assert math.log(wide.high_s / wide.step_s) == pytest.approx(math.hypot(half, 1.645 * 0.3))
    assert wide.step_s == found[1].step_s
    assert found[1].widened(0.0) == found[1]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    found = Machine(calibration="auto")
    monkeypatch.setattr("tuner.launch.runner.open_runner", lambda name, setup: found)
    monkeypatch.setattr("tuner.profiling.measured._check_machine", lambda measure, job: None)  # it stands in for one with such GPUs
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return found


ASKED: dict[str, Any] = {
    "model": "llama3-8b", "cluster": "h100x32", "seq_len": "8k", "global_batch": 256, "fix": "cp=1,vpp=1", "proxy": True,
}  # fmt: skip


def test_a_search_by_proxies(machine: Machine, tmp_path: Path) -> None:
    answer = tuner.search(**ASKED, profile=5, folder=tmp_path / "out", top=40)
    assert machine.asked
    assert all(trial.job.gpus <= 8 and trial.plan.pp == 1 and trial.short is None for trial in machine.asked)
    assert len({(trial.plan, trial.job.model.layers) for trial in machine.asked}) == len(machine.asked)  # none twice
    record = answer.record()
    results = [run["result"] for run in record["measured"]["trials"]]
    assert len(results) == 5 >= len(machine.asked)
    assert all(result["end"] == "ok" and result["basis"].startswith("proxy of ") for result in results)
    for run in record["measured"]["trials"]:
        assert run["result"]["step_s"] == pytest.approx(SLOWER * run["predicted_s"], rel=1e-6)
    bases = {row["basis"] for row in record["ranking"]}
    assert bases == {"proxy", "calibrated"}
    best = record["ranking"][0]
    assert best["basis"] == "proxy"  # a plan that no proxy told is not ranked before the best that one did
    assert best["low_tokens_per_s_per_gpu"] < best["tokens_per_s_per_gpu"] < best["high_tokens_per_s_per_gpu"]
    assert record["measured"]["together"] > 0.0
    assert answer.measured is not None
    assert answer.measured.calibration == ""  # extrapolated times are no runs to calibrate by
    for width in (60, 120):
        text = search_text(record, Page(width=width))
        assert "extrapolated" in text
        assert max(map(len, text.splitlines())) <= width
    assert json.loads(json.dumps(record)) == record


def test_a_search_by_proxies_goes_on_where_it_was(machine: Machine, tmp_path: Path) -> None:
    first = tuner.search(**ASKED, profile=3, folder=tmp_path / "out")
    ran = len(machine.asked)
    again = tuner.search(**ASKED, profile=3, folder=tmp_path / "out")
    assert len(machine.asked) == ran
    assert first.measured is not None
    assert again.measured is not None
    assert again.measured.record()["trials"] == first.measured.record()["trials"]


def test_without_proxies_the_whole_job_runs_in_short_steps(machine: Machine, tmp_path: Path) -> None:
    asked = {name: value for name, value in ASKED.items() if name != "proxy"} | {"global_batch": 4096}
    tuner.search(**asked, profile=3, folder=tmp_path / "out")
    assert {trial.job.gpus for trial in machine.asked} == {32}
    counts = [trial.short for trial in machine.asked]
    assert any(counts)
    for trial in machine.asked:
        assert trial.short is None or trial.short[1] == 2 * trial.short[0] >= 2 * trial.plan.pp
    tuner.search(**asked, profile=3, folder=tmp_path / "whole", full_steps=True, no_cache=True)
    assert all(trial.short is None for trial in machine.asked[len(counts) :])
    assert len(machine.asked) > len(counts)


def test_accelerator_time_of_a_proxy_is_that_of_its_node(machine: Machine, tmp_path: Path) -> None:
    # runs of 30 s on 8 accelerators: 240 s each, 480 s in all
    answer = tuner.search(**ASKED, budget="7.5gpu-min", folder=tmp_path / "out")
    assert answer.measured is not None
    assert len(machine.asked) == 2
    assert answer.measured.ended.why == "0.125 accelerator-hours are spent"


@pytest.mark.parametrize("other", [{"runner": "replay"}, {"command": __file__}])
def test_proxies_are_of_the_built_in_workload(other: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"proxy.*a program of your own cannot be cropped"):
        tuner.search(**ASKED, profile=2, **other)
