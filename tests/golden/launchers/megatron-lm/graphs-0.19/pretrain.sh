#!/bin/bash
# Written by tuner for Megatron-LM (core 0.19): a few steps on made-up data.
# MEGATRON_LM is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further arguments are
# handed to pretrain_gpt.py.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment
export NCCL_GRAPH_REGISTER=0  # CUDA graphs beside expandable segments would touch memory that is gone
export CUDA_DEVICE_MAX_CONNECTIONS=1  # one queue starts collectives of tensor and context parallelism before the compute that hides them

MEGATRON_LM=${MEGATRON_LM:?must be the folder of Megatron-LM}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-16}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --num-layers 80
    --hidden-size 8192
    --ffn-hidden-size 28672
    --num-attention-heads 64
    --kv-channels 128
    --vocab-size 128256
    --seq-length 8192
    --max-position-embeddings 8192
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --group-query-attention
    --num-query-groups 8
)
PRECISION_ARGS=(
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 8
    --pipeline-model-parallel-size 4
    --context-parallel-size 2
    --sequence-parallel
    --cp-comm-type all_gather
    --overlap-grad-reduce
    --use-distributed-optimizer
    --overlap-param-gather
    --tp-comm-overlap
)
MEMORY_ARGS=(
    --cuda-graph-impl full_iteration
    --no-check-for-nan-in-loss-and-grad
)
TRAINING_ARGS=(
    --micro-batch-size 1
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
    "${MEMORY_ARGS[@]}" \
    "${TRAINING_ARGS[@]}" \
    "${DATA_ARGS[@]}" \
    "$@"
