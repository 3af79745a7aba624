"""Megatron-LM: facts held against its own arguments.py by hand, golden scripts, and scripts of the kind that people keep."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.launch.launchers.golden import check
from tests.launch.launchers.megatron_jobs import EXPERTS, GRAPHS, asked, refused, written
from tests.launch.launchers.test_hostile_names import HOSTILE, shellcheck
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found
from tuner.launch.launchers.megatron_lm import MegatronLm
from tuner.plan_defaults import read_plan

LAUNCHER = MegatronLm()


def script(knobs: str, model: str = "llama3-8b", version: str = "", **changes: Any) -> list[str]:
    return written(LAUNCHER, knobs, model, version, **changes).files["pretrain.sh"].splitlines()


def flags(*args: str, **changes: Any) -> list[str]:
    return [line.strip() for line in script(*args, **changes) if line.startswith("    --")]


def read(arguments: str, *, head: str = "torchrun --nnodes 2 --nproc_per_node 8") -> Found:
    """Return what a line says. Its flags begin in the second line of the file."""
    return LAUNCHER.read({"run.sh": f"#!/bin/bash\n{head} pretrain_gpt.py --num-layers 8 --hidden-size 64 {arguments}\n"})


@pytest.mark.parametrize(("folder", "knobs", "model"), [("experts", EXPERTS, "mixtral-8x7b"), ("graphs", GRAPHS, "llama3-70b")])
@pytest.mark.parametrize("version", ["0.16", "0.19"])
def test_golden_files(folder: str, knobs: str, model: str, version: str) -> None:
    changes = {"precision": "fp8"} if folder == "experts" else {}
    check(f"megatron-lm/{folder}-{version}", written(LAUNCHER, knobs, model, version, **changes).files)


def test_experts_beside_interleaving_with_an_uneven_layout() -> None:
    """The layout tells the chunks, so that no flag of interleaving may stand beside it (arguments.py)."""
    found = flags(EXPERTS, "mixtral-8x7b", precision="fp8")
    chunks = "|".join(["Et", *["t*3"] * 10, "tL"])
    assert f"--pipeline-model-parallel-layout '{chunks}'" in found
    assert not [flag for flag in found if "virtual" in flag]
    assert {"--num-experts 8", "--moe-router-topk 2", "--expert-model-parallel-size 8", "--expert-tensor-parallel-size 1"} <= set(found)
    assert {"--recompute-granularity selective", "--recompute-modules moe_act layernorm"} <= {
        flag.replace("layernorm moe_act", "moe_act layernorm") for flag in found
    }
    assert {"--bf16", "--fp8-format hybrid", "--fp8-recipe tensorwise"} <= set(found)


def test_releases_spell_graphs_in_their_own_ways() -> None:
    assert {"--cuda-graph-impl local", "--cuda-graph-scope full_iteration"} <= set(flags(GRAPHS, "llama3-70b", "0.16"))
    newer = flags(GRAPHS, "llama3-70b", "0.19")
    assert "--cuda-graph-impl full_iteration" in newer and not [flag for flag in newer if "scope" in flag]
    with pytest.raises(SpecError, match=r"0\.16, 0\.19"):
        written(LAUNCHER, GRAPHS, "llama3-70b", "0.1")


def test_queues_to_the_gpu() -> None:
    """arguments.py: 1 with tensor or context parallelism before Blackwell, unset under FSDP, several for overlapped experts."""
    name = "CUDA_DEVICE_MAX_CONNECTIONS"

    def told(knobs: str, model: str = "llama3-8b") -> str:
        return next((line.split("  #")[0] for line in script(knobs, model) if name in line), "")

    assert told("tp=2,zero=1") == f"export {name}=1"
    assert told("zero=1") == ""
    assert told("zero=3") == f"unset {name}"
    assert told("ep=8,etp=1,zero=1,ep_overlap=true,recompute=none", "mixtral-8x7b") == f"export {name}=32"


def test_sharding_by_hand() -> None:
    assert {"--use-megatron-fsdp", "--data-parallel-sharding-strategy optim_grads_params", "--ckpt-format fsdp_dtensor"} <= set(
        flags("zero=3")
    )
    assert "--data-parallel-sharding-strategy optim_grads" in flags("zero=2")
    assert not [flag for flag in flags("zero=0") if "optimizer" in flag]
    assert "--num-distributed-optimizer-instances 2" in flags("zero=1,shard_group=8")


def test_recompute_by_hand() -> None:
    assert {"--recompute-method uniform", "--recompute-num-layers 1"} <= set(flags("zero=1,recompute=full"))
    assert {"--recompute-method block", "--recompute-num-layers 3"} <= set(flags("zero=1,recompute=full:3"))
    assert {"--recompute-method block", "--recompute-num-layers 2"} <= set(flags("pp=2,vpp=2,zero=1,recompute=full:4", "llama3-8b"))


def test_what_has_no_flag_is_refused_by_name() -> None:
    assert refused(LAUNCHER, "pp=2,schedule=zero_bubble,zero=1").keys() == {"schedule"}
    assert refused(LAUNCHER, "zero=0,offload=optimizer").keys() == {"offload"}
    assert refused(LAUNCHER, "zero=1", task="lora").keys() == {"task"}
    job, plan = asked(LAUNCHER, "zero=1")
    with pytest.raises(SpecError, match="alibi"):
        LAUNCHER.write(job.model_copy(update={"model": presets.model("bloom-176b")}), plan)


# Facts of examples/gpt3/train_gpt3_175b_distributed.sh: the model of the paper, fp16, a ramp of the batch, tp 8 and pp 16.
GPT3 = """\
#!/bin/bash
# GPT-3 175B
GPUS_PER_NODE=8
NUM_NODES=16
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
SAVED=$1
VOCAB=$2 #<path>/gpt2-vocab.json
DATA=$3

