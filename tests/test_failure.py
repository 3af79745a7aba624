"""Failure data: what a file may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tuner.errors import SpecError
from tuner.presets import configs_dir, failure


def stated(tmp_path: Path, **changes: Any) -> str:
    data = yaml.safe_load((configs_dir() / "failures" / "llama3-herd.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data | changes))
    return str(path)


def test_rates_of_a_file(tmp_path: Path) -> None:
    data = failure(stated(tmp_path, mtbf={"value": "1000 h", "source": "ours"}))
    assert data.events_per_hour == pytest.approx(0.001)
    assert data.mean_repair_hours == pytest.approx(0.78 * 120 + 0.22 * 3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mtbf": {"value": "0 h", "source": "x"}}, "mtbf.value.*greater than 0"),
        ({"mtbf": {"value": 1000, "source": "x"}}, "mtbf.value.*seconds with a unit"),
        ({"mtbf": {"value": "1000 h"}}, "mtbf.source.*is missing"),
        ({"hardware_share": {"value": 1.5, "source": "x"}}, "hardware_share.value.*less than or equal to 1"),
        ({"power_cap": {"value": 0.5, "source": "x"}}, "power_cap.value.*greater than or equal to 1"),
        ({"blast": []}, "blast must name at least one number of GPUs"),
        ({"blast": [{"gpus": 1, "share": {"value": 0.5, "source": "x"}}]}, r"shares of blast must add up to 1, not 0\.5"),
        ({"blast": [{"gpus": 4, "share": {"value": 0.5, "source": "x"}}] * 2}, "names a number of GPUs twice"),
        ({"hardware_share": {"value": True, "source": "x"}}, "hardware_share.value = True: must be a number, not true"),
        ({"power_cap": {"value": True, "source": "x"}}, "power_cap.value = True: must be a number, not true"),
        ({"power_exponent": {"value": 0.001, "source": "x"}}, "power_exponent must be at least 0.1, not 0.001: there a tenth more speed"),
        ({"mtfb": {"value": "1 h", "source": "x"}}, "did you mean mtbf"),
    ],
)
def test_what_a_file_may_not_say(tmp_path: Path, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError, match=says):
        failure(stated(tmp_path, **changes))
