"""MaxText: facts held against its sources by hand, golden files, and configurations and scripts that people keep."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.launch.launchers import hostile
from tests.launch.launchers.golden import check
from tests.launch.launchers.plans import job_of
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found, Written
from tuner.launch.launchers.maxtext import MaxText, per_device, split_axes
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHER = MaxText()


def written(knobs: str, model: str = "llama3-8b", **changes: Any) -> Written:
    job = job_of("maxtext", model).model_copy(update=changes)
    return LAUNCHER.write(job, read_plan(knobs, job, "plan")[0])


def config(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load(written(knobs, model, **changes).files["train.yml"])
    return read


def axes(read: dict[str, Any]) -> dict[str, int]:
    """Return the axes that are not 1, without what their names end with."""
    return {key.removesuffix("_parallelism"): value for key, value in read.items() if key.endswith("_parallelism") and value != 1}


def refused(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(knobs, model, **changes)
    return {problem.path: problem.rule for problem in error.value.problems}


def read(**files: str) -> Found:
    return LAUNCHER.read({name.replace("__", "."): text for name, text in files.items()})


@pytest.mark.parametrize(
    ("folder", "knobs", "model", "cluster"),
    [
        ("llama3-8b-hsdp", "zero=3,shard_group=8,micro_batch=2,recompute=layernorm+mlp", "llama3-8b", "h100x16"),
        ("llama3-70b-pipeline", "tp=8,pp=4,vpp=2,zero=3,recompute=full", "llama3-70b", "h100x128"),
        ("mixtral-8x7b-ep8", "ep=8,tp=2,etp=2,zero=3,recompute=full", "mixtral-8x7b", "h100x64"),
        ("llama3-70b-racks", "tp=8,pp=2,zero=3,recompute=full", "llama3-70b", "gb200x144"),
    ],
)
def test_golden_files(folder: str, knobs: str, model: str, cluster: str, tmp_path: Path) -> None:
    files = written(knobs, model, cluster=presets.cluster(cluster), **({"global_batch": 144} if "gb200" in cluster else {}))
    check(f"maxtext/{folder}", files.files)
    hostile.shellchecked(files, tmp_path)


def test_axes_fill_a_domain_by_hand() -> None:
    """tp 8, pp 4 and 4 data-parallel ranks over nodes of 8 are tensor inside and the rest outside, over racks of 72 pods of 8 x 9."""
    degrees = {"tensor": 8, "fsdp": 4, "pipeline": 4}
    nodes = split_axes(degrees, 8)
    assert (nodes["tensor"], nodes["fsdp"], nodes["pipeline"]) == ((8, 1), (1, 4), (1, 4))
    pods = split_axes(degrees, 64)
    assert (pods["tensor"], pods["fsdp"], pods["pipeline"]) == ((8, 1), (4, 1), (2, 2))
    assert math.prod(inside for inside, _ in split_axes({"tensor": 4, "fsdp": 36}, 72).values()) == 72


def test_one_pod_has_no_axis_between_domains() -> None:
    """72 GPUs of a rack: 8 x 9, all of it inside."""
    racks = config("tp=8,zero=3,recompute=full", "llama3-70b", cluster=presets.cluster("gb200x72"), global_batch=144)
    assert axes(racks) == {"ici_tensor": 8, "ici_fsdp": 9}
    assert racks["num_slices"] == 1


def test_data_axes_by_hand() -> None:
    """16 GPUs in nodes of 8: weights sharded over all, over a node twice, or not at all."""
    assert axes(config("zero=3,recompute=full")) == {"ici_fsdp": 8, "dcn_fsdp": 2}
    assert axes(config("zero=3,shard_group=8,recompute=full")) == {"ici_fsdp": 8, "dcn_data": 2}
    assert axes(config("zero=0,recompute=full")) == {"ici_data": 8, "dcn_data": 2}
    over_data = config("zero=1,recompute=full")
    assert axes(over_data) == {"ici_data": 8, "dcn_data": 2}
    assert over_data["shard_optimizer_over_data"] is True
    assert axes(config("tp=2,sequence_parallel=true,zero=3,recompute=full")) == {
        "ici_tensor_sequence": 2, "ici_fsdp": 4, "dcn_fsdp": 2,
    }  # fmt: skip


def test_batches_by_hand() -> None:
    """64 sequences on 16 GPUs. micro 2: 16 replicas take 32 a pass, two passes. tp 2: 8 replicas, so 1 a device, 4 passes. A pipeline of 2
    holds a whole step: 64/16 = 4 a device, in 4 micro batches of each of 8 replicas.
    """
    plain = config("zero=3,micro_batch=2,recompute=full")
    assert (plain["per_device_batch_size"], plain["gradient_accumulation_steps"]) == (2.0, 2)
    tensor = config("tp=2,zero=3,micro_batch=2,recompute=full")
    assert (tensor["per_device_batch_size"], tensor["gradient_accumulation_steps"]) == (1.0, 4)
    eighth = config("tp=8,zero=3,micro_batch=1,recompute=full")
    assert (eighth["per_device_batch_size"], eighth["gradient_accumulation_steps"]) == (0.125, 32)
    piped = config("pp=2,zero=3,micro_batch=2,recompute=full")
    assert (piped["per_device_batch_size"], piped["num_pipeline_microbatches"], piped["gradient_accumulation_steps"]) == (4.0, 4, 1)
    assert piped["num_layers_per_pipeline_stage"] == 16


@pytest.mark.parametrize(("batch", "gpus"), [(1, 3), (7, 72), (5, 49), (100, 144), (1, 1536), (2, 3)])
def test_a_share_of_a_sequence_survives_maxtexts_rounding(batch: int, gpus: int) -> None:
    """types.py: global_batch_size_to_load = int(num_devices * per_device_batch_size)."""
    assert int(gpus * per_device(batch, gpus)) == batch


def test_remat_policies_by_hand() -> None:
    """minimal_with_context keeps products and attention: norms alone are recomputed; minimal leaves attention out as well."""
    assert config("zero=3,recompute=full")["remat_policy"] == "full"
    assert config("zero=3,recompute=layernorm")["remat_policy"] == "minimal_with_context"
    assert config("zero=3,recompute=layernorm+core_attn")["remat_policy"] == "minimal"
    assert config("zero=3,recompute=layernorm+core_attn+mlp")["remat_policy"] == "save_dot_except_mlp"
    assert config("zero=3,recompute=layernorm+mlp")["remat_policy"] == "save_dot_with_context_except_mlp"
    experts = config("zero=3,etp=1,recompute=layernorm+moe", "mixtral-8x7b")
    assert experts["remat_policy"] == "minimal_with_context"  # which names no tensor of experts
    assert "norms always" in refused("zero=3,recompute=mlp")["recompute"]


def test_what_has_no_spelling_is_refused_together() -> None:
    rules = refused("tp=2,pp=4,zero=1,shard_group=1,offload=activations,micro_batch=32,recompute=full,cp=2,cp_kind=a2a")
    assert set(rules) == {"zero", "offload", "cp_kind", "micro_batch", "shard_group"}
    assert "equal" in refused("pp=2,vpp=3,zero=3,recompute=full")["vpp"]
    assert "experts" in refused("ep=8,tp=2,etp=1,zero=3,recompute=full", "mixtral-8x7b")["etp"]
    assert "zero" in refused("zero=2,recompute=full")
    assert refused("zero=3,recompute=full", task="lora").keys() == {"task"}
    assert refused("zero=3,recompute=full", precision="fp8-rowwise").keys() == {"precision"}


def test_precisions_and_kernels() -> None:
    assert config("zero=3,recompute=full", precision="fp8")["quantization"] == "te_fp8_currentscaling"
    assert config("zero=3,recompute=full")["attention"] == "cudnn_flash_te"
    assert config("zero=3,recompute=full", attention="unfused")["attention"] == "dot_product"
    for precision in ("bf16", "fp32", "fp8", "mxfp8", "nvfp4"):
        assert LAUNCHER.read(written("zero=3,recompute=full", precision=precision).files).job["precision"] == precision


def test_overlap_is_the_schedulers() -> None:
    assert "scheduler=true" in written("zero=3,recompute=full,dp_overlap=true").files["train.sh"]
    off = written("zero=3,recompute=full,dp_overlap=false").files
    assert "scheduler=false" in off["train.sh"]
    assert LAUNCHER.read(off).plan["dp_overlap"] is False


@pytest.mark.parametrize("name", ["llama3-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen2.5-7b", "gpt3-175b"])
def test_models_become_keys_without_loss(name: str) -> None:
    model = presets.model(name)
    job = job_of("maxtext", "mixtral-8x7b").model_copy(update={"model": model, "seq_len": 2048})
    files = LAUNCHER.write(job, read_plan({"zero": 3, "recompute": "full"}, job, "plan")[0]).files
    told = LAUNCHER.read(files).model
    again = type(model).model_validate({"name": name, "layers": 1, **told})
    names = {"name", "source", "aliases", "max_positions"}  # as many positions as the sequence is long
    names |= {"ffn_hidden"} if model.moe and not model.moe.first_dense_layers else set()  # no layer has one
    assert again.model_dump(exclude=names) == model.model_dump(exclude=names)


A3 = """\
echo "Running 128vm.sh"
set -e
export OUTPUT_PATH="gs://some-bucket"
# Arguments are variables.
for ARGUMENT in "$@"; do
    IFS='=' read -r KEY VALUE <<< "$ARGUMENT"
    export "$KEY"="$VALUE"
