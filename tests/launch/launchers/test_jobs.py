"""Ten jobs in all ten formats: kept files, each of which parses; scripts are clean; what cannot be written is said, knob by knob."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.launch.launchers.golden import check
from tests.launch.launchers.jobs import FORMATS, JOBS, exported
from tests.launch.launchers.test_hostile_names import parsed, shellcheck
from tuner.formats import grouped
from tuner.launch.launchers.launcher import open_launcher
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from pathlib import Path

# Their text is the same for every job, or its figures are the cost model's.
ELSEWHERE = ("prediction.json", "verify.sh", "train.py")


def test_there_are_ten_of_each() -> None:
    assert len(JOBS) == len(FORMATS) == 10


@pytest.mark.parametrize("name", JOBS)
def test_golden_files(name: str) -> None:
    answer = exported(name)
    files = {path: text for path, (text, _) in answer.files().items() if path.rpartition("/")[2] not in ELSEWHERE}
    refused = [str(problem) for problems in answer.refused.values() for problem in grouped(problems)]
    check(f"jobs/{name}", {**files, "refused.txt": "".join(f"{line}\n" for line in refused)})


@pytest.mark.parametrize("name", JOBS)
def test_every_file_parses_and_every_script_is_clean(name: str, tmp_path: Path) -> None:
    answer = exported(name, wrap="slurm,torchrun")
    scripts = []
    for format_, one in answer.formats.items():
        assert parsed(one.written.files) == len(one.written.files)
        for file, text in one.written.files.items():
            if file.endswith((".sh", ".sbatch")):
                path = tmp_path / f"{format_}-{file}"
                path.write_text(text)
                scripts.append(str(path))
        assert set(one.written.programs) <= set(one.written.files)
        assert ("verify.sh" in one.written.files) == (format_ != "neutral")
    shellcheck(scripts)


@pytest.mark.parametrize("name", JOBS)
def test_each_format_reads_back_as_its_plan(name: str) -> None:
    for format_, one in exported(name).formats.items():
        launcher = open_launcher(format_)
        files = {file: text for file, text in one.written.files.items() if launcher.reads(file, text)}
        found = launcher.read(files)
        knobs = {knob: value for knob, value in found.plan.items() if knob != "edp"}
        plan, _ = read_plan(knobs, one.job, format_)
        assert plan.dp(one.job.gpus) == one.plan.dp(one.job.gpus)
        for knob in ("tp", "pp", "vpp", "cp", "ep", "micro_batch", "zero", "recompute"):
            assert getattr(plan, knob) == getattr(one.plan, knob), (format_, knob)


def test_each_job_has_formats_and_each_format_has_jobs() -> None:
    written = {name: set(exported(name).formats) for name in JOBS}
    assert min(len(formats) for formats in written.values()) >= 3
    for format_ in FORMATS:
        assert sum(format_ in formats for formats in written.values()) >= 1, format_
