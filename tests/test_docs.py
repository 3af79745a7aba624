"""What the documents say is so: their YAML loads, their options exist, their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tuner
from tests.terminal import ROOT
from tuner import presets
from tuner.cli import app
from tuner.load import load_file
from tuner.search.space import SpaceSpec

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = ("search", "estimate", "explain", "presets", "validate", "doctor")


def blocks(path: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)


def help_of(verb: str) -> str:
    return CliRunner().invoke(app, [verb, "--help"]).stdout


def test_yaml_of_the_files_page_loads(tmp_path: Path) -> None:
    job, model, cluster, space = (tmp_path / f"{name}.yaml" for name in ("job", "model", "cluster", "space"))
    for path, text in zip((job, model, cluster, space), blocks(ROOT / "docs/files.md"), strict=True):
        path.write_text(text)
    assert tuner.search(job=str(job), top=1).ranking
    assert presets.model(str(model)).moe is not None
    assert presets.cluster(str(cluster)).gpus == 256
    assert load_file(SpaceSpec, space).fix == {"zero": 1, "cp": 1}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_named_files_exist(path: Path) -> None:
    text = path.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (path.parent / target).exists(), target
    for name in re.findall(r"`((?:tuner|configs|docs|tests|benchmarks)/[\w/.-]+)`", text):
        assert (ROOT / name.rstrip("/")).exists() or "NAME" in name or name == "tuner/configs", name


def test_documented_options_exist_and_all_options_are_documented() -> None:
    pages = {verb: set(re.findall(r"--[a-z][a-z-]+", help_of(verb))) for verb in VERBS}
    known = set().union(*pages.values()) | {"--version", "--install-completion"}
    text = (ROOT / "docs/commands.md").read_text()
    documented = set(re.findall(r"`(--[a-z][a-z-]+)", text)) | set(re.findall(r"[ \[](--[a-z][a-z-]+)", text))
    assert documented - known <= {"--rampup-batch-size"}
    short = {"--help", "--seq-len", "--gbs", "--quiet", "--verbose", "--out"}
    assert known - documented - short <= {"--version", "--install-completion"}


@pytest.mark.parametrize("verb", VERBS)
def test_examples_of_the_help_pages_parse(verb: str) -> None:
    for line in re.findall(r"^    ?tuner (.+)$", help_of(verb), re.MULTILINE):
        words = shlex.split(line)
        assert words[0] == verb
        result = CliRunner().invoke(app, [*words, "--help"])
        assert result.exit_code == 0, line
        for option in (word for word in words if word.startswith("-")):
            assert re.search(rf"(^|[\s,]){re.escape(option)}\b", help_of(verb)), option
