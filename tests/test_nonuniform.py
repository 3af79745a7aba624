"""`tuner profile --ntp`: a nonuniform step really run on this machine, and what it refuses."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from typer.testing import CliRunner

import tuner
from tuner.cli.app import app
from tuner.nonuniform import read_degrees
from tuner.report.nonuniform import nonuniform_text
from tuner.report.table import Page

if TYPE_CHECKING:
    from pathlib import Path

SMALL = {"name": "small", "layers": 2, "hidden": 64, "ffn_hidden": 96, "heads": 4, "kv_heads": 4, "head_dim": 16, "vocab": 96}


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL))
    return str(path)


def test_a_nonuniform_step_beside_a_uniform_one(model: str, tmp_path: Path) -> None:
    argv = ["profile", "--ntp", "--degrees", "2,1", "-m", model, "-s", "15", "-b", "3", "--steps", "3", "-q", "-o", str(tmp_path / "out")]
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out/profile.json").read_text())
    assert (record["uniform"]["degrees"], record["nonuniform"]["degrees"], record["processes"]) == ([2, 2], [2, 1], 4)
    assert record["uniform"]["samples"] == [2, 1] and record["nonuniform"]["samples"] == [2, 1]
    assert record["losses_apart"] < 1e-5, "both train the same model"
    assert record["uniform"]["step_s"] > 0 and record["nonuniform"]["steps"] == 2
    core, spare = record["ranks"]
    assert (core["spare"], spare["spare"]) == (False, True)
    assert spare["before_sent"] == core["before_received"] == pytest.approx(spare["formula"])  # all widths are even
    assert spare["before_sent"] < spare["after_received"], "with the replicated gradients"
    assert all(one["total_s"] >= 0 and one["exposed_s"] >= 0 for one in record["reshard"].values())
    text = nonuniform_text(record, Page(width=60))
    assert "reshard before the sum" in text and all(len(line) <= 60 for line in text.splitlines())
    assert (tmp_path / "out/log.txt").read_text().count("tuner-step") == 18


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"degrees": "4"}, "two replicas or more, of different degree"),
        ({"degrees": "4,4"}, "of different degree"),
        ({"degrees": "4,0"}, "degrees"),
        ({"degrees": "4,x"}, "degrees"),
        ({"degrees": "8,7", "global_batch": 1}, "one for each of 2 replicas"),
        ({"model": "mixtral-8x7b"}, "runs dense models alone"),
        ({"model": "deepseek-v3"}, "experts"),
        ({"model": "nothing"}, "no such model"),
        ({"degrees": "64,1"}, "heads"),
        ({"steps": 2}, "warm-up"),
        ({"micro_batch": 0}, "micro_batch"),
        ({"layers": 2}, "is no argument of this verb"),
    ],
)
def test_what_it_refuses(given: dict[str, Any], words: str) -> None:
    with pytest.raises(tuner.SpecError, match=words):
        tuner.profile_ntp(**given)


def test_degrees() -> None:
    assert read_degrees("4, 3,2") == (4, 3, 2) == read_degrees([4, 3, 2])


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["profile"], "DIR: is missing"),
        (["profile", "out", "--ntp"], "means nothing to --ntp"),
        (["profile", "--ntp", "--profile", "8"], "means nothing to --ntp"),
        (["profile", "out", "--degrees", "4,3"], "concerns --ntp alone"),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], words: str) -> None:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == 2 and words in result.stderr.replace("= 'out'", "")
