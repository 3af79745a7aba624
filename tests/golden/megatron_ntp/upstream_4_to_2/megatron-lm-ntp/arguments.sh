# shellcheck shell=bash disable=SC2034
# heads8: model, batch and parallelism. Tokenizer, data and schedule are yours: give them to launch.sbatch.
# The vocabulary is padded so that both 4 and 2 divide it.
ARGUMENTS=(
  --num-layers 1
  --hidden-size 256
  --ffn-hidden-size 1024
  --num-attention-heads 8
  --kv-channels 32
  --seq-length 16
  --max-position-embeddings 16
  --position-embedding-type none
  --normalization LayerNorm
  --untie-embeddings-and-output-weights
  --attention-dropout 0.0
  --hidden-dropout 0.0
  --micro-batch-size 1
  --global-batch-size 2
  --make-vocab-size-divisible-by 128
  --tensor-model-parallel-size 4
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --sequence-parallel
  --ddp-bucket-size 100000000
  --disable-gloo-process-groups
)
WHOLE_RUN=(--bf16)
