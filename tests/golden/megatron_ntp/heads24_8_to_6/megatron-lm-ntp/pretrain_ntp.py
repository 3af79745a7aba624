"""EXPERIMENTAL: pretrain_gpt.py of Megatron-LM's dev branch with replicas of two tensor-parallel degrees, as ntp.json has them.

    python3 pretrain_ntp.py PATH/TO/pretrain_gpt.py ITS ARGUMENTS

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment. Nothing of Megatron-LM is changed on disk: names of it are replaced
before pretrain_gpt.py runs, and this program stops where one is not there. It was written from the source and has never trained anything:
run the parity check of README.md first.
"""

import json
import os
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TOLD = json.loads((HERE / os.environ.get("NTP_LAYOUT", "ntp.json")).read_text())

# What Megatron keeps of each kind of group ("alone": this rank and nothing else; there are no experts and no pipeline).
GROUPS = {
    "tp": [
        "TENSOR_MODEL_PARALLEL_GROUP",
        "MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_PARALLEL_GROUP",
        "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",
        "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP",
    ],
    "dp": ["DATA_PARALLEL_GROUP"],
    "dp_cp": [
        "DATA_PARALLEL_GROUP_WITH_CP",
        "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
        "EXPERT_DATA_PARALLEL_GROUP",
        "INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
        "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",
    ],
    "cp": ["CONTEXT_PARALLEL_GROUP"],
    "tp_cp": ["TENSOR_AND_CONTEXT_PARALLEL_GROUP"],
    "alone": ["PIPELINE_MODEL_PARALLEL_GROUP", "EMBEDDING_GROUP", "POSITION_EMBEDDING_GROUP", "EXPERT_MODEL_PARALLEL_GROUP"],
}
RANKS = {
    "tp": ["TENSOR_MODEL_PARALLEL_GLOBAL_RANKS", "MODEL_PARALLEL_GLOBAL_RANKS"],
    "dp": ["DATA_PARALLEL_GLOBAL_RANKS"],
    "dp_cp": ["DATA_PARALLEL_GLOBAL_RANKS_WITH_CP"],
    "cp": ["CONTEXT_PARALLEL_GLOBAL_RANKS"],
    "alone": ["PIPELINE_GLOBAL_RANKS", "EMBEDDING_GLOBAL_RANKS", "POSITION_EMBEDDING_GLOBAL_RANKS", "EXPERT_MODEL_PARALLEL_RANKS"],
}


def stop(why):
    """End this process with a message."""
    raise SystemExit(f"pretrain_ntp.py: {why}")


def place(module, name, value):
    """Replace a name of Megatron's, which must be there."""
    if not hasattr(module, name):
        stop(f"{module.__name__}.{name} is not there: this Megatron-LM is not the one that this was written for")
    setattr(module, name, value)


def config():
    """Return NonuniformTPConfig (the second of the six calls)."""
    from megatron.core.distributed.nonuniform_tp import NonuniformTPConfig

    idle = {tuple(map(int, key.split(","))): slots for key, slots in TOLD["non_active_ranks_per_dp"].items()}
    names = ("tp_base", "tp_spares", "num_reduced_tp_dp_ranks")
    return NonuniformTPConfig(**{name: TOLD[name] for name in names}, non_active_ranks_per_dp=idle or None)


def make_groups():
    """Make every process group by rank (the first and the third call: initialize_model_parallel takes all replicas for equal, and
    initialize_nonuniform_tp_process_groups takes ranks for those of whole replicas, and leaves data-parallel groups by slot).
    """
    import torch
    from megatron.core import parallel_state

    rank = torch.distributed.get_rank()
    if torch.distributed.get_world_size() != TOLD["world"]:
        stop(f"WORLD_SIZE is {torch.distributed.get_world_size()}, and the layout has {TOLD['world']} ranks")
    mine = {}
    for kind, every in json.loads((HERE / TOLD["groups"]).read_text()).items():
        for ranks in every:  # every rank makes every group, in this order
            group = torch.distributed.new_group(ranks)
            if rank in ranks:
                mine[kind] = group, ranks
    mine["alone"] = torch.distributed.new_group([rank], use_local_synchronization=True), [rank]
    for kind, (group, ranks) in mine.items():
        for name in GROUPS[kind]:
            place(parallel_state, "_" + name, group)
        for name in RANKS.get(kind, []):
            place(parallel_state, "_" + name, ranks)
    place(parallel_state, "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", [mine["cp"][0]])
    for name in ("_TENSOR_AND_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"):
        place(parallel_state, name, torch.distributed.group.WORLD)
    # A healthy replica's extra ranks share a group with none of the reduced ones: their own number in it would make them reduced, too.
    parallel_state.set_data_parallel_rank(replica(rank))
    parallel_state._set_global_memory_buffer()
    return len(mine["tp"][1])


