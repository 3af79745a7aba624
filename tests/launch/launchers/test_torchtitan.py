"""torchtitan: facts held against its sources by hand, golden files in its three vocabularies, and configurations that people keep."""

from __future__ import annotations

import ast
import tomllib
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.launchers import hostile
from tests.launch.launchers.golden import check
from tests.launch.launchers.plans import job_of
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found, Written
from tuner.launch.launchers.torchtitan import Torchtitan, installed_version
from tuner.plan_defaults import read_plan

if TYPE_CHECKING:
    from pathlib import Path

LAUNCHER = Torchtitan()


def written(knobs: str, model: str = "llama3-8b", version: str = "0.3", **changes: Any) -> Written:
    job = job_of("torchtitan", model).model_copy(update=changes)
    return LAUNCHER.write(job, read_plan(knobs, job, "plan")[0], version)


def toml(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, Any]:
    return tomllib.loads(written(knobs, model, "0.2", **changes).files["train.toml"])


def flags(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, str]:
    """Return the --section.key words of 0.3's script."""
    lines = written(knobs, model, "0.3", **changes).files["train.sh"].splitlines()
    words = [line.strip(" \\").partition(" ") for line in lines if line.startswith("    --") and "." in line.split()[0]]
    return {name: value for name, _, value in words}


def code(knobs: str, model: str = "llama3-8b", **changes: Any) -> dict[str, Any]:
    """Return what main's run() assigns to attributes of the configuration, as literals."""
    tree = ast.parse(written(knobs, model, "main", **changes).files["tuner_run.py"])
    run = next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "run")
    found = {}
    for node in run.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Attribute) and isinstance(node.value, ast.Constant):
            found[ast.unparse(node.targets[0]).removeprefix("config.")] = node.value.value
    return found


def refused(knobs: str, model: str = "llama3-8b", version: str = "0.3", **changes: Any) -> dict[str, str]:
    with pytest.raises(SpecError) as error:
        written(knobs, model, version, **changes)
    return {problem.path: problem.rule for problem in error.value.problems}


@pytest.mark.parametrize(
    ("folder", "version", "knobs", "model"),
    [
        ("llama3-8b-fsdp-0.2", "0.2", "tp=2,zero=3,micro_batch=2,recompute=full", "llama3-8b"),
        ("llama3-70b-pipeline-0.3", "0.3", "tp=8,pp=4,vpp=2,zero=2,recompute=none,tp_overlap=true", "llama3-70b"),
        ("mixtral-8x7b-ep8-main", "main", "ep=8,cp=2,cp_kind=all_gather,zero=3,recompute=full", "mixtral-8x7b"),
    ],
)
def test_golden_files(folder: str, version: str, knobs: str, model: str, tmp_path: Path) -> None:
    files = written(knobs, model, version)
    check(f"torchtitan/{folder}", files.files)
    hostile.shellchecked(files, tmp_path)


def test_degrees_by_hand() -> None:
    """128 GPUs, tp 8, pp 4: 4 data-parallel ranks; in groups of 2, they are replicated twice."""
    whole = toml("tp=8,pp=4,zero=3,recompute=full", "llama3-70b")["parallelism"]
    assert (whole["tensor_parallel_degree"], whole["pipeline_parallel_degree"]) == (8, 4)
    assert (whole["data_parallel_replicate_degree"], whole["data_parallel_shard_degree"]) == (1, 4)
    assert whole["fsdp_reshard_after_forward"] == "always"
    halves = toml("tp=8,pp=4,zero=2,shard_group=2,recompute=full", "llama3-70b")["parallelism"]
    assert (halves["data_parallel_replicate_degree"], halves["data_parallel_shard_degree"]) == (2, 2)
    assert halves["fsdp_reshard_after_forward"] == "never"


def test_weights_are_sharded_over_context_parallel_ranks_too() -> None:
    """16 GPUs, cp 2: 8 replicas; a group of 4 ranks is a shard degree of 2, four times replicated."""
    degrees = code("cp=2,cp_kind=all_gather,zero=3,shard_group=4,recompute=full")
    assert degrees["parallelism.data_parallel_shard_degree"] == 2
    assert degrees["parallelism.data_parallel_replicate_degree"] == 4
    assert "zero" in refused("cp=2,cp_kind=all_gather,zero=0,recompute=full")
    assert "shard_group" in refused("cp=4,cp_kind=all_gather,zero=3,shard_group=2,recompute=full")


