"""Written by tuner for NeMo 2.0: a few steps on made-up data. Start it with launch.sh."""

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

NUM_NODES = 8
GPUS_PER_NODE = 8


def main():
    config = llm.GPTConfig(
        activation_func=F.silu,
        num_layers=32,
        hidden_size=4096,
        ffn_hidden_size=14336,
        num_attention_heads=32,
        kv_channels=128,
        vocab_size=32000,
        seq_length=4096,
        position_embedding_type='rope',
        normalization='RMSNorm',
        gated_linear_unit=True,
        share_embeddings_and_output_weights=False,
        add_bias_linear=False,
        qk_layernorm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_query_groups=8,
        num_moe_experts=8,
        moe_router_topk=2,
        moe_ffn_hidden_size=14336,
        moe_grouped_gemm=True,
        moe_token_dispatcher_type='alltoall',
        recompute_granularity='selective',
        recompute_modules=['layernorm', 'moe_act'],
    )
    strategy = nl.MegatronStrategy(
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        context_parallel_size=1,
        sequence_parallel=True,
        expert_model_parallel_size=8,
        expert_tensor_parallel_size=1,
        virtual_pipeline_model_parallel_size=3,
        pipeline_model_parallel_layout='Et|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|t*3|tL',
        ddp=DistributedDataParallelConfig(
            overlap_grad_reduce=True,
            use_distributed_optimizer=True,
            overlap_param_gather=True,
        ),
    )
    overlap = MegatronCommOverlapCallback(
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        tp_comm_overlap=True,
    )
    data = llm.MockDataModule(
        tokenizer=get_nmt_tokenizer(library="null", model_name="NullTokenizer", vocab_size=32000),
        micro_batch_size=1,
        global_batch_size=256,
        seq_length=4096,
    )
    optimizer = OptimizerConfig(
        optimizer="adam",
        lr=1e-5,
        bf16=True,
        use_distributed_optimizer=True,
    )
    trainer = nl.Trainer(
        accelerator="gpu",
        devices=GPUS_PER_NODE,
        num_nodes=NUM_NODES,
        max_steps=50,
        limit_val_batches=0,
        log_every_n_steps=1,
        use_distributed_sampler=False,
        strategy=strategy,
        plugins=nl.MegatronMixedPrecision(
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            autocast_enabled=False,
            grad_reduce_in_fp32=False,
            precision='bf16-mixed',
            fp8='hybrid',
            fp8_recipe='tensorwise',
        ),
        callbacks=[overlap],
    )
    llm.pretrain(
        model=llm.GPTModel(config, tokenizer=data.tokenizer),
        data=data,
        trainer=trainer,
        log=nl.NeMoLogger(ckpt=None),
        optim=nl.MegatronOptimizerModule(config=optimizer),
    )


if __name__ == "__main__":
    main()
