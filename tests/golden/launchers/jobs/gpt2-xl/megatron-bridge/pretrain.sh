#!/bin/bash
# Written by tuner for Megatron-Bridge: a few steps of a recipe without settings of its own, on made-up data.
# MEGATRON_BRIDGE is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further overrides are
# handed on.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment

MEGATRON_BRIDGE=${MEGATRON_BRIDGE:?must be the folder of Megatron-Bridge}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_OVERRIDES=(
    model.num_layers=48
    model.hidden_size=1600
    model.ffn_hidden_size=6400
    model.num_attention_heads=25
    model.kv_channels=64
    model.vocab_size=50257
    tokenizer.vocab_size=50257
    model.seq_length=1024
    dataset.seq_length=1024
    model.position_embedding_type=learned_absolute
    model.normalization=LayerNorm
    model.gated_linear_unit=false
    model.share_embeddings_and_output_weights=true
    model.add_bias_linear=true
    model.qk_layernorm=false
    model.hidden_dropout=0.1
    model.attention_dropout=0.1
    model.activation_func=gelu
    model.should_pad_vocab=true
)
PRECISION_OVERRIDES=(
    mixed_precision=fp16_mixed
)
PARALLEL_OVERRIDES=(
    model.tensor_model_parallel_size=1
    model.pipeline_model_parallel_size=1
    model.context_parallel_size=1
    model.sequence_parallel=false
    ddp.overlap_grad_reduce=true
    ddp.use_distributed_optimizer=false
    optimizer.use_distributed_optimizer=false
    ddp.overlap_param_gather=false
    optimizer.overlap_param_gather=false
    model.tp_comm_overlap=false
)
TRAINING_OVERRIDES=(
    train.micro_batch_size=4
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
    "${TRAINING_OVERRIDES[@]}" \
    "$@"