done
if [ -n "$RUN_NAME" ];
then
    export M_RUN_NAME=$RUN_NAME
fi
export XLA_FLAGS="--xla_dump_to=$OUTPUT_PATH/$M_RUN_NAME/HLO_dumps/ --xla_dump_hlo_pass_re=.*
 --xla_gpu_enable_latency_hiding_scheduler=true --xla_gpu_enable_triton_gemm=false"

python MaxText/train.py MaxText/configs/base.yml hardware=gpu base_output_directory=$OUTPUT_PATH \\
    steps=30 model_name=llama2-70b enable_checkpointing=false attention=cudnn_flash_te dataset_type=synthetic \\
    scan_layers=true per_device_batch_size=4 \\
    remat_policy=save_qkv_proj max_target_length=4096 \\
    ici_fsdp_parallelism=8 dcn_fsdp_parallelism=16 ici_data_parallelism=1 dcn_data_parallelism=8 \\
    ici_tensor_parallelism=1 dcn_tensor_parallelism=1
"""


def test_a_script_for_128_machines() -> None:
    """8 x 16 ranks hold the weights once, 8 times over: 1024 GPUs, 4 sequences each."""
    found = read(vm128__sh=A3)
    assert (found.framework, found.gpus, found.model) == ("maxtext", 1024, {"preset": "llama2-70b"})
    assert found.job == {"seq_len": 4096, "global_batch": 4096, "attention": "flash"}
    assert {name: found.plan[name] for name in ("tp", "dp", "zero", "shard_group", "micro_batch", "recompute")} == {
        "tp": 1, "dp": 1024, "zero": 3, "shard_group": 128, "micro_batch": 4, "recompute": "core_attn+mlp+layernorm",
    }  # fmt: skip
    assert "dp_overlap" not in found.plan
    assert [(item.name, item.where) for item in found.unknown] == [("scan_layers", "vm128.sh:18")]
    assert not found.problems
    off = read(vm128__sh=A3.replace("scheduler=true", "scheduler=false"))
    assert off.plan["dp_overlap"] is False


V5E = """\
set -e
export EXECUTABLE="train.py" # or train_compile.py
export LIBTPU_INIT_ARGS="--xla_tpu_enable_async_collective_fusion=true --xla_enable_async_all_gather=true"

