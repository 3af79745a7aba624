# shellcheck shell=bash disable=SC2034
# heads24: model, batch and parallelism. Tokenizer, data and schedule are yours: give them to launch.sbatch.
# The vocabulary is padded so that both 8 and 6 divide it.
ARGUMENTS=(
  --num-layers 4
  --hidden-size 1536
  --ffn-hidden-size 6144
  --num-attention-heads 24
  --kv-channels 64
  --seq-length 2048
  --max-position-embeddings 2048
  --position-embedding-type learned_absolute
  --normalization LayerNorm
  --attention-dropout 0.1
  --hidden-dropout 0.1
  --micro-batch-size 1
  --global-batch-size 16
  --make-vocab-size-divisible-by 384
  --tensor-model-parallel-size 8
  --pipeline-model-parallel-size 1
  --context-parallel-size 1
  --overlap-grad-reduce
  --ddp-bucket-size 100000000
  --disable-gloo-process-groups
)
WHOLE_RUN=(--bf16)
