"""nanotron: facts held against its sources by hand, golden files, and configurations of the kind that people keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.launch.launchers import hostile
from tests.launch.launchers.golden import check
from tests.launch.launchers.plans import job_of
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found, Written
from tuner.launch.launchers.nanotron import Nanotron
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHER = Nanotron()


def written(knobs: str, model: str = "llama3-8b", version: str = "main", **changes: Any) -> Written:
    job = job_of("nanotron", model).model_copy(update=changes)
    return LAUNCHER.write(job, read_plan(knobs, job, "plan")[0], version)


def config(knobs: str, model: str = "llama3-8b", version: str = "main", **changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(written(knobs, model, version, **changes).files["train.yaml"])
    return read


def refused(knobs: str, model: str = "llama3-8b", version: str = "main", **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(knobs, model, version, **changes)
    return {problem.path: problem.rule for problem in error.value.problems}


def read(**files: str) -> Found:
    return LAUNCHER.read({name.replace("__", "."): text for name, text in files.items()})


@pytest.mark.parametrize(
    ("folder", "version", "knobs", "model"),
    [
        ("llama3-8b-tp2-0.4", "0.4", "tp=2,zero=1,micro_batch=2,recompute=none", "llama3-8b"),
        ("llama3-70b-ring-main", "main", "tp=8,pp=4,cp=2,cp_kind=p2p,zero=1,recompute=full,sequence_parallel=true", "llama3-70b"),
        ("mixtral-8x7b-main", "main", "tp=2,etp=1,zero=0,recompute=none,tp_overlap=true,sequence_parallel=true", "mixtral-8x7b"),
    ],
)
def test_golden_files(folder: str, version: str, knobs: str, model: str, tmp_path: Path) -> None:
    files = written(knobs, model, version)
    check(f"nanotron/{folder}", files.files)
    hostile.shellchecked(files, tmp_path)


def test_degrees_and_batches_by_hand() -> None:
    """128 GPUs, tp 8, pp 4, cp 2 are 2 replicas; 256 sequences are 128 micro batches of each."""
    told = config("tp=8,pp=4,cp=2,cp_kind=p2p,zero=1,recompute=full", "llama3-70b")
    degrees = told["parallelism"]
    assert [degrees[name] for name in ("dp", "tp", "pp", "context_parallel_size")] == [2, 8, 4, 2]
    assert told["tokens"]["micro_batch_size"] == 1
    assert told["tokens"]["batch_accumulation_per_replica"] == 128
    assert told["tokens"]["sequence_length"] == 8192
    assert told["optimizer"]["zero_stage"] == 1


def test_engines_and_modes() -> None:
    assert config("pp=2,schedule=1f1b,zero=0,recompute=none")["parallelism"]["pp_engine"] == "1f1b"
    assert config("pp=2,schedule=gpipe,zero=0,recompute=none")["parallelism"]["pp_engine"] == "afab"
    scattered = config("tp=2,sequence_parallel=true,tp_overlap=true,zero=0,recompute=none")["parallelism"]
    assert (scattered["tp_mode"], scattered["tp_linear_async_communication"]) == ("REDUCE_SCATTER", True)
    assert config("tp=2,sequence_parallel=false,zero=0,recompute=none")["parallelism"]["tp_mode"] == "ALL_REDUCE"


def test_one_queue_only_with_tensor_parallelism() -> None:
    assert "export CUDA_DEVICE_MAX_CONNECTIONS=1" in written("tp=2,zero=1,recompute=none").files["train.sh"]
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in written("zero=1,recompute=none").files["train.sh"]


def test_what_differs_between_versions() -> None:
    assert config("zero=1,recompute=full")["parallelism"]["recompute_layer"] is True
    assert not {"recompute_layer", "context_parallel_size"} & set(config("zero=1,recompute=none", version="0.4")["parallelism"])
    rules = refused("cp=2,cp_kind=p2p,zero=1,recompute=full", version="0.4")
    assert set(rules) == {"recompute", "cp"}
    assert "0.4 has no mixture" in refused("etp=1,zero=1,recompute=none", "mixtral-8x7b", "0.4")["model"]
    with pytest.raises(SpecError, match=r"0\.4, main"):
        written("zero=1,recompute=none", version="0.3")


def test_what_has_no_spelling_is_refused_together() -> None:
    rules = refused("pp=2,vpp=2,zero=3,offload=optimizer,recompute=core_attn,dp_overlap=true")
    assert {"vpp", "offload", "dp_overlap"} <= set(rules)
    assert set(refused("zero=3,recompute=core_attn,schedule=1f1b")) == {"zero", "recompute"}
    assert "ring" in refused("cp=2,cp_kind=a2a,zero=1,recompute=none")["cp_kind"]
    assert refused("zero=1,recompute=none", precision="fp8").keys() == {"precision"}
    assert refused("zero=1,recompute=none", task="lora").keys() == {"task"}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt3-175b", "norms"),
        ("deepseek-v3", "hidden/heads"),
        ("qwen2.5-7b", "biases"),
        ("qwen3-8b", "norms of heads"),
        ("gemma2-9b", "norms"),
    ],
)
def test_architectures_that_its_models_do_not_have(name: str, why: str) -> None:
    job = job_of("nanotron").model_copy(update={"model": presets.model(name)})
    with pytest.raises(SpecError, match=f"model = {name}: .*{why}"):
        LAUNCHER.write(job, read_plan("zero=1,recompute=none", job, "plan")[0])


TINY = """\
checkpoints:
  checkpoint_interval: 10
  checkpoints_path: checkpoints
  checkpoints_path_is_shared_file_system: false
