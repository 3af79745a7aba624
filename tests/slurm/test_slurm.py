"""What only Slurm does to a trial: node failures, requeueing, its own time limit, scancel by others, several nodes, odd names."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.launch.standin import FAKE, ended, interpreter, small_job, trial, until
from tests.slurm.cluster import Cluster, slurm
from tuner.errors import InfrastructureError
from tuner.launch.command import Command
from tuner.launch.runner import Setup, open_runner
from tuner.launch.site import Container, Site
from tuner.launch.slurm import SlurmJob, SlurmRunner
from tuner.launch.slurm_queue import job_state, steps
from tuner.launch.slurm_script import launch_script, sbatch_options
from tuner.launch.trial import read_result

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with slurm(nodes=5) as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.conf))
        yield started


def runner(tmp: Path, word: str, **changes: Any) -> SlurmRunner:
    quick: dict[str, Any] = {"grace_s": 0.3, "error_s": 0.5, "linger_s": 1.0, "every_s": 0.2}
    site = Site(python=interpreter(tmp), environment={"FAKE": word}, **changes.pop("site", {}))
    return SlurmRunner(site=site, **quick | changes)


def started(running: Any, folder: Path) -> SlurmJob:
    """Wait until the trial's program writes."""
    until(lambda: (folder / "log.txt").exists() and (folder / "log.txt").stat().st_size, 20)
    assert isinstance(running, SlurmJob)
    return running


