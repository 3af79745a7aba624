#!/bin/bash
# Written by tuner for NeMo 2.0. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set.
set -euo pipefail
cd "$(dirname "$0")"

export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True  # the allocator grows its segments, so that they do not fragment
export CUDA_DEVICE_MAX_CONNECTIONS=1  # one queue starts collectives of tensor and context parallelism before the compute that hides them

exec torchrun --nnodes 8 --nproc-per-node 8 --node-rank "${NODE_RANK:-0}" \
    --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" pretrain.py "$@"
