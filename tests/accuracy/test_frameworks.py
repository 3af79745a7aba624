"""Framework presets: complete, sourced, and with defaults that are plans."""

import pytest

from tuner.plan_text import parse_knobs
from tuner.presets import framework, names

DEFAULTS = ("vpp", "zero", "recompute", "sequence_parallel", "tp_overlap", "dp_overlap", "ep_overlap", "cuda_graphs", "pipeline_layout")
PUBLISHED = (
    "megatron-lm",
    "megatron-bridge",
    "nemo",
    "nemo-launcher",
    "nanotron",
    "torchtitan",
    "megatron-deepspeed",
    "maxtext",
    "llm-foundry",
    "internevo",
    "aleph-alpha-scaling",
    "colossalai",
    "paxml",
    "megatron-lm-zero-bubble",
    "unstated",
)


@pytest.mark.parametrize("name", names("frameworks"))
def test_defaults_are_knobs_of_a_plan(name):
    found = framework(name)
    assert found.name == name
    assert "always" in found.rules
    parse_knobs({knob: getattr(found.defaults, knob).value for knob in DEFAULTS}, name)


@pytest.mark.parametrize("name", names("frameworks"))
def test_bytes_a_parameter_are_those_of_mixed_precision_adam(name):
    """16 bytes (gradients in 16 bits, or fp32 weights that are their own masters) or 18 (fp32 gradients beside 16-bit weights)."""
    found = framework(name)
    assert found.param_bytes.value + found.grad_bytes.value + found.optimizer_bytes.value in (16, 18, 20)


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_framework_of_the_published_rows_has_a_preset(name):
    assert framework(name).name == ("generic" if name == "unstated" else name)


def test_known_differences():
    """nanotron and Megatron-LM's command line do not overlap data-parallel communication, recipes of Megatron-Bridge do."""
    overlaps = {name: framework(name).defaults.dp_overlap.value for name in ("nanotron", "megatron-lm", "megatron-bridge", "torchtitan")}
    assert overlaps == {"nanotron": False, "megatron-lm": False, "megatron-bridge": True, "torchtitan": True}
    assert framework("torchtitan").defaults.zero.value == 3
    assert framework("nanotron").pipeline_balance.value == "cost"
    assert framework("aleph-alpha-scaling").sharded_logits.value is False
