"""Written by tuner for NeMo 2.0: a few steps on made-up data. Start it with launch.sh."""

import torch
import torch.nn.functional as F
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from nemo import lightning as nl
from nemo.collections import llm
from nemo.collections.nlp.modules.common.tokenizer_utils import get_nmt_tokenizer
from nemo.lightning.pytorch.callbacks.megatron_comm_overlap import MegatronCommOverlapCallback

NUM_NODES = 128
GPUS_PER_NODE = 8


def main():
    config = llm.GPTConfig(
        activation_func=F.gelu,
        num_layers=96,
        hidden_size=12288,
        ffn_hidden_size=49152,
        num_attention_heads=96,
        kv_channels=128,
        vocab_size=51200,
        seq_length=2048,
        position_embedding_type='learned_absolute',
        normalization='LayerNorm',
        gated_linear_unit=False,
        share_embeddings_and_output_weights=True,
        add_bias_linear=True,
        qk_layernorm=False,
        hidden_dropout=0.1,
        attention_dropout=0.1,
        recompute_granularity='full',
        recompute_method='uniform',
        recompute_num_layers=1,
    )
    strategy = nl.MegatronStrategy(
        pipeline_dtype=torch.bfloat16,
        tensor_model_parallel_size=8,
        pipeline_model_parallel_size=8,
        context_parallel_size=1,
        sequence_parallel=True,
        account_for_embedding_in_pipeline_split=False,
        account_for_loss_in_pipeline_split=False,
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
        tokenizer=get_nmt_tokenizer(library="null", model_name="NullTokenizer", vocab_size=51200),
        micro_batch_size=1,
        global_batch_size=1536,
        seq_length=2048,
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