def replica(rank):
    """Return the replica of a rank: reduced ones come first."""
    reduced = TOLD["num_reduced_tp_dp_ranks"] if TOLD["tp_spares"] else 0
    small, large = ((TOLD["tp_base"] - TOLD["tp_spares"]) * TOLD["context_parallel"], TOLD["tp_base"] * TOLD["context_parallel"])
    return rank // small if rank < reduced * small else reduced + (rank - reduced * small) // large


def start(*_arguments, **_named):
    """Stand in for initialize_model_parallel; from here on this rank's arguments say the degree of its replica (the fourth call builds
    the model with it).
    """
    from megatron.training.global_vars import get_args

    args = get_args()
    args.tensor_model_parallel_size = make_groups()
    for each in (TOLD["tp_base"], TOLD["tp_base"] - TOLD["tp_spares"]):
        if args.padded_vocab_size % each:
            stop(f"padded_vocab_size = {args.padded_vocab_size} does not divide by {each}: raise --make-vocab-size-divisible-by")


def map_parameters(model, ntp_config, padded_vocab):
    """Attach the mapping between both degrees to a model's parameters (the fifth call)."""
    from megatron.core.distributed.nonuniform_tp import ntp_init, ntp_map

    for name, module in model.named_modules():
        if type(module).__name__ == "TransformerLayer":
            ntp_init(module, ntp_config)
        elif name.rpartition(".")[2] in ("word_embeddings", "output_layer"):
            ntp_map(module, ntp_config, padded_vocab)


def wrapper():
    """Return the data-parallel wrapper that reshards gradients (the sixth call)."""
    from megatron.core.distributed import nonuniform_tp
    from megatron.training.global_vars import get_args

    mend(nonuniform_tp.NonuniformTPParamAndGradBuffer)
    ntp_config = config()

    class Wrapped(nonuniform_tp.NonuniformTPDistributedDataParallel):
        def __init__(self, config, ddp_config, module, *arguments, **named):
            args = get_args()
            if config.tensor_model_parallel_size != args.tensor_model_parallel_size:
                stop("the model was configured before the process groups were made: its tensor-parallel size is not this replica's")
            map_parameters(module, ntp_config, args.padded_vocab_size)
            super().__init__(config, ddp_config, module, *arguments, ntp_config=ntp_config, **named)

    return Wrapped


def mend(buffer):
    """Let the buffer drop the param_layout that DDP gives it: it gives itself one, and two are a TypeError."""
    made = buffer.__init__

    def init(self, *arguments, param_layout=None, **named):
        made(self, *arguments, **named)

    buffer.__init__ = init


def whole(validate):
    """Return Megatron's check of the arguments as it holds for whole replicas: it counts them as world / (tp x cp)."""

    def check(args, *arguments, **named):
        running, args.world_size = args.world_size, TOLD["replicas"] * TOLD["tp_base"] * TOLD["context_parallel"]
        try:
            return validate(args, *arguments, **named)
        finally:
            args.world_size = running

    return check


def install():
    """Replace what pretrain_gpt.py will use."""
    from importlib import import_module

    from megatron.core import parallel_state

    arguments, initialize, training = (import_module(f"megatron.training.{name}") for name in ("arguments", "initialize", "training"))
    check = whole(arguments.validate_args)
    place(arguments, "validate_args", check)
    if hasattr(initialize, "validate_args"):
        place(initialize, "validate_args", check)
    place(parallel_state, "initialize_model_parallel", start)
    # The last rank is an extra one, which averages losses with extra ranks alone: rank 0 has one of every replica in its group.
    place(training, "print_rank_last", training.print_rank_0)
    wrapped = wrapper()
    place(training, "DDP", wrapped)
    try:
        builder = import_module("megatron.training.models.dist_utils")
    except ModuleNotFoundError:  # models are built in training.py
        return
    place(builder, "DistributedDataParallel", wrapped)


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_file():
        stop("name pretrain_gpt.py, then its arguments")
    del sys.argv[0]
    sys.path.insert(0, str(Path(sys.argv[0]).resolve().parent))
    install()
    runpy.run_path(sys.argv[0], run_name="__main__")
