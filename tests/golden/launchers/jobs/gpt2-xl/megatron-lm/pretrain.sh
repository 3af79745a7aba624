#!/bin/bash
# Written by tuner for Megatron-LM (core 0.19): a few steps on made-up data.
# MEGATRON_LM is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further arguments are
# handed to pretrain_gpt.py.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment

MEGATRON_LM=${MEGATRON_LM:?must be the folder of Megatron-LM}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-1}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --num-layers 48
    --hidden-size 1600
    --ffn-hidden-size 6400
    --num-attention-heads 25
    --kv-channels 64
    --vocab-size 50257
    --seq-length 1024
    --max-position-embeddings 1024
    --position-embedding-type learned_absolute
    --normalization LayerNorm
    --hidden-dropout 0.1
    --attention-dropout 0.1
)
PRECISION_ARGS=(
    --fp16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 1
    --context-parallel-size 1
)
TRAINING_ARGS=(
    --micro-batch-size 4
    --global-batch-size 256
    --train-iters 50
    --lr 1.0e-5
    --min-lr 1.0e-6
    --lr-decay-style cosine
    --clip-grad 1.0
    --log-interval 1
    --log-throughput
    --eval-iters 0
)
DATA_ARGS=(
    --mock-data
    --tokenizer-type NullTokenizer
)

exec torchrun "${DISTRIBUTED_ARGS[@]}" "$MEGATRON_LM"/pretrain_gpt.py \
    "${MODEL_ARGS[@]}" \
    "${PRECISION_ARGS[@]}" \
    "${PARALLEL_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "$@"