def test_batches_in_sequences_and_in_tokens() -> None:
    """64 sequences of 8192 tokens on 16 GPUs. Without a pipeline a rank's batch is a micro batch: 2, or 16,384 tokens of 524,288; at pp 2
    a replica of 8 takes 8 sequences as 4 micro batches of 2.
    """
    plain = flags("zero=3,micro_batch=2,recompute=full")
    assert (plain["--training.local_batch_size"], plain["--training.global_batch_size"], plain["--training.seq_len"]) == ("2", "64", "8192")
    assert "--parallelism.pipeline_parallel_microbatch_size" not in plain
    tokens = code("zero=3,micro_batch=2,recompute=full")
    assert tokens["training.num_tokens_per_microbatch_per_dp_rank"] == 16_384
    assert tokens["training.num_tokens_per_train_step"] == 524_288
    assert tokens["training.max_context_length"] == 8192
    piped = flags("pp=2,zero=3,micro_batch=2,recompute=full")
    assert (piped["--training.local_batch_size"], piped["--parallelism.pipeline_parallel_microbatch_size"]) == ("8", "2")
    assert code("pp=2,zero=3,micro_batch=2,recompute=full")["parallelism.num_pp_microbatches"] == 4


def test_stages_by_hand() -> None:
    """80 layers, embedding and loss counted as one each, are 82 over 8 stages: 11 a stage, 8 stages of at most 11 (pipeline_parallel.py
    rounds up). Over 16 stages 6 a stage would make 14: the modules of each stage are listed instead.
    """
    eight = flags("tp=8,pp=4,vpp=2,zero=2,recompute=none,pipeline_layout=embedding=1+loss=1", "llama3-70b")
    assert eight["--parallelism.pipeline_parallel_layers_per_stage"] == "11"
    assert eight["--parallelism.pipeline_parallel_schedule"] == "Interleaved1F1B"
    sixteen = toml("tp=8,pp=4,vpp=4,zero=2,recompute=none,pipeline_layout=embedding=1+loss=1", "llama3-70b")["parallelism"]
    stages = sixteen["module_fqns_per_model_part"]
    assert len(stages) == 16
    assert stages[0] == ["tok_embeddings", *(f"layers.{i}" for i in range(5))]
    assert stages[-1][-2:] == ["norm", "output"]
    assert [name for stage in stages for name in stage if name.startswith("layers")] == [f"layers.{i}" for i in range(80)]


def test_schedules() -> None:
    assert toml("pp=2,zero=3,schedule=gpipe,recompute=full")["parallelism"]["pipeline_parallel_schedule"] == "GPipe"
    assert toml("pp=2,zero=3,schedule=1f1b,recompute=full")["parallelism"]["pipeline_parallel_schedule"] == "1F1B"


def test_recompute_in_each_vocabulary() -> None:
    assert toml("zero=3,recompute=full")["activation_checkpoint"] == {"mode": "full"}
    assert toml("zero=3,recompute=layernorm+mlp")["activation_checkpoint"] == {"mode": "selective", "selective_ac_option": "op"}
    assert written("zero=3,recompute=layernorm+mlp").files["train.sh"].endswith("activation-checkpoint:selective\n")
    assert "config.activation_checkpoint = None" in written("zero=3,recompute=none", version="main").files["tuner_run.py"]
    assert (
        "config.activation_checkpoint = SelectiveAC.Config()"
        in written("zero=3,recompute=layernorm+mlp", version="main").files["tuner_run.py"]
    )
    assert "selective means" in refused("zero=3,recompute=core_attn")["recompute"]