@pytest.fixture(scope="module", autouse=True)
def past_its_limit(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """A job whose time limit, which Slurm looks at every half minute, runs out while the other tests run."""
    tmp = tmp_path_factory.mktemp("limit")
    job = started(runner(tmp, "slow").start(trial(tmp / "t", wall_s=500.0, steps=100_000)), tmp / "t")
    cluster.run("scontrol", "update", f"JobId={job.job}", "EndTime=now+1")
    return job


@pytest.fixture(scope="module", autouse=True)
def on_a_dead_node(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SlurmJob:
    """A job whose node's slurmd is killed: Slurm takes a while to see it."""
    tmp = tmp_path_factory.mktemp("dead")
    run = runner(tmp, "slow", site={"requeue": False}, exclude=("n1", "n2", "n3", "n4"))
    job = started(run.start(trial(tmp / "t", wall_s=500.0, steps=100_000)), tmp / "t")
    cluster.daemons["n5"].kill()
    cluster.daemons["n5"].wait()
    return job


def test_a_job_whose_node_goes_down_is_run_once_more_elsewhere(cluster: Cluster, tmp_path: Path) -> None:
    folder = tmp_path / "t"
    job = started(runner(tmp_path, "slow").start(trial(folder, steps=100_000)), folder)
    node = job_state(job.job).nodes[0]
    cluster.run("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    try:
        until(lambda: job_state(job.job).phase == "waiting" and job.poll() is None, 30)
        cluster.run("scontrol", "update", f"JobId={job.job}", "StartTime=now")
        until(lambda: (folder / "log.1.txt").exists() and job_state(job.job).phase == "running", 40)
        assert job_state(job.job).nodes != (node,)
        result = job.stop("enough")
        assert (result.end, result.attempts) == ("stopped", 2)
    finally:
        cluster.run("scontrol", "update", f"NodeName={node}", "State=RESUME")


def test_a_job_whose_supervisor_dies_says_so(tmp_path: Path) -> None:
    job = started(runner(tmp_path, "slow").start(trial(tmp_path / "t")), tmp_path / "t")
    os.kill(json.loads((tmp_path / "t" / "supervisor.json").read_text())["pid"], signal.SIGKILL)
    result = ended(job, 30)
    assert result.end == "infrastructure" and "exit code 137" in result.reason


def test_a_job_that_somebody_cancels_is_no_fault_of_the_plan(cluster: Cluster, tmp_path: Path) -> None:
    job = started(runner(tmp_path, "slow").start(trial(tmp_path / "t", steps=100_000)), tmp_path / "t")
    cluster.run("scancel", job.job)
    result = ended(job, 30)
    assert result.end == "infrastructure" and "cancelled by somebody else" in result.reason


def test_an_allocation_that_ends_under_a_trial_is_no_fault_of_the_plan(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.run("sbatch", "--parsable", "--nodes=1", "--gpus-per-node=4", "--output=/dev/null", "--wrap", "sleep 600").strip()
    until(lambda: job_state(job).phase == "running", 20)
    running = runner(tmp_path, "slow", allocation=job).start(trial(tmp_path / "t", steps=100_000))
    until(lambda: (tmp_path / "t" / "log.txt").exists() and (tmp_path / "t" / "log.txt").stat().st_size, 20)
    cluster.run("scancel", job)
    assert ended(running, 30).end == "infrastructure"


def test_a_job_that_waits_too_long_is_given_up(tmp_path: Path) -> None:
    run = runner(tmp_path, "ok", site={"queue_s": 1.0, "slurm_options": ("--begin=now+600",)})
    running = run.start(trial(tmp_path / "t"))
    assert isinstance(running, SlurmJob)
    result = ended(running, 15)
    assert result.end == "infrastructure" and "in the queue (BeginTime)" in result.reason
    until(lambda: job_state(running.job).phase == "ended", 15)


def test_a_waiting_job_is_stopped_without_having_run(tmp_path: Path) -> None:
    running = runner(tmp_path, "ok", site={"slurm_options": ("--begin=now+600",)}).start(trial(tmp_path / "t"))
    result = running.stop("no more runs")
    assert (result.end, result.reason, result.steps) == ("stopped", "no more runs", 0)
    assert not (tmp_path / "t" / "log.txt").exists()


def test_a_job_of_an_earlier_start_does_not_run_in_a_folder_used_anew(cluster: Cluster, tmp_path: Path) -> None:
    held = runner(tmp_path, "failed", site={"slurm_options": ("--begin=now+600",)}).start(trial(tmp_path / "t"))
    assert isinstance(held, SlurmJob)
    assert ended(runner(tmp_path, "ok").start(trial(tmp_path / "t"))).end == "ok"
    cluster.run("scontrol", "update", f"JobId={held.job}", "StartTime=now")
    until(lambda: job_state(held.job).name == "COMPLETED", 20)
    result = read_result(tmp_path / "t")
    assert result is not None and result.end == "ok"


def test_the_job_is_found_by_name_when_the_search_died_before_it_wrote_its_id(tmp_path: Path) -> None:
    run = runner(tmp_path, "slow")
    job = started(run.start(trial(tmp_path / "t", steps=100_000)), tmp_path / "t")
    (tmp_path / "t" / "job.json").unlink()
    found = run.attach(trial(tmp_path / "t"))
    assert isinstance(found, SlurmJob) and found.job == job.job
    assert found.stop("enough").end == "stopped"


def test_excluded_nodes_are_left_out(cluster: Cluster, tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "ok", exclude=("n1", "n2", "n3")).start(trial(tmp_path / "t")))
    assert result.nodes == ("n4",)


def test_nodes_that_a_trial_leaves_out(cluster: Cluster, tmp_path: Path) -> None:
    result = ended(runner(tmp_path, "ok", exclude=("n1",)).start(trial(tmp_path / "t", exclude=("n2", "n4"))))
    assert result.nodes == ("n3",)


def test_a_refused_job_says_what_slurm_says(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(InfrastructureError, match=r"sbatch: error: .*invalid partition specified: \$\(touch x\)"):
        runner(tmp_path, "ok", site={"partition": "$(touch x)"}).start(trial(tmp_path / "t"))


TWO_NODES = """\
echo "task $SLURM_PROCID of $SLURM_NTASKS at $MASTER_ADDR:$MASTER_PORT on $SLURMD_NODENAME tp {tp}"
[ "$SLURM_PROCID" != 0 ] || exec """


@pytest.mark.parametrize(("per", "tasks"), [("node", 2), ("gpu", 8), ("job", 1)])
def test_a_command_runs_once_a_job_a_node_or_an_accelerator(cluster: Cluster, tmp_path: Path, per: str, tasks: int) -> None:
    fake = f"env FAKE=ok {shlex.quote(sys.executable)} {shlex.quote(str(FAKE))}"
    text = TWO_NODES + fake if per != "job" else f"srun --overlap echo task of {{gpus}}; {fake}"
    command = Command(launcher="workload", command=text, per=per)  # type: ignore[arg-type]
    asked = trial(tmp_path / "t", job=small_job(8, 4))
    result = ended(runner(tmp_path, "ok", command=command).start(asked))
    lines = [line for line in (tmp_path / "t" / "log.txt").read_text().splitlines() if line.startswith("task ")]
    assert result.end == "ok" and len(result.nodes) == 2
    assert len(lines) == (2 if per == "job" else tasks)
    if per != "job":
        assert len({line.split()[5] for line in lines}) == 1, "one address for all"
        assert {line.split()[7] for line in lines} == set(result.nodes)


def test_torchrun_over_two_nodes_of_an_allocation(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real torchrun, whose ranks find each other across two nodes; the module is a small one, without a model."""
    pytest.importorskip("torch", reason="torch is not installed (pip install meshtuner[profile])")
    (tmp_path / "meet.py").write_text(MEET)
    job = cluster.run("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=4", "--output=/dev/null", "--wrap", "sleep 600").strip()
    until(lambda: job_state(job).phase == "running", 20)
    monkeypatch.setenv("SLURM_JOB_ID", job)
    made = open_runner("slurm", Setup(site=Site(environment={"PYTHONPATH": str(tmp_path)})))
    assert isinstance(made, SlurmRunner) and made.allocation == job
    allocated = SlurmRunner(site=made.site, allocation=job, module="meet", grace_s=1.0)
    asked = trial(tmp_path / "t", job=small_job(2, 1), wall_s=300.0, quiet_s=240.0)
    running = allocated.start(asked)
    with pytest.raises(InfrastructureError, match="has 0 free nodes of 2: 2 are needed"):
        allocated.start(trial(tmp_path / "other", job=small_job(2, 1)))
    result = ended(running, 300.0)
    assert (result.end, result.step_s, len(result.nodes)) == ("ok", 2.0, 2), (tmp_path / "t" / "log.txt").read_text()
    assert [name for _, name, _ in steps(job) if name.startswith("tuner-")] == []
    cluster.run("scancel", job)
    with pytest.raises(InfrastructureError, match=f"allocation {job} is .*: start a new one"):
        until(lambda: allocated.start(trial(tmp_path / "late")).stop("late") and None, 20)


MEET = """\
import json, os
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    for step in range(8):
        print("tuner-step " + json.dumps({"step": step, "seconds": float(dist.get_world_size()), "loss": 1.0}), flush=True)
dist.barrier()
dist.destroy_process_group()
"""


def test_options_and_scripts_of_a_container_site(tmp_path: Path) -> None:
    container = Container(image="nvcr.io#nvidia/pytorch:25.10", mounts=("/data/it's:/data",))
    site = Site(account="a b", qos="-q", container=container, gpus="gres", gpu_type="h100", cpus_per_task=8, slurm_options=("--mem=0",))
    asked = trial(tmp_path / "t", job=small_job(8, 4))
    options = sbatch_options(site, asked, "gpu", ("n7",))
    asked_for = {
        "--account=a b",
        "--qos=-q",
        "--gres=gpu:h100:4",
        "--ntasks-per-node=4",
        "--nodes=2",
        "--mem=0",
        "--exclude=n7",
        "--cpus-per-task=8",
    }
    assert asked_for <= set(options)
    words = shlex.split(launch_script(site, asked, "node", (), ()).splitlines()[-1])
    assert f"--container-image={container.image}" in words
    mounts = next(word for word in words if word.startswith("--container-mounts="))
    assert mounts.startswith(f"--container-mounts=/data/it's:/data,{tmp_path}/t:{tmp_path}/t,")


def test_without_slurm_the_error_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(Path(shutil.which("bash") or "/bin/bash").parent / "nowhere"))
    with pytest.raises(InfrastructureError, match="sbatch is not installed here"):
        runner(tmp_path, "ok").start(trial(tmp_path / "t"))


def test_a_node_that_dies_fails_a_job_that_is_not_requeued(on_a_dead_node: SlurmJob) -> None:
    result = ended(on_a_dead_node, 60)
    assert (result.end, result.failed_nodes, result.nodes) == ("infrastructure", ("n5",), ("n5",))


def test_slurms_own_time_limit_stops_a_job(past_its_limit: SlurmJob) -> None:
    result = ended(past_its_limit, 60)
    assert (result.end, result.reason) == ("stopped", f"Slurm's time limit of job {past_its_limit.job}")
    assert result.step_s == 0.25
