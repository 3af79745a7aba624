"""`tuner check` as a person runs it: exit codes, JSON, width, diffs, and files that nobody should trust."""

from __future__ import annotations

import json
import os
import random
import subprocess
import time
from pathlib import Path

import pytest

import tuner
from tests.launch.launchers.plans import job_of, plans_of
from tests.terminal import run
from tests.test_checking import MEGATRON, lay
from tuner.checking.checked import CheckAnswer
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import BUILT_IN, open_launcher

TINY = "model: tiny\ncluster: h100x8\nseq_len: 128\nglobal_batch: 64\nplan: tp={}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return lay(tmp_path, {"pretrain.sh": MEGATRON, "fast.yaml": TINY.format(1), "wrong.yaml": TINY.format(3)})


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("fast.yaml", "--no-search"), 0),
        (("wrong.yaml", "--no-search"), 3),
        (("fast.yaml", "wrong.yaml", "--no-search"), 3),
        (("pretrain.sh",), 2),
        (("pretrain.sh", "-c", "h100"), 3),  # past the gap
        (("pretrain.sh", "-c", "h100", "--gap", "100%"), 0),
        (("pretrain.sh", "-c", "h100", "--no-search"), 0),
        (("missing.sh",), 2),
        (("fast.yaml", "--format", "slurm"), 2),
        (("fast.yaml", "--gap", "lots"), 2),
        (("fast.yaml", "-m", "no-such-model"), 2),
        (("fast.yaml", "--fix", "--no-search"), 2),
        ((), 2),
    ],
)
def test_exit_codes(words: tuple[str, ...], code: int, folder: Path) -> None:
    result = run("check", *words, cwd=folder)
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stderr and "internal error" not in result.stderr


def test_json_is_all_that_stdout_has_and_the_same_as_in_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = run("check", ".", "-c", "h100", "--fix", "--json", "-v", cwd=folder)
    printed = json.loads(result.stdout)
    monkeypatch.chdir(folder)
    ours = json.loads(json.dumps(tuner.check(".", cluster="h100", fix=True).record(), allow_nan=False))
    assert ours == printed and printed["exit_code"] == result.returncode == 3
    one = next(item for item in printed["checked"] if item["files"] == ["pretrain.sh"])
    assert one["legal"] and one["fits"] and one["best"]["gain"] > 1.1 and one["patch"]["diff"].startswith("diff --git a/pretrain.sh")
    assert one["cost"]["low_s"] < one["cost"]["step_s"] < one["cost"]["high_s"]
    assert printed["counts"] == {"illegal": 1, "slower": 2}


@pytest.mark.parametrize("columns", [60, 120])
def test_plain_in_a_pipe_and_no_wider_than_the_page(columns: int, folder: Path) -> None:
    result = run("check", ".", "-c", "h100", cwd=folder, COLUMNS=str(columns))
    assert "\x1b" not in result.stdout + result.stderr
    assert [line for line in result.stdout.splitlines() if len(line) > columns] == []
    assert "pretrain.sh (megatron-lm): slower" in result.stdout
    assert "illegal   " in result.stdout and "[heads-tp]" in result.stdout
    assert "checked   3 launches: " in result.stdout


def test_what_is_not_understood_is_counted_and_named_when_asked_for(folder: Path) -> None:
    flags = " ".join(f"--odd-{n} {n}" for n in range(9))
    (folder / "pretrain.sh").write_text(MEGATRON.replace("--frobnicate 3", flags))
    short, every = (run("check", "pretrain.sh", "-c", "h100", "--no-search", *more, cwd=folder).stdout for more in ((), ("-v",)))
    assert "9 settings not understood" in short and "--odd-0 0 at pretrain.sh:" in short and "--odd-8" not in short
    assert "--odd-8 8 at pretrain.sh:" in every


