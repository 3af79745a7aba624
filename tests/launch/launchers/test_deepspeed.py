"""DeepSpeed: facts held against its own sources by hand, golden files, and configurations of the kind that people keep."""

from __future__ import annotations

import ast
import json
from dataclasses import replace
from typing import Any

import pytest

from tests.launch.launchers.golden import check
from tests.launch.launchers.plans import job_of
from tuner import presets
from tuner.errors import SpecError
from tuner.hf_config import read_hf_config
from tuner.launch.launchers.deepspeed import DeepSpeed
from tuner.launch.launchers.hf.model import hf_model
from tuner.launch.launchers.hf.train_scripts import ACCELERATE, DEEPSPEED
from tuner.launch.launchers.launcher import Found, Written
from tuner.plan_defaults import read_plan

LAUNCHER = DeepSpeed()


def written(knobs: str, model: str = "llama3-8b", **changes: Any) -> Written:
    job = job_of("deepspeed", model)
    job = job.model_copy(update=changes)
    return LAUNCHER.write(job, read_plan(knobs, job, "plan")[0])


def config(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(written(knobs, model, **changes).files["ds_config.json"])
    return read


def refused(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(knobs, model, **changes)
    assert all(problem.hint for problem in error.value.problems), error.value
    return {problem.path: problem.rule for problem in error.value.problems}


def without_script(files: Written) -> dict[str, str]:
    return {name: text for name, text in files.files.items() if name != "train.py"}


@pytest.mark.parametrize(
    ("folder", "knobs", "model"),
    [
        ("llama3-8b-zero3", "zero=3,micro_batch=2,recompute=full,dp_overlap=true,offload=optimizer", "llama3-8b"),
        ("llama3-70b-tp8", "tp=8,zero=1,micro_batch=1,recompute=full,tp_overlap=true", "llama3-70b"),
        ("mixtral-8x7b-ep8", "ep=8,cp=2,cp_kind=a2a,zero=2", "mixtral-8x7b"),
    ],
)
def test_golden_files(folder: str, knobs: str, model: str) -> None:
    check(f"deepspeed/{folder}", without_script(written(knobs, model)))


def test_batch_by_hand() -> None:
    """16 GPUs, 64 sequences: micro 2 x 2 steps x 16; with Ulysses over 4 the world is 4: 2 x 8 x 4."""
    plain = config("zero=1,micro_batch=2")
    assert (plain["train_batch_size"], plain["train_micro_batch_size_per_gpu"], plain["gradient_accumulation_steps"]) == (64, 2, 2)
    ulysses = config("zero=1,micro_batch=2,cp=4,cp_kind=a2a")
    assert (ulysses["train_batch_size"], ulysses["gradient_accumulation_steps"], ulysses["sequence_parallel_size"]) == (64, 8, 4)


def test_under_autotp_the_batch_is_left_to_deepspeed() -> None:
    """Its check counts tensor-parallel ranks as data-parallel ones: 16 GPUs at tp 4 are micro 1 x 16 steps x 16 = 256, four times 64."""
    tensor = config("tp=4,zero=1")
    assert "train_batch_size" not in tensor
    assert tensor["gradient_accumulation_steps"] == 16
    files = {"ds_config.json": json.dumps(tensor | {"train_batch_size": 256}), "launch.sh": written("tp=4,zero=1").files["launch.sh"]}
    assert LAUNCHER.read(files).job["global_batch"] == 64


def test_precisions() -> None:
    assert config("zero=1")["bf16"] == {"enabled": True}
    assert config("zero=1", precision="fp16")["fp16"] == {"enabled": True}
    assert not {"bf16", "fp16"} & set(config("zero=1", precision="fp32"))
    assert "precision" in refused("zero=1", precision="fp8")


def test_every_combination_that_has_no_spelling_is_refused_at_once() -> None:
    rules = refused("cp=2,tp=2,pp=2,zero=0,offload=optimizer,dp_overlap=true,etp=1")
    assert set(rules) == {"pp", "cp_kind", "cp", "offload", "dp_overlap"}
    assert "PipelineModule" in rules["pp"]
    assert refused("recompute=core_attn").keys() == {"recompute"}
    assert refused("tp_overlap=true").keys() == {"tp_overlap"}
    assert refused("offload=activations,zero=1").keys() == {"offload"}
    assert refused("ep=4,tp=2,zero=1,offload=optimizer", "mixtral-8x7b").keys() == {"offload"}
    assert refused("zero=1", task="lora").keys() == {"task"}


def test_a_model_of_no_family_is_refused_by_name() -> None:
    job = job_of("deepspeed").model_copy(update={"model": presets.model("grok-1")})
    with pytest.raises(SpecError, match=r"model = 'grok-1': is no model of a family"):
        LAUNCHER.write(job, read_plan("zero=1", job, "plan")[0])


@pytest.mark.parametrize(
    "name", ["llama3-8b", "mixtral-8x7b", "qwen3-30b-a3b", "qwen2-57b-a14b", "deepseek-v3", "gpt3-175b", "mistral-7b", "gemma2-9b"]
)
def test_models_become_config_json_without_loss(name: str) -> None:
    model = presets.model(name)
    config_json = hf_model(model, 4096, "test").config
    told = read_hf_config(dict(config_json), "config.json")
    names = {"name", "source", "aliases"}
    assert told.model_dump(exclude=names) == model.model_dump(exclude=names)


def test_training_scripts_are_python_and_print_what_the_log_reader_knows() -> None:
    for text in (DEEPSPEED, ACCELERATE):
        ast.parse(text)
        assert all(f'say("{kind}", ' in text for kind in ("step", "rank", "versions"))


ALPACA = {
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": 5,
}
ALPACA_LINE = """\
#!/bin/bash
# Fine-tuning as Stanford Alpaca's README does it.
GPUS=4
torchrun --nproc_per_node=$GPUS --master_port=29500 train.py \\
    --model_name_or_path "$MODEL" \\
    --bf16 True \\
    --per_device_train_batch_size 4 \\
    --gradient_accumulation_steps 8 \\
    --evaluation_strategy "no" \\
    --model_max_length 512 \\
    --remove_unused_columns False \\
    --deepspeed ./configs/default_offload_opt_param.json --tf32 True
"""


def alpaca() -> Found:
    return LAUNCHER.read({"ds.json": json.dumps(ALPACA, indent=2), "run.sh": ALPACA_LINE})


def test_a_trainers_line_and_an_auto_configuration_are_read_together() -> None:
    """Facts of tatsu-lab/stanford_alpaca's README and configs/default_offload_opt_param.json: 4 GPUs x 4 x 8 = 128 sequences."""
    found = alpaca()
    assert found.framework == "deepspeed" and found.gpus == 4
    assert found.job == {"seq_len": 512, "global_batch": 128, "precision": "bf16"}
    assert found.plan == {"zero": 3, "offload": "optimizer", "dp_overlap": True, "micro_batch": 4}
    assert set(found.assumed) >= {"train_batch_size", "bf16.enabled"}
    assert not found.problems


def test_what_is_not_understood_is_kept_with_its_line() -> None:
    unknown = {each.name: (each.value, each.where) for each in alpaca().unknown}
    assert unknown == {"zero_optimization.offload_param.device": ("cpu", "ds.json:19"), "--remove_unused_columns": ("False", "run.sh:11")}


def read_json(**config: Any) -> Found:
    return LAUNCHER.read({"ds.json": json.dumps(config, indent=1), "launch.sh": "deepspeed --num_gpus 8 train.py\n"})


def test_the_third_of_the_batch_sizes_follows_from_two() -> None:
    """As DeepSpeed's set_train_batch_size: 64 over 8 GPUs in 2 steps are 4 each; 4 each without steps are 2 steps."""
    assert read_json(train_batch_size=64, gradient_accumulation_steps=2).plan["micro_batch"] == 4
    assert read_json(train_batch_size=64, train_micro_batch_size_per_gpu=4).job["global_batch"] == 64
    assert read_json(train_batch_size=64).plan["micro_batch"] == 8
    assert read_json(train_micro_batch_size_per_gpu=4).job["global_batch"] == 32


def test_a_contradiction_is_a_problem_with_the_frameworks_rule() -> None:
    found = read_json(train_batch_size=60, train_micro_batch_size_per_gpu=4, gradient_accumulation_steps=2)
    (problem,) = found.problems
    assert problem.where == "ds.json:2" and "4 x 2 x 8 = 64" in problem.rule
    (problem,) = read_json(train_batch_size=61, train_micro_batch_size_per_gpu=4).problems
    assert "multiple" in problem.rule
    (problem,) = read_json(bf16={"enabled": True}, fp16={"enabled": True}).problems
    assert "exclude" in problem.rule


def test_overlap_is_what_the_stage_makes_it() -> None:
    assert read_json(zero_optimization={"stage": 3}).plan["dp_overlap"] is True
    assert "dp_overlap" not in read_json(zero_optimization={"stage": 2}).plan
    assert "dp_overlap" not in read_json(zero_optimization={"stage": 0, "overlap_comm": True}).plan


def test_buckets_of_another_size_are_not_passed_over() -> None:
    assert not read_json(zero_optimization={"stage": 2, "reduce_bucket_size": 500000000}).unknown
    assert read_json(zero_optimization={"stage": 2, "reduce_bucket_size": 200000000}).unknown


def test_values_that_cannot_be_parsed_name_file_line_and_key() -> None:
    with pytest.raises(SpecError) as error:
        read_json(zero_optimization={"stage": 7}, train_micro_batch_size_per_gpu="many", sequence_parallel_size=0)
    assert {(p.where, p.path) for p in error.value.problems} == {
        ("ds.json:3", "zero_optimization.stage"),
        ("ds.json:5", "train_micro_batch_size_per_gpu"),
        ("ds.json:6", "sequence_parallel_size"),
    }


HOSTILE = {
    "deep": "[" * 100_000,
    "nested": '{"zero_optimization": ' * 200 + "{}" + "}" * 200,
    "long": '{"train_batch_size": "' + "9" * 1_000_000 + '"}',
    "binary": "\x00\x01\xff" * 1000,
    "list": "[1, 2]",
    "twice": '{"train_batch_size": 1, "train_batch_size": 2}',
    "infinite": '{"train_batch_size": Infinity}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_configurations_give_an_error(name: str) -> None:
    LAUNCHER.reads("ds.json", HOSTILE[name])
    with pytest.raises(SpecError):
        LAUNCHER.read({"ds.json": HOSTILE[name]})


@pytest.mark.parametrize(
    "text",
    [
        "deepspeed " + "x" * 1_000_000,
        "deepspeed train.py --per_device_train_batch_size 'open",
        "deepspeed --num_gpus eight train.py",
    ],
)
def test_hostile_launch_lines_give_an_error(text: str) -> None:
    with pytest.raises(SpecError, match=r"launch\.sh:\d"):
        LAUNCHER.read({"launch.sh": text})


def test_a_line_that_never_ends_is_read_all_the_same() -> None:
    assert LAUNCHER.read({"launch.sh": "deepspeed --num_gpus 8 train.py \\\n" * 20_000}).gpus == 8


def test_what_a_script_does_not_set_itself_stays_unresolved() -> None:
    found = LAUNCHER.read({"run.sh": "deepspeed --num_gpus $1 train.py --per_device_train_batch_size ${MICRO:-2}\n"})
    assert found.gpus is None and found.plan == {"micro_batch": 2}
    assert [(each.name, each.value, each.where) for each in found.unknown] == [("--num_gpus", "$1", "run.sh:1")]


def test_hostile_names_are_quoted() -> None:
    job = job_of("deepspeed", "llama3-8b")
    evil = job.model.replace(name="$(touch evil); 'y")
    text = LAUNCHER.write(job.model_copy(update={"model": evil}), read_plan("zero=1", job, "plan")[0]).files["launch.sh"]
    assert [line for line in text.splitlines() if "evil" in line] == [line for line in text.splitlines() if line.startswith("# Written")]


def test_gpus_that_do_not_fill_their_nodes_evenly_are_refused() -> None:
    job = job_of("deepspeed", "llama3-8b")
    plan = replace(read_plan("zero=1", job, "plan")[0])
    odd = job.model_copy(update={"cluster": job.cluster.replace(gpus=9), "global_batch": 9})
    with pytest.raises(SpecError, match="evenly"):
        LAUNCHER.write(odd, plan)
