#!/bin/bash
# Written by tuner for Megatron-Bridge: a few steps of a recipe without settings of its own, on made-up data.
# MEGATRON_BRIDGE is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further overrides are
# handed on.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment
export NCCL_GRAPH_REGISTER=0  # CUDA graphs beside expandable segments would touch memory that is gone
export CUDA_DEVICE_MAX_CONNECTIONS=1  # one queue starts collectives of tensor and context parallelism before the compute that hides them

MEGATRON_BRIDGE=${MEGATRON_BRIDGE:?must be the folder of Megatron-Bridge}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-16}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_OVERRIDES=(
    model.num_layers=80
    model.hidden_size=8192
    model.ffn_hidden_size=28672
    model.num_attention_heads=64
    model.kv_channels=128
    model.vocab_size=128256
    tokenizer.vocab_size=128256
    model.seq_length=8192
    dataset.seq_length=8192
    model.position_embedding_type=rope
    model.normalization=RMSNorm
    model.gated_linear_unit=true
    model.share_embeddings_and_output_weights=false
    model.add_bias_linear=false
    model.qk_layernorm=false
    model.hidden_dropout=0.0
    model.attention_dropout=0.0
    model.num_query_groups=8
    model.activation_func=silu
    model.should_pad_vocab=true
)
PRECISION_OVERRIDES=(
    mixed_precision=bf16_mixed
)
PARALLEL_OVERRIDES=(
    model.tensor_model_parallel_size=8
    model.pipeline_model_parallel_size=4
    model.context_parallel_size=2
    model.sequence_parallel=true
    model.cp_comm_type=all_gather
    model.account_for_embedding_in_pipeline_split=false
    model.account_for_loss_in_pipeline_split=false
    ddp.overlap_grad_reduce=true
    ddp.use_distributed_optimizer=true
    optimizer.use_distributed_optimizer=true
    ddp.overlap_param_gather=true
    optimizer.overlap_param_gather=true
    model.tp_comm_overlap=true
)
MEMORY_OVERRIDES=(
    model.cuda_graph_impl=full_iteration
    rerun_state_machine.check_for_nan_in_loss=false
    ddp.check_for_nan_in_grad=false
)
TRAINING_OVERRIDES=(
    train.micro_batch_size=1
    train.global_batch_size=256
    train.train_iters=50
    validation.eval_iters=0
    scheduler.lr_warmup_iters=0
    logger.log_interval=1
    checkpoint.save=null
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" "$MEGATRON_BRIDGE"/scripts/training/run_recipe.py \
    --recipe vanilla_gpt_pretrain_config \
    "${MODEL_OVERRIDES[@]}" \
    "${PRECISION_OVERRIDES[@]}" \
    "${PARALLEL_OVERRIDES[@]}" \
    "${MEMORY_OVERRIDES[@]}" \
    "${TRAINING_OVERRIDES[@]}" \
    "$@"