python MaxText/$EXECUTABLE MaxText/configs/base.yml model_name=llama2-70b\\
  base_output_directory=$OUTPUT_PATH dataset_path=${DATASET_PATH}\\
  per_device_batch_size=2 remat_policy=qkv_proj_offloaded\\
  steps=15 enable_checkpointing=false use_iota_embed=true
"""


def test_a_script_for_any_count_of_pods() -> None:
    """How many slices there are is not told: what depends on it stays open, and is said."""
    found = read(llama2_70b__sh=V5E)
    assert (found.model, found.gpus, found.job["seq_len"]) == ({"preset": "llama2-70b"}, None, 2048)
    assert (found.plan["zero"], found.plan["micro_batch"]) == (3, 2)
    assert set(found.assumed) == {"seq_len", "shard_group", "offload"}
    assert {(item.name, item.value) for item in found.unknown} == {("dataset_path", "$DATASET_PATH"), ("use_iota_embed", "true")}
    assert not found.problems


GPU_YML = """\
base_config: "base.yml"
model_name: "llama3-70b"
run_name: "gpu_train_test"
hardware: "gpu"
steps: 30
per_device_batch_size: 4
max_target_length: 8192
attention: "cudnn_flash_te"
remat_policy: "full"
use_iota_embed: True
dataset_type: "synthetic"
reuse_example_batch: 1
enable_checkpointing: False
"""
OVERRIDES = """\
python3 -m MaxText.train configs/models/gpu/llama3_70b.yml run_name=x ici_fsdp_parallelism=8 dcn_fsdp_parallelism=4 \\
  dcn_data_parallelism=1 quantization=fp8 'per_device_batch_size=0.5' ici_tensor_parallelism=2
