"""Launch commands of a person's own: placeholders, quoting, hostile values, the site's settings in scripts."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launch.standin import ended, small_job, trial
from tests.services import missing
from tuner.errors import SpecError
from tuner.launch.command import Command, CommandRunner, read_command
from tuner.launch.script import task_script
from tuner.launch.site import Site, read_site
from tuner.launch.slurm_script import job_script, launch_script
from tuner.launch.template import fill_command, fill_file, values
from tuner.plan import FULL, Plan

HOSTILE = (
    "it's",
    '"',
    "$(touch pwned)",
    "`touch pwned`",
    "a\nb; touch pwned",
    "-rf",
    "ä → 漢字",
    "${HOME}",
    "\\",
    "*",
    "a b",
    "&& touch pwned",
)


def test_each_value_is_put_in(tmp_path: Path) -> None:
    facts = values(trial(tmp_path, plan=Plan(tp=2, pp=2, micro_batch=4, sequence_parallel=1, recompute=FULL, recompute_layers=3)))
    text = "run --tp {tp} --pp={pp} --mb {micro_batch} {sequence_parallel?--sp} {interleaved?--vpp} "
    text += "--rc {recompute} --n {steps} --dp {dp} ${HOME} {{tp}}"
    assert fill_command(text, facts, "f") == "run --tp 2 --pp=2 --mb 4 --sp  --rc full:3 --n 8 --dp 1 ${HOME} {tp}"


def test_other_braces_stand_for_themselves(tmp_path: Path) -> None:
    text = """awk '{print $1}' <<< '{"a": {"b": 1}}' | grep -E '^.{3,}' {tp}"""
    assert fill_command(text, values(trial(tmp_path)), "f") == text.replace("{tp}", "2")


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_value_is_one_word_of_the_command(tmp_path: Path, value: str) -> None:
    command = fill_command("printf '%s' {model}", {"model": value}, "f")
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == value and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("text", ['echo "{model}"', "echo '{model}'", "echo `cat {model}`", "echo 'a' \"b {model} c\""])
def test_a_value_that_needs_quotes_is_refused_within_quotes(text: str) -> None:
    with pytest.raises(SpecError, match="stands within"):
        fill_command(text, {"model": "$(touch pwned)"}, "f")
    assert "gpt-2" in fill_command(text, {"model": "gpt-2"}, "f")


def test_files_take_values_that_cannot_break_them() -> None:
    facts = {"trial_dir": "/a b: #x", "tp": 8}
    assert yaml.safe_load(fill_file("dir: {trial_dir}\ntp: {tp}\n", facts, "c.yaml", "f")) == {"dir": "/a b: #x", "tp": 8}
    assert fill_file("cd {trial_dir}", facts, "c.sh", "f") == "cd '/a b: #x'"
    with pytest.raises(SpecError, match=r"\{trial_dir\} cannot be written into c.toml safely"):
        fill_file("dir = {trial_dir}", facts, "c.toml", "f")


def test_unknown_placeholders_are_all_named_with_their_nearest(tmp_path: Path) -> None:
    path = tmp_path / "command.yaml"
    path.write_text("launcher: megatron-lm\ncommand: run {tpp} {trial_dri}\nfiles:\n  a.yaml: 'x: {micro_bach}'\n")
    with pytest.raises(SpecError) as raised:
        read_command(path)
    text = str(raised.value)
    assert all(
        hint in text for hint in ("did you mean tp?", "did you mean trial_dir?", "files.a.yaml = {micro_bach}", "did you mean micro_batch?")
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"launcher": "megatron"}, "did you mean megatron-lm?"),
        ({"files": {"../x": "a"}}, "must be a path inside the trial's folder"),
        ({"files": {"/x": "a"}}, "must be a path inside the trial's folder"),
        ({"files": {"result.json": "a"}}, "is a file that the tuner writes itself"),
        ({"folder": "/nowhere/at/all"}, "is no folder"),
        ({"comand": "x"}, "did you mean command?"),
    ],
)
def test_a_command_file_is_read_strictly(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "command.yaml"
    path.write_text(yaml.safe_dump({"launcher": "megatron-lm", "command": "true"} | changes))
    with pytest.raises(SpecError) as raised:
        read_command(path)
    assert message in str(raised.value)


def test_the_plan_and_files_are_written_beside_the_command(tmp_path: Path) -> None:
    files = {"conf/run.yaml": "tensor_parallel: {tp}\nout: {trial_dir}\n"}
    command = Command(launcher="workload", command='cat conf/run.yaml plan.yaml; echo "$TEST_IT"', files=files)
    site = Site(environment={"TEST_IT": "it's $(x)\nhere"}, pre_commands=("echo before",))
    asked = trial(tmp_path / "a $(b) c", plan=Plan(tp=4))
    result = ended(CommandRunner(command=command, site=site, grace_s=0.2).start(asked))
    log = (asked.folder / "log.txt").read_text()
    assert result.end == "failed" and "it ended by itself after 0 steps" in result.reason
    assert log.startswith("before\ntensor_parallel: 4\n") and "it's $(x)\nhere" in log
    assert yaml.safe_load((asked.folder / "plan.yaml").read_text())["tp"] == 4
    assert yaml.safe_load((asked.folder / "conf/run.yaml").read_text())["out"] == str(asked.folder)


@pytest.mark.parametrize("value", HOSTILE)
def test_hostile_values_of_a_site_stay_values(tmp_path: Path, value: str) -> None:
    folder = tmp_path / "a $(touch pwned) 'b"
    folder.mkdir()
    script = task_script(Site(environment={"X": value}), str(folder), ['printf "%s" "$X"; pwd >&2'])
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout == value and done.stderr.strip() == str(folder) and not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"partitoin": "x"}, "did you mean partition?"),
        ({"account": "a\nb"}, "without line breaks"),
        ({"environment": {"A B": "x"}}, "letters, digits and _ only"),
        ({"environment": {"N": 3}}, "must be text"),
        ({"slurm_options": ["-x"]}, "must be one long option"),
        ({"slurm_options": ["--wrap=rm"]}, "--wrap is set by the tuner itself"),
        ({"modules": ["-x"]}, "is an option, not a module"),
        ({"container": {"image": "i", "mounts": ["a:b,c:d"]}}, "is one mount"),
        ({"gpus": "gpu"}, "must be"),
        ({"cpus_per_task": 0}, "greater than or equal to 1"),
    ],
)
def test_a_site_file_is_read_strictly(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(yaml.safe_dump(changes))
    with pytest.raises(SpecError) as raised:
        read_site(path)
    assert message in str(raised.value)


def test_scripts_pass_shellcheck(tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    hostile = {f"V{i}": value for i, value in enumerate(HOSTILE) if value != "ä → 漢字"}
    site = Site(account="it's", modules=("cuda/12 'x",), environment=hostile, pre_commands=("ulimit -c 0",))
    asked = dataclasses.replace(trial(tmp_path / "it's $(x)", job=small_job(8, 4)), number=3)
    scripts = [task_script(site, str(asked.folder), ["exec true"]), job_script(site, asked, "t")]
    scripts += [launch_script(site, asked, per, ("--overlap",), nodes) for per in ("job", "node", "gpu") for nodes in ((), ("n1", "n2"))]
    for i, script in enumerate(scripts):
        path = tmp_path / f"{i}.sh"
        path.write_text(script)
        options = ["--exclude=SC1003,SC1091,SC2016,SC2089,SC2090"]  # sourced files that are not here; what the quotes are meant to keep
        done = subprocess.run(["shellcheck", *options, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


# What stands where a checkout of Megatron-LM would: it says which degree it was told, and steps as Megatron-LM logs them.
_STANDIN = """
import os, sys
words = sys.argv[1:]
def told(flag): return words[len(words) - 1 - words[::-1].index(flag) + 1]
assert int(os.environ["WORLD_SIZE"]) % int(told("--tensor-model-parallel-size")) == 0
if os.environ["RANK"] == "0":
    print("degree", told("--tensor-model-parallel-size"), flush=True)
    for step in range(1, int(told("--train-iters")) + 1):
        line = f" iteration {step:8d}/{told('--train-iters'):>8} | consumed samples: {step} | elapsed time per iteration (ms): 250.0 |"
        print(f" [2026-01-01 00:00:0{step % 10}]{line} lm loss: 1.0E+01 |", flush=True)
