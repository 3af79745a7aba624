"""The files of a nonuniform tensor-parallel job on Megatron-LM's dev branch: experimental, their README says what is wrong there."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

from tuner.arrays import ceil_div
from tuner.errors import Problem, SpecError
from tuner.launch.launchers.launcher import Written
from tuner.launch.megatron_ntp import SOURCE, refusals, vocab_multiple, wrong_gradients

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.megatron_ntp import Layout
    from tuner.plan import Plan

CONFIG, SETUP, ARGUMENTS, BATCH, TASK, READ_ME = "ntp.json", "ntp_setup.py", "arguments.sh", "launch.sbatch", "task.sh", "README.md"


def write(job: Job, plan: Plan, layout: Layout) -> Written:
    """Return the files of the export. Raises SpecError listing every rule of that implementation that the job breaks."""
    problems = refusals(job, plan, layout.degree)
    groups_a_node = max(job.cluster.gpus_per_node // layout.tp, 1)
    if layout.reduced * layout.cp % groups_a_node:
        rule = f"{layout.reduced * layout.cp} reduced groups do not fill nodes of {groups_a_node}, whose tasks are counted by node"
        problems.append(Problem(where="megatron-lm-ntp", path="ntp-node", value="", rule=rule, hint=f"a multiple of {groups_a_node}"))
    if layout.reduced >= layout.replicas:
        problems.append(
            Problem(
                where="megatron-lm-ntp",
                path="ntp-reduced",
                value="",
                rule="every replica lost GPUs: none is healthy",
                hint="a smaller tp for all",
            )
        )
    if problems:
        raise SpecError(problems)
    files = {
        CONFIG: json.dumps(_config(layout), indent=2) + "\n",
        SETUP: _SETUP,
        ARGUMENTS: _arguments(job, plan, layout),
        TASK: _task(job, layout),
        BATCH: _batch(job, layout, groups_a_node),
        READ_ME: _read_me(job, plan, layout),
    }
    return Written(
        files=files, programs=(TASK, BATCH), start=f"sbatch {BATCH}", notes=("experimental: run the parity check of README.md first",)
    )


def _config(layout: Layout) -> dict[str, object]:
    """Return ntp.json: the fields of NonuniformTPConfig, and the groups by rank."""
    idle = {f"{replica},{slice_},0": list(slots) for replica, slots in layout.idle.items() for slice_ in range(layout.cp)}
    return {
        "tp_base": layout.tp,
        "tp_spares": layout.spares,
        "num_reduced_tp_dp_ranks": layout.reduced,
        "non_active_ranks_per_dp": idle,
        "context_parallel": layout.cp,
        "replicas": layout.replicas,
        "groups": layout.groups(),
    }


def _arguments(job: Job, plan: Plan, layout: Layout) -> str:
    """Return arguments.sh: what parallelism and batch are; the architecture's and data's flags are the person's own."""
    flags = {
        "--tensor-model-parallel-size": str(layout.tp),
        "--pipeline-model-parallel-size": "1",
        "--context-parallel-size": str(layout.cp),
        "--micro-batch-size": str(int(plan.micro_batch)),
        "--global-batch-size": str(job.global_batch),
        "--seq-length": str(job.seq_len),
        "--num-layers": str(job.model.layers),
        "--hidden-size": str(job.model.hidden),
        "--ffn-hidden-size": str(job.model.ffn_hidden),
        "--num-attention-heads": str(job.model.heads),
        "--make-vocab-size-divisible-by": str(vocab_multiple(job, layout.tp, layout.degree)),  # so that both degrees divide it
    }
    if job.model.kv_heads != job.model.heads:
        flags |= {"--group-query-attention": "", "--num-query-groups": str(job.model.kv_heads)}
    flags |= {"--sequence-parallel": ""} if plan.sequence_parallel else {}
    flags |= {"--bf16": ""} if job.precision != "fp32" else {}
    flags |= {"--overlap-grad-reduce": "", "--ddp-bucket-size": "100000000"}  # the path that hides resharding; few large buckets
    lines = [f"  {shlex.quote(name)}{' ' + shlex.quote(value) if value else ''}" for name, value in flags.items()]
    head = [
        f"# {job.model.name} (of these flags; add tokenizer and data). tp is that of healthy replicas.",
        "# shellcheck shell=bash disable=SC2034",
    ]
    return "\n".join([*head, "ARGUMENTS=(", *lines, ")", ""])


