#!/bin/bash
# Two layers, three steps, fp32, made-up data, the same weights cut for each degree: at tp 8 and 6, then
# at 6 throughout. Losses and gradient norms must agree. The first loss says whether the model is the same, all else is
# about gradients.
set -euo pipefail
cd "$(dirname "$0")"
: "${PRETRAIN:?the path of pretrain_gpt.py in Megatron-LM}"
export NTP_PARITY=1 PRETRAIN
few=(--num-layers 2 --train-iters 3 --tokenizer-type NullTokenizer --vocab-size 51200 --attention-dropout 0.0 --hidden-dropout 0.0 --lr 1e-4 --log-interval 1 --eval-iters 0 --mock-data --use-cpu-initialization)
sbatch --wait --output=parity.ntp.log launch.sbatch "${few[@]}"
uniform=(--tensor-model-parallel-size 6 --make-vocab-size-divisible-by 512)  # the same padded vocabulary
sbatch --wait --output=parity.uniform.log uniform.sbatch "${few[@]}" "${uniform[@]}"
figures() { grep -oE '(lm loss|grad norm): [0-9.E+-]+' "$1"; }
paste -d ' ' <(figures parity.ntp.log) <(figures parity.uniform.log) | awk '
  { mine = $3; other = $6; gap = mine > other ? mine - other : other - mine
    bad = !(NF == 6 && gap <= 1e-4 * other + ($1 == "grad") * 1e-3)  # norms are printed with three decimals
    print $1, $2, mine, other, bad ? "DIFFERS" : "agrees"; wrong += bad }
  END { if (NR != 6) { print "a run did not end: see parity.*.log"; exit 1 } exit wrong > 0 }'
