"""torchtitan's keys, as tables by version: one entry holds a key and its codec in both directions.

0.2: TOML (torchtitan 0.2.2 torchtitan/config/job_config.py). 0.3: `--section.key` flags over a Python configuration (0.3.0
torchtitan/config/configs.py, distributed/activation_checkpoint.py). main: the configuration alone, with batches in tokens
(torchtitan/config/{parallelism,training}.py).
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tuner.launch.launchers.tables.vocabulary import Key, one_of, text, truth, whole, whole_from

if TYPE_CHECKING:
    from collections.abc import Mapping

NAME = "torchtitan"
VERSIONS = ("0.2", "0.3", "main")
SINGLE = {"1f1b": "1F1B", "gpipe": "GPipe"}
LOOPED = "Interleaved1F1B"
POLICIES = {"selective": "SelectiveAC", "full": "FullAC", "memory_budget": "MemoryBudgetAC", "none": "None"}


def _replicated(value: Any) -> int:
    found = whole(value, -1)
    if found == 0:
        raise ValueError("must be -1 or at least 1")
    return found


def _names(value: Any) -> list[str]:
    """Return a list of names, or one text with commas between them."""
    found = value.split(",") if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise ValueError("must be a list of names")
    return [item for item in found if item]


def _stages(value: Any) -> list[list[str]]:
    if not isinstance(value, list) or not all(isinstance(part, list) and all(isinstance(name, str) for name in part) for part in value):
        raise ValueError("must be a list of lists of module names")
    return value


_MESH = (
    Key(path="parallelism.data_parallel_replicate_degree", name="replicate", take=whole),
    Key(path="parallelism.data_parallel_shard_degree", name="shard", take=_replicated),
    Key(path="parallelism.fsdp_reshard_after_forward", name="reshard", take=one_of("default", "always", "never")),
    Key(path="parallelism.tensor_parallel_degree", name="tp", take=whole),
    Key(path="parallelism.pipeline_parallel_degree", name="pp", take=whole),
    Key(path="parallelism.context_parallel_degree", name="cp", take=whole),
    Key(path="parallelism.expert_parallel_degree", name="ep", take=whole),
    Key(path="parallelism.pipeline_parallel_schedule", name="schedule", take=text),
    Key(path="parallelism.pipeline_parallel_first_stage_less_layers", name="first_less", take=whole_from(0)),
    Key(path="parallelism.pipeline_parallel_last_stage_less_layers", name="last_less", take=whole_from(0)),
    Key(path="parallelism.pipeline_parallel_layers_per_stage", name="layers_per_stage", take=whole),
    Key(path="training.enable_cpu_offload", name="cpu_offload", take=truth),
    Key(path="training.dtype", name="dtype", take=one_of("bfloat16", "float32")),
    Key(path="training.mixed_precision_param", name="param", take=one_of("bfloat16", "float32")),
    Key(path="compile.enable", name="compile", take=truth),
)
_SEQUENCES = (
    Key(path="training.local_batch_size", name="local", take=whole),
    Key(path="training.global_batch_size", name="global", take=_replicated),
    Key(path="training.seq_len", name="seq_len", take=whole),
    Key(path="parallelism.pipeline_parallel_microbatch_size", name="micro", take=whole),
)
_FQNS = Key(path="parallelism.module_fqns_per_model_part", name="stages", take=_stages)
_SP = Key(path="parallelism.enable_sequence_parallel", name="sp", take=truth)
_GRAPHS = Key(path="training.disable_cuda_graphs", name="no_graphs", take=truth)
_ASYNC_TP = Key(path="compile.enable_async_tensor_parallel", name="async_tp", take=truth)
_AC = Key(path="activation_checkpoint.mode", name="recompute", take=one_of(*POLICIES))

TABLES: Mapping[str, tuple[Key, ...]] = MappingProxyType(
    {
        "0.2": (
            Key(path="experimental.custom_import", name="import", take=text),
            Key(path="model.name", name="family", take=text),
            Key(path="model.flavor", name="flavor", take=text),
            Key(path="model.converters", name="converters", take=_names),
            *_MESH,
            *_SEQUENCES,
            _FQNS,
            Key(path="parallelism.enable_async_tensor_parallel", name="async_tp", take=truth),
            Key(path="parallelism.context_parallel_rotate_method", name="rotate", take=one_of("allgather", "alltoall")),
            Key(path="parallelism.expert_tensor_parallel_degree", name="etp", take=whole),
            _AC,
            Key(path="activation_checkpoint.selective_ac_option", name="option", take=str),
            Key(path="quantize.linear.float8.recipe_name", name="float8", take=text),
        ),
        "0.3": (*_MESH, *_SEQUENCES, _FQNS, _SP, _GRAPHS, _ASYNC_TP, _AC),
        "main": (
            *_MESH,
            Key(path="training.num_tokens_per_microbatch_per_dp_rank", name="tokens_micro", take=whole_from(1, 10**12)),
            Key(path="training.num_tokens_per_train_step", name="tokens_step", take=lambda value: whole(value, -1, 10**13)),
            Key(path="training.max_context_length", name="seq_len", take=whole),
            Key(path="parallelism.num_pp_microbatches", name="pp_microbatches", take=whole),
            Key(path="parallelism.pipeline_parallel_module_fqns_per_model_part", name="stages", take=_stages),
            _SP,
            _GRAPHS,
            _ASYNC_TP,
            _AC,
        ),
    }
)
READ = tuple({key.path: key for table in TABLES.values() for key in table}.values())
TOKENS = {key.path for key in TABLES["main"]} - {key.path for key in TABLES["0.3"]}
# Keys that a written job has and that change no cost.
QUIET = frozenset(
    {
        "job.config_file",
        "job.dump_folder",
        "job.description",
        "training.steps",
        "training.dataset",
        "metrics.log_freq",
        "model.hf_assets_path",
        "hf_assets_path",
        "dump_folder",
        "dataloader.dataset",
        "model_spec",
        "loss.loss_fn.global_vocab_size",
    }
)
