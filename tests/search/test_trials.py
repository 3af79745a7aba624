"""Trials: whose they are, how they end, what a person's own make of them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import Any

import pytest

from tests.profiling.searches import candidates
from tuner.search import trials
from tuner.search.beliefs import Ran
from tuner.search.sampler import PlanSampler, ran_of
from tuner.search.trials import alive, ask, new_study, orphans, repeat, tell, tell_nothing, this_driver

COUNT = 6


@pytest.fixture
def of() -> Any:
    return candidates(COUNT)


def test_which_drivers_live() -> None:
    host, pid, since = this_driver().split(":")
    assert alive(this_driver())
    assert not alive(f"{host}:{pid}:{int(since) + 1}")  # its number came again
    assert not alive("") and not alive(f"{host}:x:y") and not alive(f"{host}:999999999:1")
    assert alive("another-host:1:2")
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    name = f"{socket.gethostname()}:{child.pid}:{trials.start_time(child.pid)}"
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not alive(name)  # a zombie
    child.wait()


def test_orphans_are_those_of_dead_drivers(of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    study = new_study(PlanSampler(of, "random"))
    assert ask(study, of) is not None
    with monkeypatch.context() as patch:
        patch.setattr(trials, "this_driver", lambda: f"{socket.gethostname()}:999999999:1")
        assert ask(study, of) is not None
    assert [trial.number for trial in orphans(study)] == [1]


def test_a_trial_is_told_once(of: Any) -> None:
    study = new_study(PlanSampler(of, "random"))
    trial, index = ask(study, of) or pytest.fail("nothing to run")
    tell(study, trial, Ran(index, "ok", 2.0))
    tell(study, trial, Ran(index, "ok", 3.0))
    tell_nothing(study, trial.number, {"result": {}})
    assert (study.trials[0].value, study.trials[0].state.name) == (2.0, "COMPLETE")


def test_a_repeat_is_no_proposal(of: Any) -> None:
    study = new_study(PlanSampler(of, "tpe"))
    assert repeat(study, 3).number == 0
    assert repeat(study, 3).number == 1
    assert ran_of(of, study) == ([], [])
    assert ask(study, of, 1) is not None and ask(study, of, 1) is None


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_a_person_enqueues_and_no_candidate_is_is_given_up(of: Any) -> None:
    study = new_study(PlanSampler(of, "random"))
    study.enqueue_trial({"micro_batch": 12345})
    study.enqueue_trial(dict.fromkeys(of.words[0], "?"))
    study.enqueue_trial(dict(of.words[4]))
    study.enqueue_trial(dict(of.words[4]))
    first, second = ask(study, of), ask(study, of)
    assert first is not None and second is not None and first[1] == 4 != second[1]
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "RUNNING", "FAIL", "RUNNING"]


def test_plain_types_that_a_dashboard_shows(of: Any) -> None:
    import json

    study = new_study(PlanSampler(of))
    trial, index = ask(study, of) or pytest.fail("nothing to run")
    tell(study, trial, Ran(index, "oom", None, 5.0), {"reason": "out"})
    told = study.trials[0]
    assert json.loads(json.dumps(told.params)) == told.params and json.loads(json.dumps(told.user_attrs)) == told.user_attrs
    assert all(type(value) in (int, str, bool, float) for value in told.params.values())
    assert (told.state.name, told.constraints, told.user_attrs["end"]) == ("PRUNED", {"memory": 1.0}, "oom")
