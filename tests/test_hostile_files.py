"""Preset files with a few values gone wrong: each is refused in words or gives figures that are numbers."""

from __future__ import annotations

import copy
import json
import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tuner
from tuner import presets
from tuner.cli.output import json_text
from tuner.errors import TunerError

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest.tmpdir import TempPathFactory

ODD = (
    None, "", 0, -1, 1, 7, 1e30, -1e308, 5e-324, 10**29, 2**31, 2**31 - 1, "8", "abc", "a\x1b[31mb", "\u202e", [], {}, [1], True, 1.5,
    "80 GB", "1 B", "1e18 EB", "1e-20 FLOP/s", "1e-25 GB/s", "0 GB", "-1 GB", "1e11 s", "full:99999999", "core_attn+nothing", "x" * 5000,
    "h100", "embedding=999+loss=999", "fp32",
)  # fmt: skip
OPTION = {"models": "model", "clusters": "cluster", "gpus": "cluster", "frameworks": "framework", "calibrations": "calibration"}
JOB = {"model": "tiny", "cluster": "h100x8", "seq_len": 128, "global_batch": 64}
LAYERED = ("prior", "pooled")  # these two are read by name


def preset(kind: str, name: str) -> Any:
    return yaml.safe_load((presets.configs_dir() / kind / f"{name}.yaml").read_text(encoding="utf-8"))


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in items for place in ((*at, key), *places(inner, (*at, key)))]


def broken(whole: Any, at: tuple[Any, ...], value: Any) -> Any:
    """Return a copy with the value at a place replaced, or removed where it is ... ."""
    whole = copy.deepcopy(whole)
    inner = whole
    for key in at[:-1]:
        inner = inner[key]
    if value is ...:
        del inner[at[-1]]
    else:
        inner[at[-1]] = value
    return whole


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        below_zero = value.get("name") == "measured_runs"  # what they take off
        value = [] if below_zero else [inner for name, inner in value.items() if name != "measured_runs"]
    if isinstance(value, list):
        return [number for inner in value for number in numbers(inner)]
    return [value] if isinstance(value, (int, float)) else []


def ask(kind: str, content: Any, folder: Path) -> None:
    """Estimate with this file: a refusal in words, or figures that are finite and not negative."""
    path = folder / f"{kind}-{len(list(folder.iterdir()))}.yaml"  # what was read once is kept
    path.write_text(yaml.safe_dump(content, allow_unicode=True), encoding="utf-8")
    if kind == "gpus":
        wire = {"bandwidth": {"value": "450 GB/s", "source": "s"}, "latency": {"value": "1 us", "source": "s"}}
        node = {"name": "node", "gpu": str(path), "gpus": 8, "gpus_per_node": 8, "domains": [{"name": "nvlink", "size": 8, **wire}]}
        path = folder / f"node-{path.name}"
        path.write_text(yaml.safe_dump(node), encoding="utf-8")
    more = {"gpus": 8} if kind == "clusters" else {}
    try:
        record = tuner.estimate(**{**JOB, OPTION[kind]: str(path), **more}, plan="tp=2").record()
    except TunerError as error:
        assert error.exit_code in (1, 2)
        assert str(error).strip()
        assert str(error).isprintable() or "\n" in str(error)
        return
    figures = numbers(json.loads(json_text(record)))
    assert all(math.isfinite(figure) and figure >= 0 for figure in figures)


@pytest.mark.parametrize("kind", OPTION)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_preset_with_a_value_gone_wrong(kind: str, data: st.DataObject, tmp_path_factory: TempPathFactory) -> None:
    name = data.draw(st.sampled_from([n for n in presets.names(kind) if n not in LAYERED]))
    content = preset(kind, name)
    at = data.draw(st.sampled_from(places(content)))
    ask(kind, broken(content, at, data.draw(st.sampled_from((*ODD, ...)))), tmp_path_factory.mktemp("files"))


@pytest.mark.parametrize(
    ("at", "value", "says"),
    [
        (("defaults", "recompute", "value"), "everything", "defaults.recompute.value = 'everything': must be none, selective, full"),
        (("defaults", "pipeline_layout", "value"), "odd", "defaults.pipeline_layout.value = 'odd': must be"),
        (("defaults", "vpp", "value"), 0, "defaults.vpp.value = 0"),
        (("defaults", "zero", "value"), 4, "defaults.zero.value = 4"),
        (("param_bytes", "value"), -2, "param_bytes.value = -2"),
        (("padded_vocab", "value"), 2**62, "padded_vocab.value = "),
        (("rules",), ["always", "megatorn"], "did you mean megatron?"),
    ],
)
def test_a_framework_that_cannot_be(at: tuple[str, ...], value: Any, says: str, tmp_path: Path) -> None:
    path = tmp_path / "framework.yaml"
    path.write_text(yaml.safe_dump(broken(preset("frameworks", "megatron-lm"), at, value)), encoding="utf-8")
    with pytest.raises(TunerError, match=r"framework\.yaml: ") as caught:
        presets.framework(str(path))
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("memory_bandwidth_efficiency", 0.0, "must be from 0.001 to 1"),
        ("tp_overlap_fraction", 1.5, "must be from 0 to 1"),
        ("step_fixed_s", -1.0, "must be from 0 to 10"),
        ("step_fixed_s", 1e300, "must be from 0 to 10"),
        ("oom_margin_spread", 0.0, "must be from 0.001 to 10"),
    ],
)
def test_a_coefficient_that_no_formula_takes(name: str, value: float, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"name": "mine", "coefficients": {name: {"value": value, "source": "s"}}}), encoding="utf-8")
    with pytest.raises(TunerError) as caught:
        tuner.estimate(**JOB, plan="tp=2", calibration=str(path))
    assert f"mine: coefficients.{name} = {value}: {says}" in str(caught.value)
