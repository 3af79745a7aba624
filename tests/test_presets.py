import time
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import SpecError
from tuner.load import load_yaml
from tuner.presets import KINDS, cluster, configs_dir, failure, find, framework, gpu, model, names, with_gpus

READERS = {"gpus": gpu, "clusters": cluster, "models": model, "frameworks": framework, "failures": failure}
PRESETS = [(kind, name) for kind in READERS for name in names(kind)]


@pytest.mark.parametrize(("kind", "name"), PRESETS)
def test_every_preset_is_valid_and_named_as_its_file(kind: str, name: str) -> None:
    assert READERS[kind](name).name == name


@pytest.mark.parametrize("kind", READERS)
def test_no_name_means_two_things(kind: str) -> None:
    known: dict[str, str] = {}
    for path in (configs_dir() / kind).glob("*.yaml"):
        for name in [path.stem, *load_yaml(path).get("aliases", [])]:
            assert name.lower() == name, name
            assert known.setdefault(name, path.stem) == path.stem, name


def test_what_the_presets_cover() -> None:
    gpus = "v100-sxm2-16gb v100-sxm2-32gb a100-sxm-40gb a100-sxm-80gb a800 h100-sxm-80gb h100-pcie h800 h20 h200 b200 b300 gb200 gb300"
    for name in (gpus + " mi300x mi325x mi355x tpu-v4 tpu-v5e tpu-v5p trillium trainium2").split():
        assert gpu(name).memory.source
    models = (
        "gpt3-175b gpt-22b gpt-145b gpt-530b gpt-1t bloom-176b mt-nlg-530b llama2-7b llama2-13b llama2-70b llama3-8b llama3-70b llama3-405b"
    )
    models += " mixtral-8x7b mixtral-8x22b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b deepseek-v3 gpt-oss-20b gpt-oss-120b kimi-k2"
    for name in (models + " nemotron-4-15b nemotron-4-340b tiny").split():
        assert model(name).source
    clusters = (
        "dgx-a100 dgx-h100 dgx-h200 dgx-b200 dgx-b300 gb200-nvl72 gb300-nvl72 hgx-h100-200g-ib hgx-h100-400g-eth hgx-b200-800g-ib aws-p5"
    )
    for name in clusters.split():
        assert cluster(name).domains


@pytest.mark.parametrize(
    "spelling",
    [
        "a100",
        "a100-sxm-40gb",
        "a800-80gb",
        "b200",
        "b200?",
        "gb200",
        "gb300",
        "h100-sxm-95gb-hbm2e-500w",
        "h100-sxm-96gb-hbm2e-500w",
        "h200-sxm-141gb",
        "h800-80gb",
        "tpu-v5e",
        "tpu-v5p",
        "trillium",
        "v100-16gb",
        "v100-32gb",
        "H100",
        "h100_sxm_80gb",
    ],
)
def test_spellings_of_published_runs(spelling: str) -> None:
    assert gpu(spelling).name in names("gpus")
    assert cluster(f"{spelling}x8" if "?" not in spelling else "b200x8").gpu.name == gpu(spelling).name


def test_failure_data_is_what_its_papers_say() -> None:
    """Llama 3: 419 interruptions of 16,384 GPUs in 54 days. Meta's RSC: failures per 1,000 node-days of 8 GPUs. 18 min on 98,304 GPUs."""
    hours = {name: failure(name).mtbf.value / 3600 for name in names("failures")}
    assert hours["llama3-herd"] == pytest.approx(16384 * 54 * 24 / 419, rel=1e-4)
    assert hours["meta-rsc-1"] == pytest.approx(8 * 24 * 1000 / 6.50, rel=1e-4)
    assert hours["meta-rsc-2"] == pytest.approx(8 * 24 * 1000 / 2.34, rel=1e-4)
    assert hours["meta-ft-hsdp-100k"] == pytest.approx(98304 * 18 / 60, rel=1e-4)
    assert hours["gb200-nvl72"] == pytest.approx(hours["llama3-herd"] / 3, rel=1e-4)


def test_a_bare_a100_has_80_gb() -> None:
    assert gpu("a100").name == "a100-sxm-80gb"
    assert gpu("a100").memory.value == 85094039552  # 79.25 GiB as PyTorch reports it
    assert gpu("a100").peak["bf16"].value == 312e12
    assert gpu("h100").peak["bf16"].value == 989.4e12


def test_a_card_with_a_lower_cap_says_so() -> None:
    card = gpu("h100-sxm-96gb-hbm2e-500w")
    assert card.power_cap is not None and card.power_cap.value == 500
    assert card.power is not None and card.power.value == 700