data_stages:
- data:
    dataset:
      hf_dataset_or_datasets: stas/openwebtext-10k
      hf_dataset_splits: train
      text_column_name: text
    num_loading_workers: 1
    seed: 42
  name: Stable Training Stage
  start_training_step: 1
general:
  ignore_sanity_checks: true
  project: debug
  run: tiny_llama_%date_%jobid
  seed: 42
lighteval: null
model:
  ddp_bucket_cap_mb: 25
  dtype: bfloat16
  init_method:
    std: 0.025
  make_vocab_size_divisible_by: 1
  model_config:
    bos_token_id: 1
    hidden_act: silu
    hidden_size: 16
    intermediate_size: 64
    is_llama_config: true
    max_position_embeddings: 256
    num_attention_heads: 4
    num_hidden_layers: 2
    num_key_value_heads: 4
    pad_token_id: null
    rope_scaling: null
    tie_word_embeddings: true
    vocab_size: 256
optimizer:
  accumulate_grad_in_fp32: true
  zero_stage: 0
parallelism:
  dp: 2
  expert_parallel_size: 1
  pp: 2
  pp_engine: 1f1b
  tp: 2
  tp_linear_async_communication: true
  tp_mode: REDUCE_SCATTER
tokens:
  batch_accumulation_per_replica: 1
  limit_test_batches: 0
  micro_batch_size: 2
  sequence_length: 256
  train_steps: 15
  val_check_interval: -1
"""
RUN = "CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc_per_node=8 run_train.py --config-file config_tiny_llama.yaml\n"


def test_the_tiny_llama_configuration() -> None:
    """2 x 2 x 2 GPUs, 2 replicas of one micro batch of 2: 4 sequences a step."""
    found = read(config_tiny_llama__yaml=TINY, go__sh=RUN)
    assert (found.framework, found.gpus, found.gpus_per_node) == ("nanotron", 8, 8)
    assert found.job == {"seq_len": 256, "global_batch": 4, "precision": "bf16"}
    assert found.plan == {
        "tp": 2, "pp": 2, "dp": 2, "ep": 1, "zero": 0, "micro_batch": 2, "schedule": "1f1b", "sequence_parallel": True, "tp_overlap": True,
    }  # fmt: skip
    assert found.model == {
        "hidden": 16, "ffn_hidden": 64, "heads": 4, "kv_heads": 4, "layers": 2, "vocab": 256, "tied_embeddings": True, "head_dim": 4,
    }  # fmt: skip
    assert not found.problems and not found.assumed
    unknown = {item.name: (item.value, item.where) for item in found.unknown}
    assert unknown["checkpoints.checkpoint_interval"] == ("10", "config_tiny_llama.yaml:2")
    assert unknown["tokens.val_check_interval"] == ("-1", "config_tiny_llama.yaml:58")
    assert not any(name.startswith("parallelism") for name in unknown)


def test_its_world_must_be_that_of_the_command() -> None:
    found = read(config_tiny_llama__yaml=TINY, go__sh=RUN.replace("=8", "=4"))
    assert [problem.path for problem in found.problems] == ["dp"]
    assert found.problems[0].where == "config_tiny_llama.yaml:45"


MOE = """\
    moe_config:
      num_experts: 8
      top_k: 1
      enable_shared_expert: true
      token_dispatcher_type: alltoall