CLUSTER=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr localhost
)
MODEL=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # or flash
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --train-iters 500000
    --weight-decay 0.1
    --adam-beta1 0.9
    --init-method-std 0.006
    --fp16
    --lr 6.0e-5
    --lr-warmup-fraction .001
)
PARALLEL=(
\t--tensor-model-parallel-size 8
\t--pipeline-model-parallel-size 16
)
DATA_AND_LOGS=(
    --data-path $DATA
    --vocab-file $VOCAB
    --split 949,50,1
    --save $SAVED
    --eval-iters 10
    --tensorboard-dir $SAVED
)

torchrun ${CLUSTER[@]} pretrain_gpt.py \\
    ${MODEL[@]} \\
    ${TRAINING[@]} \\
    ${PARALLEL[@]} \\
    ${DATA_AND_LOGS[@]}
"""


def test_the_script_of_gpt3() -> None:
    found = LAUNCHER.read({"gpt3.sh": GPT3})
    assert (found.gpus, found.gpus_per_node) == (128, 8)
    assert found.plan == {"tp": 8, "pp": 16, "micro_batch": 1}
    ramp = {"start": 16, "increment": 16, "samples": 5859375}
    assert found.job == {"seq_len": 2048, "global_batch": 1536, "precision": "fp16", "ramp_up": ramp}
    assert not found.unknown and not found.problems
    paper = presets.model("gpt3-175b")
    told = {name: found.model[name] for name in ("layers", "hidden", "heads", "head_dim", "ffn_hidden", "kv_heads", "norm", "positions")}
    assert told == {name: getattr(paper, name) for name in told}
    assert set(found.assumed) == {"ffn_hidden", "biases", "dropout"}


def test_too_few_gpus_for_the_degrees_are_a_problem_with_its_line() -> None:
    """The public script stands as it is for one node: tp 8 x pp 16 are 128, and it launches 8."""
    (problem,) = LAUNCHER.read({"gpt3.sh": GPT3.replace("NUM_NODES=16", "NUM_NODES=1")}).problems
    line = GPT3.splitlines().index("\t--pipeline-model-parallel-size 16") + 1
    assert (problem.where, problem.path, problem.value) == (f"gpt3.sh:{line}", "--pipeline-model-parallel-size", "16")
    assert "= 128 must divide the 8 GPUs" in problem.rule


# Facts of examples/mixtral/train_mixtral_8x7b_distributed.sh as a fork of it has them: tp 2, pp 4, ep 8.
MIXTRAL = """\
#!/bin/bash
#SBATCH --nodes=8
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-"1"}
RANK_OF_NODE=${RANK:-"0"}
SAVED=${1:-"${HOME}/checkpoints/tp2pp4ep8"}
ARGS=(--nproc_per_node ${GPUS_PER_NODE} --nnodes ${NNODES} --node_rank ${RANK_OF_NODE})
MODEL=(
    --use-mcore-models
    --disable-bias-linear
    --seq-length 4096
    --max-position-embeddings 32768
    --num-layers 32
    --hidden-size 4096
    --ffn-hidden-size 14336
    --num-attention-heads 32
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --normalization RMSNorm
    --position-embedding-type rope
    --swiglu
    --untie-embeddings-and-output-weights
    --group-query-attention
    --num-query-groups 8
    --no-masked-softmax-fusion
    --rotary-base 1000000
    --vocab-size 32000
)
EXPERTS=(
    --num-experts 8
    --moe-router-topk 2
    --moe-router-load-balancing-type aux_loss
    --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm
    --moe-token-dispatcher-type alltoall
    --overlap-param-gather
    --overlap-grad-reduce
)
TRAINING=(
    --micro-batch-size 1
    --global-batch-size 256
    --bf16
    #--log-interval 1 \\
    --tensor-model-parallel-size 2
    --pipeline-model-parallel-size 4
    --expert-model-parallel-size 8
    --use-distributed-optimizer
    --sequence-parallel
    --no-load-optim \\
    --load "$SAVED"
)
if [ -n "${WANDB_API_KEY}" ]; then
    TRAINING+=(
        --wandb-project ${WANDB_PROJECT:-"Mixtral"}
    )
