"""Written by tuner for NeMo 2.0: a few steps on made-up data. Start it with launch.sh."""

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

NUM_NODES = 16
GPUS_PER_NODE = 8


def main():
    config = llm.GPTConfig(
        activation_func=F.silu,
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=28672,
        num_attention_heads=64,
        kv_channels=128,
        vocab_size=128256,
        seq_length=8192,
        position_embedding_type='rope',
        normalization='RMSNorm',
        gated_linear_unit=True,
        share_embeddings_and_output_weights=False,
        add_bias_linear=False,
        qk_layernorm=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_query_groups=8,
        cp_comm_type='all_gather',
        enable_cuda_graph=True,
    )
    strategy = nl.MegatronStrategy(
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        sequence_parallel=True,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
        use_te_rng_tracker=True,
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
        tokenizer=get_nmt_tokenizer(library="null", model_name="NullTokenizer", vocab_size=128256),
        micro_batch_size=1,
        global_batch_size=256,
        seq_length=8192,
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
