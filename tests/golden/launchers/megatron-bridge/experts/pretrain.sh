#!/bin/bash
# Written by tuner for Megatron-Bridge: a few steps of a recipe without settings of its own, on made-up data.
# MEGATRON_BRIDGE is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further overrides are
# handed on.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment
export CUDA_DEVICE_MAX_CONNECTIONS=1  # one queue starts collectives of tensor and context parallelism before the compute that hides them

MEGATRON_BRIDGE=${MEGATRON_BRIDGE:?must be the folder of Megatron-Bridge}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-8}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_OVERRIDES=(
    model.num_layers=32
    model.hidden_size=4096
    model.ffn_hidden_size=14336
    model.num_attention_heads=32
    model.kv_channels=128
    model.vocab_size=32000
    tokenizer.vocab_size=32000
    model.seq_length=4096
    dataset.seq_length=4096
    model.position_embedding_type=rope
    model.normalization=RMSNorm
    model.gated_linear_unit=true
    model.share_embeddings_and_output_weights=false
    model.add_bias_linear=false
    model.qk_layernorm=false
    model.hidden_dropout=0.0
    model.attention_dropout=0.0
    model.num_query_groups=8
    model.num_moe_experts=8
    model.moe_router_topk=2
    model.moe_ffn_hidden_size=14336
    model.moe_grouped_gemm=true
    model.moe_token_dispatcher_type=alltoall
    model.moe_router_force_load_balancing=true
    model.activation_func=silu
    model.should_pad_vocab=true
)
PRECISION_OVERRIDES=(
    mixed_precision=bf16_with_fp8_current_scaling_mixed
)
PARALLEL_OVERRIDES=(
    model.tensor_model_parallel_size=2
    model.pipeline_model_parallel_size=4
    model.context_parallel_size=1
    model.sequence_parallel=true
    model.expert_model_parallel_size=8
    model.expert_tensor_parallel_size=1
    model.virtual_pipeline_model_parallel_size=3
    'model.pipeline_model_parallel_layout='"'"'Et|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|tL'"'"''
    ddp.overlap_grad_reduce=true
    ddp.use_distributed_optimizer=true
    optimizer.use_distributed_optimizer=true
    ddp.overlap_param_gather=true
    optimizer.overlap_param_gather=true
    model.tp_comm_overlap=true
    model.overlap_moe_expert_parallel_comm=false
)
MEMORY_OVERRIDES=(
    model.recompute_granularity=selective
    'model.recompute_modules=[layernorm,moe_act]'
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
