"""Standard streams and --out as a shell may give them: closed, full, in another encoding, a link, a pipe."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from tests.accuracy.row import changed
from tests.terminal import ROOT, TINY, run

ESTIMATE = ("estimate", *TINY, "--plan", "tp=2")
MODEL = (ROOT / "configs/models/tiny.yaml").read_text(encoding="utf-8")
COMMAND = f"{sys.executable} -c 'from tuner.cli import main; main()'"


def shell(line: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=ROOT, timeout=60, check=False, env=env)


@pytest.mark.parametrize(
    ("redirect", "code", "words"),
    [
        (">&-", 4, "tuner: the machine failed: Bad file descriptor\n"),
        ("2>&-", 0, ""),
        (">&- 2>&-", 4, ""),
        ("<&- 2>&-", 0, ""),
    ],
)
def test_closed_streams(redirect: str, code: int, words: str) -> None:
    result = shell(f"{COMMAND} {' '.join(ESTIMATE)} {redirect}")
    assert (result.returncode, result.stderr) == (code, words)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")
@pytest.mark.parametrize("arguments", [" ".join(ESTIMATE), "--help"])
def test_a_full_device_is_one_line(arguments: str) -> None:
    result = shell(f"{COMMAND} {arguments} > /dev/full")
    assert (result.returncode, result.stderr) == (4, "tuner: the machine failed: No space left on device\n")
    assert shell(f"{COMMAND} estimate 2> /dev/full").returncode == 2


def test_letters_that_an_encoding_lacks_are_spelled_out(tmp_path: Path) -> None:
    model = tmp_path / "model.yaml"
    model.write_text(MODEL.replace("name: tiny", "name: tïny😀", 1), encoding="utf-8")
    arguments = ("estimate", "--model", str(model), *TINY[2:], "--plan", "tp=2")
    for encoding in ("ascii", "utf-8"):
        result = run(*arguments, "--json", PYTHONIOENCODING=encoding)
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout)["job"]["model"] == "tïny😀"
    assert "t\\u00efny\\ud83d\\ude00 " in run(*arguments, PYTHONIOENCODING="ascii").stdout


def test_a_row_cannot_steer_the_terminal(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    bad = changed(id="\x1b[31m\x9b1m\u202eid", model={"heads": "\x1b[2J"})
    rows.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in (bad, changed(id="\x1b]0;x\x07"))) + "\n", encoding="utf-8")
    for more in ((), ("--json",), ("-v",)):
        result = run("validate", str(rows), *more)
        assert result.returncode == 0
        assert not {"\x1b", "\x07", "\x9b", "\u202e"} & set(result.stdout + result.stderr)
    found = json.loads(run("validate", str(rows), "--json").stdout)
    assert [row["id"] for row in found["rows"] + found["skipped"]] == ["\x1b]0;x\x07", "\x1b[31m\x9b1m\u202eid"]


@pytest.mark.parametrize("out", ["", " ", ".", "/", "~nobody-of-that-name/x.json", "file/below", "loop", "x" * 300])
def test_an_out_that_is_no_file_is_bad_input(out: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "loop").symlink_to("loop")
    result = run(*ESTIMATE, "--out", out, cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.startswith("tuner: --out = ")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "loop"]


def test_out_keeps_links_permissions_and_pipes(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o600)
    (tmp_path / "link").symlink_to("file")
    os.mkfifo(tmp_path / "pipe")
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_text()), daemon=True)
    reader.start()
    for name in ("link", "pipe"):
        assert run(*ESTIMATE, "--out", name, cwd=tmp_path).returncode == 0
    reader.join(timeout=10)
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "pipe").is_fifo()
    assert read == [(tmp_path / "file").read_text()]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]


def test_ctrl_c_during_start_up_is_one_line() -> None:
    late = "import sys, time\nfrom tuner.cli import main\nprint('ready', flush=True)\nimport tuner.cli\n"
    slow = "class Slow:\n    def find_spec(self, *_):\n        time.sleep(0.05)\nsys.meta_path.insert(0, Slow())\nmain()\n"
    child = subprocess.Popen(
        [sys.executable, "-c", late + slow, *ESTIMATE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.3)
    child.send_signal(signal.SIGINT)
    _, words = child.communicate(timeout=30)
    assert (child.returncode, words) == (130, "tuner: interrupted\n")


@pytest.mark.parametrize("width", ["1", "-3"])
def test_odd_widths(width: str) -> None:
    assert run(*ESTIMATE, COLUMNS=width).returncode == 0
