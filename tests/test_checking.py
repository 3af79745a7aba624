"""What `tuner check` says of launch files: rules with their ids, memory, order, what is missing, and edits that read back."""

from __future__ import annotations

import subprocess
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

import tuner
from benchmarks import reports
from tests.launch.launchers.plans import job_of, plans_of
from tests.test_user_reports import APART, REPORTS, WRONG_FIT, WRONG_ORDER, name, trusted, variants
from tuner import presets
from tuner.accuracy.fields import row_of
from tuner.accuracy.knobs import plan_of
from tuner.accuracy.rows import job_of as row_job
from tuner.accuracy.rows import source_year
from tuner.checking.checked import CheckAnswer, Checked, read_gap
from tuner.cluster_text import cluster_text
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import BUILT_IN, Launcher, launchers, open_launcher
from tuner.load import load_yaml
from tuner.plan import Plan
from tuner.plan_text import plan_record

INVALID = load_yaml(Path(__file__).parent / "fixtures" / "invalid_reports.yaml")
MEGATRON = """\
#!/bin/bash
TP=8
PP=4
ARGS="
    --tensor-model-parallel-size $TP \\
    --pipeline-model-parallel-size ${PP} \\
    --num-layers 80 --hidden-size 8192 --ffn-hidden-size 28672 --num-attention-heads 64 \\
    --group-query-attention --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \\
    --position-embedding-type rope --untie-embeddings-and-output-weights --hidden-dropout 0 --attention-dropout 0 \\
    --seq-length 8192 --micro-batch-size 1 --global-batch-size 512 --bf16 \\
    --recompute-granularity full --recompute-method uniform --recompute-num-layers 1 \\
    --frobnicate 3
"
torchrun --nnodes 8 --nproc_per_node 8 pretrain_gpt.py $ARGS
"""


