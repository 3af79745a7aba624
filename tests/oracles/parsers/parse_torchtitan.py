"""torchtitan: ConfigManager, then Trainer's own constructor up to where it would put the model onto GPUs, then the dealing of stages.

Shims, each standing for a GPU or for minutes of building: the world's process group is PyTorch's fake one; meshes are of CPU devices; the
device cannot be set; the model and its metrics are stand-ins (the configuration of the model is torchtitan's own and is checked by it).
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from lines import answer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torchtitan import trainer
from torchtitan.config import manager
from torchtitan.distributed import parallel_dims, pipeline_parallel
from torchtitan.tools import utils

parallel_dims.device_type = "cpu"
utils.device_module = SimpleNamespace(set_device=lambda device: None, device_count=lambda: 8, current_device=lambda: 0)
utils.get_local_device = lambda: torch.device("cpu")
FOLDER = tempfile.TemporaryDirectory(prefix="oracles-")
sys.path.insert(0, FOLDER.name)


class Parallelised(BaseException):
    """Trainer got as far as wrapping the model: all that it checks of a configuration was checked."""


def judge(case: dict[str, Any]) -> str:
    """Raise what torchtitan raises for these words, beside this tuner_run.py."""
    (Path(FOLDER.name) / "tuner_run.py").write_text(case["module"])
    sys.modules.pop("tuner_run", None)
    importlib.invalidate_caches()
    sys.dont_write_bytecode = True
    config = manager.ConfigManager().parse_args(case["arguments"])
    os.environ |= {"WORLD_SIZE": str(case["gpus"]), "RANK": "0", "LOCAL_RANK": "0"}
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=case["gpus"])
    try:
        _train(config, case["gpus"])
    except Parallelised:
        return ""
    finally:
        torch.distributed.destroy_process_group()
    raise RuntimeError("Trainer did not reach the model")


def _train(config: Any, gpus: int) -> None:
    def stop(*args: Any, **more: Any) -> None:
        dims = more["parallel_dims"]
        if dims.pp > 1:
            _stages(config, dims)
        if config.parallelism.expert_parallel_degree > 1:
            dims.get_mesh("efsdp")
        raise Parallelised

    spec = config.model_spec
    object.__setattr__(config, "model_spec", dataclasses.replace(spec, pipelining_fn=stop, parallelize_fn=stop))
    stand_in = SimpleNamespace(verify_module_protocol=lambda: None)
    metrics = SimpleNamespace(color=SimpleNamespace(blue="", red="", reset=""))
    with_build(type(spec.model), lambda self: stand_in)
    type(spec.model).get_nparams_and_flops = lambda *a: (0, 0)
    object.__setattr__(config, "metrics", SimpleNamespace(build=lambda **more: metrics))
    trainer.Trainer.Config.to_dict = lambda self: {}
    trainer.Trainer.Config.maybe_log = lambda self: None
    trainer.Trainer.init_distributed = lambda self: parallel_dims.ParallelDims.from_config(self.config.parallelism, gpus)
    trainer.Trainer.__init__(object.__new__(trainer.Trainer), config)


def with_build(kind: type, build: Any) -> None:
    """Give the class of a model's configuration a build() of its own."""
    kind.build = build  # type: ignore[attr-defined]


def _stages(config: Any, dims: Any) -> None:
    """Deal the layers to stages and build the schedule, as pipeline_llm does."""
    parallelism = config.parallelism
    count, layers, first, last = pipeline_parallel._get_pipeline_metadata(dims, parallelism, config.model_spec.model)
    names = parallelism.module_fqns_per_model_part
    if names is None:
        names = pipeline_parallel._generate_llm_fqn_per_model_part(count, layers, first, last)
    if len(names) % dims.pp:
        raise ValueError(f"{len(names)} stages over {dims.pp} ranks")
    stages = [
        SimpleNamespace(
            is_first=i == 0, is_last=False, num_stages=len(names), group_size=dims.pp, group_rank=0, group=None,
            stage_index=i * dims.pp, stage_index_to_group_rank={n: n % dims.pp for n in range(len(names))}, has_backward=True,
            submod=None, device=torch.device("cpu"),
        )
        for i in range(len(names) // dims.pp)
    ]  # fmt: skip
    pipeline_parallel._build_pipeline_schedule(
        parallelism=parallelism, local_batch_size=config.training.local_batch_size, stages=stages, loss_fn=lambda *a: (None, None)
    )


if __name__ == "__main__":
    answer(f"torchtitan {importlib.metadata.version('torchtitan')}", judge)
