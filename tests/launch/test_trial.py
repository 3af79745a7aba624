"""Trials and results as files."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.jobs import gpt_job
from tuner.errors import SpecError
from tuner.launch.trial import RESULT, TRIAL, Result, Trial, json_text, read_result, read_trial
from tuner.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path


def test_a_trial_comes_back_from_its_folder(tmp_path: Path) -> None:
    trial = Trial(number=7, job=gpt_job(), plan=Plan(tp=2, recompute=128), folder=tmp_path, steps=5, wall_s=60.0, short=(2, 4))
    (tmp_path / TRIAL).write_text(json_text(trial.record()))
    assert read_trial(tmp_path) == trial


def test_a_result_comes_back_and_its_absence_is_none(tmp_path: Path) -> None:
    assert read_result(tmp_path) is None
    result = Result(end="oom", reason="CUDA out of memory", nodes=("n1",))
    (tmp_path / RESULT).write_text(json_text(result.model_dump(mode="json")))
    assert read_result(tmp_path) == result


def test_a_broken_result_is_named(tmp_path: Path) -> None:
    (tmp_path / RESULT).write_text('{"end": "fine"}')
    with pytest.raises(SpecError, match=r"result\.json: end = 'fine'"):
        read_result(tmp_path)
