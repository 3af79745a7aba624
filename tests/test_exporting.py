"""Exports: formats as people name them, each under its own framework, what cannot be written, what does not fit."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import tuner
from tests.terminal import ROOT, run
from tuner.cli.app import app
from tuner.cli.export import HELP
from tuner.cli.search import HELP as SEARCH_HELP
from tuner.errors import Problem, SpecError
from tuner.formats import as_knobs, grouped, known_formats, read_formats
from tuner.launch.site import Site
from tuner.plan import Plan

SMALL: dict[str, Any] = {"model": "llama3-8b", "cluster": "h100x16", "seq_len": 8192, "global_batch": 64}
SMALL_OPTIONS = ("-m", "llama3-8b", "-c", "h100x16", "-s", "8k", "-b", "64")
FITS = "zero=3,recompute=full"


def export(formats: Any, plan: Any = FITS, **more: Any) -> Any:
    return tuner.export(formats, **{**SMALL, "plan": plan, **more})


def test_formats_are_named_as_people_name_them() -> None:
    assert read_formats("megatron,bridge,torchtitan,maxtext,deepspeed,slurm").names == (
        "megatron-lm", "megatron-bridge", "torchtitan", "maxtext", "deepspeed",
    )  # fmt: skip
    assert read_formats(["Megatron-LM", "megatron", "k8s"], "slurm,k8s").wraps == ("kubernetes", "slurm")
    assert read_formats("ntp").names == ("megatron-lm-ntp",)
    assert len(known_formats()) == 11


def test_everything_wrong_with_the_names_is_said_at_once() -> None:
    with pytest.raises(SpecError) as told:
        read_formats("megatrom-lm,deepspede", "slrum")
    text = str(told.value)
    assert all(f"did you mean {name}?" in text for name in ("megatron-lm", "deepspeed", "slurm"))
    with pytest.raises(SpecError, match="is missing"):
        read_formats("slurm")


def test_the_framework_is_that_of_the_first_format_unless_it_is_named() -> None:
    assert export("torchtitan").job.framework.name == "torchtitan"
    assert export("neutral,accelerate").job.framework.name == "accelerate"
    assert export("neutral").job.framework.name == "megatron-lm"
    answer = export("accelerate", framework="deepspeed")
    assert answer.job.framework.name == "deepspeed" and answer.formats["accelerate"].job.framework.name == "accelerate"
    assert "the job is about deepspeed; this launches accelerate" in answer.formats["accelerate"].written.notes
    assert not any("is about" in note for note in export("deepspeed,accelerate").formats["accelerate"].written.notes)


def test_what_is_not_stated_is_as_each_formats_framework_has_it() -> None:
    answer = export("megatron-lm,torchtitan,megatron-bridge", "recompute=full")
    plans = {name: one.plan for name, one in answer.formats.items()}
    assert (plans["megatron-lm"].zero, plans["torchtitan"].zero, plans["megatron-bridge"].zero) == (0, 3, 1)
    assert (plans["megatron-lm"].dp_overlap, plans["torchtitan"].dp_overlap) == (0, 1)
    assert {"zero", "dp_overlap"} <= set(answer.formats["torchtitan"].assumed)
    assert export("torchtitan", Plan(zero=3, dp_overlap=1, tp=2)).formats["torchtitan"].plan == Plan(zero=3, dp_overlap=1, tp=2)


def test_a_release_is_of_the_framework_that_it_was_named_for() -> None:
    answer = export("megatron-bridge,nemo", "zero=1,recompute=full", release="26.02")
    assert (answer.formats["megatron-bridge"].job.release, answer.formats["nemo"].job.release) == ("26.02", "")


def test_a_format_that_cannot_spell_the_plan_is_told_beside_those_that_can() -> None:
    answer = export("megatron-lm,deepspeed,accelerate", "pp=4,vpp=2,zero=1,recompute=full,pipeline_layout=embedding=1+loss=1")
    assert list(answer.formats) == ["megatron-lm"] and answer.exit_code == 2
    assert {problem.path for problem in answer.refused["accelerate"]} == {"pp", "vpp", "pipeline_layout", "zero"}
    causes = [str(problem) for problem in grouped(answer.refused["accelerate"])]
    assert len(causes) == 2
    assert causes[0].startswith(
        "accelerate: pp = 4, vpp = 2, pipeline_layout = embedding=1+loss=1: cannot be written: Accelerate has no pipeline"
    )
    assert causes[0].endswith("(pp=1, vpp=1, pipeline_layout=even, or another format)")


def test_where_no_format_can_spell_it_the_question_is_wrong() -> None:
    with pytest.raises(SpecError, match="deepspeed: pp = 4: cannot be written") as told:
        export("deepspeed,accelerate", "pp=4")
    assert len(told.value.problems) == 2


def test_fields_of_a_plan_are_told_as_knobs() -> None:
    def problem(path: str, value: str) -> Problem:
        return Problem(where="x", path=path, value=value, rule="no")

    told = as_knobs([problem("embedding_layers", "1"), problem("loss_layers", "3"), problem("recompute_layers", "4")])
    assert [(one.path, one.value) for one in told] == [("pipeline_layout", "embedding=1+loss=3"), ("recompute", "full:4")]
    assert [(one.path, one.value) for one in as_knobs([problem("loss_layers", "2")])] == [("pipeline_layout", "loss=2")]


def test_a_plan_that_does_not_fit_is_written_with_a_warning() -> None:
    """16 bytes a parameter of 8.03 B and 6 more of gradients: 161.9 GB with zero 0."""
    answer = export("megatron-lm,accelerate", "recompute=full")
    one = answer.formats["megatron-lm"]
    assert answer.exit_code == 3 and not answer.refused
    assert re.fullmatch(r"stage 0 needs 161\.\d of 84\.9 GB \(optimizer 96\.4\)", one.too_large)
    assert "verify.sh" in one.written.files and not answer.formats["accelerate"].too_large
    done = run("export", "megatron-lm", *SMALL_OPTIONS, "-p", "recompute=full")
    assert done.returncode == 3
    assert "tuner: megatron-lm: does not fit: stage 0 needs 161" in done.stderr


def test_replicas_at_a_lower_degree_must_fit_as_well() -> None:
    """gpt3-175b with tp 8: 433 GB of weights, gradients and optimizer on each GPU."""
    answer = tuner.export(
        "ntp", model="gpt3-175b", cluster="h100x64", seq_len=2048, global_batch=64, plan="tp=8,recompute=full", failed="0:3,0:5"
    )
    assert answer.exit_code == 3 and answer.formats["megatron-lm-ntp"].too_large.startswith("stage 0 needs 4")
    small = {"model": "gpt-7.5b", "cluster": "h100x64", "seq_len": 2048, "global_batch": 64}
    needs = {}
    for to in (4, 1):
        answer = tuner.export("ntp", **small, plan=f"tp=8,fallback_tp={to},micro_batch=1,recompute=none", reduced=2)
        needs[to] = answer.formats["megatron-lm-ntp"].too_large
    assert needs[4] == ""
    assert re.fullmatch(r"a replica at tp 1 needs \d+\.\d of 84\.9 GB", needs[1])


def test_rules_of_the_formats_framework_are_checked() -> None:
    answer = export("megatron-lm,primus", "pp=2,vpp=3,zero=1,recompute=full")
    assert answer.exit_code == 3
    assert all(not one.legal and one.broken for one in answer.formats.values())


@pytest.mark.parametrize(
    ("formats", "options", "said"),
    [
        ("neutral", {"wrap": "slurm"}, "has nothing to start"),
        ("deepspeed", {"site": Site()}, "is about what starts the launch"),
        ("deepspeed", {"failed": "0:1"}, "concerns megatron-lm-ntp alone"),
        ("deepspeed", {"version": "9"}, "is no version"),
        ("ntp", {}, "is missing: which GPUs"),
        ("ntp", {"failed": "x"}, "must be REPLICA:SLOT"),
        ("deepspeed,kubernetes", {}, "pods run an image"),
    ],
)
def test_wrong_questions(formats: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        export(formats, **options)


def test_a_launch_must_reach_the_accelerator() -> None:
    answer = export("maxtext,neutral,megatron-lm", "zero=3,recompute=full", cluster="tpu-v5p-podx64")
    assert set(answer.formats) == {"maxtext", "neutral"}
    assert str(answer.refused["megatron-lm"][0]) == "megatron-lm: gpu = tpu-v5p: the launch needs CUDA or ROCm (maxtext or neutral)"
    with pytest.raises(SpecError, match="gpu = gaudi3: the launch needs CUDA or ROCm"):
        export("deepspeed", cluster="gaudi3-nodex16")


def test_wrappers_go_around_what_is_launched() -> None:
    answer = export("neutral,deepspeed,slurm,torchrun")
    assert set(answer.formats["neutral"].written.files) == {"plan.yaml"}
    files = answer.formats["deepspeed"].written.files
    assert {"job.sbatch", "node.sh", "verify.sh"} <= set(files)
    assert answer.formats["deepspeed"].written.start == "sbatch job.sbatch"


def test_a_variable_that_a_launch_needs_is_the_nodes_to_set() -> None:
    """`exec NAME=value command` is no shell: the script that a node runs has the command alone, and a note names the variable."""
    one = export("megatron-lm,slurm").formats["megatron-lm"].written
    assert one.files["node.sh"].endswith("\nexec bash pretrain.sh\n")
    assert any(note.startswith("MEGATRON_LM must be set on the nodes") for note in one.notes)
    assert "MEGATRON_LM=/path" not in one.files["verify.sh"]
    site = Site(environment={"MEGATRON_LM": "/opt/megatron"})
    assert not any("must be set" in note for note in export("megatron-lm,slurm", site=site).formats["megatron-lm"].written.notes)


def test_python_and_the_command_line_give_the_same() -> None:
    ours = json.loads(json.dumps(export("megatron,torchtitan,deepspeed").record(), allow_nan=False))
    done = run("export", "megatron,torchtitan,deepspeed", *SMALL_OPTIONS, "-p", FITS, "--json")
    assert json.loads(done.stdout) == ours and done.returncode == 0
    assert set(ours["formats"]) == {"megatron-lm", "torchtitan", "deepspeed"}


def test_files_land_in_a_folder_for_each_format(tmp_path: Path) -> None:
    done = run("export", "torchtitan,deepspeed", *SMALL_OPTIONS, "-p", FITS, "-o", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"torchtitan", "deepspeed"}
    assert os.access(tmp_path / "torchtitan/train.sh", os.X_OK) and os.access(tmp_path / "deepspeed/verify.sh", os.X_OK)
    assert not os.access(tmp_path / "deepspeed/ds_config.json", os.X_OK)


@pytest.mark.parametrize("width", [60, 120])
def test_no_line_of_the_report_is_wider_than_the_page(width: int, tmp_path: Path) -> None:
    options = (*SMALL_OPTIONS, "-p", "pp=2,recompute=full,zero=1", "-o", str(tmp_path))
    done = run("export", "megatron,accelerate,torchtitan,slurm", *options, COLUMNS=str(width))
    assert done.returncode == 2
    assert max(map(len, done.stdout.splitlines())) <= width
    assert done.stderr.splitlines()[:1] != [] and "accelerate is not written: pp, zero" in done.stderr


@pytest.mark.parametrize("line", re.findall(r"^  tuner (export .+)$", HELP, re.MULTILINE))
def test_the_examples_of_the_help_run_and_fit(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("site.yaml").write_text("partition: gpu\n")
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output


def test_the_example_of_the_search_writes_files_for_every_format(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (line,) = re.findall(r"^  tuner (search .+ --export .+)$", SEARCH_HELP, re.MULTILINE)
    done = CliRunner().invoke(app, shlex.split(line))
    assert done.exit_code == 0, done.output
    for name in ("megatron-lm", "megatron-bridge", "torchtitan", "maxtext", "deepspeed"):
        assert Path(f"out/best/{name}/job.sbatch").is_file() and Path(f"out/best/{name}/verify.sh").is_file()


def verified(folder: Path, *logs: str, **env: str) -> subprocess.CompletedProcess[str]:
    done = run("export", "megatron", *SMALL_OPTIONS, "-p", FITS, "-o", str(folder))
    assert done.returncode == 0, done.stderr
    variables = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), **env}
    script = ["bash", str(folder / "megatron-lm/verify.sh"), *logs]
    return subprocess.run(script, capture_output=True, text=True, check=False, env=variables, timeout=60)


def test_verify_holds_a_log_against_the_prediction(tmp_path: Path) -> None:
    """tests/fixtures/logs/megatron-lm.log: 12.87 s a step, 16.52 GB, of another job: far from this one's."""
    done = verified(tmp_path, str(ROOT / "tests/fixtures/logs/megatron-lm.log"))
    assert done.returncode == 3, done.stderr
    assert done.stdout.startswith("llama3-8b: megatron-lm, 16 GPUs; ")
    assert "step     measured 12.87 s, predicted " in done.stdout and "OUTSIDE the 90 % interval" in done.stdout


def test_verify_of_a_launch_that_fails_says_so(tmp_path: Path) -> None:
    done = verified(tmp_path, MEGATRON_LM="")
    assert done.returncode == 4
    assert "the launch ended with exit code 1" in done.stderr and "must be the folder of Megatron-LM" in done.stdout


def test_verify_of_a_launch_reads_its_own_log(tmp_path: Path) -> None:
    """torchrun is a stand-in here: it prints the log of a run."""
    (tmp_path / "torchrun").write_text(f"#!/bin/bash\nexec cat {ROOT}/tests/fixtures/logs/megatron-lm.log\n")
    (tmp_path / "torchrun").chmod(0o755)
    done = verified(tmp_path, MEGATRON_LM="/nowhere", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 3, done.stderr
    assert "measured 12.87 s" in done.stdout and (tmp_path / "megatron-lm/verify.log").is_file()
