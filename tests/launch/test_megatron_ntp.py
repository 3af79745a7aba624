"""The export of a nonuniform tensor-parallel job to Megatron-LM's dev branch: its layout, its rules, its files on a real Slurm."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tuner
from tests.jobs import gpt, gpt_job, llama_job, moe_job
from tests.services import missing
from tests.slurm.cluster import slurm
from tests.terminal import ROOT, run
from tuner import presets
from tuner.errors import SpecError
from tuner.job import Job
from tuner.launch.megatron_ntp import Layout, defects, layout_of, mapped, padded_vocab, parity, refusals, vocab_multiple
from tuner.launch.megatron_ntp_files import write
from tuner.launch.megatron_ntp_slurm import parts, table
from tuner.plan import FULL, RECOMPUTE_MODULES, Plan

if TYPE_CHECKING:
    from tuner.launch.launchers.launcher import Written

GOLDEN = ROOT / "tests/golden/megatron_ntp"
# `tuner export megatron-lm-ntp ... -o FOLDER` writes each of these folders; {here} is GOLDEN.
CASES = {
    "heads24_8_to_6": "-m {here}/heads24.yaml -c h100x32 -s 2k -b 16 -p tp=8,dp_overlap=true,sp=false,recompute=none --failed 1:3,1:5,3:0",
    "upstream_4_to_2": "-m {here}/heads8.yaml -c {here}/node4.yaml -s 16 -b 2 -p tp=4,fallback_tp=2,sp=true,recompute=none --reduced 1",
}


def small(heads: int = 24, gpus: int = 16, **changes: Any) -> Job:
    """A GPT of 24 heads on nodes of 8 GPUs: 8 -> 6 deals its heads evenly."""
    cluster = presets.cluster("h100x16").replace(gpus=gpus)
    return gpt_job(gpt(layers=4, hidden=64 * heads, heads=heads), cluster=cluster, global_batch=16, **changes)


def exported(job: Job, plan: Plan, failed: dict[int, tuple[int, ...]], degree: int | None = None) -> Written:
    return write(job, plan, layout_of(job, plan, degree, failed), sum(map(len, failed.values())))


def rules(job: Job, plan: Plan, degree: int) -> set[str]:
    return {rule for problem in refusals(job, plan, degree) for rule in problem.path.split(", ")}


def test_packed_groups_by_hand() -> None:
    """Ranks 0 and 1 are TP2, ranks 2 to 5 TP4: the layout of the upstream end-to-end test."""
    groups = Layout(tp=4, degree=2, cp=1, replicas=2, idle={0: (2, 3)}).groups()
    assert groups["tp"] == [[0, 1], [2, 3, 4, 5]]
    assert groups["dp"] == groups["dp_cp"] == [[0, 2], [1, 3], [4], [5]]
    assert groups["cp"] == [[0], [1], [2], [3], [4], [5]] and groups["tp_cp"] == groups["tp"]


def test_groups_of_two_context_slices_by_hand() -> None:
    groups = Layout(tp=2, degree=1, cp=2, replicas=2, idle={0: (1,)}).groups()  # slices of one rank: 0, 1; of two: 2 3, 4 5
    assert groups["tp"] == [[0], [1], [2, 3], [4, 5]]
    assert groups["dp"] == [[0, 2], [3], [1, 4], [5]]
    assert groups["dp_cp"] == [[0, 1, 2, 4], [3, 5]]
    assert groups["cp"] == [[0, 1], [2, 4], [3, 5]]
    assert groups["tp_cp"] == [[0, 1], [2, 3, 4, 5]]


@settings(deadline=None)
@given(st.integers(2, 9), st.integers(1, 3), st.integers(2, 5), st.integers(1, 9), st.data())
def test_every_rank_is_in_one_group_of_each_kind_and_has_a_gpu_of_its_own(tp: int, cp: int, replicas: int, node: int, data: Any) -> None:
    lost = data.draw(st.integers(1, tp - 1))
    failed = {
        replica: tuple(data.draw(st.lists(st.integers(0, tp - 1), min_size=1, max_size=lost, unique=True)))
        for replica in data.draw(st.lists(st.integers(0, replicas - 1), min_size=1, max_size=replicas - 1, unique=True))
    }
    cluster = presets.cluster("h100x16").replace(gpus=tp * cp * replicas, gpus_per_node=node)
    layout = layout_of(gpt_job(cluster=cluster), Plan(tp=tp, cp=cp), tp - lost, failed)
    for each in (layout, layout.uniform()):
        every = list(range(each.world))
        for groups in each.groups().values():
            assert sorted(rank for ranks in groups for rank in ranks) == every
        rows = [line.split() for line in table(each, parts(each, node)).splitlines()]
        assert sorted(int(row[0]) for row in rows) == every
        used = {(int(row[5]), int(row[1])) for row in rows}  # node, GPU
        gone = {(replica * cp + c) * tp + slot for replica, slots in failed.items() for slot in slots for c in range(cp)}
        assert len(used) == each.world and not used & {divmod(gpu, node) for gpu in gone}


def test_other_replicas_idle_as_many_from_their_highest_slots() -> None:
    assert parity({0: [2, 5], 1: [1]}, 8) == (2, {0: (2, 5), 1: (1, 7)})  # the example in its docstring
    assert parity({3: [7], 1: [6, 7, 0]}, 8) == (3, {3: (5, 6, 7), 1: (0, 6, 7)})
    assert parity({}, 8) == (0, {})


def test_reduced_replicas_come_first_and_keep_their_gpus() -> None:
    """Replica 2 of four at TP4 lost its slot 1, on nodes of 8: GPU 1 of node 1, which it shares with replica 3."""
    cluster = presets.cluster("h100x16")
    layout = layout_of(gpt_job(cluster=cluster), Plan(tp=4), None, {2: (1,)})
    assert layout.origin == (2, 0, 1, 3) and layout.idle == {0: (1,)}
    few, whole = parts(layout, 8)
    assert (few.gpus, few.ranks) == ((0, 2, 3, 4, 5, 6, 7), {1: (0, 1, 2, 11, 12, 13, 14)})  # ranks 0 to 2, and those of replica 3
    assert (whole.gpus, whole.ranks) == (tuple(range(8)), {0: tuple(range(3, 11))})


@pytest.mark.parametrize(
    ("units", "tp", "degree", "left"),
    [
        (24, 8, 6, [3] * 6), (28672, 8, 7, [3584] * 7), (53248, 8, 7, [6656] * 7), (24, 8, 4, [3] * 4),  # run upstream: right
        (64, 8, 7, [8, 9, 9, 9, 9, 9, 3]), (32768, 8, 7, [4096, *[4097] * 5, 4091]),  # run upstream: 3 to 9, and unequal
        (128, 32, 30, None), (128, 32, 28, None), (64, 64, 62, None), (8, 8, 7, None),  # run upstream: IndexError
    ],
)  # fmt: skip
def test_the_mapping_as_upstream_computes_it(units: int, tp: int, degree: int, left: list[int] | None) -> None:
    assert mapped(units, tp, degree) == left


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(2, 64), st.data())
def test_the_mapping_is_right_where_both_degrees_divide(times: int, tp: int, data: Any) -> None:
    degree = data.draw(st.integers(1, tp - 1))
    whole = math.lcm(tp, degree) * times
    assert mapped(whole, tp, degree) == [whole // tp] * degree
    if (times * degree) % tp:
        assert mapped(times * degree, tp, degree) != [times * degree / tp] * degree


def test_rules_by_id() -> None:
    plan = Plan(tp=8)
    assert rules(small(), plan, 6) == set()
    assert rules(small(), plan, 7) == {"heads-tp", "kv-heads-tp", "ffn-tp", "ntp-map"}
    assert rules(small(gpus=32), Plan(tp=8, pp=2), 6) == {"ntp-pp"}
    assert rules(small(), Plan(tp=8, zero=1), 6) == {"ntp-distributed-optimizer"}
    assert {"ntp-experts", "ntp-mla", "ntp-mtp"} <= rules(moe_job(), Plan(tp=8), 6)
    assert rules(small(), plan, 8) == rules(small(), plan, 0) == {"ntp-degree"}
    assert rules(small(gpus=8), plan, 6) == {"ntp-dp"}
    assert "kv-heads-tp" in rules(llama_job(), plan, 6)  # 8 groups on 6 ranks
    assert rules(llama_job(), plan, 4) == set()
    assert rules(small(framework=presets.framework("torchtitan")), plan, 6) == {"ntp-framework"}
    assert rules(small(task="lora"), plan, 6) == {"ntp-task"}
    assert rules(small(precision="fp8"), plan, 6) == {"ntp-precision"}
    assert rules(small(heads=48, gpus=32), Plan(tp=16), 12) == set()  # a group over two nodes


def test_the_way_out_is_the_next_degree_that_keeps_all_rules() -> None:
    (all_at_7,) = refusals(small(), Plan(tp=8, sequence_parallel=1), 7)  # one cause: one problem, and one way out
    assert set(all_at_7.path.split(", ")) == {"heads-tp", "kv-heads-tp", "ffn-tp", "seq-sp", "ntp-map"}
    assert all_at_7.hint == "fallback_tp=4"  # 6 divides heads and ffn_hidden, not 2,048 tokens
    assert all_at_7.rule.startswith("reduced replicas: tp = 7 must divide heads = 24; ") and "mapping" not in all_at_7.rule
    (tokens,) = refusals(small(), Plan(tp=8, sequence_parallel=1), 6)
    assert (tokens.path, tokens.hint) == ("seq-sp", "fallback_tp=4, or sequence_parallel=false")
    assert {problem.hint for problem in refusals(small(), Plan(tp=8), 7)} == {"fallback_tp=6"}
    assert {problem.hint for problem in refusals(small(heads=7), Plan(tp=8), 6)} == {"another tp"}


def test_sequence_parallelism_asks_both_degrees() -> None:
    assert rules(small(), Plan(tp=8, sequence_parallel=1), 6) == {"seq-sp"}  # 2,048 tokens on 6 ranks
    assert rules(small(), Plan(tp=8, sequence_parallel=1), 4) == set()
    assert rules(small(), Plan(tp=8, sequence_parallel=1), 1) == {"ntp-sequence-parallel"}


def test_fused_qkv_that_does_not_divide_by_heads_is_refused() -> None:
    """12 heads and 4 groups of 32: 640 rows, 53 1/3 a head. 2 groups on 4 ranks are copied twice."""
    few = small(heads=12)

    def refused(**changes: int) -> set[str]:
        return rules(few.model_copy(update={"model": few.model.model_copy(update=changes)}), Plan(tp=4), 2)

    assert refused(kv_heads=4, head_dim=32) == {"ntp-qkv"}
    assert refused(kv_heads=6) == {"kv-heads-tp"}
    assert refused(kv_heads=12) == set()
    assert refused(kv_heads=2, head_dim=48) == {"ntp-kv-copies"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"tp_overlap": 1, "sequence_parallel": 1}, "tp_overlap"), ({"cuda_graphs": 1}, "cuda_graphs"), ({"offload": 1}, "offload")],
)
def test_a_knob_without_an_argument_is_refused_by_name(changes: dict[str, int], named: str) -> None:
    (problem,) = refusals(small(), Plan(tp=8, **changes), 4)
    assert problem.path == "ntp-knob" and named in problem.rule


def test_every_knob_of_a_plan_is_an_argument_or_refused() -> None:
    """A field that is added to Plan is refused until something is known of it."""
    job, plain, refused = small(gpus=96), Plan(tp=8), set()
    before = exported(job, plain, {0: (7,)}, 4).files["arguments.sh"]
    for field in dataclasses.fields(Plan):
        if field.name in ("fallback_tp", "recompute_layers", "cp_kind", "embedding_layers", "loss_layers", "schedule"):
            continue  # the degree itself; idle on their own
        plan = dataclasses.replace(plain, **{field.name: 12 if field.name == "tp" else getattr(plain, field.name) + 1})
        if rules(job, plan, 4):
            refused.add(field.name)
        else:
            assert exported(job, plan, {0: (7,)}, 4).files["arguments.sh"] != before, field.name
    assert refused == {"pp", "vpp", "ep", "etp", "zero", "shard_group", "offload", "tp_overlap", "ep_overlap", "cuda_graphs", "idle_tp"}


def test_the_vocabulary_is_padded_so_that_both_degrees_divide_it() -> None:
    assert vocab_multiple(small(), 8, 6) == 384  # 128 x 3: 8 x 384 = 3,072 = 6 x 512; 52,224 rows in place of 51,200
    assert "--make-vocab-size-divisible-by 384" in exported(small(), Plan(tp=8), {0: (3, 5)}).files["arguments.sh"]
    llama = llama_job()  # 128,256: 32 x 1,920 would pad to 184,320; 32 x 240 = 30 x 256 to 130,560 (usual: 131,072)
    assert (vocab_multiple(llama, 32, 30), padded_vocab(llama, 32, 240)) == (240, 130_560)


@settings(deadline=None)
@given(st.integers(1, 300_000), st.integers(2, 72), st.data())
def test_padding_divides_by_both_degrees_and_is_modest(vocab: int, tp: int, data: Any) -> None:
    degree = data.draw(st.integers(1, tp - 1))
    job = gpt_job(gpt(layers=2, hidden=256, heads=4, vocab=vocab))
    multiple = vocab_multiple(job, tp, degree)
    padded = padded_vocab(job, tp, multiple)
    assert padded >= vocab and padded % tp == padded % degree == 0 and multiple * tp % degree == 0
    assert padded <= max(1.02 * padded_vocab(job, tp, 128), vocab + tp * degree)


def test_arguments_spell_model_batch_and_plan() -> None:
    recompute = RECOMPUTE_MODULES["core_attn"] | RECOMPUTE_MODULES["mlp"]
    plan = Plan(tp=8, cp=2, cp_kind=1, micro_batch=2, recompute=recompute, sequence_parallel=1, dp_overlap=1)
    job = llama_job(precision="fp16", tokens=1e9, ramp_up={"start": 32, "increment": 32, "samples": 9600})
    text = exported(job, plan, {1: (0, 1, 2, 3)}).files["arguments.sh"]
    for words in (
        "--num-layers 80", "--num-attention-heads 64", "--num-query-groups 8", "--kv-channels 128", "--ffn-hidden-size 28672",
        "--swiglu", "--normalization RMSNorm", "--position-embedding-type rope", "--untie-embeddings-and-output-weights",
        "--disable-bias-linear", "--attention-dropout 0.0", "--micro-batch-size 2", "--context-parallel-size 2",
        "--cp-comm-type all_gather", "--sequence-parallel", "--overlap-grad-reduce", "--recompute-granularity selective",
        "--recompute-modules core_attn mlp",
    ):  # fmt: skip
        assert f"  {words}\n" in text, words
    assert "WHOLE_RUN=(--fp16 --rampup-batch-size 32 32 9600 --train-samples 122070)" in text  # 1e9 // 8192
    assert "--bf16" not in text
    full = exported(small(), Plan(tp=8, recompute=FULL, recompute_layers=3), {0: (7, 6)}).files["arguments.sh"]
    assert "--recompute-granularity full\n  --recompute-method block\n  --recompute-num-layers 3\n" in full


def test_files_say_what_failed_and_what_is_wrong() -> None:
    written = exported(small(gpus=32), Plan(tp=8), {2: (1,), 0: (3, 5)})
    told = json.loads(written.files["ntp.json"])
    assert (told["tp_base"], told["tp_spares"], told["num_reduced_tp_dp_ranks"], told["world"]) == (8, 2, 2, 28)
    assert told["non_active_ranks_per_dp"] == {"0,0,0": [3, 5], "1,0,0": [1, 7]}  # reduced replicas come first
    assert any("4 GPUs are not used: 3 failed, 1 idle though healthy" in note for note in written.notes)
    read_me = written.files["README.md"]
    assert "| 1 | 2 | 1, 7 |" in read_me  # replica 2 is now replica 1
    assert "EXPERIMENTAL" in read_me and "parity.sh" in read_me and "row-parallel" in read_me
    words = " ".join(text for _, text in defects(llama_job(), Plan(tp=8, sequence_parallel=1)))
    assert all(part in words for part in ("Grouped-query", "Gated MLP", "Sequence parallelism", "TypeError"))


@pytest.mark.parametrize(
    ("plan", "given", "words"),
    [
        ("tp=8,fallback_tp=6", {"failed": "0:1,0:2,0:3"}, "lost 3 GPUs, which leaves 5"),
        ("tp=8", {"failed": "9:1"}, "must name one of 2 replicas"),
        ("tp=8", {"failed": "0:8"}, "a slot below tp = 8"),
        ("tp=8", {"failed": "0-1"}, "must be REPLICA:SLOT"),
        ("tp=8", {"failed": "0:1,0:2,1:0,1:1"}, "every replica lost GPUs"),
        ("tp=8", {}, "is missing"),
        ("tp=8", {"failed": "0:1", "reduced": 1}, "both say"),
        ("tp=8", {"reduced": 1}, "needs the degree"),
        ("tp=8,fallback_tp=6", {"reduced": 2}, "must be from 1 to 1"),
        ("tp=8,fallback_tp=6", {"reduced": "x"}, "must be a whole number"),
    ],
)
def test_bad_input_is_refused_with_a_way_out(plan: str, given: dict[str, Any], words: str) -> None:
    question = {"model": "gpt3-175b", "cluster": "h100x16", "seq_len": 2048, "global_batch": 16}
    with pytest.raises(SpecError, match=words):
        tuner.export("megatron-lm-ntp", **question, plan=plan + ",zero=0", **given)


def test_all_rules_are_named_at_once_and_the_exit_code_is_2() -> None:
    options = ("-m", "mixtral-8x7b", "-c", "h100x64", "-s", "4k", "-b", "64", "-p", "tp=8,pp=2,zero=1", "--failed", "0:1")
    result = run("export", "megatron-lm-ntp", *options)
    assert result.returncode == 2 and result.stdout == ""
    for rule in ("ntp-pp", "ntp-experts", "ntp-distributed-optimizer", "heads-tp, kv-heads-tp, ntp-map"):
        assert f"megatron-lm-ntp: {rule}: " in result.stderr


def test_command_line_and_python_give_the_same() -> None:
    options = ("-m", "gpt3-175b", "-c", "h100x16", "-s", "2048", "-b", "16", "-p", "tp=8,fallback_tp=4", "--reduced", "1", "--json")
    printed = json.loads(run("export", "megatron-lm-ntp", *options).stdout)
    asked = {"model": "gpt3-175b", "cluster": "h100x16", "seq_len": 2048, "global_batch": 16, "plan": "tp=8,fallback_tp=4"}
    assert printed == json.loads(json.dumps(tuner.export("megatron-lm-ntp", reduced=1, **asked).record()))


@pytest.mark.parametrize("case", CASES)
def test_golden_files(case: str, tmp_path: Path) -> None:
    done = run("export", "megatron-lm-ntp", *CASES[case].format(here=GOLDEN).split(), "-o", str(tmp_path), "-q")
    assert done.returncode == 0, done.stderr
    written = {path.name: path.read_text() for path in (tmp_path / "megatron-lm-ntp").iterdir()}
    kept = {path.name: path.read_text() for path in (GOLDEN / case / "megatron-lm-ntp").iterdir()}
    assert written == kept


def test_scripts_pass_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    scripts = [path for path in GOLDEN.rglob("*") if path.suffix in (".sh", ".sbatch")]
    assert len(scripts) == 10
    done = subprocess.run(["shellcheck", "-x", *map(str, scripts)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def program(folder: Path, layout: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("NTP_LAYOUT", layout)
    spec = importlib.util.spec_from_file_location("pretrain_ntp", folder / "pretrain_ntp.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def megatron(monkeypatch: pytest.MonkeyPatch, told: Any) -> dict[str, Any]:
    """Stand-ins for the modules of Megatron-LM that the program imports; `told` notes what is called."""

    class Wrapped:
        def __init__(self, config: Any, ddp_config: Any, module: Any, disable_bucketing: bool = False, ntp_config: Any = None) -> None:
            told.append(("wrap", config.tensor_model_parallel_size, disable_bucketing, ntp_config.kept["tp_spares"]))

    class Buffer:
        def __init__(self, *arguments: Any, **named: Any) -> None:
            told.append(("buffer", named))

    class Config:
        def __init__(self, **fields: Any) -> None:
            self.kept = fields

    def validate_args(args: Any, defaults: Any) -> Any:
        told.append(("validate", args.world_size))
        return args

    names = ("parallel_state", "distributed.nonuniform_tp", "distributed", "")
    modules = {name: types.ModuleType("megatron.core" + ("." + name if name else "")) for name in names}
    modules |= {f"t.{n}": types.ModuleType(f"megatron.training.{n}") for n in ("arguments", "initialize", "training", "global_vars")}
    modules |= {"m": types.ModuleType("megatron"), "t": types.ModuleType("megatron.training")}
    state, ntp = modules["parallel_state"], modules["distributed.nonuniform_tp"]
    modules[""].parallel_state, modules["distributed"].nonuniform_tp = state, ntp  # type: ignore[attr-defined]
    state.initialize_model_parallel = None  # type: ignore[attr-defined]
    ntp.NonuniformTPConfig, ntp.NonuniformTPDistributedDataParallel = Config, Wrapped  # type: ignore[attr-defined]
    ntp.NonuniformTPParamAndGradBuffer = Buffer  # type: ignore[attr-defined]
    ntp.ntp_init = lambda layer, config: told.append(("init", layer.name))  # type: ignore[attr-defined]
    ntp.ntp_map = lambda module, config, units: told.append(("map", module.name, units))  # type: ignore[attr-defined]
    modules["t.arguments"].validate_args = modules["t.initialize"].validate_args = validate_args  # type: ignore[attr-defined]
    modules["t.training"].DDP = modules["t.training"].print_rank_last = None  # type: ignore[attr-defined]
    modules["t.training"].print_rank_0 = print  # type: ignore[attr-defined]
    for module in modules.values():
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return modules


def test_the_program_makes_these_groups_in_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """On torch's process group that talks to nobody; the names are those of megatron-core's parallel_state (0.16.1 has them all)."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    folder, seen = GOLDEN / "upstream_4_to_2/megatron-lm-ntp", {}
    for rank in range(6):
        state = megatron(monkeypatch, [])["parallel_state"]
        module = program(folder, "ntp.json", monkeypatch)
        for name in {name for names in (*module.GROUPS.values(), *module.RANKS.values()) for name in names}:
            setattr(state, "_" + name, None)
        for name in ("HIERARCHICAL_CONTEXT_PARALLEL_GROUPS", "TENSOR_AND_DATA_PARALLEL_GROUP", "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"):
            setattr(state, "_" + name, None)
        numbers: list[int] = []
        state.set_data_parallel_rank, state._set_global_memory_buffer = numbers.append, lambda: None  # type: ignore[attr-defined]
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=6)
        try:
            width = module.make_groups()
            members = [
                dist.get_process_group_ranks(getattr(state, f"_{n}_PARALLEL_GROUP")) for n in ("TENSOR_MODEL", "DATA", "PIPELINE_MODEL")
            ]
        finally:
            dist.destroy_process_group()
        seen[rank] = (width, *members, numbers)
    assert seen == {
        0: (2, [0, 1], [0, 2], [0], [0]),
        1: (2, [0, 1], [1, 3], [1], [0]),
        2: (4, [2, 3, 4, 5], [0, 2], [2], [1]),
        3: (4, [2, 3, 4, 5], [1, 3], [3], [1]),
        4: (4, [2, 3, 4, 5], [4], [4], [1]),  # extra ranks: of replica 1, though alone in their groups
        5: (4, [2, 3, 4, 5], [5], [5], [1]),
    }