def test_the_diff_is_printed_last_or_written_and_git_applies_it(folder: Path) -> None:
    printed = run("check", "pretrain.sh", "-c", "h100", "--fix", cwd=folder)
    assert "\ndiff --git a/pretrain.sh b/pretrain.sh\n" in printed.stdout
    written = run("check", "pretrain.sh", "-c", "h100", "--fix", "-o", "best.diff", cwd=folder)
    assert written.stderr.strip() == "wrote best.diff: git apply best.diff"
    assert "diff --git" not in written.stdout
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    for text in ((folder / "best.diff").read_text(), printed.stdout):  # what stands before the diff is passed over
        assert subprocess.run(["git", "apply", "--check", "-"], input=text, text=True, cwd=folder, check=False).returncode == 0
    subprocess.run(["git", "apply", "best.diff"], cwd=folder, check=True)
    assert run("check", "pretrain.sh", "-c", "h100", cwd=folder).returncode == 0


def test_a_folder_of_every_launchers_scripts_in_one_run(tmp_path: Path) -> None:
    files: dict[str, str] = {}
    for kind in BUILT_IN:
        launcher = open_launcher(kind)
        job = job_of("megatron-lm" if launcher.framework == "generic" else launcher.framework, "llama3-8b")
        for plan in plans_of(launcher, "llama3-8b"):
            try:
                written = launcher.write(job, plan, launcher.versions[-1] if launcher.versions else "")
            except SpecError:
                continue
            files |= {f"{kind}/{name}": text for name, text in written.files.items()}
            break
    lay(tmp_path, {**files, "README.md": "notes", "data/blob.bin": "\0"})
    result = run("check", str(tmp_path), "-c", "h100", "--no-search", "--json")
    printed = json.loads(result.stdout)
    assert {item["format"] for item in printed["checked"]} == set(BUILT_IN)
    for item in printed["checked"]:
        assert not item["problems"] and not item["unknown"], item
        assert item["job"]["gpus"] == 16 and item["job"]["model"] == "llama3-8b"
    assert result.returncode == max(item["exit_code"] for item in printed["checked"])


