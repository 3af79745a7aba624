"""What the documents say is so: their YAML loads, their options exist, their links lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tuner
from tests.terminal import ROOT
from tests.test_cli import ROW
from tuner import presets
from tuner.cli.app import app
from tuner.load import load_file
from tuner.search.space import SpaceSpec

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
VERBS = ("search", "profile", "estimate", "explain", "check", "export", "failures", "presets", "validate", "replay", "calibrate", "doctor")


def blocks(path: Path) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", path.read_text(), re.DOTALL)


def help_of(verb: str) -> str:
    return CliRunner().invoke(app, [verb, "--help"]).stdout


def test_yaml_of_the_files_page_loads(tmp_path: Path) -> None:
    job, model, cluster, space, data = (tmp_path / f"{name}.yaml" for name in ("job", "model", "cluster", "space", "data"))
    for path, text in zip((job, model, cluster, space, data), blocks(ROOT / "docs/files.md"), strict=True):
        path.write_text(text)
    assert tuner.search(job=str(job), top=1).ranking
    assert presets.model(str(model)).moe is not None
    assert presets.cluster(str(cluster)).gpus == 256
    assert presets.failure(str(data)).mtbf.value == 60_000 * 3600
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


def test_the_sample_of_the_readme_is_what_the_command_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command still runs, and prints the same parts; the figures are those of the day."""
    monkeypatch.setenv("COLUMNS", "120")
    samples = re.findall(r"^\$ tuner (.+)\n((?:.+\n|\n)+?)```", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert samples
    for command, printed in samples:
        result = CliRunner().invoke(app, shlex.split(command))
        assert result.exit_code == 0, result.stderr
        assert labels(result.stdout) == labels(printed)


def labels(report: str) -> list[str]:
    """The first line, and the words at the left of the others."""
    return [report.splitlines()[0], *re.findall(r"^[a-z]+\b", report, re.MULTILINE)[1:]]


def test_the_accuracy_table_goes_between_its_marks(tmp_path: Path) -> None:
    document, rows = tmp_path / "page.md", tmp_path / "rows.jsonl"
    document.write_text("before\n<!-- accuracy -->\nstale\n<!-- /accuracy -->\nafter\n")
    rows.write_text(json.dumps(ROW) + "\n")
    script = [sys.executable, str(ROOT / "benchmarks/accuracy.py"), "--write", str(document), str(rows)]
    for _ in range(2):  # again: the block is replaced
        subprocess.run(script, check=True, timeout=120)
    text = document.read_text()
    assert text.startswith("before\n<!-- accuracy -->\n1 public runs scored")
    assert text.endswith("<!-- /accuracy -->\nafter\n")
    assert "stale" not in text
    assert text.count("| step time: median error, 90th percentile | ") == 1
    said = tuner.validate(rows).record()["summary"]["time"]["median_abs_err"]
    assert f"{100 * said:.1f}%" in text
    document.write_text("no marks")
    assert subprocess.run(script, check=False, capture_output=True, timeout=120).returncode == 1
    assert document.read_text() == "no marks"


def test_the_readme_has_the_marks_of_the_accuracy_table_and_names_its_command() -> None:
    text = (ROOT / "README.md").read_text()
    assert re.search(r"<!-- accuracy -->\n(.|\n)+<!-- /accuracy -->\n\n`python benchmarks/accuracy.py --write README.md", text)
