#!/bin/bash
# One process: looks up its rank and its GPU, by Slurm's count of processes through all parts of the job.
set -euo pipefail
cd "$(dirname "$0")"
mapfile -t ranks <"${NTP_RANKS:-ranks.txt}"
read -r RANK CUDA_VISIBLE_DEVICES _ <<<"${ranks[SLURM_PROCID]}"
export RANK CUDA_VISIBLE_DEVICES LOCAL_RANK=0 WORLD_SIZE="${NTP_WORLD:-28}"
# One queue, so that reductions keep the order in which resharding launches them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# shellcheck source=/dev/null
source ./arguments.sh
[ "${NTP_PARITY:-}" = 1 ] || ARGUMENTS+=("${WHOLE_RUN[@]}")
exec "${PYTHON:-python3}" pretrain_ntp.py "${PRETRAIN:?the path of pretrain_gpt.py in Megatron-LM}" "${ARGUMENTS[@]}" "$@"