def test_what_differs_between_versions() -> None:
    assert "cuda_graphs" in refused("zero=3,recompute=full,cuda_graphs=true", version="0.2")
    assert flags("zero=3,recompute=full,cuda_graphs=true")["--training.no_disable_cuda_graphs"] == ""
    assert "captures no pipeline" in refused("pp=2,zero=3,recompute=full,cuda_graphs=true")["cuda_graphs"]
    assert code("pp=2,zero=3,recompute=full,cuda_graphs=true")["training.disable_cuda_graphs"] is False
    ring = toml("cp=2,cp_kind=p2p,zero=3,recompute=full")["parallelism"]
    assert ring["context_parallel_rotate_method"] == "alltoall"
    assert "cp_kind" in refused("cp=2,cp_kind=p2p,zero=3,recompute=full", version="main")
    assert "sequence_parallel" in refused("tp=2,sequence_parallel=false,zero=3,recompute=full", version="0.2")
    assert "--parallelism.no_enable_sequence_parallel" in flags("tp=2,sequence_parallel=false,zero=3,recompute=full")
    assert toml("tp=2,zero=3,recompute=full,tp_overlap=true")["parallelism"]["enable_async_tensor_parallel"] is True
    assert "--compile.enable_async_tensor_parallel" in flags("tp=2,zero=3,recompute=full,tp_overlap=true")


def test_the_allocators_variable_is_named_as_torch_names_it() -> None:
    """torch 2.9 renamed it; 0.2 is run with older ones."""
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable" in written("zero=3,recompute=full", version="0.2").files["train.sh"]
    assert "export PYTORCH_ALLOC_CONF=expandable" in written("zero=3,recompute=full").files["train.sh"]
    assert "unset CUDA_DEVICE_MAX_CONNECTIONS" in written("tp=2,zero=3,recompute=full").files["train.sh"]


def test_precisions() -> None:
    assert toml("zero=3,recompute=full")["training"]["mixed_precision_param"] == "bfloat16"
    assert toml("zero=3,recompute=full", precision="fp32")["training"]["mixed_precision_param"] == "float32"
    float8 = toml("zero=3,recompute=full", precision="fp8-rowwise")
    assert float8["model"]["converters"] == ["quantize.linear.float8"]
    assert float8["quantize"]["linear"]["float8"] == {"recipe_name": "rowwise"}
    assert (
        'Float8LinearConverter.Config(recipe_name="rowwise", '
        in written("zero=3,recompute=full", precision="fp8-rowwise").files["tuner_run.py"]
    )
    assert "precision" in refused("zero=3,recompute=full", precision="fp8")
    for version, precision in (("0.2", "fp8"), ("0.2", "mxfp8"), ("0.3", "fp8-rowwise"), ("0.3", "nvfp4"), ("main", "mxfp8")):
        assert LAUNCHER.read(written("zero=3,recompute=full", version=version, precision=precision).files).job["precision"] == precision


def test_knobs_without_a_spelling_are_refused_together() -> None:
    assert set(refused("tp=2,zero=1,offload=activations,dp_overlap=false,recompute=core_attn")) >= {
        "zero",
        "offload",
        "dp_overlap",
        "recompute",
    }


def sources(root: Path, **files: str) -> Path:
    (root / "config").mkdir(parents=True)
    for name, text in files.items():
        (root / f"config/{name}.py").write_text(text)
    return root


def test_the_installed_configuration_tells_the_version(tmp_path: Path) -> None:
    """0.3 has configs.py with local_batch_size, main training.py that counts tokens, 0.2 job_config.py."""
    assert installed_version(sources(tmp_path / "a", job_config="class Training:\n    local_batch_size: int = 8\n")) == "0.2"
    assert installed_version(sources(tmp_path / "b", configs="class TrainingConfig:\n    local_batch_size: int = 8\n")) == "0.3"
    assert installed_version(sources(tmp_path / "c", training="num_tokens_per_microbatch_per_dp_rank: int = 1\n")) == "main"
    assert installed_version(sources(tmp_path / "d", other="")) == ""


def test_without_one_the_versions_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.launch.launchers.torchtitan.installed_version", lambda: "")
    with pytest.raises(SpecError, match=r"0\.2, 0\.3, main"):
        written("zero=3,recompute=full", version="")
    with pytest.raises(SpecError, match=r"framework-version = '0\.1'.*0\.2, 0\.3, main"):
        written("zero=3,recompute=full", version="0.1")
    monkeypatch.setattr("tuner.launch.launchers.torchtitan.installed_version", lambda: "0.2")
    assert "train.toml" in written("zero=3,recompute=full", version="").files