def test_the_program_replaces_what_pretrain_gpt_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    modules = megatron(monkeypatch, told)
    args = types.SimpleNamespace(world_size=6, tensor_model_parallel_size=4, padded_vocab_size=1024)
    modules["t.global_vars"].get_args = lambda: args
    module = program(GOLDEN / "upstream_4_to_2/megatron-lm-ntp", "ntp.json", monkeypatch)
    module.install()
    modules["t.initialize"].validate_args(args, {})
    assert told.pop() == ("validate", 8) and args.world_size == 6  # two replicas of four, as they would be
    assert modules["t.training"].print_rank_last is print
    monkeypatch.setattr(module, "make_groups", lambda: 2)
    modules["parallel_state"].initialize_model_parallel(4, 1)
    assert args.tensor_model_parallel_size == 2

    layer = type("TransformerLayer", (), {"name": "layer"})()
    part = types.SimpleNamespace(name="part")
    parts_ = [("module.decoder.layers.0", layer), ("module.embedding.word_embeddings", part), ("module.output_layer", part), ("x", part)]
    model = types.SimpleNamespace(named_modules=lambda: parts_)
    modules["t.training"].DDP(types.SimpleNamespace(tensor_model_parallel_size=2), None, model, disable_bucketing=True)
    assert told == [("init", "layer"), ("map", "part", 1024), ("map", "part", 1024), ("wrap", 2, True, 2)]
    modules["distributed.nonuniform_tp"].NonuniformTPParamAndGradBuffer(1, param_layout=3, nccl_ub=4)
    assert told[-1] == ("buffer", {"nccl_ub": 4})  # given by DDP and by the buffer itself, it would be a TypeError
    with pytest.raises(SystemExit, match="configured before"):
        modules["t.training"].DDP(types.SimpleNamespace(tensor_model_parallel_size=4), None, model)
    args.padded_vocab_size = 1023
    with pytest.raises(SystemExit, match="does not divide by"):
        modules["parallel_state"].initialize_model_parallel()
    del modules["t.training"].DDP
    with pytest.raises(SystemExit, match=r"training\.DDP is not there"):
        module.install()


