"""Accelerate with FSDP2: facts held against its sources by hand, golden files, and configurations of the kind that people keep."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from tests.launch.launchers.golden import check
from tests.launch.launchers.plans import job_of
from tuner.errors import SpecError
from tuner.launch.launchers.accelerate import Accelerate
from tuner.launch.launchers.launcher import Found, Written
from tuner.plan_defaults import read_plan

LAUNCHER = Accelerate()
SIZES = "parallelism_config_"


def written(knobs: str, model: str = "llama3-70b", **changes: Any) -> Written:
    job = job_of("accelerate", model).model_copy(update=changes)
    return LAUNCHER.write(job, read_plan(knobs, job, "plan")[0])


def config(knobs: str, **changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(written(knobs, **changes).files["accelerate.yaml"])
    return read


def refused(knobs: str, **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(knobs, **changes)
    assert all(problem.hint for problem in error.value.problems), error.value
    return {problem.path: problem.rule for problem in error.value.problems}


@pytest.mark.parametrize(
    ("folder", "knobs", "model"),
    [
        ("llama3-70b-hsdp", "zero=3,shard_group=16,cp=2,recompute=full", "llama3-70b"),
        ("llama3-8b-ddp", "zero=0,micro_batch=2,recompute=full", "llama3-8b"),
        ("mixtral-8x7b-keep", "zero=2,tp=2,offload=optimizer", "mixtral-8x7b"),
    ],
)
def test_golden_files(folder: str, knobs: str, model: str) -> None:
    files = written(knobs, model).files
    check(f"accelerate/{folder}", {name: text for name, text in files.items() if name != "train.py"})


def test_degrees_by_hand() -> None:
    """128 GPUs, tp 2, cp 4: dp is 16; shards of 32 ranks are dp_shard 8 x cp 4, twice."""
    found = config("zero=3,tp=2,cp=4,shard_group=32")["parallelism_config"]
    sizes = {name: found[f"{SIZES}{name}_size"] for name in ("dp_replicate", "dp_shard", "tp", "cp")}
    assert sizes == {"dp_replicate": 2, "dp_shard": 8, "tp": 2, "cp": 4}


def test_ring_attention_is_alltoall_and_gathering_is_allgather() -> None:
    """torch _AllToAllRotater hands keys and values to the next rank; _AllGatherRotater gathers them once."""
    assert config("cp=2,cp_kind=p2p")["parallelism_config"][f"{SIZES}cp_comm_strategy"] == "alltoall"
    assert config("cp=2,cp_kind=all_gather")["parallelism_config"][f"{SIZES}cp_comm_strategy"] == "allgather"
    assert refused("cp=2,cp_kind=a2a").keys() == {"cp_kind"}


def test_sharding_by_hand() -> None:
    assert config("zero=3")["fsdp_config"]["fsdp_reshard_after_forward"] is True
    assert config("zero=2")["fsdp_config"]["fsdp_reshard_after_forward"] is False
    plain = config("zero=0")
    assert plain["distributed_type"] == "MULTI_GPU" and not {"fsdp_config", "parallelism_config"} & set(plain)
    assert refused("zero=1").keys() == {"zero"}


def test_combinations_that_have_no_spelling_are_refused_at_once() -> None:
    rules = refused("pp=2,tp=2,zero=0,dp_overlap=false,offload=optimizer,sequence_parallel=true")
    assert set(rules) == {"pp", "zero", "dp_overlap", "offload", "sequence_parallel"}
    assert refused("tp=64,pp=2,zero=3").keys() == {"pp", "zero"}
    assert refused("zero=3,cp=4,shard_group=4").keys() == {"shard_group"}
    assert refused("zero=3", precision="fp8").keys() == {"precision"}


def test_without_fsdp_the_script_recomputes() -> None:
    assert "--gradient_checkpointing" in written("zero=0,recompute=full").files["launch.sh"]
    sharded = written("zero=3,recompute=full")
    assert "--gradient_checkpointing" not in sharded.files["launch.sh"]
    assert yaml.safe_load(sharded.files["accelerate.yaml"])["fsdp_config"]["fsdp_activation_checkpointing"] is True


def test_tensor_parallelism_says_that_it_needs_weights() -> None:
    assert any("--write_weights" in note for note in written("tp=2,zero=3").notes)
    assert not any("--write_weights" in note for note in written("zero=3").notes)


TRL = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "FSDP",
    "downcast_bf16": "no",
    "fsdp_config": {
        "fsdp_activation_checkpointing": False,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_version": 2,
    },
    "mixed_precision": "bf16",
    "num_machines": 1,
    "num_processes": 8,
    "use_cpu": False,
}


def read(document: dict[str, Any], line: str = "") -> Found:
    files = {"fsdp.yaml": yaml.safe_dump(document, sort_keys=False)}
    return LAUNCHER.read(files | ({"run.sh": line} if line else {}))


def test_a_configuration_for_fsdp2_and_its_launch_line() -> None:
    """Facts of huggingface/trl examples/accelerate_configs/fsdp2.yaml; 8 GPUs x 2 x 4 = 64 sequences."""
    line = "accelerate launch --config_file fsdp.yaml sft.py --per_device_train_batch_size 2 \\\n"
    line += "  --gradient_accumulation_steps 4 --packing true\n"
    found = read(TRL, line)
    assert (found.framework, found.gpus, found.gpus_per_node) == ("accelerate", 8, 8)
    assert found.plan == {"zero": 3, "dp_overlap": True, "micro_batch": 2}
    assert found.job == {"global_batch": 64, "precision": "bf16"}
    assert [(each.name, each.where) for each in found.unknown] == [("--packing", "run.sh:2")]


def test_the_command_line_wins_over_the_configuration() -> None:
    line = "NODES=2\naccelerate launch --config_file fsdp.yaml --num_machines $NODES --num_processes $((NODES * 8)) train.py --bf16\n"
    found = read(TRL | {"mixed_precision": "no"}, line)
    assert (found.gpus, found.gpus_per_node) == (16, 8)
    assert found.job["precision"] == "bf16"


def test_deepspeed_through_accelerate_is_deepspeeds() -> None:
    """Facts of huggingface/alignment-handbook recipes/accelerate_configs/deepspeed_zero3.yaml."""
    document = {
        "distributed_type": "DEEPSPEED",
        "deepspeed_config": {"zero_stage": 3, "offload_optimizer_device": "cpu", "offload_param_device": "cpu", "zero3_init_flag": True},
        "mixed_precision": "bf16",
        "num_processes": 8,
    }
    found = read(document)
    assert found.framework == "deepspeed"
    assert found.plan == {"zero": 3, "offload": "optimizer"}
    assert [(each.name, each.where) for each in found.unknown] == [("deepspeed_config.offload_param_device", "fsdp.yaml:5")]


def test_the_first_fsdp_is_read_by_its_strategy() -> None:
    hybrid = TRL | {"fsdp_config": {"fsdp_sharding_strategy": "HYBRID_SHARD"}, "num_machines": 4, "num_processes": 32}
    assert read(hybrid).plan == {"zero": 3, "dp_overlap": True, "shard_group": 8}
    assert read(TRL | {"fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}).plan["zero"] == 2
    assert read(TRL | {"fsdp_config": {"fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_version": 1}}).plan["zero"] == 3


def test_contradictions_are_problems_with_accelerates_rule() -> None:
    (problem,) = read(TRL | {"parallelism_config": {f"{SIZES}dp_shard_size": 4, f"{SIZES}tp_size": 4}}).problems
    assert problem.path == "num_processes" and problem.rule.endswith("= 16") and problem.where.startswith("fsdp.yaml:")
    both = {f"{SIZES}cp_size": 2, f"{SIZES}sp_size": 2, f"{SIZES}dp_shard_size": 2}
    assert [each.path for each in read(TRL | {"parallelism_config": both}).problems] == [f"{SIZES}sp_size"]
    old = TRL | {"fsdp_config": {"fsdp_version": 1}, "parallelism_config": {f"{SIZES}dp_shard_size": 8}}
    assert [each.path for each in read(old).problems] == ["fsdp_config.fsdp_version"]


def test_values_that_cannot_be_parsed_name_file_line_and_key() -> None:
    bad = TRL | {"mixed_precision": "int3", "num_processes": "all", "parallelism_config": {f"{SIZES}cp_comm_strategy": "rsync"}}
    with pytest.raises(SpecError) as error:
        read(bad)
    assert {problem.path for problem in error.value.problems} == {
        "mixed_precision",
        "num_processes",
        f"parallelism_config.{SIZES}cp_comm_strategy",
    }
    assert all(problem.where.startswith("fsdp.yaml:") for problem in error.value.problems)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text", [BOMB, "distributed_type: !!python/object:os.system x\n", "\x00\x01" * 100, "[1, 2]\n", "a: " + "[" * 10_000]
)
def test_hostile_configurations_give_an_error(text: str) -> None:
    LAUNCHER.reads("a.yaml", text)
    with pytest.raises(SpecError):
        LAUNCHER.read({"a.yaml": text})


def test_a_line_of_a_megabyte_is_no_trouble() -> None:
    found = LAUNCHER.read({"a.yaml": f"distributed_type: FSDP\nsomething: {'x' * 1_000_000}\n"})
    assert [(each.name, each.where, len(each.value)) for each in found.unknown] == [("something", "a.yaml:2", 200)]
