#!/usr/bin/env bash
# nanotron main, written by tuner: llama3-8b on 64 x h100-sxm-80gb.
set -euo pipefail
# framework-version: main
here="$(cd "$(dirname "$0")" && pwd)"
NNODES="${NNODES:-8}"
NPROC_PER_NODE="${NPROC_PER_NODE:-8}"
# fragmentation does not turn a plan that fits into one that does not
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
cd "${NANOTRON:?set NANOTRON to the folder of a nanotron checkout}"
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" \
    --rdzv-backend c10d --rdzv-endpoint "${MASTER_ADDR:-localhost}:${MASTER_PORT:-29500}" --rdzv-id "${RUN_ID:-tuner}" \
    run_train.py \
    --config-file "$here/train.yaml"
