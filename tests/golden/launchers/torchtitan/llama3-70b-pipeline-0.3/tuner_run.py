"""llama3-70b on 128 GPUs, for torchtitan 0.3: --module tuner_run --config run."""

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.models.llama3 import model_registry
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer


def run() -> Trainer.Config:
    config = llama3_debugmodel()  # for its data, tokenizer and optimizer; all that costs time is set below
    converters = []
    config.model_spec = model_registry("70B", converters=converters)
    vocab = decoder_vocab_size(config.model_spec)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab))
    return config
