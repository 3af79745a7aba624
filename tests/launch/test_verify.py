"""A launch held against its prediction: the step time and memory of golden logs, and every way in which that ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.terminal import ROOT
from tuner.launch.verify import main

LOGS = Path(__file__).parents[1] / "fixtures/logs"


def interval(value: float, spread: float = 1.1) -> dict[str, float]:
    return {"value": value, "low": value / spread, "high": value * spread}


def prediction(tmp: Path, step_s: float, gigabytes: float = 1.0) -> str:
    content = {
        "name": "llama3-70b",
        "framework": "megatron-lm",
        "basis": "calibrated",
        "calibration": "nemo",
        "gpus": 64,
        "seq_len": 8192,
        "global_batch": 64,
        "step_s": interval(step_s),
        "memory": {kind: interval(gigabytes * 1e9) for kind in ("allocated", "reserved", "device")},
    }
    path = tmp / "prediction.json"
    path.write_text(json.dumps(content))
    return str(path)


def verified(tmp: Path, log: str, step_s: float, capsys: pytest.CaptureFixture[str], gigabytes: float = 1.0) -> tuple[int, str]:
    code = main([prediction(tmp, step_s, gigabytes), str(LOGS / f"{log}.log")])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_inside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """megatron-lm.log: 12.87 s, at most 15,754 MiB allocated: 16.52 GB."""
    code, said = verified(tmp_path, "megatron-lm", 12.5, capsys, 16.5)
    assert code == 0, said
    assert "measured 12.87 s, predicted 12.5 (11.36 to 13.75): +3.0%" in said
    assert "inside the 90 % interval" in said and "bytes in tensors" in said


def test_too_slow_is_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verified(tmp_path, "megatron-lm", 10.0, capsys, 16.5)
    assert code == 3 and "+28.7%, OUTSIDE" in said and "OUTSIDE the 90 % interval" in said


def test_more_memory_than_foretold_is_outside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verified(tmp_path, "megatron-lm", 12.87, capsys, 10.0)
    assert code == 3 and said.count("OUTSIDE") == 2


def test_a_rate_is_converted_by_the_predictions_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """torchtitan.log: 64 sequences of 8192 on 64 GPUs at 4098 tokens/s each: 2.00 s; its memory is what is reserved."""
    code, said = verified(tmp_path, "torchtitan", 2.0, capsys, 50.0)
    assert "measured 1.999 s" in said and "bytes that the allocator holds" in said
    assert code in (0, 3)


def test_a_run_out_of_memory_has_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, said = verified(tmp_path, "oom", 1.0, capsys)
    assert code == 4 and "ended with" in said and "out of memory" in said.lower()


def test_a_log_that_no_launcher_wrote_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.log").write_text("hello\n" * 10)
    assert main([prediction(tmp_path, 1.0), str(tmp_path / "x.log")]) == 2
    assert "no line of a launcher's log" in capsys.readouterr().err
    assert main([prediction(tmp_path, 1.0), str(tmp_path / "none.log")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "change", [{"gpus": 0}, {"step_s": {"value": 1}}, {"step_s": interval(float("inf"))}, {"extra": 1}, {"memory": {}}]
)
def test_a_prediction_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any]) -> None:
    path = prediction(tmp_path, 1.0)
    Path(path).write_text(json.dumps(json.loads(Path(path).read_text()) | change))
    assert main([path, str(LOGS / "megatron-lm.log")]) == 2
    assert "prediction.json" in capsys.readouterr().err


def test_logs_of_several_nodes_are_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a run whose last rank alone prints steps, the logs of other nodes tell memory."""
    (tmp_path / "other.log").write_text("[Rank 3] (after 2 iterations) memory (MB) | max allocated: 71000.0 | max reserved: 72000.0\n")
    code = main([prediction(tmp_path, 12.87, 74.45), str(LOGS / "megatron-lm.log"), str(tmp_path / "other.log")])
    said = capsys.readouterr()
    assert code == 0, said.err
    assert "measured 74.45 GB" in said.out


def test_as_a_module(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tuner.launch.verify", prediction(tmp_path, 12.87, 16.5), str(LOGS / "megatron-lm.log")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0 and "inside" in done.stdout


def test_each_problem_stands_on_a_line_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "none.json").write_text("{}")
    assert main([str(tmp_path / "none.json"), str(LOGS / "megatron-lm.log")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 3 and all(line.startswith(str(tmp_path)) for line in lines) and not any("\\x0a" in line for line in lines)