LOG = " iteration {i}/3 | lm loss: {loss} | loss scale: 1.0 | grad norm: {norm} | number of skipped iterations: 0 |"


@pytest.mark.parametrize(
    ("losses", "norms", "code", "words"),
    [
        ("10.001E+00", "2.346", 0, "agrees"),
        ("1.011000E+01", "2.346", 1, "lm loss: 1.011000E+01 1.000100E+01 DIFFERS"),
        ("1.000100E+01", "2.400", 1, "grad norm: 2.400 2.345 DIFFERS"),
        ("nan", "nan", 1, "DIFFERS"),
        ("none", "none", 1, "did not end"),
    ],
)
def test_the_parity_check_compares_losses_and_norms(losses: str, norms: str, code: int, words: str, tmp_path: Path) -> None:
    """sbatch is a stand-in that writes the log it is told to."""
    shutil.copy(GOLDEN / "upstream_4_to_2/megatron-lm-ntp/parity.sh", tmp_path / "parity.sh")
    other = ("1.000100E+01", "2.345") if losses != "none" else ("none", "none")
    for name, loss, norm in (("ntp", losses, norms), ("uniform", *other)):
        (tmp_path / f"{name}.txt").write_text("\n".join(LOG.format(i=i + 1, loss=loss, norm=norm) for i in range(3)) + "\n")
    stand_in = '#!/bin/bash\nlog=${2#--output=}; name=${log#parity.}; cp "${name%.log}.txt" "$log"\n'
    (tmp_path / "sbatch").write_text(stand_in)
    (tmp_path / "sbatch").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PRETRAIN": "x"}
    done = subprocess.run(["bash", "parity.sh"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert words in done.stdout


def test_a_heterogeneous_job_gives_every_process_its_rank_and_gpu(tmp_path: Path) -> None:
    """Three nodes of 4, two replicas over one and a half each: TP6 without GPU 5 of replica 1 (GPU 3 of node 2), so TP5 of 20 heads does
    not do: TP3. The interpreter is a stand-in that prints what it was given.
    """
    cluster = presets.cluster("h100x16").replace(gpus=12, gpus_per_node=4)
    job = gpt_job(gpt(layers=4, hidden=768, heads=12), cluster=cluster, global_batch=12)
    layout = layout_of(job, Plan(tp=6), 3, {1: (5,)})
    assert layout.idle == {0: (3, 4, 5)} and layout.origin == (1, 0)
    for name, text in write(job, Plan(tp=6), layout, 1).files.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    shown = "RANK WORLD_SIZE CUDA_VISIBLE_DEVICES MASTER_ADDR"
    (tmp_path / "python").write_text(
        f'#!/bin/bash\nout=rank; for n in {shown}; do out="$out ${{!n}}"; done; echo "$out $SLURMD_NODENAME ${{@:1:2}} $#"\n'
    )
    (tmp_path / "python").chmod(0o755)
    exported = f"--export=ALL,PRETRAIN=pretrain_gpt.py,PYTHON={tmp_path / 'python'}"
    with slurm(nodes=3, gpus=4) as started:
        started.run("sbatch", "--wait", f"--chdir={tmp_path}", "--output=out.txt", exported, str(tmp_path / "launch.sbatch"))
    text = (tmp_path / "out.txt").read_text()
    lines = [line.split() for line in text.splitlines() if line.startswith("rank")]
    assert len(lines) == 9, text
    # replica 1 held GPUs 2 and 3 of node 1 and node 2; ranks 0 to 2 are its slots 0 to 2, on GPUs 2, 3 of node 1 and GPU 0 of node 2
    assert sorted((int(line[1]), int(line[3])) for line in lines) == [(0, 2), (1, 3), (2, 0), *((3 + i, i % 4) for i in range(6))]
    nodes = {int(line[1]): line[5] for line in lines}
    assert nodes[0] == nodes[1] == nodes[7] == nodes[8] != nodes[2] and nodes[3] == nodes[6] not in (nodes[0], nodes[2])
    assert {(line[2], line[6], line[7]) for line in lines} == {("9", "pretrain_ntp.py", "pretrain_gpt.py")}
    assert all(int(line[8]) > 20 for line in lines)
