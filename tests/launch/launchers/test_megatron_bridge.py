"""Megatron-Bridge: overrides held against its configuration by hand, golden scripts, and lines of the kind that people keep."""

from __future__ import annotations

import shlex
from typing import Any

import pytest

from tests.launch.launchers.golden import check
from tests.launch.launchers.megatron_jobs import EXPERTS, GRAPHS, refused, written
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found
from tuner.launch.launchers.megatron_bridge import MegatronBridge

LAUNCHER = MegatronBridge()


def overrides(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, str]:
    lines = written(LAUNCHER, knobs, model, **changes).files["pretrain.sh"].splitlines()
    words = [word for line in lines if line.startswith("    ") and "=" in line for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in words if "=" in word)


def read(arguments: str) -> Found:
    line = f"torchrun --nnodes 2 --nproc_per_node 8 scripts/training/run_recipe.py --recipe vanilla_gpt_pretrain_config {arguments}"
    return LAUNCHER.read({"run.sh": f"#!/bin/bash\n{line}\n"})


@pytest.mark.parametrize(("folder", "knobs", "model"), [("experts", EXPERTS, "mixtral-8x7b"), ("graphs", GRAPHS, "llama3-70b")])
def test_golden_files(folder: str, knobs: str, model: str) -> None:
    changes = {"precision": "fp8"} if folder == "experts" else {}
    check(f"megatron-bridge/{folder}", written(LAUNCHER, knobs, model, **changes).files)


def test_overrides_by_hand() -> None:
    """The recipe's provider takes vpp beside a layout, unlike Megatron-LM's command line."""
    found = overrides(EXPERTS, "mixtral-8x7b", precision="fp8")
    assert found["model.virtual_pipeline_model_parallel_size"] == "3" and found["model.num_moe_experts"] == "8"
    assert found["mixed_precision"] == "bf16_with_fp8_current_scaling_mixed"
    assert found["model.share_embeddings_and_output_weights"] == "false"
    assert set(found["model.recompute_modules"].strip("'[]").split(",")) == {"layernorm", "moe_act"}
    assert found["ddp.overlap_grad_reduce"] == "true"
    assert overrides("zero=1", precision="fp16")["mixed_precision"] == "fp16_mixed"


def test_what_has_no_key_is_refused_by_name() -> None:
    assert refused(LAUNCHER, "pp=2,schedule=zero_bubble,zero=1").keys() == {"schedule"}
    assert refused(LAUNCHER, "zero=1", precision="fp32").keys() == {"precision"}
    assert refused(LAUNCHER, "zero=1", attention="unfused").keys() == {"attention"}


# A line as docs and issues show them: a recipe of its own, with Hydra's overrides behind it.
RECIPE = """\
#!/bin/bash
#SBATCH --nodes=8
#SBATCH --gpus-per-node=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 scripts/training/run_recipe.py \\
    --recipe llama3_70b_pretrain_config \\
    --dataset mock \\
    model.tensor_model_parallel_size=4 \\
    model.pipeline_model_parallel_size=4 \\
    +model.virtual_pipeline_model_parallel_size=5 \\
    model.sequence_parallel=true \\
    'model.recompute_modules=[core_attn, layernorm]' model.recompute_granularity=selective \\
    train.micro_batch_size=1 \\
    train.global_batch_size=128 \\
    train.train_iters=100 \\
    model.odd_switch=true \\
    mixed_precision=bf16_mixed
"""


def test_a_recipe_with_overrides() -> None:
    found = LAUNCHER.read({"run.sh": RECIPE})
    assert (found.gpus, found.gpus_per_node, found.model) == (64, 8, {"preset": "llama3-70b"})
    assert found.plan == {
        "tp": 4, "pp": 4, "vpp": 5, "sequence_parallel": True, "micro_batch": 1, "recompute": "core_attn+layernorm",
    }  # fmt: skip
    assert found.job == {"global_batch": 128, "precision": "bf16"}
    assert [(each.name, each.value, each.where) for each in found.unknown] == [("model.odd_switch", "true", "run.sh:16")]
    assert not found.problems and "was not read" in found.assumed["recipe"]


def test_a_line_of_the_scripts_for_performance() -> None:
    """scripts/performance: flags of its own; sequence parallelism follows from -tp; nodes of GB200 hold four GPUs."""
    line = "python setup_experiment.py -m llama -mr llama3_70b -g gb200 -ng 64 -c fp8_cs -tp 2 -pp 4 -vp 5 -mb 1 -gb 128 -rl 2 --made_up 3"
    found = LAUNCHER.read({"perf.sh": f"{line}\n"})
    assert (found.gpus, found.gpus_per_node, found.model) == (64, 4, {"preset": "llama3-70b"})
    assert found.plan == {"tp": 2, "pp": 4, "vpp": 5, "sequence_parallel": True, "micro_batch": 1, "recompute": "full:10"}
    assert found.job == {"global_batch": 128, "precision": "fp8"}
    assert [(each.name, each.value, each.where) for each in found.unknown] == [("--made_up", "3", "perf.sh:1")]


@pytest.mark.parametrize(
    ("arguments", "key", "rule"),
    [
        ("model.tp_comm_overlap=true model.tensor_model_parallel_size=2", "model.tp_comm_overlap", "sequence_parallel"),
        ("model.tensor_model_parallel_size=3", "model.tensor_model_parallel_size", "must divide the 16 GPUs"),
        ("ddp.overlap_param_gather=true", "ddp.overlap_param_gather", "use_distributed_optimizer"),
        ("train.global_batch_size=40 train.micro_batch_size=1", "train.global_batch_size", "= 16"),
        ("model.num_moe_experts=8 model.expert_model_parallel_size=16", "model.expert_model_parallel_size", "num_experts 8"),
    ],
)
def test_contradictions_are_problems(arguments: str, key: str, rule: str) -> None:
    problems = {problem.path: problem for problem in read(arguments).problems}
    assert key in problems and rule in problems[key].rule and problems[key].where == "run.sh:2"


@pytest.mark.parametrize(
    ("arguments", "key"),
    [
        ("model.tensor_model_parallel_size=two", "model.tensor_model_parallel_size"),
        ("model.sequence_parallel=perhaps", "model.sequence_parallel"),
        ("train.micro_batch_size=[1,2]", "train.micro_batch_size"),
        ("-c fp9", "-c"),
        ("model.recompute_granularity=some", "model.recompute_granularity"),
    ],
)
def test_values_that_cannot_be_read_name_file_line_and_key(arguments: str, key: str) -> None:
    with pytest.raises(SpecError) as wrong:
        read(arguments)
    assert [(problem.where, problem.path) for problem in wrong.value.problems] == [("run.sh:2", key)]


@pytest.mark.parametrize("text", ["", "\x00\x01" * 500, "python train.py\n", "x" * 1_000_000, "torchrun run_recipe.py 'open"])
def test_hostile_scripts_give_an_error(text: str) -> None:
    LAUNCHER.reads("run.sh", text)
    with pytest.raises(SpecError, match=r"run\.sh"):
        LAUNCHER.read({"run.sh": text})


def test_an_override_that_the_file_does_not_fill_in_stays_unknown() -> None:
    found = read("model.tensor_model_parallel_size=$TP train.micro_batch_size=2")
    assert found.plan["micro_batch"] == 2 and "tp" not in found.plan
    assert [(each.name, each.where) for each in found.unknown] == [("model.tensor_model_parallel_size", "run.sh:2")]
