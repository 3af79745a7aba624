"""NeMo 2.0: keywords held against its classes by hand, golden files, and recipes of the kind that people keep."""

from __future__ import annotations

import ast

import pytest

from tests.launch.launchers.golden import check
from tests.launch.launchers.megatron_jobs import GRAPHS, refused, written
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Found
from tuner.launch.launchers.nemo import Nemo

LAUNCHER = Nemo()
EXPERTS = "tp=2,pp=4,vpp=3,ep=8,etp=1,sp=true,zero=1,recompute=layernorm+moe_act,pipeline_layout=embedding=2+loss=2,dp_overlap=true"


def keywords(text: str) -> dict[str, dict[str, object]]:
    """Return the literal keywords of each call of a program by its class."""
    found: dict[str, dict[str, object]] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            for word in node.keywords:
                if isinstance(word.value, ast.Constant):
                    found.setdefault(name, {})[word.arg or ""] = word.value.value
    return found


@pytest.mark.parametrize(("folder", "knobs", "model"), [("experts", EXPERTS, "mixtral-8x7b"), ("graphs", GRAPHS, "llama3-70b")])
def test_golden_files(folder: str, knobs: str, model: str) -> None:
    changes = {"precision": "fp8"} if folder == "experts" else {}
    check(f"nemo/{folder}", written(LAUNCHER, knobs, model, **changes).files)


def test_keywords_by_hand() -> None:
    found = keywords(written(LAUNCHER, EXPERTS, "mixtral-8x7b", precision="fp8").files["pretrain.py"])
    strategy = found["MegatronStrategy"]
    assert (strategy["tensor_model_parallel_size"], strategy["pipeline_model_parallel_size"]) == (2, 4)
    assert (strategy["virtual_pipeline_model_parallel_size"], strategy["expert_model_parallel_size"]) == (3, 8)
    assert found["GPTConfig"]["num_moe_experts"] == 8 and found["GPTConfig"]["gated_linear_unit"] is True
    assert found["MegatronMixedPrecision"]["fp8_recipe"] == "tensorwise"
    assert found["DistributedDataParallelConfig"]["use_distributed_optimizer"] is True
    assert found["MockDataModule"]["global_batch_size"] == 256
    assert found["Trainer"]["max_steps"] == 50


def test_what_has_no_keyword_is_refused_by_name() -> None:
    assert refused(LAUNCHER, "zero=1,offload=optimizer").keys() == {"offload"}
    assert refused(LAUNCHER, "ep=8,etp=1,zero=1,ep_overlap=true,recompute=none", "mixtral-8x7b").keys() == {"ep_overlap"}
    assert refused(LAUNCHER, "zero=1", precision="nvfp4").keys() == {"precision"}
    assert refused(LAUNCHER, "zero=1,cuda_graphs=true,recompute=full").keys() == {"cuda_graphs"}


# A script as NeMo's guides have them: a recipe, and assignments to its parts.
RECIPE = """\
import nemo_run as run
from nemo.collections import llm

GPUS = 8


def configure(nodes=16):
    recipe = llm.llama3_70b.pretrain_recipe(name="run", dir="/results", num_nodes=16, num_gpus_per_node=GPUS)
    recipe.trainer.strategy.tensor_model_parallel_size = 8
    recipe.trainer.strategy.pipeline_model_parallel_size = 4
    recipe.trainer.strategy.virtual_pipeline_model_parallel_size = 5
    recipe.trainer.strategy.context_parallel_size = 1
    recipe.trainer.strategy.sequence_parallel = True
    recipe.trainer.strategy.of_my_own = 3
    recipe.model.config.recompute_granularity = "full"
    recipe.model.config.recompute_method = "block"
    recipe.model.config.recompute_num_layers = 2
    recipe.data.global_batch_size = 256
    recipe.data.micro_batch_size = 1
    recipe.data.seq_length = 4096 * 2
    recipe.trainer.max_steps = 100
    recipe.optim.config.lr = 3e-4
    recipe.trainer.plugins = llm.recipes.precision.mixed_precision.bf16_with_fp8_mixed()
    return recipe


if __name__ == "__main__":
    run.run(configure(), executor=run.LocalExecutor())
"""


def test_a_recipe_with_assignments() -> None:
    """Two of the four layers of each of five chunks are recomputed: ten layers of a stage."""
    found = LAUNCHER.read({"run.py": RECIPE})
    assert (found.gpus, found.gpus_per_node, found.model) == (128, 8, {"preset": "llama3-70b"})
    assert found.plan == {
        "tp": 8, "pp": 4, "vpp": 5, "cp": 1, "sequence_parallel": True, "micro_batch": 1, "recompute": "full:10",
    }  # fmt: skip
    assert found.job == {"seq_len": 8192, "global_batch": 256, "precision": "fp8"}
    assert [(each.name, each.value, each.where) for each in found.unknown] == [("recipe.trainer.strategy.of_my_own", "3", "run.py:14")]
    assert not found.problems and "was not read" in found.assumed["recipe"]