# --- files that nobody should trust

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
MARKS = {
    "plan.yaml": "kind: tuner/launch-plan\n",
    "nano.yaml": "parallelism:\n  tp: 1\nmodel_config: 1\n",
    "maxtext.yml": "per_device_batch_size: 1\n",
    "primus.yaml": "framework: megatron\noverrides: 1\nmodules: 1\n",
    "accelerate.yaml": "distributed_type: FSDP\n",
    "job.yaml": "model: tiny\nplan: tp=1\n",
}
HOSTILE: dict[str, dict[str, str | bytes]] = {
    **{f"aliases in {name}": {name: mark + BOMB} for name, mark in MARKS.items()},
    **{f"depth in {name}": {name: mark + "deep: " + "[" * 40_000} for name, mark in MARKS.items()},
    "deep json": {"ds_config.json": '{"zero_optimization": ' + "[" * 100_000},
    "deep toml": {"train.toml": "[parallelism]\na = " + "[" * 50_000},
    "deep python": {"recipe.py": "from nemo import MegatronStrategy\nx = " + "(" * 20_000},
    "a long line": {"pretrain.sh": MEGATRON + "# " + "x" * 1_000_000 + "\ntorchrun pretrain_gpt.py --num-layers " + "9" * 900_000},
    "a variable of itself": {"pretrain.sh": "A=$A$A\nB=$A$B\n" * 200 + MEGATRON},
    "open quotes": {"pretrain.sh": MEGATRON + "'" + '"$(' * 2000},
    "binary": {"pretrain.sh": b"\x7fELF\0\0" + b"\0" * 1000},
    "latin-1": {"pretrain.sh": MEGATRON.encode() + b"# caf\xe9\n"},
    "nothing": {"pretrain.sh": ""},
    "huge numbers": {"pretrain.sh": MEGATRON.replace("TP=8", "TP=" + "9" * 500)},
    "odd numbers": {"pretrain.sh": MEGATRON.replace("TP=8", "TP=-8").replace("PP=4", "PP=0")},
    "escapes": {"pretrain.sh": MEGATRON.replace("--frobnicate 3", "--frob\x1b[31mnicate '\u202e'")},
    "zero of all": {"job.yaml": "model: tiny\ncluster: h100x8\nseq_len: 0\nglobal_batch: -1\nplan: {tp: 0, pp: x, zz: 1}\n"},
    "lists": {"job.yaml": "model: [1]\ncluster: {a: b}\nplan: [[tp]]\n"},
    "long flags": {"pretrain.sh": "torchrun pretrain_gpt.py --num-layers 2 " + "--x y " * 30_000},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_files_are_an_error_and_neither_a_hang_nor_a_traceback(name: str, tmp_path: Path) -> None:
    paths = []
    for file, content in HOSTILE[name].items():
        (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
        paths.append(file)
    started = time.monotonic()
    for where in (paths, ["."]):
        result = run("check", *where, "-c", "h100", "--fix", cwd=tmp_path)
        assert result.returncode in (2, 3), result.stdout[-2000:] + result.stderr[-2000:]
        assert "Traceback" not in result.stderr and "internal error" not in result.stderr, result.stderr
        report = result.stdout.split("diff --git")[0]  # a diff into a pipe is the file's own text
        assert "\x1b" not in report and "\u202e" not in report
        assert len(result.stderr) < 20_000
    assert time.monotonic() - started < 60


def test_links_pipes_and_what_cannot_be_read(tmp_path: Path) -> None:
    lay(tmp_path, {"good/fast.yaml": TINY.format(1)})
    (tmp_path / "good/loop").symlink_to(tmp_path / "good", target_is_directory=True)
    (tmp_path / "good/self").symlink_to("self")
    (tmp_path / "good/again.yaml").symlink_to("fast.yaml")
    os.mkfifo(tmp_path / "good/pipe.sh")
    with (tmp_path / "good/huge.sh").open("wb") as file:
        file.truncate(2**33)
    result = run("check", "good", "--no-search", cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "1 launch: 1 ok" in result.stdout
    for path in ("good/self", "/dev/zero", "good/huge.sh", "good/loop/loop/self"):
        result = run("check", path, cwd=tmp_path)
        assert result.returncode == 2 and "Traceback" not in result.stderr
    assert run("check", "good/loop", "--no-search", cwd=tmp_path).returncode == 0


def test_an_empty_folder_is_bad_input(tmp_path: Path) -> None:
    result = run("check", ".", cwd=tmp_path)
    assert result.returncode == 2 and "hold no launch file that is known" in result.stderr


def test_files_with_pieces_gone_wrong_are_never_an_internal_error(tmp_path: Path) -> None:
    """Lines of every launcher's own files dropped, doubled, and characters changed: whatever is left is judged or refused in words."""
    random_ = random.Random(7)
    for kind in BUILT_IN:
        launcher = open_launcher(kind)
        job = job_of("megatron-lm" if launcher.framework == "generic" else launcher.framework, "mixtral-8x7b")
        version = launcher.versions[-1] if launcher.versions else ""
        files: dict[str, str] = {}
        for plan in plans_of(launcher, "mixtral-8x7b"):
            try:
                files = dict(launcher.write(job, plan, version).files)
                break
            except SpecError:
                continue
        for number in range(12):
            spoiled = {name: spoil(text, random_) for name, text in files.items() if Path(name).name != "train.py"}
            folder = lay(tmp_path / f"{kind}-{number}", spoiled)
            try:
                answer: CheckAnswer = tuner.check([str(folder / name) for name in spoiled], cluster="h100", no_search=True)
            except SpecError:
                continue
            assert answer.exit_code in (0, 2, 3)
            json.dumps(answer.record(), allow_nan=False)


def spoil(text: str, random_: random.Random) -> str:
    lines = text.split("\n")
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(lines))
        act = random_.choice(("drop", "double", "digit", "cut", "swap"))
        line = lines[at]
        if act == "drop":
            lines[at] = ""
        elif act == "double":
            lines.insert(at, line)
        elif act == "digit":
            lines[at] = "".join(random_.choice("0123456789-x.") if c.isdigit() else c for c in line)
        elif act == "cut":
            lines[at] = line[: random_.randint(0, len(line))]
        else:
            lines[at] = line.translate(str.maketrans("=:[]{}()'\"", random_.choice(("=:[]{}()'\"", ":=][}{)(\"'")) * 1))
    return "\n".join(lines)
