"""Nonuniform tensor-parallel steps run on this machine beside uniform ones: step times, what resharding takes, hides and moves."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.answers import plain
from tuner.cost_model.params import parameters
from tuner.errors import InfrastructureError, Problem, SpecError
from tuner.files import write
from tuner.job import Job
from tuner.launch.detection import named_cluster
from tuner.launch.nonuniform.layout import ideal_bytes
from tuner.launch.nonuniform.trial import SPEC, Loss, NonuniformTrial, Phase, refusals, samples_of
from tuner.units import show_bytes
from tuner.values import Problems, quantity, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from tuner.model import Model

    Progress = Callable[..., None]

WARMUP = 2  # steps of each phase that are not counted
ROUNDS = 2  # uniform and nonuniform in turn, so that a slow spell of the machine meets both
CPU = "cpu-core"
FULL = 4  # bytes of a summed gradient's element
LIMIT_S, STOP_S = 1800.0, 10.0
PRECISIONS = ("fp32", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class NonuniformAnswer:
    """What was run and measured: `document` is the JSON of `tuner profile --ntp`."""

    document: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        return dict(plain(self.document))


def read_degrees(value: Any, *, equal: bool = False) -> tuple[int, ...]:
    """Return the tensor-parallel degrees of the replicas, of a text like "4,3": the healthy one first. Raises SpecError.

    equal: whether they may all be the same.
    """
    texts = value if isinstance(value, (list, tuple)) else str(value).split(",")
    found = () if not str(value).strip() else tuple(whole(text, "degrees", most=64) for text in texts)
    if len(found) < 2 or (len(set(found)) == 1 and not equal) or max(found) > found[0]:
        rule = "must name two replicas or more, of different degree"
        if len(found) > 1 and max(found) > found[0]:
            rule = f"the first replica is the healthy one: no degree may exceed its {found[0]}"
        raise SpecError([Problem(where="degrees", path="", value=str(value)[:60], rule=rule, hint="like 4,3")])
    return found


def _given(given: Mapping[str, Any], name: str, default: Any) -> Any:
    """Return what was given, be it empty, or the default where nothing was."""
    return default if given.get(name) is None else given[name]


def _count(given: Mapping[str, Any], name: str, default: int) -> int:
    return whole(_given(given, name, default), name)


def state_bytes(model: Model, precision: str, degrees: Sequence[int], *, cpu: bool) -> float:
    """Return the least bytes that training keeps: P (4 weights + 4 sums of gradients + 8 moments) in fp32, 18 in bf16 (2 weights, 4
    master weights). On CPUs of all replicas, as they share the memory; else of a rank of the smallest replica, P / n2. Activations come
    on top.
    """
    each = float(parameters(model)) * (16.0 if precision == "fp32" else 18.0)
    return each * len(degrees) if cpu else each / min(degrees)


def too_large(job: Job, precision: str, degrees: Sequence[int]) -> list[Problem]:
    """Return why a run does not fit this machine's memory, none where its weights and moments do."""
    cpu = job.cluster.gpu.name == CPU
    need = state_bytes(job.model, precision, degrees, cpu=cpu)
    has = job.cluster.gpu.memory.value * (job.cluster.gpus if cpu else 1)
    if need <= has:
        return []
    of = f"{len(degrees)} replicas of {job.model.name}" if cpu else f"a rank of {job.model.name} at degree {min(degrees)}"
    where = "this machine" if cpu else "a GPU"
    rule = f"weights, gradients and moments of {of} in {precision} need {show_bytes(need)} at least, and {where} has {show_bytes(has)}"
    return [Problem(where="model", path="", value=job.model.name, rule=rule, hint="a smaller model, like tiny")]


