#!/usr/bin/env bash
# torchtitan 0.3, written by tuner: llama3-70b on 128 x h100-sxm-80gb.
set -euo pipefail
# framework-version: 0.3
here="$(cd "$(dirname "$0")" && pwd)"
NNODES="${NNODES:-16}"
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
    --module tuner_run --config run \
    --parallelism.data_parallel_replicate_degree 1 \
    --parallelism.data_parallel_shard_degree 4 \
    --parallelism.fsdp_reshard_after_forward never \
    --parallelism.tensor_parallel_degree 8 \
    --parallelism.pipeline_parallel_degree 4 \
    --parallelism.context_parallel_degree 1 \
    --parallelism.expert_parallel_degree 1 \
    --parallelism.pipeline_parallel_schedule Interleaved1F1B \
    --parallelism.pipeline_parallel_first_stage_less_layers 1 \
    --parallelism.pipeline_parallel_last_stage_less_layers 1 \
    --parallelism.pipeline_parallel_layers_per_stage 11 \
    --training.no_enable_cpu_offload \
    --training.dtype float32 \
    --training.mixed_precision_param bfloat16 \
    --compile.enable \
    --training.local_batch_size 64 \
    --training.global_batch_size 256 \
    --training.seq_len 8192 \
    --parallelism.pipeline_parallel_microbatch_size 1 \
    --parallelism.enable_sequence_parallel \
    --training.disable_cuda_graphs \
    --compile.enable_async_tensor_parallel \
    --training.steps 30 \
    --metrics.log_freq 1 \
    activation-checkpoint:none
