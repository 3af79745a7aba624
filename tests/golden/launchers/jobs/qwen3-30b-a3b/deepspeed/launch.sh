#!/bin/bash
# Written by tuner: qwen3-30b-a3b, 32 GPUs, deepspeed. Run it once on each node; a scheduler sets the variables.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
NNODES=${NNODES:-4}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
STEPS=${STEPS:-20}
# Blocks of memory that grow in place: what allocations of changing size leave unused stays small.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# Collectives that run beside products need queues of their own; 1, as Megatron-LM wants it, lines them up behind those.
unset CUDA_DEVICE_MAX_CONNECTIONS

exec torchrun --nnodes="$NNODES" --nproc-per-node="$GPUS_PER_NODE" \
    --node-rank="$NODE_RANK" --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" \
    train.py --deepspeed_config ds_config.json --model_name_or_path model --max_steps "$STEPS" \
    --max_seq_length 4096 --attn_implementation sdpa --gradient_checkpointing
