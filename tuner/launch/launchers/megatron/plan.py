"""A plan and a batch as settings of Megatron-Core, under the names that its command line gives them (megatron/training/arguments.py).

Megatron-LM, Megatron-Bridge, NeMo and Primus share them; each spells them in its own way. Where a rule is meant, it is the framework's own
(Megatron-LM 0.19: arguments.py, transformer_config.py, optimizer_config.py, parallel_state.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tuner.launch.launchers.megatron import degrees, memory, overlap, sharding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.launch.launchers.tables.settings import Aspect, Kind

# Knobs by the launchers of this family: how they are spelled on Megatron-LM's command line, or why they are not.
SAYS: Mapping[str, str] = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "vpp": "num_virtual_stages_per_pipeline_rank, or what pipeline_model_parallel_layout holds",
    "cp": "context_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "micro_batch": "micro_batch_size",
    "sequence_parallel": "sequence_parallel",
    "recompute": "recompute_granularity, recompute_modules",
    "recompute_layers": "recompute_method block, recompute_num_layers",
    "zero": "1: use_distributed_optimizer; 2 and 3: use_megatron_fsdp with data_parallel_sharding_strategy",
    "shard_group": "num_distributed_optimizer_instances",
    "embedding_layers": "account_for_embedding_in_pipeline_split; pipeline_model_parallel_layout for more than one",
    "loss_layers": "account_for_loss_in_pipeline_split; pipeline_model_parallel_layout for more than one",
    "offload": "optimizer_cpu_offload, cpu_offloading_num_layers",
    "tp_overlap": "tp_comm_overlap",
    "dp_overlap": "overlap_grad_reduce, overlap_param_gather",
    "ep_overlap": "overlap_moe_expert_parallel_comm",
    "cuda_graphs": "cuda_graph_impl",
    "cp_kind": "cp_comm_type",
}
CANNOT: Mapping[str, str] = {
    "schedule": "it runs 1F1B, interleaved where vpp > 1, and nothing names another schedule",
    "fallback_tp": "no release goes on at a lower tensor-parallel degree (`tuner export megatron-lm-ntp` writes for the dev branch)",
    "idle_tp": "a plan that is launched has no idle ranks",
}
KINDS: Mapping[str, Kind] = {**degrees.KINDS, **sharding.KINDS, **overlap.KINDS, **memory.KINDS}
# In the order in which they are written.
PLAN: tuple[Aspect, ...] = (
    degrees.RANKS,
    degrees.PIPELINE,
    sharding.SHARDING,
    overlap.OVERLAP,
    memory.RECOMPUTE,
    memory.OFFLOAD,
    overlap.GRAPHS,
    degrees.BATCH,
)