LLAMA3_8B = """\
# 64 GPUs
[job]
dump_folder = "./outputs"
description = "Llama 3 8B training"

[profiling]
enable_profiling = true

[model]
name = "llama3"
flavor = "8B"
hf_assets_path = "./assets/hf/Llama-3.1-8B"

[optimizer]
name = "AdamW"
lr = 3e-4

[training]
local_batch_size = 1
seq_len = 8192
steps = 1000
dataset = "c4"

[parallelism]
data_parallel_replicate_degree = 1
data_parallel_shard_degree = -1
tensor_parallel_degree = 1
pipeline_parallel_degree = 1
context_parallel_degree = 1

[activation_checkpoint]
mode = 'selective'
selective_ac_option = 'op'

[compile]
enable=false
"""
LLAMA3_70B = (
    LLAMA3_8B.replace("8B", "70B")
    .replace("local_batch_size = 1", "local_batch_size = 8")
    .replace("tensor_parallel_degree = 1", "tensor_parallel_degree = 8  # 8-way TP")
    .replace("mode = 'selective'\nselective_ac_option = 'op'", 'mode = "full"')
)
DEBUG = (
    LLAMA3_8B.replace('"8B"', '"debugmodel"')
    .replace("seq_len = 8192", "seq_len = 2048")
    .replace("local_batch_size = 1", "local_batch_size = 8")
    .replace("'op'", "'2'")
    .replace("[activation", 'fsdp_reshard_after_forward = "default"\nenable_async_tensor_parallel = false\n\n[activation')
)
RUN = 'NGPU=${NGPU:-"8"}\ntorchrun --nproc_per_node=${NGPU} --rdzv_backend c10d -m torchtitan.train --job.config_file ${CONFIG_FILE} "$@"\n'


def read(**files: str) -> Found:
    return LAUNCHER.read({name.replace("__", "."): text for name, text in files.items()})


def test_the_8b_configuration_of_0_2() -> None:
    found = read(llama3_8b__toml=LLAMA3_8B, run_train__sh=RUN)
    assert (found.framework, found.release, found.model["preset"]) == ("torchtitan", "0.2", "llama3-8b")
    assert (found.gpus, found.gpus_per_node) == (8, 8)
    assert found.job == {"seq_len": 8192, "global_batch": 8}
    assert {name: found.plan[name] for name in ("tp", "pp", "cp", "dp", "micro_batch", "recompute")} == {
        "tp": 1, "pp": 1, "cp": 1, "dp": 8, "micro_batch": 1, "recompute": "mlp+layernorm",
    }  # fmt: skip
    assert {(item.name, item.where) for item in found.unknown} == {
        ("profiling.enable_profiling", "llama3_8b.toml:7"),
        ("optimizer.name", "llama3_8b.toml:15"),
        ("optimizer.lr", "llama3_8b.toml:16"),
    }
    assert "every other matrix product" in found.assumed["recompute"]
    assert not found.problems


def test_the_70b_configuration_of_0_2() -> None:
    """64 GPUs are not told by the file: the plan is known but for the data-parallel ranks."""
    found = read(llama3_70b__toml=LLAMA3_70B)
    assert (found.model["preset"], found.gpus) == ("llama3-70b", None)
    assert (found.plan["tp"], found.plan["recompute"], found.plan["micro_batch"]) == (8, "full", 8)
    assert "dp" not in found.plan
    assert found.plan["sequence_parallel"] is True
    assert "global_batch" not in found.job


def test_the_debug_configuration_of_0_2() -> None:
    """Its flavor has no preset of ours, and every second layer of a model that is not told cannot be counted."""
    found = read(debug_model__toml=DEBUG, run_train__sh=RUN)
    assert not found.model
    assert ("model.flavor", "debugmodel") in {(item.name, item.value) for item in found.unknown}
    assert not found.problems and "recompute" not in found.plan
    assert found.plan["micro_batch"] == 8


REGISTRY = """\
from torchtitan.config import ActivationCheckpointConfig, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.trainer import Trainer

from . import model_registry


def llama3_debugmodel() -> Trainer.Config:
    return Trainer.Config(model_spec=model_registry("debugmodel"), training=TrainingConfig(local_batch_size=8, seq_len=2048))


def llama3_70b() -> Trainer.Config:
    return Trainer.Config(
        hf_assets_path="./assets/hf/Llama-3.1-70B",
        model_spec=model_registry("70B"),
        optimizer=OptimizersContainer.Config(lr=1.5e-4),
        training=TrainingConfig(
            local_batch_size=8,
            seq_len=8192,
            steps=1000,
        ),
        parallelism=ParallelismConfig(tensor_parallel_degree=8),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
    )


def llama3_405b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("405B"),
        model_converters=ModelConvertersContainer.Config(
            converters=[Float8LinearConverter.Config(enable_fsdp_float8_all_gather=True, filter_fqns=["output"])],
        ),
        training=TrainingConfig(local_batch_size=2, seq_len=8192, steps=3000),
        parallelism=ParallelismConfig(tensor_parallel_degree=8, enable_async_tensor_parallel=True),
        activation_checkpoint=ActivationCheckpointConfig(mode="full"),
        compile=CompileConfig(enable=True),
    )
"""