"""


def test_a_trial_runs_the_files_that_its_format_writes_for_the_plan(tmp_path: Path) -> None:
    (tmp_path / "megatron").mkdir()
    (tmp_path / "megatron/pretrain_gpt.py").write_text(_STANDIN)
    text = f"MEGATRON_LM={tmp_path}/megatron MASTER_PORT=0 bash {{trial_dir}}/pretrain.sh --train-iters {{steps}}"
    command = Command(launcher="megatron-lm", export="megatron-lm", command=text)
    site = Site(environment={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"})  # torchrun lies beside the interpreter
    asked = trial(tmp_path / "trial", plan=Plan(tp=2, pp=2, sequence_parallel=1))
    result = ended(CommandRunner(command=command, site=site).start(asked))
    assert (result.end, result.step_s) == ("ok", 0.25), result.reason
    assert "degree 2" in (asked.folder / "log.txt").read_text()
    assert "--pipeline-model-parallel-size 2" in (asked.folder / "pretrain.sh").read_text()


def test_a_command_knows_the_plans_that_its_format_cannot_spell(tmp_path: Path) -> None:
    command = Command(launcher="deepspeed", export="deepspeed", command="bash {trial_dir}/launch.sh")
    job = trial(tmp_path).job
    refused = [plan for plan in (Plan(pp=2), Plan(zero=1)) if not command.spells(job, plan)]
    assert refused == [Plan(pp=2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"export": "megatron"}, "did you mean megatron-lm?"),
        ({"export": "neutral"}, "launches nothing"),
        ({"export": "megatron-lm", "framework_version": "0.1"}, "is no version of megatron-lm"),
        ({"framework_version": "0.19"}, "is that of `export`"),
    ],
)
def test_what_is_exported_must_be_known(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = tmp_path / "command.yaml"
    path.write_text(yaml.safe_dump({"launcher": "megatron-lm", "command": "true"} | changes))
    with pytest.raises(SpecError) as raised:
        read_command(path)
    assert message in str(raised.value)
