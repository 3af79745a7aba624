#!/bin/bash
# Written by tuner for Megatron-LM (core 0.19): a few steps on made-up data.
# MEGATRON_LM is its folder. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set; further arguments are
# handed to pretrain_gpt.py.
set -euo pipefail

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment

MEGATRON_LM=${MEGATRON_LM:?must be the folder of Megatron-LM}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=${NNODES:-256}
DISTRIBUTED_ARGS=(
    --nnodes "$NNODES"
    --nproc-per-node "$GPUS_PER_NODE"
    --node-rank "${NODE_RANK:-0}"
    --master-addr "${MASTER_ADDR:-localhost}"
    --master-port "${MASTER_PORT:-29500}"
)
MODEL_ARGS=(
    --num-layers 61
    --hidden-size 7168
    --ffn-hidden-size 18432
    --num-attention-heads 128
    --kv-channels 128
    --vocab-size 129280
    --seq-length 4096
    --max-position-embeddings 4096
    --position-embedding-type rope
    --normalization RMSNorm
    --swiglu
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --hidden-dropout 0.0
    --attention-dropout 0.0
    --mtp-num-layers 1
    --multi-latent-attention
    --q-lora-rank 1536
    --kv-lora-rank 512
    --qk-head-dim 128
    --qk-pos-emb-head-dim 64
    --v-head-dim 128
    --num-experts 256
    --moe-router-topk 8
    --moe-ffn-hidden-size 2048
    --moe-layer-freq '([0]*3+[1]*58)'
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --moe-router-force-load-balancing
    --moe-shared-expert-intermediate-size 2048
    --moe-router-enable-expert-bias
    --moe-router-score-function sigmoid
)
PRECISION_ARGS=(
    --bf16
)
PARALLEL_ARGS=(
    --tensor-model-parallel-size 1
    --pipeline-model-parallel-size 16
    --context-parallel-size 1
    --expert-model-parallel-size 64
    --expert-tensor-parallel-size 1
    --pipeline-model-parallel-layout 'Et*3|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*4|t*2mL'
    --use-distributed-optimizer
)
MEMORY_ARGS=(
    --recompute-granularity full
    --recompute-method uniform
    --recompute-num-layers 1
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 15360
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
