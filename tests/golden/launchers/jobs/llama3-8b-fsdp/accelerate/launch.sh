#!/bin/bash
# Written by tuner: llama3-8b, 16 GPUs, accelerate. Run it once on each node; a scheduler sets the variables.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
NNODES=${NNODES:-2}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NODE_RANK=${NODE_RANK:-0}
MASTER_ADDR=${MASTER_ADDR:-localhost}
MASTER_PORT=${MASTER_PORT:-29500}
STEPS=${STEPS:-20}
# Blocks of memory that grow in place: what allocations of changing size leave unused stays small.
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
# FSDP's collectives run beside products and need queues of their own; 1, as Megatron-LM wants it, lines them up behind those.
unset CUDA_DEVICE_MAX_CONNECTIONS

exec accelerate launch --config_file accelerate.yaml \
    --num_machines "$NNODES" --num_processes "$((NNODES * GPUS_PER_NODE))" --machine_rank "$NODE_RANK" \
    --main_process_ip "$MASTER_ADDR" --main_process_port "$MASTER_PORT" \
    train.py --model_name_or_path model --max_steps "$STEPS" \
    --max_seq_length 8192 --per_device_train_batch_size 1 --gradient_accumulation_steps 4 --attn_implementation sdpa