fi
torchrun ${ARGS[@]} pretrain_gpt.py ${MODEL[@]} ${EXPERTS[@]} ${TRAINING[@]}
"""


def test_the_script_of_mixtral() -> None:
    """64 GPUs of eight nodes by its header: experts take tp 2 (that of the rest) x ep 8 x pp 4 = 64 of them."""
    found = LAUNCHER.read({"mixtral.sh": MIXTRAL})
    assert found.gpus == 64 and not found.unknown and not found.problems
    assert found.plan == {
        "tp": 2, "pp": 4, "ep": 8, "sequence_parallel": True, "zero": 1, "dp_overlap": True, "micro_batch": 1,
    }  # fmt: skip
    preset = presets.model("mixtral-8x7b")
    assert preset.moe is not None
    for name in ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "head_dim", "vocab", "gated_mlp", "tied_embeddings"):
        assert found.model[name] == getattr(preset, name), name
    assert {name: found.model["moe"][name] for name in ("experts", "top_k", "expert_ffn_hidden")} == {
        "experts": 8, "top_k": 2, "expert_ffn_hidden": 14336,
    }  # fmt: skip
    one = LAUNCHER.read({"mixtral.sh": MIXTRAL.replace("#SBATCH --nodes=8", "#")})
    assert ["64 must divide the 8 GPUs" in problem.rule for problem in one.problems] == [True]


# Facts of examples/llama/train_llama3_8b_h100_fp8.sh: flags quoted together with their values, taken in a condition.
LLAMA = """\
#!/bin/bash
TOKENIZER=${1:-"MOCK"}
GPUS=8
TP=1
CP=1
DTYPE="fp8"
RUN=(--nproc_per_node $GPUS --nnodes 1)
MODEL=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --kv-channels 128
    --seq-length 8192 --max-position-embeddings 8192 --position-embedding-type rope
    --attention-dropout 0.0 --hidden-dropout 0.0 --swiglu --attention-backend fused
    --untie-embeddings-and-output-weights --disable-bias-linear
)
TRAINING=(
    --micro-batch-size 1 --global-batch-size 128
    --bf16
    --grad-reduce-in-bf16
    --cross-entropy-loss-fusion
    --manual-gc
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
PARALLEL=(--tensor-model-parallel-size $TP --context-parallel-size $CP --sequence-parallel)
SHARED=(--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather)
TRAINING+=("${SHARED[@]}")
DATA=()
if [[ "$TOKENIZER" == "MOCK" ]] || [[ -z "$TOKENIZER" ]]; then
    DATA+=("--mock-data" "--tokenizer-type NullTokenizer" "--vocab-size 128256" "--split '99,1,0'")
else
    DATA+=("--vocab-size 32000")
fi
torchrun ${RUN[@]} pretrain_gpt.py ${MODEL[@]} ${TRAINING[@]} ${DTYPE_ARGS[@]} ${PARALLEL[@]} ${DATA[@]}
"""


def test_the_script_of_llama3_in_fp8() -> None:
    found = LAUNCHER.read({"llama.sh": LLAMA})
    assert found.gpus == 8 and not found.problems
    assert found.plan == {"tp": 1, "cp": 1, "sequence_parallel": False, "zero": 1, "dp_overlap": True, "micro_batch": 1}
    assert found.job == {"seq_len": 8192, "global_batch": 128, "precision": "fp8", "attention": "flash"}
    assert found.model["vocab"] == 128256
    assert "sequence_parallel" in found.assumed
    assert {(each.name, each.where) for each in found.unknown} == {
        ("--grad-reduce-in-bf16", "llama.sh:18"), ("--cross-entropy-loss-fusion", "llama.sh:19"), ("--fp8-param-gather", "llama.sh:26"),
    }  # fmt: skip


def test_flags_of_older_releases_are_understood() -> None:
    found = read("--use-flash-attn --recompute-activations --use-custom-fsdp --use-rotary-position-embeddings --bf16")
    assert found.plan["recompute"] == "core_attn" and found.plan["zero"] == 3 and found.model["positions"] == "rotary"
    assert read("--moe-layer-recompute --num-experts 8").plan["recompute"] == "core_attn+moe"
    assert read("--enable-cuda-graph").plan["cuda_graphs"] is True


def test_what_is_not_understood_is_kept_with_its_line() -> None:
    found = LAUNCHER.read(
        {"run.sh": "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 8 \\\n  --a-new-flag 1 2 \\\n  --hidden-size 64 $@ --tp $TP\n"}
    )
    assert [(each.name, each.value, each.where) for each in found.unknown] == [
        ("--a-new-flag", "1 2", "run.sh:2"), ("--tp", "$TP", "run.sh:3"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "flag", "rule"),
    [
        ("--overlap-param-gather", "--overlap-param-gather", "use_distributed_optimizer"),
        ("--tp-comm-overlap --tensor-model-parallel-size 2", "--tp-comm-overlap", "sequence_parallel"),
        ("--bf16 --fp16", "--fp16", "together"),
        ("--recompute-granularity full --recompute-num-layers 1", "--recompute-granularity", "uniform or block"),
        ("--recompute-granularity full --recompute-method block", "--recompute-granularity", "at least 1"),
        ("--recompute-granularity selective --recompute-method block", "--recompute-method", "selective"),
        ("--expert-model-parallel-size 16 --num-experts 8", "--expert-model-parallel-size", "num_experts 8"),
        ("--expert-model-parallel-size 3 --num-experts 9", "--expert-model-parallel-size", "must divide the 16 GPUs"),
        ("--tensor-model-parallel-size 3", "--tensor-model-parallel-size", "must divide the 16 GPUs"),
        ("--global-batch-size 40 --micro-batch-size 1", "--global-batch-size", "= 16"),
        ("--pipeline-model-parallel-size 16", "--pipeline-model-parallel-size", "must divide the 8 layers"),
        (
            "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3",
            "--decoder-first-pipeline-num-layers",
            "leaves 5 of 8 layers, which 3 other stages",
        ),
        ("--optimizer-cpu-offload --use-distributed-optimizer", "--optimizer-cpu-offload", "precision_aware"),
        ("--use-torch-fsdp2 --use-distributed-optimizer", "--use-torch-fsdp2", "distributed_optimizer"),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "at least 1"),
        ("--num-query-groups 3 --num-attention-heads 8 --group-query-attention", "--num-query-groups", "divide num_attention_heads 8"),
        ("--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout 'Et*3|t*4L'", "--pipeline-model-parallel-layout", "deals 7"),
    ],
)  # fmt: skip
def test_contradictions_are_problems_with_megatrons_rule(arguments: str, flag: str, rule: str) -> None:
    problems = {problem.path: problem for problem in read(arguments).problems}
    assert flag in problems and rule in problems[flag].rule, problems
    assert problems[flag].where == "run.sh:2"


@pytest.mark.parametrize(
    ("arguments", "flag"),
    [
        ("--tensor-model-parallel-size two", "--tensor-model-parallel-size"),
        ("--micro-batch-size -1", "--micro-batch-size"),
        ("--global-batch-size 1 2", "--global-batch-size"),
        ("--swiglu yes", "--swiglu"),
        ("--normalization Batch", "--normalization"),
        ("--recompute-granularity some", "--recompute-granularity"),
        ("--cuda-graph-impl odd", "--cuda-graph-impl"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy all", "--data-parallel-sharding-strategy"),
        ("--pipeline-model-parallel-layout 'Ex|L'", "--pipeline-model-parallel-layout"),
        ("--num-experts 8 --moe-layer-freq '__import__(1)'", "--moe-layer-freq"),
        ("--attention-dropout", "--attention-dropout"),
        ("--seq-length " + "9" * 5000, "--seq-length"),
    ],
)  # fmt: skip
def test_values_that_cannot_be_read_name_file_line_and_flag(arguments: str, flag: str) -> None:
    with pytest.raises(SpecError) as wrong:
        read(arguments)
    assert [(problem.where, problem.path) for problem in wrong.value.problems] == [("run.sh:2", flag)]
    assert len(str(wrong.value)) < 1000


@pytest.mark.parametrize(
    "text",
    ["", "\x00\x01" * 500, "torchrun train.py\n", "x" * 1_000_000, "torchrun pretrain_gpt.py 'open", "$(" * 5000 + " pretrain_gpt.py"],
)
def test_hostile_scripts_give_an_error(text: str) -> None:
    LAUNCHER.reads("run.sh", text)
    with pytest.raises(SpecError, match=r"run\.sh"):
        LAUNCHER.read({"run.sh": text})


@pytest.mark.parametrize("text", HOSTILE)
def test_names_of_models_are_data_in_a_script(text: str, tmp_path: Path) -> None:
    job, plan = asked(LAUNCHER, EXPERTS, "mixtral-8x7b")
    model = job.model.model_copy(update={"name": text})
    written_script = LAUNCHER.write(job.model_copy(update={"model": model}), plan).files["pretrain.sh"]
    path = tmp_path / "pretrain.sh"
    path.write_text(written_script)
    shellcheck([str(path)])
    found = LAUNCHER.read({"pretrain.sh": written_script})
    assert (found.plan["ep"], found.plan["vpp"], found.plan["pipeline_layout"]) == (8, 3, "embedding=2+loss=2")


def test_no_precision_is_fp32_and_said() -> None:
    found = read("--num-attention-heads 8")
    assert found.job["precision"] == "fp32" and "precision" in found.assumed


def test_knobs_of_a_read_script_make_a_plan() -> None:
    from tests.launch.launchers.plans import job_of

    job = job_of("megatron-lm", "mixtral-8x7b")
    plan, _ = read_plan(dict(LAUNCHER.read({"m.sh": MIXTRAL}).plan), job, "megatron-lm")
    assert (plan.tp, plan.pp, plan.ep, plan.etp, plan.dp(job.gpus), plan.zero) == (2, 4, 8, 2, 8, 1)