# Facts of nemo/collections/llm/recipes/llama3_70b.py: factories whose degrees are arguments.
FACTORY = """\
import nemo_run as run
from nemo import lightning as nl


def trainer(tensor_parallelism: int = 4, num_nodes: int = 4, num_gpus_per_node: int = 8):
    strategy = run.Config(
        nl.MegatronStrategy,
        tensor_model_parallel_size=tensor_parallelism,
        pipeline_model_parallel_size=4,
        virtual_pipeline_model_parallel_size=5,
        context_parallel_size=2,
        sequence_parallel=True,
        gradient_as_bucket_view=True,
        ddp=run.Config(DistributedDataParallelConfig, check_for_nan_in_grad=True, overlap_grad_reduce=True, overlap_param_gather=True),
    )
    return run.Config(nl.Trainer, devices=num_gpus_per_node, num_nodes=num_nodes, plugins=bf16_mixed(), strategy=strategy)


def pretrain_recipe():
    return run.Partial(
        pretrain,
        model=run.Config(LlamaModel, config=run.Config(Llama3Config70B)),
        trainer=trainer(),
        data=run.Config(MockDataModule, seq_length=8192, global_batch_size=512, micro_batch_size=1),
        optim=distributed_fused_adam_with_cosine_annealing(max_lr=3e-4),
    )
"""


def test_a_factory_whose_degrees_are_arguments() -> None:
    found = LAUNCHER.read({"recipe.py": FACTORY})
    assert found.plan == {
        "pp": 4, "vpp": 5, "cp": 2, "sequence_parallel": True, "zero": 1, "dp_overlap": True, "micro_batch": 1,
    }  # fmt: skip
    assert found.job == {"seq_len": 8192, "global_batch": 512, "precision": "bf16"} and found.model == {"preset": "llama3-70b"}
    assert {(each.name, each.where) for each in found.unknown} == {
        ("MegatronStrategy.tensor_model_parallel_size", "recipe.py:8"),
        ("nl.Trainer.devices", "recipe.py:16"),
        ("nl.Trainer.num_nodes", "recipe.py:16"),
    }
    assert not found.problems


def read(strategy: str, more: str = "") -> Found:
    text = f"from nemo import lightning as nl\nstrategy = nl.MegatronStrategy({strategy})\n{more}\n"
    return LAUNCHER.read({"run.py": text + "trainer = nl.Trainer(devices=8, num_nodes=2, strategy=strategy)\n"})


@pytest.mark.parametrize(
    ("strategy", "more", "keyword", "rule"),
    [
        ("tensor_model_parallel_size=3", "", "MegatronStrategy.tensor_model_parallel_size", "must divide the 16 GPUs"),
        ("", "MockDataModule(global_batch_size=40, micro_batch_size=1)", "MockDataModule.global_batch_size", "= 16"),
        ("", "GPTConfig(num_layers=8, hidden_size=64, recompute_granularity='full')", "GPTConfig.recompute_granularity", "num_layers"),
    ],
)
def test_contradictions_are_problems(strategy: str, more: str, keyword: str, rule: str) -> None:
    problems = {problem.path: problem.rule for problem in read(strategy, more).problems}
    assert keyword in problems and rule in problems[keyword], problems


@pytest.mark.parametrize(
    ("strategy", "keyword"),
    [
        ("tensor_model_parallel_size='two'", "MegatronStrategy.tensor_model_parallel_size"),
        ("sequence_parallel='perhaps'", "MegatronStrategy.sequence_parallel"),
        ("pipeline_model_parallel_size=-1", "MegatronStrategy.pipeline_model_parallel_size"),
        ("fsdp='own'", "MegatronStrategy.fsdp"),
    ],
)
def test_values_that_cannot_be_read_name_file_line_and_keyword(strategy: str, keyword: str) -> None:
    with pytest.raises(SpecError) as wrong:
        read(strategy)
    assert [(problem.where, problem.path) for problem in wrong.value.problems] == [("run.py:2", keyword)]


@pytest.mark.parametrize("text", ["MegatronStrategy(", "(" * 100_000, "\x00", "x = 1\n" * 500_000, "a." * 200_000 + "a"])
def test_hostile_recipes_give_an_error(text: str) -> None:
    LAUNCHER.reads("run.py", text)
    with pytest.raises(SpecError, match=r"run\.py"):
        LAUNCHER.read({"run.py": text})


def test_nothing_of_a_recipe_is_run() -> None:
    found = read("tensor_model_parallel_size=__import__('os').getpid()")
    assert [each.name for each in found.unknown] == ["MegatronStrategy.tensor_model_parallel_size"]