@pytest.mark.parametrize(
    ("text", "gpus", "node", "sizes"),
    [
        ("h100x1024", 1024, 8, (8, 1024)),
        ("H100X64", 64, 8, (8, 64)),
        ("dgx-h100:64", 64, 8, (8, 64)),
        ("h100", 8, 8, (8, 8)),
        ("h100x1", 1, 1, (1, 1)),
        ("h100x4", 4, 4, (4, 4)),
        ("a100x1024", 1024, 8, (8, 1024)),
        ("gb300-nvl72x288", 288, 4, (72, 288)),
        ("gb200x64", 64, 4, (64, 64)),
        ("gb200x256", 256, 4, (64, 256)),  # 64 of each rack's 72, so that groups of 2^n stay inside racks
        ("gb200x100", 100, 4, (20, 100)),
        ("mi300x", 8, 8, (8, 8)),
        ("mi300x64", 64, 8, (8, 64)),
        ("mi300xx64", 64, 8, (8, 64)),
        ("trilliumx512", 512, 4, (256, 512)),
        ("trn2x64", 64, 16, (16, 64)),
    ],
)
def test_clusters_by_count(text: str, gpus: int, node: int, sizes: tuple[int, ...]) -> None:
    found = cluster(text)
    assert (found.gpus, found.gpus_per_node, found.sizes) == (gpus, node, sizes)
    assert found == with_gpus(cluster(text), gpus).replace(name=found.name)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("h100x12", "gpus = 12: must be whole nodes of 8 GPUs, or part of one node (nearest: 8 or 16)"),
        ("h100x0", "gpus = 0: must be whole nodes"),
        ("h100x999999999", "gpus = 999999999: must be"),
        ("h100x80000000", "gpus = 80000000: must be at most 10000000"),
        ("h10x8", "no such cluster (did you mean h100?"),
        ("h100x", "no such cluster"),
        ("x8", "no such cluster"),
        ("", "no such cluster"),
        ("no/such.yaml", "no such file"),
        ("../../no-such", "no such file"),
        ("~no-such-user/x", "unknown user"),
        ("x" * 10_000, "no such cluster"),
    ],
)
def test_wrong_clusters(text: str, says: str) -> None:
    with pytest.raises(SpecError) as caught:
        cluster(text)
    assert says in str(caught.value)


@pytest.mark.parametrize("kind", READERS)
def test_a_wrong_name_offers_the_nearest(kind: str) -> None:
    name = names(kind)[0]
    with pytest.raises(SpecError, match=f"did you mean {name}"):
        READERS[kind](name[:-1] + "q")


def test_a_cluster_file_names_a_preset_gpu(tmp_path: Path) -> None:
    data = yaml.safe_load((configs_dir() / "clusters" / "dgx-h100.yaml").read_text())
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(data | {"name": "mine", "gpus": 16, "price_per_gpu_hour": 2.5}))
    assert cluster(str(path)).gpu == gpu("h100")
    assert cluster(str(path)).price_per_gpu_hour == 2.5
    path.write_text(yaml.safe_dump(data | {"gpu": "h10"}))
    with pytest.raises(SpecError, match=r"mine.yaml: gpu: .*did you mean h100\?"):
        cluster(str(path))
    path.write_text(yaml.safe_dump(data | {"gpu": 3}))
    with pytest.raises(SpecError, match="gpu"):
        cluster(str(path))


def test_a_model_from_our_file_a_config_json_and_a_folder(tmp_path: Path) -> None:
    ours = tmp_path / "ours.yaml"
    ours.write_text((configs_dir() / "models" / "tiny.yaml").read_text())
    assert model(str(ours)) == model("tiny")
    config = Path(__file__).parent / "fixtures" / "hf" / "mistral-7b.json"
    folder = tmp_path / "Mistral-7B"
    folder.mkdir()
    (folder / "config.json").write_text(config.read_text())
    assert model(str(folder)).name == "Mistral-7B"
    assert model(str(folder)) == model(str(config)).replace(name="Mistral-7B")
    with pytest.raises(SpecError, match="is a folder"):
        model(str(tmp_path))


def test_a_hub_id_means_the_preset_of_that_name() -> None:
    assert model("Qwen/Qwen3-30B-A3B").name == "qwen3-30b-a3b"
    assert model("meta-llama/Llama-3.1-70B").name == "llama3-70b"
    with pytest.raises(SpecError, match="no such file"):
        model("meta-llama/Llama-9")


def test_a_result_of_ours_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "model.json"
    path.write_text(model("deepseek-v3").model_dump_json())
    assert model(str(path)) == model("deepseek-v3")


def test_one_preset_is_read_fast() -> None:
    cluster("dgx-h100")
    start = time.perf_counter()
    for _ in range(10):
        cluster("h100x1024"), model("gpt3-175b"), gpu("a100")
    assert (time.perf_counter() - start) / 10 < 0.1


def test_kinds_have_names() -> None:
    for kind in KINDS:
        assert names(kind) == sorted(names(kind))
    assert find("gpus", "A100").stem == "a100-sxm-80gb"


@settings(deadline=None)
@given(st.one_of(st.text(max_size=20), st.text(alphabet="h100x:/~. -agb*20nvl7", max_size=14)))
def test_any_text_is_a_preset_or_refused(text: str) -> None:
    for read in (cluster, model, gpu):
        try:
            read(text)
        except SpecError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),  # as nvidia-smi prints them
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("AMD Instinct MI300X", "mi300x"),
        ("TPU v5p", "tpu-v5p"),
        ("AWS Trainium2", "trainium2"),
    ],
)
def test_a_gpu_by_the_name_that_its_vendor_gives_it(text: str, name: str) -> None:
    assert gpu(text).name == name


@pytest.mark.parametrize("kind", KINDS)
def test_the_home_of_nobody(kind: str) -> None:
    with pytest.raises(SpecError, match=r"~nobody-of-that-name/x\.yaml: names the home folder of an unknown user"):
        find(kind, "~nobody-of-that-name/x.yaml")
