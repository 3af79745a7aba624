"""A question as a person puts it: texts and numbers from a command line, a YAML file or a Python call, read into specs.

The three ways in share these names, so a job file holds what the command line would. Each value is checked where it is read, and
everything wrong with a question is reported at once.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from tuner import presets
from tuner.cluster import Cluster
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.job import PRECISIONS, AttentionKernel, Framework, Job, Task
from tuner.load import load_spec, read_spec
from tuner.model import Model
from tuner.values import Problems, close, gpu_counts, money, quantity, read_ramp_up, whole

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tuner.cost_model.calibration import Calibration

    T = TypeVar("T")

DEFAULT_FRAMEWORK = "megatron-lm"
CPU = "cpu-core"
LOCAL_JOB = {"seq_len": "128", "global_batch": "16"}
FLAGS = ("all", "no_cache", "full_steps", "proxy", "in_place", "no_packing", "fixed_batch", "simulate")
ATTENTION: tuple[str, ...] = get_args(AttentionKernel)
TASKS: tuple[str, ...] = get_args(Task)
_COUNTED_CLUSTER = re.compile(r"(.+?)\s*[x*:]\s*\d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Every question's parts, each as given (None: not given). The fields are the command line's options."""

    job: Any = None
    model: Any = None
    cluster: Any = None
    gpus: Any = None
    seq_len: Any = None
    global_batch: Any = None
    tokens: Any = None
    ramp_up: Any = None
    task: Any = None
    lora_rank: Any = None
    precision: Any = None
    framework: Any = None
    release: Any = None
    attention: Any = None
    calibration: Any = None
    price: Any = None
    space: Any = None
    fix: Any = None
    limit: Any = None
    max_memory: Any = None
    max_p_oom: Any = None
    current: Any = None
    objective: Any = None
    failure_data: Any = None
    deadline: Any = None
    export: Any = None
    top: Any = None
    all: Any = None
    strategy: Any = None
    trials: Any = None
    seed: Any = None
    profile: Any = None
    budget: Any = None
    steps: Any = None
    trial_time: Any = None
    runner: Any = None
    site: Any = None
    command: Any = None
    storage: Any = None
    no_cache: Any = None
    parallel: Any = None
    allocation: Any = None
    full_steps: Any = None
    proxy: Any = None
    folder: Any = None
    plan: Any = None
    mtbf: Any = None
    rate_scale: Any = None
    hardware_share: Any = None
    repair: Any = None
    software_repair: Any = None
    blast: Any = None
    failed_fraction: Any = None
    detection: Any = None
    restart: Any = None
    checkpoint_write: Any = None
    checkpoint_every: Any = None
    fallback_tp: Any = None
    fallback_ep: Any = None
    power_cap: Any = None
    in_place: Any = None
    no_packing: Any = None
    spares: Any = None
    fixed_batch: Any = None
    quantile: Any = None
    domains: Any = None
    simulate: Any = None
    days: Any = None
    traces: Any = None


def _keys(first: str, last: str) -> tuple[str, ...]:
    """Return the names of the request's parts from one to another."""
    names = [field.name for field in dataclasses.fields(Request)]
    return tuple(names[names.index(first) : names.index(last) + 1])


JOB_KEYS = _keys("job", "price")
SEARCH_KEYS = _keys("space", "seed")
MEASURE_KEYS = _keys("profile", "folder")  # how a search measures plans
FAILURE_KEYS = ("failure_data", *_keys("mtbf", "traces"), "seed")  # how GPUs fail, and what a job does about it


def read_request(given: Mapping[str, Any], *, keys: tuple[str, ...]) -> Request:
    """Return the request of these arguments on top of its job file's; `keys` are those that this verb takes."""
    unknown = [name for name in given if name not in keys]
    if unknown:
        raise SpecError([Problem(where=n, path="", value="", rule="is no argument of this verb", hint=nearest(n, keys)) for n in unknown])
    values = {name: value for name, value in given.items() if value is not None}
    if values.get("job") is not None:
        values = _job_file(values["job"], keys) | values
    return Request(**_on_this_machine(values) | values)


