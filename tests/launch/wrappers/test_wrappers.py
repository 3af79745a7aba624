"""Wrappers around a launcher's files: what they tell each node, how they quote, and what the schedulers' schemas ask for."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.jobs import llama_job
from tests.services import missing
from tests.slurm.cluster import slurm
from tuner import presets
from tuner.errors import SpecError
from tuner.launch.launchers.launcher import Written
from tuner.launch.site import Container, Site
from tuner.launch.wrappers.wrapper import BUILT_IN, label, wrapped

if TYPE_CHECKING:
    from pathlib import Path

    from tuner.job import Job

PRINTS = '#!/bin/bash\nprintf \'%s\\n\' "$NNODES $NODE_RANK $GPUS_PER_NODE $PET_NPROC_PER_NODE $PET_NODE_RANK" >"place-$NODE_RANK"\n'
LAUNCH = Written(files={"launch.sh": PRINTS, "model/config.json": "{}\n"}, programs=("launch.sh",), start="bash launch.sh", notes=("a",))
SITE = Site(container=Container(image="ghcr.io/x/y:1"), environment={"HF_TOKEN": "hf_secretsecretsecret", "LANG": "C; echo 'x'"})
EVIL = "$(touch evil)`touch evil`;'\"#x"


def job(gpus: int = 16, cluster: str = "h100") -> Job:
    return llama_job(cluster=presets.cluster(f"{cluster}x{gpus}"))


def files(name: str, site: Site = SITE, the_job: Job | None = None) -> Written:
    return wrapped(name, the_job or job(), LAUNCH, site, "Llama3 70B!")


def lay(written: Written, folder: Path) -> None:
    for name, text in written.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def refused(name: str, site: Site = SITE, the_job: Job | None = None) -> str:
    with pytest.raises(SpecError) as error:
        files(name, site, the_job)
    return str(error.value)


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_launchers_own_files_stay_as_they_are(name: str) -> None:
    written = files(name)
    assert {file: written.files[file] for file in LAUNCH.files} == dict(LAUNCH.files)
    assert set(written.programs) >= {"launch.sh", "node.sh"} and written.start != LAUNCH.start
    assert written.notes[0] == "a" and all(text.endswith("\n") for text in written.files.values())


@pytest.mark.parametrize("name", BUILT_IN)
def test_secrets_are_written_nowhere(name: str) -> None:
    text = "".join(files(name).files.values())
    assert "hf_secret" not in text and "HF_TOKEN" in text


@pytest.mark.parametrize("name", BUILT_IN)
def test_scripts_are_clean(name: str, tmp_path: Path) -> None:
    if shutil.which("shellcheck") is None:
        missing("shellcheck", "shellcheck")
    site = SITE if name != "torchrun" else Site(modules=("cuda/12", EVIL), environment={"A": EVIL})
    lay(files(name, site), tmp_path)
    scripts = [str(path) for path in tmp_path.iterdir() if path.suffix in (".sh", ".sbatch")]
    # SC2016: a $ of a value stays as it is, on purpose
    done = subprocess.run(["shellcheck", "--shell=bash", "--exclude=SC2016", *scripts], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_a_file_that_both_write_is_refused() -> None:
    with pytest.raises(SpecError, match="is written by the launcher as well"):
        wrapped("slurm", job(), replace(LAUNCH, files={"job.sbatch": "x\n"}), SITE, "x")


def test_names_become_labels() -> None:
    assert label("Llama3 70B!") == "llama3-70b"
    assert label("70B") == "t-70b"
    assert label("x" * 100) == "x" * 40
    assert label("a" * 39 + "-b") == "a" * 39


def test_node_script_sets_a_nodes_place_and_quotes_what_the_site_says(tmp_path: Path) -> None:
    site = Site(environment={"WORD": EVIL, "HF_TOKEN": "hf_secretsecretsecret"}, pre_commands=('printf "%s" "$WORD" >word',))
    lay(files("torchrun", site), tmp_path)
    env = os.environ | {"NODE_RANK": "1", "HF_TOKEN": "x"}
    subprocess.run(["bash", str(tmp_path / "node.sh")], check=True, env=env, cwd=tmp_path)
    assert (tmp_path / "place-1").read_text() == "2 1 8 8 1\n"
    assert (tmp_path / "word").read_text() == EVIL and not (tmp_path / "evil").exists()
    done = subprocess.run(
        ["bash", str(tmp_path / "node.sh")], check=False, capture_output=True, text=True, env=os.environ | {"HF_TOKEN": ""}, cwd=tmp_path
    )
    assert done.returncode and "HF_TOKEN" in done.stderr


def test_one_node_needs_no_rank_and_several_do() -> None:
    assert files("torchrun", the_job=job(8)).start == "bash node.sh"
    assert files("torchrun").start == "MASTER_ADDR=FIRST_NODE NODE_RANK=0..1 bash node.sh"


def directives(site: Site) -> list[str]:
    return [line.removeprefix("#SBATCH ") for line in files("slurm", site).files["job.sbatch"].splitlines() if line.startswith("#SBATCH")]


def test_slurm_header_by_hand() -> None:
    site = Site(account="ai", partition="h100", gpus="gres", gpu_type="h100", cpus_per_task=96, requeue=False, slurm_options=("--mem=0",))
    assert directives(site) == [
        "--job-name=llama3-70b",
        "--nodes=2",
        "--gres=gpu:h100:8",
        "--cpus-per-task=96",
        "--ntasks-per-node=1",
        "--output=slurm-%j.log",
        "--no-requeue",
        "--account=ai",
        "--partition=h100",
        "--mem=0",
    ]


@pytest.mark.parametrize("value", [EVIL, "a b", 'a"b', "a#b", "a\\b"])
def test_what_a_batch_scripts_header_cannot_hold_is_refused(value: str) -> None:
    assert "--account" in refused("slurm", Site(account=value))


def test_containers_of_slurm_get_the_folder() -> None:
    text = files("slurm", Site(container=Container(image=f"docker://{EVIL}", mounts=("/data:/data",)))).files["job.sbatch"]
    assert "--container-workdir" in text and '--container-mounts=/data:/data,"$SLURM_SUBMIT_DIR:$SLURM_SUBMIT_DIR"' in text


def test_slurm_runs_the_launch_once_on_each_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with slurm(nodes=2, gpus=4) as cluster:
        monkeypatch.setenv("SLURM_CONF", str(cluster.conf))
        small = llama_job(cluster=presets.cluster("h100x16"))
        lay(wrapped("slurm", small, LAUNCH, Site(gpus="none", environment={"A": EVIL}), "x"), tmp_path)
        subprocess.run(["sbatch", "--test-only", "job.sbatch"], cwd=tmp_path, check=True)
        subprocess.run(["sbatch", "--wait", "job.sbatch"], cwd=tmp_path, check=True, timeout=60)
    assert [(tmp_path / f"place-{rank}").read_text() for rank in (0, 1)] == ["2 0 8 8 0\n", "2 1 8 8 1\n"]


def document(written: Written, name: str) -> Any:
    read = yaml.safe_load(written.files[name])
    assert json.loads(json.dumps(read)) == read  # JSON's types: what an API server takes
    return read


def pods(written: Written) -> list[Any]:
    jobset = document(written, "jobset.yaml")["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    torch = document(written, "pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    return [jobset, *(torch[kind]["template"]["spec"] for kind in ("Master", "Worker"))]


def test_jobset_by_hand() -> None:
    jobset = document(files("kubernetes"), "jobset.yaml")
    assert (jobset["apiVersion"], jobset["kind"], jobset["metadata"]["name"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet", "llama3-70b")
    (replicated,) = jobset["spec"]["replicatedJobs"]
    work = replicated["template"]["spec"]
    assert (replicated["replicas"], work["parallelism"], work["completions"], work["completionMode"]) == (1, 2, 2, "Indexed")
    variables = {each["name"]: each.get("value") for each in work["template"]["spec"]["containers"][0]["env"]}
    assert variables["MASTER_ADDR"] == "llama3-70b-nodes-0-0.llama3-70b"
    assert (variables["NNODES"], variables["GPUS_PER_NODE"]) == ("2", "8")


def test_pytorchjob_by_hand() -> None:
    torch = document(files("kubernetes"), "pytorchjob.yaml")
    assert (torch["apiVersion"], torch["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    replicas = torch["spec"]["pytorchReplicaSpecs"]
    assert {kind: each["replicas"] for kind, each in replicas.items()} == {"Master": 1, "Worker": 1}
    assert torch["spec"]["nprocPerNode"] == "8"
    assert "Worker" not in document(files("kubernetes", the_job=job(8)), "pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]


def test_pods_get_the_files_as_they_are_and_the_accelerators() -> None:
    written = files("kubernetes")
    config = document(written, "files.yaml")
    for pod in pods(written):
        (container,) = pod["containers"]
        assert container["name"] == "pytorch" and container["resources"]["limits"] == {"nvidia.com/gpu": 8}
        assert {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "llama3-70b-secrets", "key": "HF_TOKEN"}}} in container["env"]
        (volume,) = [each["configMap"] for each in pod["volumes"] if "configMap" in each]
        mounted = {item["path"]: config["data"][item["key"]] for item in volume["items"]}
        assert mounted == {**LAUNCH.files, "node.sh": written.files["node.sh"]}
        assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    assert pods(files("kubernetes", the_job=job(16, "mi300x")))[0]["containers"][0]["resources"]["limits"] == {"amd.com/gpu": 8}


def test_the_pods_command_starts_the_launch(tmp_path: Path) -> None:
    """As a pod would, with its mounts moved into a folder."""
    written = files("kubernetes", Site(container=Container(image="x")))
    (tmp_path / "work").mkdir()
    lay(Written(files={f"files/{name}": text for name, text in written.files.items()}), tmp_path)
    command = pods(written)[0]["containers"][0]["command"]
    script = command[2].replace("/files", f"{tmp_path}/files").replace("/work", f"{tmp_path}/work")
    subprocess.run([*command[:2], script], check=True, env=os.environ | {"JOB_COMPLETION_INDEX": "1", "NNODES": "2"})
    assert (tmp_path / "work/place-1").read_text() == "2 1 8 8 1\n"


def test_kubernetes_needs_an_image_and_files_that_fit() -> None:
    assert "container.image: is missing" in refused("kubernetes", Site())
    large = replace(LAUNCH, files={"launch.sh": "x" * 1_100_000 + "\n"})
    with pytest.raises(SpecError, match="ConfigMap"):
        wrapped("kubernetes", job(), large, SITE, "x")


def test_skypilot_by_hand(tmp_path: Path) -> None:
    written = files("skypilot", Site(container=Container(image="x:1"), environment={"HF_TOKEN": "hf_secretsecretsecret"}))
    task = document(written, "skypilot.yaml")
    run = task.pop("run")
    assert task == {
        "name": "llama3-70b",
        "num_nodes": 2,
        "workdir": ".",
        "resources": {"accelerators": "H100:8", "image_id": "docker:x:1"},
        "secrets": {"HF_TOKEN": None},
    }
    lay(written, tmp_path)
    names = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": "1",
        "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    }
    subprocess.run(["bash", "-c", run], check=True, cwd=tmp_path, env=os.environ | names | {"HF_TOKEN": "x"})
    assert (tmp_path / "place-1").read_text() == "2 1 8 8 1\n"
    assert "no name in SkyPilot's catalog" in refused("skypilot", the_job=job(16, "gaudi3"))


def test_gpus_that_do_not_fill_their_nodes_evenly_are_refused() -> None:
    odd = job().model_copy(update={"cluster": presets.cluster("h100x16").replace(gpus=9)})
    assert all("evenly" in refused(name, the_job=odd) for name in BUILT_IN)


def test_an_unknown_wrapper_offers_the_nearest() -> None:
    assert "did you mean slurm?" in refused("slrum")