def test_a_function_of_a_registry_is_picked_by_the_command_line() -> None:
    line = "NGPU=64 MODULE=llama3 CONFIG=llama3_70b ./run_train.sh --training.steps 10\n"
    found = read(config_registry__py=REGISTRY, go__sh=line)
    assert (found.model["preset"], found.gpus) == ("llama3-70b", 64)
    assert {name: found.plan[name] for name in ("tp", "dp", "micro_batch", "recompute")} == {
        "tp": 8, "dp": 8, "micro_batch": 8, "recompute": "full",
    }  # fmt: skip
    assert found.job == {"seq_len": 8192, "global_batch": 64}
    assert ("optimizer.lr", "config_registry.py:15") in {(item.name, item.where) for item in found.unknown}
    assert not found.problems


def test_a_registry_whose_function_is_not_told() -> None:
    found = read(config_registry__py=REGISTRY)
    assert [problem.path for problem in found.problems] == ["--config"]
    assert "llama3_70b" in found.problems[0].hint


def test_converters_tell_the_precision() -> None:
    found = read(config_registry__py=REGISTRY, go__sh="torchrun -m torchtitan.train --module llama3 --config llama3_405b\n")
    assert (found.model["preset"], found.job["precision"]) == ("llama3-405b", "fp8")
    assert found.plan["tp_overlap"] is True


MAIN = """\
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

GROUP = 8


def run() -> Trainer.Config:
    model_spec = model_registry("8B")
    return Trainer.Config(
        model_spec=model_spec,
        training=TrainingConfig(
            num_tokens_per_microbatch_per_dp_rank=2 * 8192,
            num_tokens_per_train_step=64 * 8192,
            max_context_length=8192,
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(
            data_parallel_shard_degree=GROUP, data_parallel_replicate_degree=2, fsdp_reshard_after_forward="never"
        ),
        activation_checkpoint=FullAC.Config(),
    )
"""


def test_a_function_of_main_counts_tokens() -> None:
    """2 x 8192 tokens are micro batches of 2 sequences, 64 x 8192 a step of 64; 2 groups of 8 are 16 GPUs."""
    found = read(mine__py=MAIN)
    assert (found.release, found.gpus, found.model["preset"]) == ("main", 16, "llama3-8b")
    assert found.job == {"seq_len": 8192, "global_batch": 64}
    assert {name: found.plan[name] for name in ("dp", "zero", "shard_group", "micro_batch", "recompute")} == {
        "dp": 16, "zero": 2, "shard_group": 8, "micro_batch": 2, "recompute": "full",
    }  # fmt: skip
    assert not found.unknown and not found.problems


SPRING = """\
def llama3_8b() -> Trainer.Config:
    return Trainer.Config(
        model_spec=model_registry("8B"),
        training=TrainingConfig(local_batch_size=1, seq_len=8192),
        activation_checkpoint=ActivationCheckpointConfig(mode="selective", selective_ac_option="2"),
    )
"""


def test_a_policy_by_layers_that_a_function_tells() -> None:
    """Between 0.2 and 0.3 functions had 0.2's option: every second of 32 layers is 16."""
    text = SPRING.replace("llama3_8b", "run").replace("model_registry", "models.llama3.model_registry")
    assert read(config_registry__py=SPRING).plan["recompute"] == "full:16"
    unknown = read(config_registry__py=text.replace('mode="selective", selective_ac_option="2"', "")).unknown
    assert ("activation_checkpoint", "ActivationCheckpointConfig") in {(item.name, item.value) for item in unknown}


