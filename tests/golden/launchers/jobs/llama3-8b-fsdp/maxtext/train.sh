#!/usr/bin/env bash
# MaxText, written by tuner: llama3-8b on 16 x h100-sxm-80gb.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# whether collectives of the fsdp and data axes run beside compute
export XLA_FLAGS=--xla_gpu_enable_latency_hiding_scheduler=true
# JAX takes three quarters of a GPU's memory unless told
export XLA_PYTHON_CLIENT_MEM_FRACTION=0.95
# One process for each node: JAX finds the others through these.
export NNODES="${NNODES:-2}"
export NODE_RANK="${NODE_RANK:-${SLURM_NODEID:-0}}"
export JAX_COORDINATOR_IP="${MASTER_ADDR:-127.0.0.1}"
export JAX_COORDINATOR_PORT="${MASTER_PORT:-1234}"
exec python3 -m maxtext.trainers.pre_train.train "$here/train.yml"
