"""Megatron-LM: parse_args, validate_args, the micro-batch calculator, TransformerConfig, and its groups over a pretended world."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
import types
import typing
from functools import lru_cache
from typing import Any

from lines import answer

# Shim: typing.override came with Python 3.12; megatron-core 0.19 asks for 3.12, its parser needs nothing else of it.
if not hasattr(typing, "override"):
    typing.override = lambda function: function  # type: ignore[attr-defined]

import torch

# Shim: the parser asks the GPU for its generation, and there is none. These are an H100's, on which the cases run.
torch.cuda.get_device_capability = lambda *a: (9, 0)  # type: ignore[assignment]
torch.cuda.get_device_properties = lambda *a: types.SimpleNamespace(  # type: ignore[assignment]
    major=9, minor=0, name="NVIDIA H100 80GB HBM3", total_memory=80 << 30, multi_processor_count=132
)
from megatron.core import num_microbatches_calculator, parallel_state  # noqa: E402
from megatron.core.transformer.transformer_block import get_num_layers_to_build  # noqa: E402
from megatron.training import arguments  # noqa: E402
from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: E402

KEPT = ("CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_GRAPH_REGISTER", "PYTORCH_CUDA_ALLOC_CONF")
# The parser declares 847 options for each argument list, which is most of the time: it is the same parser each time.
_add = lru_cache(maxsize=1)(lambda: _declared())


def _declared() -> Any:
    import argparse

    return _BUILD(argparse.ArgumentParser(description="Megatron-LM Arguments", allow_abbrev=False))


_BUILD = arguments.add_megatron_arguments
arguments.add_megatron_arguments = lambda parser: _add()


def judge(case: dict[str, Any]) -> str:
    """Raise what Megatron-LM raises for an argument list in its environment."""
    for name in KEPT:
        os.environ.pop(name, None)
    os.environ |= {name: value for name, value in case["environment"].items() if name in KEPT}
    os.environ |= {"WORLD_SIZE": str(case["gpus"]), "RANK": "0", "LOCAL_RANK": "0"}
    # Shim: without Transformer Engine the fused RoPE is refused on the CPU; it has no bearing on the layout.
    sys.argv = ["pretrain_gpt.py", *case["arguments"], "--no-rope-fusion"]
    with contextlib.redirect_stdout(sys.stderr):
        args = arguments.parse_args()
        arguments.validate_args(args)
        args.padded_vocab_size = args.vocab_size or 1024
        calculator = num_microbatches_calculator
        calculator.unset_num_microbatches_calculator()
        calculator.init_num_microbatches_calculator(
            0, args.rampup_batch_size, args.global_batch_size, args.micro_batch_size, args.data_parallel_size, False
        )
        config = arguments.core_transformer_config_from_args(args)
        _groups(args, config)
    return ""


def _groups(args: Any, config: Any) -> None:
    """Build the process groups of rank 0 in a world whose ranks are pretended (PyTorch's own fake backend)."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.world_size)
    try:
        parallel_state.initialize_model_parallel(
            args.tensor_model_parallel_size,
            args.pipeline_model_parallel_size,
            args.virtual_pipeline_model_parallel_size,
            context_parallel_size=args.context_parallel_size,
            expert_model_parallel_size=args.expert_model_parallel_size,
            expert_tensor_parallel_size=args.expert_tensor_parallel_size,
            num_distributed_optimizer_instances=args.num_distributed_optimizer_instances,
            create_gloo_process_groups=False,
        )
        for stage in (0, config.pipeline_model_parallel_size - 1):  # how many layers the first and the last stage build
            get_num_layers_to_build(config, vp_stage=0, pp_rank=stage)
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    answer(f"megatron-core {importlib.metadata.version('megatron-core')}", judge)