"""


def test_words_of_a_script_count_over_the_file() -> None:
    """fsdp 8 x 4 and tensor 2 are 64 GPUs; half a sequence each is 1 a replica, 32 in all."""
    found = read(llama3_70b__yml=GPU_YML, go__sh=OVERRIDES)
    assert (found.model, found.gpus) == ({"preset": "llama3-70b"}, 64)
    assert found.job == {"seq_len": 8192, "global_batch": 32, "precision": "fp8", "attention": "flash"}
    assert (found.plan["tp"], found.plan["dp"], found.plan["micro_batch"], found.plan["recompute"]) == (2, 32, 1, "full")
    assert [(item.name, item.where) for item in found.unknown] == [("use_iota_embed", "llama3_70b.yml:10")]
    assert not found.problems


CUSTOM = GPU_YML.replace(
    'remat_policy: "full"', "remat_policy: custom\nquery_proj: offload\nkey_proj: device\nvalue_proj: device\nout_proj: device"
)


def test_a_custom_policy_tells_each_tensor() -> None:
    found = read(x__yml=CUSTOM)
    assert found.plan["recompute"] == "core_attn+mlp+layernorm"
    assert "query_proj" in found.assumed["offload"]


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("per_device_batch_size: 4", "per_device_batch_size: none", "x.yml:6: per_device_batch_size = 'none'"),
        ("steps: 30", "ici_fsdp_parallelism: 0", "x.yml:5: ici_fsdp_parallelism = 0"),
        ("steps: 30", "ici_tensor_parallelism: [1]", "x.yml:5: ici_tensor_parallelism = [1]"),
        ("steps: 30", "context_parallel_strategy: snake", "x.yml:5: context_parallel_strategy = 'snake'"),
        ("steps: 30", "key_proj: maybe", "x.yml:5: key_proj = 'maybe'"),
    ],
)
def test_values_that_cannot_be_read(key: str, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        read(x__yml=GPU_YML.replace(key, text))
    assert str(error.value).startswith(problem), error.value


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("remat_policy: bogus", "policy"),  # MaxText itself takes it
        ("quantization: int3", "quantization"),
        ("ici_pipeline_parallelism: 3\nnum_layers_per_pipeline_stage: 7", "stage_layers"),
        ("ici_pipeline_parallelism: 4\nnum_pipeline_microbatches: 2", "microbatches"),
        ("per_device_batch_size: 0.3", "per_device"),
        ("ici_tensor_parallelism: 2\nici_tensor_sequence_parallelism: 2", "ici_tensor_sequence"),
        ("ici_context_parallelism: 2\ncontext_parallel_strategy: usp", "strategy"),
    ],
)
def test_contradictions(text: str, name: str) -> None:
    keys = [line.partition(":")[0] for line in text.splitlines()]
    rest = "\n".join(line for line in GPU_YML.splitlines() if line.partition(":")[0] not in keys)
    found = read(x__yml=f"{rest}\n{text}\n")
    assert [problem.path for problem in found.problems] == [name]
    assert found.problems[0].where.startswith("x.yml:")


def test_an_unknown_model_is_kept_by_name() -> None:
    found = read(x__yml=GPU_YML.replace("llama3-70b", "gemma9-1t"))
    assert ("model_name", "gemma9-1t", "x.yml:2") in {(item.name, item.value, item.where) for item in found.unknown}
    assert not found.model


@pytest.mark.parametrize("name", hostile.NAMES)
def test_hostile_names_stay_names(name: str, tmp_path: Path) -> None:
    job = job_of("maxtext")
    job = job.model_copy(update={"model": job.model.replace(name=name)})
    files = LAUNCHER.write(job, read_plan("tp=8,zero=3,recompute=full", job, "plan")[0])
    hostile.shellchecked(files, tmp_path)
    found = LAUNCHER.read(files.files)
    assert found.plan["tp"] == 8 and not found.problems and not found.unknown


@pytest.mark.parametrize(("ending", "what"), [(ending, what) for ending in (".yaml", ".sh") for what in hostile.TEXTS[ending]])
def test_hostile_files_are_refused(ending: str, what: str) -> None:
    text = hostile.TEXTS[ending][what].replace("parallelism:\n  tp:", "ici_tensor_parallelism:")
    hostile.refuses(LAUNCHER, f"maxtext{ending}", text.replace("parallelism: x", "ici_tensor_parallelism: x"))
