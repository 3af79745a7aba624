"""llama3-8b on 16 GPUs, for torchtitan main: --module tuner_run --config run."""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.llama3 import model_registry
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def run() -> Trainer.Config:
    config = llama3_debugmodel()  # for its data, tokenizer and optimizer; all that costs time is set below
    converters = []
    config.model_spec = model_registry("8B", converters=converters)
    vocab = decoder_vocab_size(config.model_spec)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab))
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 16
    config.parallelism.fsdp_reshard_after_forward = 'always'
    config.parallelism.tensor_parallel_degree = 1
    config.parallelism.pipeline_parallel_degree = 1
    config.parallelism.context_parallel_degree = 1
    config.parallelism.expert_parallel_degree = 1
    config.training.enable_cpu_offload = False
    config.training.dtype = 'float32'
    config.training.mixed_precision_param = 'bfloat16'
    config.compile.enable = False
    config.training.num_tokens_per_microbatch_per_dp_rank = 8192
    config.training.num_tokens_per_train_step = 524288
    config.training.max_context_length = 8192
    config.training.disable_cuda_graphs = True
    config.compile.enable_async_tensor_parallel = False
    config.training.steps = 30
    config.metrics.log_freq = 1
    config.activation_checkpoint = FullAC.Config()
    return config