def test_flags_count_over_the_files() -> None:
    line = (
        "torchrun --nnodes=2 --nproc_per_node=8 -m torchtitan.train --module llama3 --config llama3_8b \\\n"
        "  --parallelism.tensor_parallel_degree=4 --parallelism.no_enable_sequence_parallel \\\n"
        "  --training.global-batch-size 32 --debug.seed=61 activation-checkpoint:none\n"
    )
    found = read(go__sh=line)
    assert (found.model["preset"], found.gpus, found.plan["tp"], found.plan["dp"]) == ("llama3-8b", 16, 4, 4)
    assert found.plan["sequence_parallel"] is False
    assert found.plan["recompute"] == "none"
    assert found.job["global_batch"] == 32
    assert [(item.name, item.value, item.where) for item in found.unknown] == [("debug.seed", "61", "go.sh:3")]


@pytest.mark.parametrize(
    ("key", "text", "problem"),
    [
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 'many'", "x.toml:27: parallelism.tensor_parallel_degree"),
        ("local_batch_size = 1", "local_batch_size = 0", "x.toml:19: training.local_batch_size"),
        ("context_parallel_degree = 1", "context_parallel_degree = true", "x.toml:29: parallelism.context_parallel_degree"),
        ("mode = 'selective'", "mode = 'sometimes'", "x.toml:32: activation_checkpoint.mode"),
    ],
)
def test_values_that_cannot_be_read(key: str, text: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        read(x__toml=LLAMA3_8B.replace(key, text))
    assert str(error.value).startswith(problem), error.value


@pytest.mark.parametrize(
    ("key", "text", "path"),
    [
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 3", "replicate"),  # 8 GPUs
        ("local_batch_size = 1", "local_batch_size = 1\nglobal_batch_size = 12", "global"),
        ("pipeline_parallel_degree = 1", 'pipeline_parallel_degree = 2\npipeline_parallel_schedule = "ZBVZeroBubble"', "schedule"),
        ("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 2\npipeline_parallel_microbatch_size = 2", "micro"),
        ("pipeline_parallel_degree = 1", "pipeline_parallel_degree = 4\npipeline_parallel_layers_per_stage = 7", "layers_per_stage"),
        ("mode = 'selective'", "mode = 'memory_budget'", "recompute"),
        ("tensor_parallel_degree = 1", "tensor_parallel_degree = 2\nenable_async_tensor_parallel = true", "async_tp"),
    ],
)
def test_contradictions(key: str, text: str, path: str) -> None:
    found = read(x__toml=LLAMA3_8B.replace(key, text), run__sh=RUN)
    assert [problem.path for problem in found.problems] == [path]
    assert all(problem.where.startswith("x.toml:") and problem.rule for problem in found.problems)


@pytest.mark.parametrize("version", LAUNCHER.versions)
@pytest.mark.parametrize("name", hostile.NAMES)
def test_hostile_names_stay_names(version: str, name: str, tmp_path: Path) -> None:
    """Of the model (one that has to be built), and of a GPU."""
    job = job_of("torchtitan", "mixtral-8x7b")
    job = job.model_copy(update={"model": job.model.replace(name=name)})
    files = LAUNCHER.write(job, read_plan("ep=8,zero=3,recompute=full", job, "plan")[0], version)
    hostile.shellchecked(files, tmp_path)
    for path, text in files.files.items():
        if path.endswith(".py"):
            ast.parse(text)
    found = LAUNCHER.read(files.files)
    assert found.plan["ep"] == 8 and not found.problems and not found.unknown
    assert found.model["name"] == name


@pytest.mark.parametrize(("ending", "what"), [(ending, what) for ending in (".toml", ".py", ".sh") for what in hostile.TEXTS[ending]])
def test_hostile_files_are_refused(ending: str, what: str) -> None:
    hostile.refuses(LAUNCHER, f"torchtitan{ending}", hostile.TEXTS[ending][what])


def test_every_second_layer_of_a_model_that_is_not_told_is_no_contradiction() -> None:
    text = LLAMA3_8B.replace('flavor = "8B"', 'flavor = "mine"').replace("selective_ac_option = 'op'", "selective_ac_option = '2'")
    found = read(llama3_8b__toml=text)
    assert not found.problems and "recompute" not in found.plan
    assert [entry.value for entry in found.unknown if entry.name == "selective_ac_option"] == [
        "every 2. layer: how many that is depends on the model, which is not told"
    ]
