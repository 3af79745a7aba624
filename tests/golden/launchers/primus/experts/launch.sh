#!/bin/bash
# Written by tuner for Primus. On several nodes run this on each, with NODE_RANK, MASTER_ADDR and MASTER_PORT set.
set -euo pipefail
cd "$(dirname "$0")"

export CUDA_DEVICE_MAX_CONNECTIONS=1  # one queue starts collectives of tensor and context parallelism before the compute that hides them
PRIMUS=${PRIMUS:?must be the folder of Primus}
NNODES=${NNODES:-8}
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
export NNODES GPUS_PER_NODE

exec bash "$PRIMUS"/runner/primus-cli direct -- train pretrain --config "$PWD"/pretrain.yaml "$@"
