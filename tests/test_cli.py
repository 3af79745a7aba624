"""The command line: exit codes, JSON purity, plain output in a pipe, hostile input, no traceback ever."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.terminal import LLAMA, ROOT, TINY, run
from tuner.cli.app import app
from tuner.errors import InfrastructureError

VERBS = ("search", "estimate", "explain", "failures", "presets", "validate", "doctor")
PLAN = ("--plan", "tp=2,pp=2")
HEAVY = ("numpy", "optuna", "torch", "pydantic", "scipy", "yaml", "rich")

# One run of each verb that succeeds.
GOOD: dict[str, tuple[str, ...]] = {
    "search": ("search", *TINY, "--top", "3"),
    "estimate": ("estimate", *TINY, *PLAN),
    "explain": ("explain", *TINY, *PLAN),
    "failures": ("failures", *TINY, *PLAN, "--simulate", "--days", "20", "--traces", "3"),
    "presets": ("presets", "model", "tiny"),
    "validate": ("validate", "rows.jsonl"),
    "doctor": ("doctor",),
}
ROW = {
    "id": "one",
    "framework": "megatron-lm",
    "model": {"name": "gpt", "layers": 24, "hidden": 2048, "ffn_hidden": 8192, "heads": 16, "vocab": 51200, "seq_len": 2048},
    "cluster": {"gpu": "a100-80gb", "gpus": 8, "gpus_per_node": 8},
    "config": {"tp": 1, "pp": 1, "dp": 8, "micro_batch": 4, "global_batch": 64},
    "measured": {"step_time_s": 1.5},
}


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def assert_clean(result: Any) -> None:
    """No traceback, no internal error, and something to read whenever it failed."""
    assert "Traceback" not in result.stdout + result.stderr
    assert "internal error" not in result.stderr, result.stderr
    code = getattr(result, "returncode", getattr(result, "exit_code", None))
    assert code in (0, 1, 2, 3), result.stderr
    assert code == 0 or result.stderr.strip() or result.stdout.strip()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW) + "\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_help_is_fast_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; sys.argv = ['tuner', '--help']\nfrom tuner.cli import main\n"
        f"try: main()\nfinally: print([m for m in {HEAVY} if m in sys.modules])"
    )
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert listed.stdout.splitlines()[-1] == "[]"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert run("--help").returncode == 0
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    # processor time: on a machine with nothing else to do that is the time it takes
    assert (after.ru_utime - before.ru_utime) + (after.ru_stime - before.ru_stime) < 0.3


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb_names_its_options_and_an_example(verb: str) -> None:
    page = run(verb, "--help").stdout
    assert "--json" in page
    assert "--no-color" in page
    assert verb == "doctor" or f"  tuner {verb}" in page
    assert "\x1b" not in page


@pytest.mark.parametrize("verb", VERBS)
def test_json_is_all_that_stdout_has(verb: str, rows: Path) -> None:
    result = run(*GOOD[verb], "--json", "-v", cwd=rows)
    assert result.returncode == 0, result.stderr
    parsed = json.loads(result.stdout, parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))
    assert parsed


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("columns", [60, 120])
def test_plain_in_a_pipe_and_no_wider_than_the_page(verb: str, columns: int, rows: Path) -> None:
    result = run(*GOOD[verb], cwd=rows, COLUMNS=str(columns))
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    too_wide = [line for line in result.stdout.splitlines() if len(line) > columns and "/" not in line]  # paths are not broken
    assert too_wide == []


@pytest.mark.parametrize("verb", VERBS)
def test_out_writes_the_answer(verb: str, rows: Path) -> None:
    result = run(*GOOD[verb], "-o", "answer.json", "-q", cwd=rows)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert json.loads((rows / "answer.json").read_text())
    if verb != "search":
        assert run(*GOOD[verb], "-o", "deep/answer.txt", cwd=rows).stderr.strip() == "wrote deep/answer.txt"
        assert (rows / "deep/answer.txt").read_text().strip()


def test_out_of_a_search_is_a_folder_that_search_can_read_back(rows: Path) -> None:
    assert run(*GOOD["search"], "-o", "out", cwd=rows).returncode == 0
    assert sorted(path.name for path in (rows / "out").iterdir()) == ["job.yaml", "ranking.csv", "search.json"]
    first = json.loads((rows / "out/search.json").read_text())
    again = json.loads(run("search", "--job", "out/job.yaml", "--json", cwd=rows).stdout)
    assert again["ranking"] == first["ranking"]
    assert (rows / "out/ranking.csv").read_text().count("\n") == 1 + len(first["ranking"])


def test_an_unwritable_out_is_bad_input(rows: Path) -> None:
    (rows / "file").write_text("")
    result = run(*GOOD["estimate"], "-o", "file/answer.json", cwd=rows)
    assert result.returncode == 2
    assert "--out" in result.stderr


def test_exit_codes() -> None:
    assert run("search", *TINY).returncode == 0
    nothing = run("search", *LLAMA, "--max-memory", "1 GB", "--fix", "tp=8", "--json")
    assert nothing.returncode == 1
    assert json.loads(nothing.stdout)["ranking"] == []
    assert "leanest" in json.loads(nothing.stdout)["why_nothing"]
    assert run("search", *TINY, "--top", "0").returncode == 2
    assert run("estimate", *TINY, "--plan", "tp=2,pp=2,vpp=3").returncode == 3  # illegal
    assert run("estimate", *LLAMA, "--plan", "tp=1").returncode == 3  # does not fit
    assert run("explain", *LLAMA, "--plan", "tp=1").returncode == 0
    assert run("nonsense").returncode == 2


def test_an_illegal_plan_still_gets_its_estimate_and_the_broken_rule() -> None:
    result = run("estimate", *TINY, "--plan", "tp=2,pp=2,vpp=3", "--json")
    record = json.loads(result.stdout)
    assert record["step_s"] > 0
    assert record["legal"] is False
    assert [item["rule"] for item in record["broken"] if item["severity"] == "error"]


def test_a_plan_that_does_not_fit_names_stage_and_term() -> None:
    words = run("explain", *LLAMA, "--plan", "tp=1,pp=2").stdout
    assert "stage 0 needs" in words
    assert "nearest" in words


def test_errors_are_reported_together_and_by_option() -> None:
    result = run("estimate", "-m", "nope", "-c", "nope", "--seq", "8x", "-b", "1.5", "-p", "tp=a,zz=3", "--precision", "y")
    assert result.returncode == 2
    for option in ("--model", "--cluster", "--seq", "--global-batch", "--plan: tp", "--plan: zz", "--precision"):
        assert f"tuner: {option}" in result.stderr
    assert result.stdout == ""


def test_errors_are_json_with_json() -> None:
    result = run("search", "-m", "llama3-7b", "--json")
    problems = json.loads(result.stdout)["error"]["problems"]
    assert {p["where"] for p in problems} == {"model", "cluster", "seq_len", "global_batch"}
    assert "did you mean" in next(p["hint"] for p in problems if p["where"] == "model")


HOSTILE = [
    "", " ", "0", "-1", "1e9", "nan", "inf", "9" * 400, "1.5", "0x10", "8192;ls", "$(id)", "\u0663", "tp=", "=", "tp=8,tp=4", "a=b=c",
    "../..", "/dev/zero", "/", "x" * 5000, "8k8", "1..0", "0..8", "1024..256", "8..1000000000:1", "h100x", "h100x0", "h100x-8", "h100x7",
    "h100x99999999999", "{}", "[]", "*", "--", "\n", "%s", "tp<=", "<3", "tp<=1e9", "tp<=8 or 1", "__import__('os')",
]  # fmt: skip
OPTIONS = {
    "search": (
        "--model", "--cluster", "--gpus", "--seq", "--global-batch", "--tokens", "--ramp-up", "--task", "--lora-rank", "--precision",
        "--framework", "--attention", "--calibration", "--price", "--job", "--space", "--fix", "--limit", "--max-memory", "--current",
        "--objective", "--deadline", "--top", "--strategy", "--trials", "--seed",
    ),
    "estimate": ("--plan", "--job", "--cluster", "--model", "--tokens"),
    "explain": ("--plan",),
}  # fmt: skip


@pytest.mark.parametrize(("verb", "option"), [(verb, option) for verb, options in OPTIONS.items() for option in options])
def test_hostile_values_are_bad_input_and_never_a_traceback(verb: str, option: str) -> None:
    base = list(TINY if verb == "search" else (*TINY, *PLAN))
    if option in base:
        at = base.index(option)
        del base[at : at + 2]
    for value in HOSTILE:
        assert_clean(invoke(verb, *base, option, value))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(OPTIONS)), st.data())
def test_any_text_in_any_option_is_answered(verb: str, data: st.DataObject) -> None:
    option = data.draw(st.sampled_from(OPTIONS[verb]))
    value = data.draw(st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=40))
    assert_clean(invoke(verb, *TINY, *(PLAN if verb != "search" else ()), option, value))


@pytest.mark.parametrize(
    "content", ["", "- 1\n", "model: [", "nonsense: 1\n", "a: &a [*a]\n", "seq_len: true\n", "model: {x: 1}\n", "\0\1", "fix: [tp=x]\n"]
)
@pytest.mark.parametrize("option", ["--job", "--space", "--model", "--cluster", "--calibration"])
def test_hostile_files_are_bad_input(option: str, content: str, tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(content)
    result = invoke("search", *TINY, option, str(path))
    assert_clean(result)
    assert result.exit_code == 2, result.stdout + result.stderr


def test_a_huge_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(2**30)
    for option in ("--job", "--model", "--space"):
        assert invoke("search", *TINY, option, str(path)).exit_code == 2
    assert invoke("presets", "model", str(path)).exit_code == 2


@pytest.mark.parametrize(
    "arguments", [("kinds",), ("models", "nope"), ("gpus", "/nope.yaml"), ("models", "."), ("jobs", "nope"), ("calibrations", "x")]
)
def test_unknown_presets_are_bad_input(arguments: tuple[str, ...]) -> None:
    result = invoke("presets", *arguments)
    assert_clean(result)
    assert result.exit_code == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"id": 1}', '{"id": "a", "measured": {"step_time_s": NaN}}', "\0", "1\n2\n", json.dumps({"id": "x" * 99999})],
)
def test_validate_survives_any_file(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    assert_clean(invoke("validate", str(tmp_path / "rows.jsonl")))
    assert_clean(invoke("validate", str(tmp_path / "missing.jsonl")))
    assert_clean(invoke("validate", str(tmp_path)))


def test_an_unexpected_failure_is_one_line_and_traced_only_when_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise ZeroDivisionError("odd\ncase")

    monkeypatch.setattr("tuner.workflow.estimate", broken)
    result = invoke("estimate", *TINY, *PLAN)
    assert result.exit_code == 4
    assert result.stderr.count("\n") == 1
    assert "ZeroDivisionError: odd case" in result.stderr
    assert "report" in result.stderr
    assert "Traceback" in invoke("estimate", *TINY, *PLAN, "-vv").stderr


def test_infrastructure_failures_exit_with_4(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(**_: Any) -> None:
        raise InfrastructureError("the scheduler is gone")

    monkeypatch.setattr("tuner.workflow.estimate", broken)
    result = invoke("estimate", *TINY, *PLAN)
    assert (result.exit_code, result.stderr) == (4, "tuner: the scheduler is gone\n")


def test_a_closed_pipe_is_silent() -> None:
    command = (
        f"{sys.executable} -c 'from tuner.cli import main; main()' presets models --json | head -c 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
    )
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, check=True)
    assert result.stderr == ""
    assert result.stdout.strip() in ("0", "141")  # 0 where the pipe took all of it in time


def test_ctrl_c_is_one_line() -> None:
    arguments = ["search", "--job", "deepseek-v3-h100x2048"]
    child = subprocess.Popen(
        [sys.executable, "-c", "from tuner.cli import main; print('ready', flush=True); main()", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(1.0)
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=30)
    assert child.returncode == 130
    assert words.strip() == "tuner: interrupted"


def test_completion_offers_options_presets_and_files(tmp_path: Path) -> None:
    def complete(words: str) -> list[str]:
        env = {"_TUNER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
        return run(cwd=tmp_path, **env).stdout.split()

    (tmp_path / "mine.yaml").write_text("")
    assert "search" in complete("tuner se")
    assert "--global-batch" in complete("tuner search --glo")
    assert "llama3-70b" in complete("tuner search --model llama3")
    assert complete("tuner search --model mi") != []
    assert "./mine.yaml" in complete("tuner search --model ./mi")
    assert "gpt3-175b" in complete("tuner presets models gpt3")


def test_no_color_and_terminals() -> None:
    from tuner.cli.output import wants_color

    class Terminal:
        def isatty(self) -> bool:
            return True

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", Terminal())
        patch.delenv("NO_COLOR", raising=False)
        patch.setenv("TERM", "xterm")
        assert wants_color(no_color=False)
        assert not wants_color(no_color=True)
        patch.setenv("NO_COLOR", "1")
        assert not wants_color(no_color=False)
