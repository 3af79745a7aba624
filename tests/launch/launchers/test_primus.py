"""Primus: keys held against Megatron's arguments by hand, golden files, and a configuration of the kind that people keep."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.launch.launchers.golden import check
from tests.launch.launchers.megatron_jobs import EXPERTS, refused, written
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found
from tuner.launch.launchers.primus import Primus

LAUNCHER = Primus()
GRAPHS = "tp=8,pp=4,cp=2,cp_kind=all_gather,sp=true,zero=1,tp_overlap=true,dp_overlap=true,cuda_graphs=true,recompute=none"


def overrides(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, Any]:
    document = yaml.safe_load(written(LAUNCHER, knobs, model, **changes).files["pretrain.yaml"])
    found: dict[str, Any] = document["modules"]["pre_trainer"]["overrides"]
    return found


@pytest.mark.parametrize(("folder", "knobs", "model"), [("experts", EXPERTS, "mixtral-8x7b"), ("graphs", GRAPHS, "llama3-70b")])
def test_golden_files(folder: str, knobs: str, model: str) -> None:
    changes = {"precision": "fp8"} if folder == "experts" else {}
    check(f"primus/{folder}", written(LAUNCHER, knobs, model, **changes).files)


def test_keys_by_hand() -> None:
    found = overrides(EXPERTS, "mixtral-8x7b", precision="fp8")
    assert found["pipeline_model_parallel_layout"] == "|".join(["Et", *["t*3"] * 10, "tL"])
    assert (found["tensor_model_parallel_size"], found["expert_model_parallel_size"], found["num_experts"]) == (2, 8, 8)
    assert (found["fp8"], found["fp8_recipe"], found["bf16"]) == ("hybrid", "tensorwise", True)
    assert set(found["recompute_modules"]) == {"layernorm", "moe_act"}
    assert overrides("zero=3")["data_parallel_sharding_strategy"] == "optim_grads_params"


def test_what_has_no_key_is_refused_by_name() -> None:
    assert refused(LAUNCHER, "pp=2,schedule=zero_bubble,zero=1").keys() == {"schedule"}
    assert refused(LAUNCHER, "zero=1,cuda_graphs=true,recompute=full").keys() == {"cuda_graphs"}


# Facts of examples/megatron/configs/MI300X/mixtral_8x22B_v0.1-BF16-pretrain.yaml.
MIXTRAL = """\
work_group: ${PRIMUS_TEAM:amd}
exp_name: ${PRIMUS_EXP_NAME:mixtral}
modules:
  pre_trainer:
    config: pre_trainer.yaml
    framework: megatron
    model: mixtral_8x22B_v0.1.yaml
    overrides:
      stderr_sink_level: DEBUG
      moe_router_force_load_balancing: true
      moe_router_dtype: null
      train_iters: 50
      micro_batch_size: 2
      global_batch_size: ${PRIMUS_GBS:128}
      seq_length: 8192
      max_position_embeddings: 8192
      lr: 1.0e-5
      eod_mask_loss: true
      # parallel
      tensor_model_parallel_size: 1
      pipeline_model_parallel_size: 4
      expert_model_parallel_size: ${PRIMUS_EP:8}
      overlap_grad_reduce: true
      gradient_accumulation_fusion: false
      recompute_granularity: full # full, selective
      recompute_method: block
      recompute_num_layers: 0
      mock_data: true
      moe_use_legacy_grouped_gemm: false
      finetune: false
      load: null
      save_interval: 20000
      ckpt_format: torch
"""
LAUNCH = "export NNODES=${NNODES:-4}\nexport GPUS_PER_NODE=8\nbash runner/primus-cli direct -- train pretrain --config x.yaml\n"


def test_a_configuration_that_primus_ships() -> None:
    """Its full recompute is that of a block of no layers."""
    found = LAUNCHER.read({"mixtral.yaml": MIXTRAL, "run.sh": LAUNCH})
    assert (found.gpus, found.gpus_per_node) == (32, 8)
    assert found.plan == {
        "tp": 1, "pp": 4, "ep": 8, "dp_overlap": True, "micro_batch": 2, "recompute": "none",
    }  # fmt: skip
    assert found.job["seq_len"] == 8192 and found.job["global_batch"] == 128 and found.job["precision"] == "bf16"
    assert {(each.name, each.where) for each in found.unknown if each.name != "model"} == {
        ("gradient_accumulation_fusion", "mixtral.yaml:24"), ("moe_use_legacy_grouped_gemm", "mixtral.yaml:29"),
    }  # fmt: skip
    assert not found.problems


def test_a_block_of_layers_is_counted_by_stage() -> None:
    """Mixtral 8x22B has 56 layers, 14 in each of 4 stages."""
    found = LAUNCHER.read({"mixtral.yaml": MIXTRAL.replace("recompute_num_layers: 0", "recompute_num_layers: 13")})
    assert found.plan["recompute"] == "full:13"
    (problem,) = LAUNCHER.read({"m.yaml": MIXTRAL.replace("_method: block", "_method: uniform")}).problems
    assert "at least 1" in problem.rule and problem.where == "m.yaml:27"


def read(line: str, model: str = "language_model.yaml") -> Found:
    text = f"modules:\n  pre_trainer:\n    framework: megatron\n    model: {model}\n    overrides:\n      num_layers: 8\n      {line}\n"
    return LAUNCHER.read({"p.yaml": text, "run.sh": LAUNCH})


def test_what_the_environment_must_say_stays_unknown() -> None:
    found = read("tensor_model_parallel_size: ${TP}")
    assert "tp" not in found.plan
    assert [(each.name, each.where) for each in found.unknown] == [("tensor_model_parallel_size", "p.yaml:7")]


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("tensor_model_parallel_size: 3", "must divide the 32 GPUs"),
        ("pipeline_model_parallel_size: 16", "must divide the 8 layers"),
        ("recompute_granularity: full", "recompute_method uniform or block"),
        ("global_batch_size: 40", "= 32"),
        ("overlap_param_gather: true", "use_distributed_optimizer"),
    ],
)
def test_contradictions_are_problems_with_their_line(line: str, rule: str) -> None:
    problems = read(line).problems
    assert any(rule in problem.rule for problem in problems), problems
    assert all((problem.where, problem.path) == ("p.yaml:7", line.split(":")[0]) for problem in problems)


@pytest.mark.parametrize(
    "line",
    ["tensor_model_parallel_size: two", "sequence_parallel: perhaps", "micro_batch_size: 1.5", "num_experts: {a: 1}", "seq_length: [1, 2]"],
)
def test_values_that_cannot_be_read_name_file_line_and_key(line: str) -> None:
    with pytest.raises(SpecError) as wrong:
        read(line)
    assert [(problem.where, problem.path) for problem in wrong.value.problems] == [("p.yaml:7", line.split(":")[0])]


ALIASES = "a: &a [x, x]\n" + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [*{chr(97 + i)}, *{chr(97 + i)}]\n" for i in range(20))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[" * 50_000,
        "\x00\x01",
        "modules: 3\n",
        "a: &a [*a]\n",
        ALIASES,
        "modules:\n  x: {overrides: [1]}\n",
        "!!python/object:os.system {}\n",
    ],
)
def test_hostile_configurations_give_an_error(text: str) -> None:
    LAUNCHER.reads("p.yaml", text)
    with pytest.raises(SpecError, match=r"p\.yaml"):
        LAUNCHER.read({"p.yaml": text})