def read_run(given: Mapping[str, Any]) -> tuple[NonuniformTrial, tuple[int, ...]]:
    """Return the trial that a question asks for, and the degrees of its replicas. Raises SpecError listing every problem.

    With `lose` it has one phase, in the middle step of which that rank is killed.
    """
    problems = Problems()
    loses = given.get("lose") is not None
    degrees = problems.trying(lambda: read_degrees(_given(given, "degrees", "4,4" if loses else "4,3"), equal=loses))
    lose = problems.trying(lambda: whole(given["lose"], "lose", at_least=0, most=64)) if loses else None
    precision = str(_given(given, "precision", PRECISIONS[0]))
    if precision not in PRECISIONS:
        problems.add("precision", precision, f"must be one of {', '.join(PRECISIONS)}")
    problems.trying(lambda: _limit(given))
    counts = {"seq_len": 128, "global_batch": 16, "steps": 6, "micro_batch": 1}
    read = {name: problems.trying(partial(_count, given, name, default)) for name, default in counts.items()}
    model = problems.trying(lambda: presets.model(str(_given(given, "model", "tiny"))))
    if read["steps"] is not None and read["steps"] <= WARMUP:
        problems.add("steps", read["steps"], f"must be more than the {WARMUP} warm-up steps")
    problems.raise_any()
    assert degrees is not None  # noqa: S101 (raise_any has raised otherwise)
    batch, steps = int(read["global_batch"] or 1), int(read["steps"] or 1)
    if batch < len(degrees):
        raise SpecError([Problem(where="global_batch", path="", value=str(batch), rule=f"must be one for each of {len(degrees)} replicas")])
    healthy = (max(degrees),) * len(degrees)
    cluster = named_cluster(f"local:{sum(healthy)}")
    job = Job(
        model=model,
        cluster=cluster,
        framework=presets.framework("tuner-workload"),
        seq_len=read["seq_len"],
        global_batch=batch,
        precision=precision,
    )
    even, uneven = samples_of(batch, healthy), samples_of(batch, degrees)
    turn = (
        Phase(degrees=healthy, samples=even, steps=steps),
        Phase(degrees=degrees, samples=uneven, steps=steps),
        Phase(degrees=degrees, samples=uneven, steps=steps, overlap=False),
    )
    trial = NonuniformTrial(
        job=job,
        phases=turn[1:2] if loses else turn * ROUNDS,
        micro_batch=read["micro_batch"],
        arithmetic=precision,
        sequence_parallel=bool(given.get("sequence_parallel")),
        timeout_s=120.0,
        lost=() if lose is None else (Loss(rank=lose, step=(steps + 1) // 2),),
    )
    wrong = [Problem(where="profile --ntp", path="", value="", rule=line) for line in refusals(trial)]
    if wrong or (wrong := too_large(job, precision, degrees)):
        raise SpecError(wrong)
    return trial, degrees


def run_nonuniform(given: Mapping[str, Any], progress: Progress | None = None) -> NonuniformAnswer:
    """Run the steps and return what they took. Raises SpecError, InfrastructureError."""
    trial, degrees = read_run(given)
    folder = given.get("folder")
    with _ended_by_sigterm(), tempfile.TemporaryDirectory(prefix="tuner-ntp-") as temporary:
        kept = Path(temporary if folder is None else folder)
        try:
            kept.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SpecError([Problem(where="out", path="", value=str(folder), rule=f"cannot be a folder: {error.strerror}")]) from None
        run = partial(_lines, folder=kept, limit_s=_limit(given), progress=progress)
        return _lost(trial, degrees, run(trial.replace(lost=())), run(trial)) if trial.lost else _answer(trial, degrees, run(trial))


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Let SIGTERM unwind this thread, so that ranks end and the folder goes, where nobody has another use for it."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if ours:
        signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        if ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit(number: int, frame: object) -> None:
    del frame
    raise SystemExit(128 + number)


def _limit(given: Mapping[str, Any]) -> float:
    """Return the seconds after which a run is stopped."""
    return LIMIT_S if given.get("trial_time") is None else quantity(given["trial_time"], "trial_time", "seconds")


def _lines(trial: NonuniformTrial, folder: Path, limit_s: float, progress: Progress | None) -> list[tuple[str, dict[str, Any]]]:
    """Run the trial's ranks under their driver; return what they said, (kind, record). log.txt keeps all of it.

    Raises InfrastructureError, also past `limit_s`; no process is left behind.
    """
    if importlib.util.find_spec("torch") is None:
        raise InfrastructureError("a nonuniform step needs torch: pip install 'meshtuner[profile]'")
    write(folder / SPEC, json.dumps(trial.model_dump(mode="json"), indent=1))
    command = [sys.executable, "-m", "tuner.launch.nonuniform.driver", "--trial", str(folder.absolute())]
    environment = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[1]), **os.environ}
    found, total = [], sum(phase.steps for phase in trial.phases)
    with (
        (folder / "log.txt").open("w", encoding="utf-8") as log,
        subprocess.Popen(  # noqa: S603 (our own module)
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        late = threading.Event()
        watch = threading.Timer(limit_s, _overdue, (process, late))
        watch.daemon = True
        watch.start()
        try:
            assert process.stdout is not None  # noqa: S101 (it is a pipe)
            for line in process.stdout:
                log.write(line)
                kind, _, text = line.partition(" ")
                if kind.startswith("tuner-") and text.startswith("{"):
                    found.append((kind, json.loads(text)))
                    if kind == "tuner-step" and progress is not None:
                        progress("steps", sum(k == "tuner-step" for k, _ in found), total)
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
        finally:
            watch.cancel()
            _stop(process)
        code = process.wait()
    if late.is_set():
        raise InfrastructureError(f"the nonuniform run was stopped after {limit_s:g} s")
    if code:
        raise InfrastructureError(f"the nonuniform run ended with exit code {code}: {_reason((folder / 'log.txt').read_text('utf-8'))}")
    return found


def _reason(log: str) -> str:
    """Return the line that says what went wrong: what the driver or the ranks say of it, else the last that is no record."""
    said = [line for line in log.splitlines() if line.strip() and " {" not in line]
    telling = [line for line in said if line.startswith(("tuner-failed: ", "tuner-refused: "))]
    return telling[-1].partition(": ")[2][:300] if telling else (said or ["it said nothing"])[-1][:300]


def _overdue(process: subprocess.Popen[str], late: threading.Event) -> None:
    late.set()
    _stop(process)


def _stop(process: subprocess.Popen[str]) -> None:
    """End the driver, which ends its ranks; then whatever of its group is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            if process.poll() is None:
                os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def _answer(trial: NonuniformTrial, degrees: tuple[int, ...], lines: Sequence[tuple[str, dict[str, Any]]]) -> NonuniformAnswer:
    steps = [record for kind, record in lines if kind == "tuner-step"]
    moved = {record["phase"]: record for kind, record in lines if kind == "tuner-reshard"}
    kinds = {"uniform": 0, "nonuniform": 1, "in_phases": 2}
    numbers = {name: [i for i in range(len(trial.phases)) if i % len(kinds) == first] for name, first in kinds.items()}

    def seconds(name: str) -> dict[str, Any]:
        each = [s["seconds"] for s in steps if s["phase"] in numbers[name] and s["step"] > WARMUP]
        return {"step_s": statistics.median(each), "fastest_s": min(each), "slowest_s": max(each), "steps": len(each)}

    def part(name: str, what: str) -> float:
        return float(statistics.median(row[what] for n in numbers[name] for row in moved[n]["steps"][WARMUP:]))

    apart = _apart(*([s for s in steps if s["phase"] == numbers[name][0]] for name in ("uniform", "nonuniform")))
    first = trial.phases[numbers["nonuniform"][0]]
    reshard = {}
    for what in ("before_s", "sum_s", "after_s"):
        whole_s, waited = part("in_phases", what), part("nonuniform", what)
        reshard[what] = {"total_s": whole_s, "exposed_s": waited, "hidden_s": max(whole_s - waited, 0.0)}
    return NonuniformAnswer(
        document={
            **_question(trial),
            "uniform": {"degrees": trial.phases[0].degrees, "samples": trial.phases[0].samples, **seconds("uniform")},
            "nonuniform": {"degrees": degrees, "samples": first.samples, **seconds("nonuniform")},
            "in_phases": seconds("in_phases"),
            "reshard": reshard,
            "ranks": _ranks(moved[numbers["nonuniform"][0]], degrees),
            "losses_apart": apart,
            "torch": _torch(lines),
        }
    )


def _question(trial: NonuniformTrial) -> dict[str, Any]:
    return {
        "model": trial.job.model.name,
        "seq_len": trial.job.seq_len,
        "global_batch": trial.job.global_batch,
        "micro_batch": trial.micro_batch,
        "precision": trial.arithmetic,
        "sequence_parallel": trial.sequence_parallel,
        "processes": trial.ranks,
        "cores": len(os.sched_getaffinity(0)),
        "cpu": trial.job.cluster.gpu.name == CPU,
    }


def _torch(lines: Sequence[tuple[str, dict[str, Any]]]) -> str:
    return next((record.get("torch", "") for kind, record in lines if kind == "tuner-versions"), "")


def _apart(steps: Sequence[Mapping[str, Any]], others: Sequence[Mapping[str, Any]]) -> float:
    """Return by how much of their value the losses of steps differ at most, of those that both have."""
    losses = {step["step"]: step["loss"] for step in steps}
    return max(abs(float(losses[step["step"]]) / float(step["loss"]) - 1.0) for step in others if step["step"] in losses)


def _lost(
    trial: NonuniformTrial,
    degrees: tuple[int, ...],
    undisturbed: Sequence[tuple[str, dict[str, Any]]],
    lines: Sequence[tuple[str, dict[str, Any]]],
) -> NonuniformAnswer:
    """Return how a run went on without a killed rank, beside the same run that lost none."""
    said = next((record for kind, record in lines if kind == "tuner-failover"), None)
    if said is None:
        raise InfrastructureError("the run ended before its rank was killed")
    steps, others = ([record for kind, record in of if kind == "tuner-step"] for of in (undisturbed, lines))
    times = {name: max(said[name], 0.0) for name in ("noticed_s", "agreed_s", "entered_s", "restored_s")}
    return NonuniformAnswer(
        document={
            **_question(trial),
            "failover": {
                "lost": said["lost"],
                "in_step": trial.lost[0].step,
                "degrees": degrees,
                "samples": trial.phases[0].samples,
                "degrees_left": said["degrees"],
                "samples_left": said["samples"],
                "steps_repeated": trial.lost[0].step - said["step"],
                "moved_bytes": said["moved_bytes"],
                **times,
            },
            "losses_apart": _apart(steps, others),
            "torch": _torch(lines),
        }
    )


def _ranks(said: Mapping[str, Any], degrees: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return of each rank of a replica that reshards the bytes that it moved before the sum, beside the formula's of even shards."""
    cores, found = min(degrees), []
    shared: dict[int, int] = {}
    for row in said["ranks"]:
        shared[row["replica"]] = shared.get(row["replica"], 0) + row["shared_parameters"]
    for row in said["ranks"]:
        if row["degree"] == cores:
            continue
        slot = row["rank"] - sum(degrees[: row["replica"]])
        ideal = ideal_bytes(shared[row["replica"]], FULL, slot, row["degree"], cores)
        kept = {
            name: row[name]
            for name in ("rank", "replica", "degree", "spare", "before_sent", "before_received", "after_sent", "after_received")
        }
        found.append(kept | {"formula": ideal})
    return found
