"""mixtral-8x7b on 64 GPUs, for torchtitan main: --module tuner_run --config run."""

from functools import partial

import torch.nn as nn
from torchtitan.components.optimizer import register_moe_load_balancing_hook
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.common import CosSinRoPE, Embedding, Linear
from torchtitan.models.common.config_utils import (
    get_attention_config,
    make_ffn_config,
    make_gqa_config,
    make_moe_config,
    make_routed_experts_config,
    make_router_config,
)
from torchtitan.models.common.nn_modules import RMSNorm
from torchtitan.models.qwen3 import Qwen3Model, parallelize_qwen3
from torchtitan.models.qwen3.model import Qwen3TransformerBlock
from torchtitan.protocols.model_spec import ModelSpec

from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.trainer import Trainer

ARCHITECTURE = {'name': 'mixtral-8x7b', 'layers': 32, 'hidden': 4096, 'ffn_hidden': 14336, 'heads': 32, 'kv_heads': 8, 'head_dim': 128, 'vocab': 32000, 'moe': {'experts': 8, 'top_k': 2, 'expert_ffn_hidden': 14336}}
SEQ_LEN = 4096
WEIGHTS = {"weight": partial(nn.init.normal_, std=0.02), "bias": nn.init.zeros_}
ONES = {"weight": nn.init.ones_}


def norm(width):
    return RMSNorm.Config(normalized_shape=width, param_init=ONES)


def mlp_or_experts():
    moe = ARCHITECTURE.get("moe")
    dim = ARCHITECTURE["hidden"]
    if moe is None:
        mlp = make_ffn_config(dim=dim, hidden_dim=ARCHITECTURE["ffn_hidden"], w1_param_init=WEIGHTS, w2w3_param_init=WEIGHTS)
        return {"feed_forward": mlp}
    sizes = {"num_experts": moe["experts"], "top_k": moe["top_k"]}
    router = make_router_config(dim=dim, gate_param_init=WEIGHTS, score_func="softmax", route_norm=True, **sizes)
    init = {name: WEIGHTS["weight"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")}
    experts = make_routed_experts_config(
        dim=dim, hidden_dim=moe["expert_ffn_hidden"], param_init=init, comm_backend="standard", **sizes
    )
    return {"moe": make_moe_config(num_experts=moe["experts"], router=router, routed_experts=experts)}


def layer():
    head_dim = ARCHITECTURE["head_dim"]
    attention = make_gqa_config(
        dim=ARCHITECTURE["hidden"],
        n_heads=ARCHITECTURE["heads"],
        n_kv_heads=ARCHITECTURE["kv_heads"],
        head_dim=head_dim,
        wqkv_param_init=WEIGHTS,
        wo_param_init=WEIGHTS,
        inner_attention=get_attention_config("flex"),
        fuse_qkv=True,
        rope=CosSinRoPE.Config(dim=head_dim, max_seq_len=SEQ_LEN, theta=500000.0),
        qk_norm=norm(head_dim) if ARCHITECTURE.get("qk_norm") else None,
    )
    dim = ARCHITECTURE["hidden"]
    return Qwen3TransformerBlock.Config(attention_norm=norm(dim), ffn_norm=norm(dim), attention=attention, **mlp_or_experts())


def own_spec(converters):
    dim, vocab = ARCHITECTURE["hidden"], ARCHITECTURE["vocab"]
    model = Qwen3Model.Config(
        vocab_size=vocab,
        dim=dim,
        norm=norm(dim),
        enable_weight_tying=ARCHITECTURE.get("tied_embeddings", False),
        tok_embeddings=Embedding.Config(num_embeddings=vocab, embedding_dim=dim, param_init=WEIGHTS),
        lm_head=Linear.Config(in_features=dim, out_features=vocab, param_init=WEIGHTS),
        layers=[layer() for _ in range(ARCHITECTURE["layers"])],
    )
    for converter in converters:
        model = converter.build().convert(model)
    return ModelSpec(
        name="tuner",
        flavor="run",
        model=model,
        parallelize_fn=parallelize_qwen3,
        pipelining_fn=pipeline_llm,
        post_optimizer_build_fn=register_moe_load_balancing_hook if "moe" in ARCHITECTURE else None,
        state_dict_adapter=None,
    )


def run() -> Trainer.Config:
    config = llama3_debugmodel()  # for its data, tokenizer and optimizer; all that costs time is set below
    converters = []
    config.model_spec = own_spec(converters)
    vocab = decoder_vocab_size(config.model_spec)
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=vocab))
    config.parallelism.data_parallel_replicate_degree = 1
    config.parallelism.data_parallel_shard_degree = 32
    config.parallelism.fsdp_reshard_after_forward = 'always'
    config.parallelism.tensor_parallel_degree = 1
    config.parallelism.pipeline_parallel_degree = 1
    config.parallelism.context_parallel_degree = 2
    config.parallelism.expert_parallel_degree = 8
    config.training.enable_cpu_offload = False
    config.training.dtype = 'float32'
    config.training.mixed_precision_param = 'bfloat16'
    config.compile.enable = False
    config.training.num_tokens_per_microbatch_per_dp_rank = 4096
    config.training.num_tokens_per_train_step = 1048576
    config.training.max_context_length = 4096
    config.training.disable_cuda_graphs = True
    config.compile.enable_async_tensor_parallel = False
    config.training.steps = 30
    config.metrics.log_freq = 1
    config.activation_checkpoint = FullAC.Config()
    return config