def lay(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    return folder


def one(answer: CheckAnswer) -> Checked:
    (found,) = answer.checked
    return found


def broken(checked: Checked) -> set[str]:
    return {item.rule for item in checked.broken if item.severity == "error"}


def missing(checked: Checked) -> str:
    return " ".join(problem.path for problem in checked.problems)


# --- public reports


@pytest.mark.parametrize("case", INVALID, ids=lambda case: case["id"])
def test_refused_configurations_are_caught_by_their_rule(case: dict[str, Any], tmp_path: Path) -> None:
    options = dict(case.get("options", {}))
    folder = lay(tmp_path, case["files"])
    if str(options.get("model", "")).endswith(".yaml"):
        options["model"] = str(folder / options["model"])
    first = folder / next(iter(case["files"]))
    answer = tuner.check(first, no_search=True, **options)
    found = one(answer)
    assert set(case["rules"]) <= broken(found)
    assert answer.exit_code == (3 if case["rules"] else 2)
    for what in case["missing"]:
        assert what in missing(found)
    assert all(item.source for item in found.broken)


def as_question(case: Any, variant: Any, folder: Path) -> Path:
    """Return a report's variant as files: a job file with a plan, its model and its cluster."""
    data, _ = reports.row_like(case, variant)
    row = row_of(data, "reports", 0)
    job = row_job(row, source_year(row))
    plan = plan_of(row, job.model, job.framework, job.gpus)
    model = job.model.model_dump(mode="json", exclude_defaults=True)
    knobs = {knob: value for knob, value in plan_record(plan, job.gpus).items() if knob not in ("edp", "dp", "idle_tp")}
    document = {
        "model": "model.yaml",
        "cluster": "cluster.yaml",
        "framework": job.framework.name,
        "seq_len": job.seq_len,
        "global_batch": job.global_batch,
        "precision": job.precision,
        "attention": job.attention,
        "task": job.task,
        "plan": knobs,
    }
    files = {"question.yaml": yaml.safe_dump(document), "model.yaml": yaml.safe_dump(model), "cluster.yaml": cluster_text(job.cluster)}
    return lay(folder, files) / "question.yaml"


COMPLETE = [case for case in REPORTS if case["confidence"] == "complete" and case["kind"] in ("fit", "rank")]
FITS = [
    pytest.param(case, index, id=name(case, index), marks=[pytest.mark.xfail(strict=True)] if name(case, index) in WRONG_FIT else [])
    for case in COMPLETE
    if case["kind"] == "fit"
    for index in range(len(variants(case)))
    if trusted(case, index)
]


@pytest.mark.parametrize(("case", "index"), FITS)
def test_it_fits_or_not_as_reported(case: Any, index: int, tmp_path: Path) -> None:
    variant = variants(case)[index]
    found = one(tuner.check(as_question(case, variant, tmp_path), no_search=True))
    seen = reports.seen(case, variant, "auto").fits
    assert found.estimate is not None, found.problems
    assert found.estimate.cost.fits == seen
    if not seen:
        assert found.exit_code == 3
        assert "stage" in found.why_not_fit


@pytest.mark.parametrize("case", [case for case in COMPLETE if case.get("order")], ids=lambda case: case["id"])
def test_ranked_reports_keep_their_order(case: Any, tmp_path: Path) -> None:
    said = {v["name"]: one(tuner.check(as_question(case, v, tmp_path / v["name"]), no_search=True)) for v in variants(case)}
    seen = {v["name"]: reports.seen(case, v, "auto").speed for v in variants(case)}
    for better, worse in combinations(case["order"], 2):
        close = seen[better] and seen[worse] and seen[better] / seen[worse] < APART
        if close or f"{case['id']}/{better}>{worse}" in WRONG_ORDER:
            continue
        fast, slow = said[better].estimate, said[worse].estimate
        assert fast and slow
        assert fast.cost.tokens_per_s_per_gpu > slow.cost.tokens_per_s_per_gpu, (better, worse)


# --- what files say and what options say


def test_a_megatron_script_is_judged_and_mended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: tp 8, pp 4 of 64 GPUs leave dp 2; the script says no vocabulary, and its dimensions are those of Llama 3 70B (or 2)."""
    monkeypatch.chdir(lay(tmp_path, {"pretrain.sh": MEGATRON}))
    answer = tuner.check("pretrain.sh", cluster="h100", fix=True)
    found = one(answer)
    assert found.job is not None and found.plan is not None
    assert (found.job.gpus, found.job.global_batch, found.job.seq_len) == (64, 512, 8192)
    assert (found.plan.tp, found.plan.pp, int(found.plan.dp(64))) == (8, 4, 2)
    assert "model.vocab" in found.assumed and "zero" in found.assumed
    assert [(item.name, item.value) for item in found.unknown] == [("--frobnicate", "3")]
    assert found.status == "slower" and answer.exit_code == 3
    assert found.better is not None and found.better.gain is not None and found.better.gain > 1.1
    assert found.patch is not None and found.patch.edited
    apply(answer.diff, tmp_path)
    changed = (tmp_path / "pretrain.sh").read_text()
    assert f"TP={found.better.plan.tp}\n" in changed and "--tensor-model-parallel-size $TP" in changed  # the variable, not the flag
    after = one(tuner.check("pretrain.sh", cluster="h100"))
    assert after.plan == found.better.plan
    assert after.status == "ok" and [item.name for item in after.unknown] == ["--frobnicate"]


def apply(diff: str, folder: Path) -> None:
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    done = subprocess.run(["git", "apply", "-"], cwd=folder, input=diff, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_file_wins_over_the_option_and_says_so(tmp_path: Path) -> None:
    lay(tmp_path, {"pretrain.sh": MEGATRON})
    found = one(tuner.check(tmp_path / "pretrain.sh", cluster="h100x32", global_batch=256, model="llama3-8b", no_search=True))
    assert found.job is not None
    assert (found.job.gpus, found.job.global_batch, found.job.model.layers) == (64, 512, 80)
    text = "\n".join(found.contradictions)
    assert all(word in text for word in ("gpus: the file says 64", "global_batch: the file says 512", "model: the file says"))


def test_what_is_missing_is_asked_for_with_its_option(tmp_path: Path) -> None:
    lay(tmp_path, {"pretrain.sh": MEGATRON})
    found = one(tuner.check(tmp_path / "pretrain.sh"))
    assert found.status == "unclear" and found.exit_code == 2
    assert [(problem.path, "-c" in problem.hint) for problem in found.problems] == [("GPU", True)]


@pytest.mark.parametrize(
    ("line", "gpu"),
    [
        ("--gres=gpu:h100:8", "h100-sxm-80gb"),
        ("--gpus-per-node=a100:8", "a100-sxm-80gb"),
        ("--constraint=h200", "h200-sxm-141gb"),
        ("--gres=gpu:8", None),
        ("--constraint=fast", None),
    ],
)
def test_the_kind_of_gpu_may_stand_in_the_slurm_header(line: str, gpu: str | None, tmp_path: Path) -> None:
    lay(tmp_path, {"run.slurm": MEGATRON.replace("#!/bin/bash\n", f"#!/bin/bash\n#SBATCH --nodes=8\n#SBATCH {line}\n")})
    found = one(tuner.check(tmp_path / "run.slurm", no_search=True))
    assert (found.job.cluster.gpu.name if found.job else None) == gpu
    told = one(tuner.check(tmp_path / "run.slurm", cluster="b200", no_search=True))  # an option is meant
    assert told.job is not None and told.job.cluster.gpu.name == "b200-sxm-180gb"


def test_a_rule_is_told_with_the_line_of_its_flag_and_the_nearest_value(tmp_path: Path) -> None:
    lay(tmp_path, {"pretrain.sh": MEGATRON.replace("TP=8", "TP=16").replace("64 \\", "72 \\").replace("PP=4", "PP=4")})
    found = one(tuner.check(tmp_path / "pretrain.sh", cluster="h100", no_search=True))
    (rule,) = (item for item in found.broken if item.rule == "heads-tp")
    assert "tp = 16 must divide heads = 72" in rule.text and "pretrain.sh:5" in rule.text and "nearest tp: 8" in rule.text


def test_no_mesh_is_illegal_and_not_bad_input(tmp_path: Path) -> None:
    lay(tmp_path, {"pretrain.sh": MEGATRON.replace("PP=4", "PP=5")})
    answer = tuner.check(tmp_path / "pretrain.sh", cluster="h100", fix=True)
    found = one(answer)
    assert "mesh" in broken(found) and found.estimate is None and answer.exit_code == 3
    assert found.better is not None and found.better.gain is None and found.patch is not None


def test_the_worst_launch_decides_and_folders_are_walked(tmp_path: Path) -> None:
    files = {
        "good/plan.yaml": "model: tiny\ncluster: h100x8\nseq_len: 128\nglobal_batch: 64\nplan: tp=1\n",
        "bad/plan.yaml": "model: tiny\ncluster: h100x8\nseq_len: 128\nglobal_batch: 64\nplan: tp=3\n",
        "notes.txt": "nothing",
        "other.yaml": "a: 1\n",
        ".git/pretrain.sh": MEGATRON,
        "blob.sh": "\0\1",
    }
    lay(tmp_path, files)
    answer = tuner.check(tmp_path, no_search=True)
    assert {Path(item.files[0]).parent.name: item.status for item in answer.checked} == {"good": "ok", "bad": "illegal"}
    assert answer.exit_code == 3
    assert answer.skipped == {"of no known format": 2, "unreadable or binary": 1}
    assert tuner.check(tmp_path / "good", no_search=True).exit_code == 0


def test_a_script_goes_with_the_configuration_it_names(tmp_path: Path) -> None:
    lay(tmp_path, {**INVALID[0]["files"]})
    for paths in (tmp_path, tmp_path / "launch.sh", [tmp_path / "ds_config.json", tmp_path / "launch.sh"]):
        found = one(tuner.check(paths, no_search=True))
        assert {Path(path).name for path in found.files} == {"launch.sh", "ds_config.json", "config.json"}
        assert found.format == "deepspeed" and "heads-tp" in broken(found)


def test_launches_of_one_job_share_a_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tuner.search.exhaustive as exhaustive

    sweeps = []
    sweep = exhaustive.sweep
    monkeypatch.setattr(exhaustive, "sweep", lambda *args, **more: sweeps.append(1) or sweep(*args, **more))
    text = "model: tiny\ncluster: h100x8\nseq_len: 128\nglobal_batch: 64\nplan: tp={}\n"
    lay(tmp_path, {f"{tp}.yaml": text.format(tp) for tp in (1, 2, 4)})
    answer = tuner.check(tmp_path)
    assert len(answer.checked) == 3 and len(sweeps) == 1


@pytest.mark.parametrize(("text", "value"), [("10%", 0.1), ("0.2", 0.2), ("0", 0.0), (0.5, 0.5), ("150%", 1.5)])
def test_a_gap_is_a_share(text: Any, value: float) -> None:
    assert read_gap(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["-1%", "much", "20", True, "nan", "inf"])
def test_a_wrong_gap_is_refused(text: Any) -> None:
    with pytest.raises(SpecError):
        read_gap(text)


BASE = (
    "--num-layers 24 --hidden-size 2048 --ffn-hidden-size 8192 --num-attention-heads 16 --vocab-size 50304 --seq-length 2048 "
    "--micro-batch-size 1 --global-batch-size 64 --bf16 "
)
MOE = "--num-experts 8 --moe-router-topk 2 --moe-shared-expert-intermediate-size 2048 "
# A launch of 8 GPUs, and the rule that it breaks (Megatron-LM's own file and line stand with each rule).
RULES = {
    "heads-tp": BASE.replace("heads 16", "heads 12") + "--tensor-model-parallel-size 8",
    "kv-heads-tp": BASE + "--group-query-attention --num-query-groups 2 --num-attention-heads 18 --hidden-size 2304 "
    "--tensor-model-parallel-size 3",
    "layers-pp-vpp": BASE.replace("layers 24", "layers 46") + "--pipeline-model-parallel-size 4",
    "vpp-microbatches": BASE.replace("size 64", "size 12") + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2",
    "vpp-p2p": BASE + "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --no-overlap-p2p-communication",
    "vpp-pp": BASE + "--num-virtual-stages-per-pipeline-rank 2",
    "vpp-group": BASE + "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2 "
    "--microbatch-group-size-per-virtual-pipeline-stage 3",
    "batch": BASE.replace("size 64", "size 60"),
    "mesh": BASE + "--tensor-model-parallel-size 16",
    "seq-cp": BASE.replace("length 2048", "length 2052") + "--context-parallel-size 8",
    "seq-sp": BASE.replace("length 2048", "length 2050") + "--tensor-model-parallel-size 4 --sequence-parallel",
    "heads-cp": BASE.replace("heads 16", "heads 4") + "--context-parallel-size 8 --cp-comm-type a2a",
    "tp-overlap-sp": BASE + "--tensor-model-parallel-size 2 --tp-comm-overlap",
    "moe-tp-sp": BASE + MOE + "--tensor-model-parallel-size 2 --expert-model-parallel-size 2",
    "experts-ep": BASE + MOE.replace("experts 8", "experts 12") + "--expert-model-parallel-size 8",
    "dense-experts": BASE + "--expert-model-parallel-size 2",
    "recompute": BASE + "--recompute-granularity full",
    "zero-pp-megatron": BASE + "--pipeline-model-parallel-size 2 --use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params",
    "offload-activations": BASE + "--pipeline-model-parallel-size 2 --cpu-offloading-num-layers 4",
    "saved-activations-sp": BASE + "--tensor-model-parallel-size 2 --sequence-parallel --distribute-saved-activations",
    "hybrid-cp": BASE + "--pipeline-model-parallel-size 2 --hybrid-context-parallel",
    "shared-expert-overlap": BASE
    + MOE
    + "--moe-shared-expert-overlap --recompute-granularity selective --recompute-modules shared_experts",
    "ramp-up": BASE + "--rampup-batch-size 6 6 1000",
}


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_found_in_a_script_and_mended(rule: str, tmp_path: Path) -> None:
    lay(tmp_path, {"run.sh": f"#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py {RULES[rule]}\n"})
    found = one(tuner.check(tmp_path / "run.sh", cluster="h100", no_search=True))
    assert rule in broken(found), found.broken
    assert found.status == "illegal" and found.exit_code == 3
    said = next(item for item in found.broken if item.rule == rule)
    assert (said.source and "run.sh:2" in said.text) or rule in ("ramp-up", "precision")


@pytest.mark.parametrize("rule", ["heads-tp", "layers-pp-vpp", "vpp-p2p", "batch", "mesh", "moe-tp-sp", "recompute", "ramp-up"])
def test_an_illegal_script_is_mended_by_changing_few_lines(rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = RULES[rule].strip().replace(" --", " \\\n    --")
    monkeypatch.chdir(lay(tmp_path, {"run.sh": f"#!/bin/bash\ntorchrun --nproc_per_node 8 pretrain_gpt.py \\\n    {words}\n"}))
    answer = tuner.check("run.sh", cluster="h100", fix=True)
    patch = one(answer).patch
    assert patch is not None and patch.edited
    apply(answer.diff, tmp_path)
    after = one(tuner.check("run.sh", cluster="h100", no_search=True))
    if rule == "ramp-up":  # no plan mends it
        assert broken(after) == {rule} and any("still broken" in note for note in patch.notes)
    else:
        assert after.status == "ok", after.broken
    changed = [line for line in answer.diff.splitlines() if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")]
    assert len(changed) <= 12, answer.diff


def test_a_launch_that_breaks_no_rule_is_legal(tmp_path: Path) -> None:
    groups = "--pipeline-model-parallel-size 4 --num-virtual-stages-per-pipeline-rank 2"
    fine = {
        "plain.sh": BASE,
        "groups.sh": f"{BASE.replace('size 64', 'size 12')}{groups} --microbatch-group-size-per-virtual-pipeline-stage 6",
        "moe.sh": BASE + MOE + "--expert-model-parallel-size 8 --moe-shared-expert-overlap",
    }
    lay(tmp_path, {name: f"torchrun --nproc_per_node 8 pretrain_gpt.py {words}\n" for name, words in fine.items()})
    for found in tuner.check(tmp_path, cluster="h100", no_search=True).checked:
        assert found.status == "ok" and not broken(found), found


def test_zero_2_with_a_pipeline_of_deepspeed_is_refused(tmp_path: Path) -> None:
    config = '{"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 2}, "pipeline": {"stages": 2}}'
    lay(tmp_path, {"ds_config.json": config})
    found = one(
        tuner.check(tmp_path / "ds_config.json", model="llama3-8b", cluster="h100x8", seq_len=2048, global_batch=64, no_search=True)
    )
    assert broken(found) == {"zero-pp-deepspeed"}


def test_a_script_of_megatron_deepspeed_has_its_own_framework(tmp_path: Path) -> None:
    """By hand, of BLOOM's run: tp 4, pp 12 of 384 GPUs leave dp 8; 70 layers, embedding and loss are dealt to 12 stages of 6."""
    words = (
        "--num-layers 70 --hidden-size 14336 --num-attention-heads 112 --seq-length 2048 --micro-batch-size 2 --global-batch-size 2048 "
        "--bf16 --position-embedding-type alibi --embed-layernorm --pad-vocab-size-to 250880 "
        "--pp-partition-method 'type:transformer|embedding' "
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 12 --checkpoint-activations --deepspeed --zero-stage 0"
    )
    lay(tmp_path, {"bloom.slurm": f"#!/bin/bash\nsrun torchrun --nnodes 48 --nproc_per_node 8 pretrain_gpt.py {words}\n"})
    found = one(tuner.check(tmp_path / "bloom.slurm", cluster="a100", no_search=True))
    assert found.framework == "megatron-deepspeed" and found.status == "ok" and not found.unknown
    assert found.job is not None and found.plan is not None
    assert (int(found.plan.dp(384)), found.plan.zero, found.job.model.positions, found.job.model.vocab) == (8, 1, "alibi", 250880)


# --- edits of each launcher's own files


def uneven_plans(launcher: Launcher, model: str, count: int) -> list[tuple[Plan, dict[str, str]]]:
    job = job_of("megatron-lm" if launcher.framework == "generic" else launcher.framework, model)
    found: list[tuple[Plan, dict[str, str]]] = []
    for plan in reversed(plans_of(launcher, model)):
        version = launcher.versions[len(found) % len(launcher.versions)] if launcher.versions else ""
        try:
            files = dict(launcher.write(job, plan, version).files)
        except SpecError:
            continue
        found.append((plan, files))
        if len(found) == count:
            break
    return found


def test_each_launcher_is_read_judged_and_edited_to_the_best_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exporter wrote with some plan: nothing is lost, and the diff gives files that read back as the plan that was found."""
    edited: dict[str, list[bool]] = {}
    for kind in BUILT_IN:
        launcher = open_launcher(kind)
        for number, (plan, files) in enumerate(uneven_plans(launcher, "llama3-8b", 2)):
            folder = lay(tmp_path / f"{kind}-{number}", files)
            monkeypatch.chdir(folder)
            answer = tuner.check(".", cluster="h100", fix=True)
            found = one(answer)
            assert found.format == kind and found.plan is not None and not found.unknown, found
            assert same_degrees(found.plan, plan), kind
            if found.patch is None:
                assert found.status == "ok"
                continue
            edited.setdefault(kind, []).append(found.patch.edited)
            apply(answer.diff, folder)
            after = one(tuner.check(".", cluster="h100"))
            assert after.status == "ok", (kind, after)
            assert found.better is not None and after.plan is not None and same_degrees(after.plan, found.better.plan)
    assert len(edited) >= len(BUILT_IN) - 1
    flat = [each for found in edited.values() for each in found]
    assert sum(flat) >= 0.8 * len(flat), edited  # the rest is written anew


def same_degrees(one: Plan, other: Plan) -> bool:
    return all(
        int(getattr(one, knob)) == int(getattr(other, knob)) for knob in ("tp", "pp", "cp", "ep", "micro_batch", "recompute", "zero")
    )


def test_every_launcher_can_be_forced(tmp_path: Path) -> None:
    lay(tmp_path, {"run.txt": MEGATRON})
    assert one(tuner.check(tmp_path / "run.txt", no_search=True)).status == "unclear"
    found = one(tuner.check(tmp_path / "run.txt", format="megatron-lm", cluster="h100", no_search=True))
    assert found.format == "megatron-lm" and found.job is not None and found.job.gpus == 64
    assert {entry for entry, known in launchers().items() if known.make} >= set(BUILT_IN)


def test_a_known_model_of_the_same_dimensions_fills_in_the_vocabulary(tmp_path: Path) -> None:
    """Llama 2 70B and Llama 3 70B have the same dimensions: the one that the script names is taken."""
    lay(tmp_path, {"llama2.sh": MEGATRON, "llama3.sh": MEGATRON})
    for family, vocab in (("llama2", 32000), ("llama3", 128256)):
        found = one(tuner.check(tmp_path / f"{family}.sh", cluster="h100", no_search=True))
        assert found.job is not None and found.job.model.vocab == vocab == presets.model(f"{family}-70b").vocab


def test_a_script_that_starts_another_is_checked_as_that_one(tmp_path: Path) -> None:
    """A batch script, by way of what each node runs; a launch script with the Python module that it names."""
    question: dict[str, Any] = {"model": "llama3-8b", "cluster": "h100x16", "seq_len": 8192, "global_batch": 64, "calibration": "none"}
    files = tuner.export("torchtitan", wrap="slurm", plan="zero=3,recompute=full", **question).files()
    for path, (text, _) in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    for path in (tmp_path, tmp_path / "torchtitan/job.sbatch"):
        (launch,) = tuner.check([str(path)], cluster="h100", no_search=True).record()["checked"]
        assert (launch["status"], launch["plan"]["zero"]) == ("ok", 3)
        assert [Path(name).name for name in launch["files"]] == ["train.sh", "tuner_run.py"]