def _on_this_machine(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a question about this very machine takes where it says nothing: the size of a trial run (shown in every answer)."""
    from tuner.launch.detection import local_count

    here = isinstance(values.get("cluster"), str) and local_count(values["cluster"]) is not None
    return dict(LOCAL_JOB) if here else {}


def _job_file(name: Any, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return what a job file says, as texts; a model or cluster file is looked for beside it. Keys of other verbs are left out."""
    path = presets.find("jobs", str(name))
    return read_spec(path, lambda data: job_values(data, path, keys))


def job_values(data: Any, path: Path, keys: tuple[str, ...]) -> dict[str, Any]:
    """Return what the content of a job file says, as texts; keys that are not among `keys` are left out. Raises SpecError."""
    if not isinstance(data, dict):
        raise one_problem(str(path), "", None, "must be a mapping, like model: llama3-70b")
    known = [f.name for f in dataclasses.fields(Request) if f.name != "job"]
    problems = []
    found = {}
    for key, value in data.items():
        if key in ("description", "source"):
            continue
        if key not in known:
            problems.append(Problem(where=str(path), path=str(key)[:80], value="", rule="unknown key", hint=nearest(str(key)[:80], known)))
        elif (isinstance(value, bool) and key not in FLAGS) or (isinstance(value, dict) and key not in ("current", "plan", "ramp_up")):
            problems.append(Problem(where=str(path), path=key, value=str(value)[:80], rule="must be text or a number"))
        elif key in keys and value is not None:
            found[key] = _beside(path, value) if key in ("model", "cluster", "space", "calibration") else _as_text(value)
    if problems:
        raise SpecError(problems)
    return found


def _as_text(value: Any) -> Any:
    """Return a YAML number as text: a quantity must have its unit in a file."""
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value if isinstance(value, dict) else str(value)


def _beside(path: Path, value: Any) -> str:
    text = str(value)
    here = path.parent / text
    return str(here) if ("/" in text or text.endswith((".yaml", ".yml", ".json"))) and here.exists() else text


def read_job(request: Request) -> Job:
    """Return the one job that the request describes. Raises SpecError listing every problem."""
    job, counts = read_range(request)
    if len(counts) > 1:
        raise one_problem("gpus", "", request.gpus, "must be one count here", "search takes a range")
    return sized(job, counts[0])


def sized(job: Job, gpus: int) -> Job:
    """Return the job on this many GPUs of its cluster."""
    if gpus == job.gpus:
        return job
    resized: Job = job.model_copy(update={"cluster": presets.with_gpus(job.cluster, gpus, "gpus")})
    return resized


def read_range(request: Request) -> tuple[Job, tuple[int, ...]]:
    """Return the job on its cluster as the preset or file states it, and the counts of GPUs that the request asks about."""
    problems = Problems()
    missing = {
        "model": "a preset (`tuner presets models`), a YAML file or a Hugging Face config.json",
        "cluster": "a preset and a count of GPUs, like h100x64 (`tuner presets clusters`), or a YAML file",
        "seq_len": "tokens of a sequence, like 8192",
        "global_batch": "sequences of a step over all GPUs, like 512",
    }
    for name, hint in missing.items():
        if getattr(request, name) is None:
            problems.add(name, None, "is missing", hint)
    model = problems.trying(lambda: _model(request.model)) if request.model is not None else None
    found = problems.trying(lambda: _cluster(request)) if request.cluster is not None else None
    framework = problems.trying(lambda: _framework(request.framework))
    fields: dict[str, Any] = {"task": request.task, "precision": request.precision, "release": request.release}
    readers: dict[str, Callable[[Any], Any]] = {
        "seq_len": lambda v: whole(v, "seq_len", thousand=1024),
        "global_batch": lambda v: whole(v, "global_batch"),
        "lora_rank": lambda v: whole(v, "lora_rank", most=4096),
        "tokens": lambda v: quantity(v, "tokens", "tokens"),
        "ramp_up": read_ramp_up,
    }
    for name, reader in readers.items():
        value = getattr(request, name)
        if value is not None:
            fields[name] = problems.trying(lambda reader=reader, value=value: reader(value))  # type: ignore[misc]
    for name, known in (("precision", PRECISIONS), ("attention", ATTENTION), ("task", TASKS)):
        value = getattr(request, name)
        if value is not None and value not in known:
            problems.add(name, value, f"must be one of {', '.join(known)}", close(str(value), known))
    for name in ("price", "ramp_up"):
        if getattr(request, name) is not None and request.tokens is None:
            problems.add(name, getattr(request, name), "concerns a whole run: it needs tokens", "like 15T")
    if request.lora_rank is not None and request.task != "lora":
        problems.add("lora_rank", request.lora_rank, "only means something with task lora")
    if framework is not None:
        fields["attention"] = request.attention or framework.defaults.attention.value
    problems.raise_any()
    cluster, counts = found or (None, ())
    if cluster is not None and cluster.gpu.name == CPU and request.precision is None:
        fields["precision"] = "fp32"  # what its calibration was measured in; 16 bits help few CPUs
    fields |= {"model": model, "framework": framework, "cluster": cluster}
    try:
        job: Job = load_spec(Job, {name: value for name, value in fields.items() if value is not None}, "", units=False)
    except SpecError as error:
        raise SpecError([dataclasses.replace(p, where=p.path or "job", path="") for p in error.problems]) from None
    return job, counts


def _model(value: Any) -> Model:
    return value if isinstance(value, Model) else presets.model(str(value))


def _framework(value: Any) -> Framework:
    return value if isinstance(value, Framework) else presets.framework(DEFAULT_FRAMEWORK if value is None else str(value))


def _cluster(request: Request) -> tuple[Cluster, tuple[int, ...]]:
    """Return the cluster of the request, and the counts of its GPUs that are asked about (its own where none is given)."""
    from tuner.launch.detection import named_cluster

    given = request.cluster
    cluster = given if isinstance(given, Cluster) else named_cluster(str(given))
    if request.price is not None:
        cluster = cluster.replace(price_per_gpu_hour=money(request.price, "price"))
    if request.gpus is None:
        return cluster, (cluster.gpus,)
    counts = gpu_counts(request.gpus, cluster.gpus_per_node)
    counted = _COUNTED_CLUSTER.fullmatch(given.strip()) if isinstance(given, str) and "/" not in given else None
    if counted and counts != (cluster.gpus,) and given not in presets.names("clusters"):
        if len(counts) > 1 and counts[0] <= cluster.gpus <= counts[-1]:  # a range around the count: the kind is meant
            return _cluster(dataclasses.replace(request, cluster=counted[1]))
        raise one_problem("gpus", "", request.gpus, f"contradicts cluster {given}", f"name the kind alone: {counted[1]}")
    for count in (counts[0], counts[-1]):
        presets.with_gpus(cluster, count, "gpus")
    return cluster, counts


def read_calibration(request: Request, job: Job) -> Calibration:
    """Return the calibration that the request names ("auto" when it names none) for the job."""
    from tuner.cost_model.calibration import Calibration, load_calibration

    given = request.calibration
    return given if isinstance(given, Calibration) else load_calibration("auto" if given is None else str(given), job)