"""
QWEN = (
    TINY.replace("is_llama_config", "is_qwen2_config")
    .replace("    pad_token_id: null\n", f"    sliding_window_size: 20\n    attention_bias: false\n{MOE}")
    .replace("expert_parallel_size: 1", "expert_parallel_size: 2\n  context_parallel_size: 1\n  recompute_layer: false")
)


def test_a_configuration_with_experts() -> None:
    """Without widths of their own, experts and the shared one (which has a gate) are as wide as intermediate_size."""
    found = read(config_qwen_with_moe__yaml=QWEN)
    assert found.model["moe"] == {
        "experts": 8, "top_k": 1, "expert_ffn_hidden": 64, "shared_expert_ffn_hidden": 64, "shared_expert_gate": True,
    }  # fmt: skip
    assert found.model["sliding_window"] == {"size": 20}
    assert (found.plan["ep"], found.plan["recompute"], found.gpus) == (2, "none", 8)
    assert "0.4 multiplies" in found.assumed["gpus"]
    assert ("model.model_config.moe_config.token_dispatcher_type", "alltoall") in {(item.name, item.value) for item in found.unknown}
    assert not found.problems


@pytest.mark.parametrize(
    ("layers", "placed"),
    [("[0, 1]", {}), ("[-1]", {}), ("[1]", {"first_dense_layers": 1})],
)
def test_layers_with_experts(layers: str, placed: dict[str, int]) -> None:
    moe = read(x__yaml=QWEN.replace("top_k: 1", f"top_k: 1\n      layers: {layers}")).model["moe"]
    assert {name: moe[name] for name in ("first_dense_layers", "every") if name in moe} == placed


def test_every_other_layer_with_experts() -> None:
    text = QWEN.replace("num_hidden_layers: 2", "num_hidden_layers: 6").replace("top_k: 1", "top_k: 1\n      layers: [1, 3, 5]")
    assert read(x__yaml=text).model["moe"]["every"] == 2
    odd = read(x__yaml=text.replace("[1, 3, 5]", "[0, 4]"))
    assert [problem.path for problem in odd.problems] == ["moe_layers"]


def test_the_engine_that_is_not_told_is_afab() -> None:
    found = read(x__yaml=TINY.replace("  pp_engine: 1f1b\n", ""))
    assert found.plan["schedule"] == "gpipe"
    assert "afab" in found.assumed["schedule"]


def test_a_vocabulary_is_padded_for_the_tensor_parallel_ranks() -> None:
    """250 up to a multiple of 128 x 2 is 256."""
    text = TINY.replace("divisible_by: 1", "divisible_by: 128").replace("vocab_size: 256", "vocab_size: 250")
    assert read(x__yaml=text).model["vocab"] == 256


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("  tp: 2", "  tp: two", "x.yaml:49: parallelism.tp = 'two'"),
        ("  dp: 2", "  dp: 0", "x.yaml:45: parallelism.dp = 0"),
        ("zero_stage: 0", "zero_stage: 4", "x.yaml:43: optimizer.zero_stage = 4"),
        ("REDUCE_SCATTER", "SCATTER", "x.yaml:51: parallelism.tp_mode = 'SCATTER'"),
        ("sequence_length: 256", "sequence_length: [256]", "x.yaml:56: tokens.sequence_length = [256]"),
    ],
)
def test_values_that_cannot_be_read(key: str, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        read(x__yaml=TINY.replace(key, text))
    assert str(error.value).startswith(problem), error.value


@pytest.mark.parametrize(
    ("key", "text", "path"),
    [("dtype: bfloat16", "dtype: float8", "dtype"), ("num_key_value_heads: 4", "num_key_value_heads: 1", "kv_heads")],
)
def test_contradictions(key: str, text: str, path: str) -> None:
    found = read(x__yaml=TINY.replace(key, text))
    assert [problem.path for problem in found.problems] == [path]
    assert found.problems[0].where.startswith("x.yaml:")


@pytest.mark.parametrize("name", hostile.NAMES)
def test_hostile_names_stay_names(name: str, tmp_path: Path) -> None:
    job = job_of("nanotron")
    job = job.model_copy(update={"model": job.model.replace(name=name)})
    files = LAUNCHER.write(job, read_plan("tp=8,zero=1,recompute=none", job, "plan")[0])
    hostile.shellchecked(files, tmp_path)
    found = LAUNCHER.read(files.files)
    assert found.plan["tp"] == 8 and not found.problems and not found.unknown


@pytest.mark.parametrize(("ending", "what"), [(ending, what) for ending in (".yaml", ".sh") for what in hostile.TEXTS[ending]])
def test_hostile_files_are_refused(ending: str, what: str) -> None:
    text = hostile.TEXTS[ending][what].replace("parallelism: x", "parallelism:\n  tp: x")
    hostile.refuses(LAUNCHER, f"nanotron{ending}", text)
