#!/usr/bin/env bash
# torchtitan main, written by tuner: qwen3-30b-a3b on 32 x h200-sxm-141gb.
set -euo pipefail
# framework-version: main
here="$(cd "$(dirname "$0")" && pwd)"
NNODES="${NNODES:-4}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
# fragmentation does not turn a plan that fits into one that does not
export PYTORCH_ALLOC_CONF=expandable_segments:True
# one hardware queue would serialise FSDP's gathers and reductions with compute
unset CUDA_DEVICE_MAX_CONNECTIONS
# The tokenizer and the data of a throughput run (c4_test) lie in torchtitan's own checkout.
cd "${TORCHTITAN:?set TORCHTITAN to the folder of a torchtitan checkout}"
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" --rdzv-id "${RUN_ID:-tuner}" \
    -m torchtitan.train \
    --module tuner_run --config run
