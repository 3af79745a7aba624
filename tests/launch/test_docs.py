"""The examples of docs/runners.md are read by what they are meant for."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tests.launch.standin import trial
from tests.terminal import ROOT
from tuner.launch.command import read_command
from tuner.launch.site import Site, read_site
from tuner.launch.template import fill_command, names, values
from tuner.plan import FULL, Plan

if TYPE_CHECKING:
    from pathlib import Path

TEXT = (ROOT / "docs" / "runners.md").read_text()


def example(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.yaml"
    path.write_text(re.findall(rf"```yaml {kind}\n(.*?)```", TEXT, re.DOTALL)[0])
    return path


def test_the_site_shows_every_setting(tmp_path: Path) -> None:
    site = read_site(example("site", tmp_path))
    assert {name for name in Site.model_fields if getattr(site, name) != getattr(Site(), name)} == set(Site.model_fields) - {
        "gpus",
        "requeue",
    }


def test_the_command_is_filled_in(tmp_path: Path) -> None:
    command = read_command(example("command", tmp_path))
    facts = values(trial(tmp_path, plan=Plan(tp=2, sequence_parallel=1, recompute=FULL)))
    text = fill_command(command.command, facts, "docs")
    assert "--tensor-model-parallel-size 2" in text and "--sequence-parallel --recompute-granularity full" in text
    assert '--node-rank="${SLURM_NODEID:-0}"' in text


def test_every_placeholder_is_named() -> None:
    listed = TEXT.partition("Placeholders:")[2]
    assert [name for name in names() if f"`{name}`" not in listed and not name.endswith("_overlap")] == []