def _task(job: Job, layout: Layout) -> str:
    """Return task.sh: one process, with its rank over both parts of the job and its GPU."""
    per_node = max(job.cluster.gpus_per_node // layout.tp, 1)
    table = "\n".join(f"  {shlex.quote(' '.join(map(str, gpus)))}" for gpus in _gpus_of_nodes(layout, per_node))
    world = layout.cp * (layout.reduced * layout.degree + (layout.replicas - layout.reduced) * layout.tp)
    return f"""#!/bin/bash
# One rank. Part 0 of the job runs the reduced replicas, part 1 the healthy ones.
set -euo pipefail
cd "$(dirname "$0")"
PYTHONPATH="$PWD${{PYTHONPATH:+:$PYTHONPATH}}"
export PYTHONPATH
USED=(  # GPUs of each node of part 0
{table}
)
if [ "$SLURM_NODEID" -lt "${{#USED[@]}}" ]; then  # nodes and processes are counted through both parts
  read -r -a gpus <<<"${{USED[$SLURM_NODEID]}}"
  CUDA_VISIBLE_DEVICES=${{gpus[$SLURM_LOCALID]}}
else
  CUDA_VISIBLE_DEVICES=$SLURM_LOCALID
fi
export WORLD_SIZE={world} RANK=$SLURM_PROCID LOCAL_RANK=0 CUDA_VISIBLE_DEVICES
# One queue, so that reductions keep the order in which resharding launches them.
export CUDA_DEVICE_MAX_CONNECTIONS=1
# shellcheck source=/dev/null
source ./{ARGUMENTS}
exec python3 "${{PRETRAIN:?your copy of pretrain_gpt.py, which calls ntp_setup.py}}" "${{ARGUMENTS[@]}}" "$@"
"""


def _gpus_of_nodes(layout: Layout, per_node: int) -> list[list[int]]:
    """Return the GPUs in use on each node of part 0, which holds `per_node` groups."""
    groups = [layout.slots(replica) for replica in range(layout.reduced) for _ in range(layout.cp)]
    nodes = [groups[start : start + per_node] for start in range(0, len(groups), per_node)]
    return [[place * layout.tp + slot for place, slots in enumerate(node) for slot in slots] for node in nodes]


def _batch(job: Job, layout: Layout, per_node: int) -> str:
    """Return launch.sbatch: a heterogeneous job, as the parts have different counts of processes a node."""
    node = job.cluster.gpus_per_node
    parts = [
        (layout.reduced * layout.cp // per_node, per_node * layout.degree),
        (ceil_div((layout.replicas - layout.reduced) * layout.cp, per_node), per_node * layout.tp),
    ]
    (few, few_tasks), (many, many_tasks) = parts
    return f"""#!/bin/bash
#SBATCH --job-name=ntp
#SBATCH --nodes={few}
#SBATCH --ntasks-per-node={few_tasks}
#SBATCH --gpus-per-node={node}
#SBATCH hetjob
#SBATCH --nodes={many}
#SBATCH --ntasks-per-node={many_tasks}
#SBATCH --gpus-per-node={node}
# Part 0: the nodes with failed GPUs, {layout.degree} of {layout.tp} in each group; name them with --nodelist. Part 1: whole nodes.
set -euo pipefail
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0" | head -n 1)
export MASTER_ADDR MASTER_PORT="${{MASTER_PORT:-29500}}"
srun --het-group=0,1 --kill-on-bad-exit=1 ./{TASK} "$@"
"""


_SETUP = '''\
"""Nonuniform tensor parallelism of Megatron-LM's dev branch, from ntp.json: call these from a copy of pretrain_gpt.py. EXPERIMENTAL.

1. start() in place of torch.distributed.init_process_group and initialize_model_parallel;
2. map_parameters(model, padded_vocab) when the model is built (with the tensor-parallel size of this rank's group, see degree());
3. wrap(...) in place of DistributedDataParallel.
"""

import json
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.distributed.nonuniform_tp import NonuniformTPConfig, NonuniformTPDistributedDataParallel, ntp_init, ntp_map

TOLD = json.loads((Path(__file__).parent / "ntp.json").read_text())
FIELDS = ("tp_base", "tp_spares", "num_reduced_tp_dp_ranks")
IDLE = {tuple(map(int, key.split(","))): slots for key, slots in TOLD["non_active_ranks_per_dp"].items()}
CONFIG = NonuniformTPConfig(**{name: TOLD[name] for name in FIELDS}, non_active_ranks_per_dp=IDLE)


def start():
    """Make the process groups by hand: ranks are packed, so neither initialize_model_parallel nor the helper of nonuniform_tp fits."""
    torch.distributed.init_process_group("nccl")
    rank = torch.distributed.get_rank()
    for name, every in TOLD["groups"].items():
        for ranks in every:  # every rank makes every group, in this order
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                _take(name, group, ranks)
    alone = None
    for other in range(torch.distributed.get_world_size()):
        group = torch.distributed.new_group([other])
        alone = group if other == rank else alone
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = alone
    parallel_state._PIPELINE_GLOBAL_RANKS = [rank]


def _take(name, group, ranks):
    if name == "tp":
        parallel_state._TENSOR_MODEL_PARALLEL_GROUP = parallel_state._MODEL_PARALLEL_GROUP = group
        parallel_state._TENSOR_MODEL_PARALLEL_GLOBAL_RANKS = parallel_state._MODEL_PARALLEL_GLOBAL_RANKS = ranks
    elif name == "dp":
        parallel_state._DATA_PARALLEL_GROUP = parallel_state._DATA_PARALLEL_GROUP_WITH_CP = group
        parallel_state._DATA_PARALLEL_GLOBAL_RANKS = ranks
    elif name == "cp":
        parallel_state._CONTEXT_PARALLEL_GROUP, parallel_state._CONTEXT_PARALLEL_GLOBAL_RANKS = group, ranks
    else:
        parallel_state._TENSOR_AND_CONTEXT_PARALLEL_GROUP = group


def degree():
    """Return the tensor-parallel size of this rank's replica: what its TransformerConfig must say."""
    return parallel_state.get_tensor_model_parallel_world_size()


def map_parameters(model, padded_vocab):
    """Attach the mapping between both degrees to the parameters of a GPTModel."""
    for layer in model.decoder.layers:
        ntp_init(layer, CONFIG)
    for module in (getattr(model.embedding, "word_embeddings", None), getattr(model, "output_layer", None)):
        if module is not None:
            ntp_map(module, CONFIG, padded_vocab)


def wrap(config, ddp_config, model, pg_collection=None):
    """Return the model in the data-parallel wrapper that reshards gradients."""
    return NonuniformTPDistributedDataParallel(
        config=config, ddp_config=ddp_config, module=model, pg_collection=pg_collection, ntp_config=CONFIG
    )
'''


def _read_me(job: Job, plan: Plan, layout: Layout) -> str:
    idle = "\n".join(f"| {replica} | {', '.join(map(str, slots))} |" for replica, slots in layout.idle.items())
    wrong = "\n".join(f"- {text}" for text in wrong_gradients(job, plan))
    return f"""# {job.model.name} at tensor-parallel degrees {layout.tp} and {layout.degree} on Megatron-LM's dev branch

EXPERIMENTAL. {layout.reduced} of {layout.replicas} replicas run at {layout.degree} of {layout.tp} GPUs.
Source of what is said here: {SOURCE}.

| replica | slots not used |
|---|---|
{idle}

`{CONFIG}` has NonuniformTPConfig and every process group by rank; `{SETUP}` makes them and wraps the model; `{BATCH}` is a Slurm
heterogeneous job, as replicas have different counts of processes; `{ARGUMENTS}` has the parallelism, the batch and the sizes of the
model: add tokenizer and data. There is no command-line flag for this: PRETRAIN names your copy of pretrain_gpt.py, which calls
`{SETUP}` at the three places that it names.

    PRETRAIN=/path/to/pretrain_ntp.py sbatch {BATCH}

## Known to be wrong there

{wrong}

No upstream test compares gradients. Its one end-to-end test (6 GPUs, TP2 and TP4, one layer) looks at whether the loss is finite.

## Before anything else: parity

Train a model of one or two layers in fp32 for three steps, once with these files and once with all replicas at tp {layout.degree} (no
failures, same seed and global batch, dropout off). Losses must agree to 1e-5 and the norms of every parameter's gradient to 1e-4. They will
not, until the defects above are mended. `tuner profile --ntp` runs the same layouts with the tuner's own engine, which passes that test.
"""
