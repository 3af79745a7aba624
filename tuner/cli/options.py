"""The options that verbs share, as dataclasses: a verb names the groups it takes, `unpacks` lays them out for typer.

Each field is an option of the same name (a test compares them with tuner.request.Request). Values stay the text that a person
wrote; tuner.request reads them, so that a bad number is reported together with everything else that is wrong.
"""

from __future__ import annotations

import dataclasses
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional, get_args, get_origin, get_type_hints

import typer

if TYPE_CHECKING:
    from collections.abc import Callable

JOB, RUN, SPACE, ANSWER, MEASURE, OUTPUT = "Job", "How it runs", "What to search", "What is best", "What is measured", "Output"
FAIL, GO_ON, SIMULATE = "How GPUs fail", "How the job goes on", "Simulation"


def _names(kind: str) -> Callable[[str], list[str]]:
    """Return the completion of a preset's name or, where none begins so, of a file's."""

    def complete(incomplete: str) -> list[str]:
        from tuner import presets

        found = [name for name in presets.names(kind) if name.startswith(incomplete.lower())]
        return found or _files(incomplete)

    return complete


def _files(incomplete: str) -> list[str]:
    folder = Path(incomplete if incomplete.endswith("/") else incomplete.rpartition("/")[0] or ".").expanduser()
    shown = incomplete.rpartition("/")[0] + "/" if "/" in incomplete else ""
    start = incomplete.rpartition("/")[2]
    try:
        return [shown + entry.name + ("/" if entry.is_dir() else "") for entry in folder.iterdir() if entry.name.startswith(start)]
    except OSError:
        return []


def _words(*words: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return complete


def _opt(*names: str, metavar: str, text: str, panel: str, complete: Callable[[str], list[str]] | None = None) -> Any:
    return typer.Option(*names, metavar=metavar, help=text, rich_help_panel=panel, show_default=False, autocompletion=complete)


Text = Optional[str]  # noqa: UP045 (typer reads it at run time)
Texts = Optional[list[str]]  # noqa: UP045

PRECISIONS = ("bf16", "fp16", "fp32", "fp8", "fp8-blockwise", "fp8-rowwise", "mxfp8", "nvfp4")
STRATEGIES = ("exhaustive", "grid", "tpe", "gp")
RUNNERS = ("local", "slurm", "command")
OBJECTIVES = ("throughput", "cost", "memory", "goodput")
KINDS = ("gpus", "clusters", "models", "frameworks", "calibrations", "failures", "jobs", "spaces")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """What is trained, on what, with which software."""

    job: Annotated[
        Text,
        _opt("--job", metavar="FILE", text="YAML with any of these options; the command line wins", panel=JOB, complete=_names("jobs")),
    ] = None
    model: Annotated[
        Text,
        _opt("--model", "-m", metavar="MODEL", text="Preset, YAML file or Hugging Face config.json", panel=JOB, complete=_names("models")),
    ] = None
    cluster: Annotated[
        Text,
        _opt(
            "--cluster",
            "-c",
            metavar="CLUSTER",
            text="Preset with a count of GPUs, like h100x1024, or YAML file",
            panel=JOB,
            complete=_names("clusters"),
        ),
    ] = None
    gpus: Annotated[Text, _opt("--gpus", "-g", metavar="N", text="GPUs of the cluster; for search also a range, 256..1024", panel=JOB)] = (
        None
    )
    seq_len: Annotated[Text, _opt("--seq", "--seq-len", "-s", metavar="N", text="Tokens of a sequence: 8192 or 8k", panel=JOB)] = None
    global_batch: Annotated[
        Text, _opt("--global-batch", "--gbs", "-b", metavar="N", text="Sequences of a step over all GPUs", panel=JOB)
    ] = None
    tokens: Annotated[Text, _opt("--tokens", metavar="N", text="Tokens of the whole run, like 15T: gives days and cost", panel=JOB)] = None
    ramp_up: Annotated[
        Text,
        _opt("--ramp-up", metavar="START,BY,SAMPLES", text="Batch ramp-up as Megatron-LM has it; counted in the days", panel=JOB),
    ] = None
    task: Annotated[
        Text, _opt("--task", metavar="TASK", text="pretrain (default), sft or lora", panel=JOB, complete=_words("pretrain", "sft", "lora"))
    ] = None
    lora_rank: Annotated[Text, _opt("--lora-rank", metavar="N", text="Rank of the adapters, for --task lora (16)", panel=JOB)] = None
    precision: Annotated[
        Text, _opt("--precision", metavar="NAME", text=f"{', '.join(PRECISIONS)} (bf16)", panel=RUN, complete=_words(*PRECISIONS))
    ] = None
    framework: Annotated[
        Text,
        _opt(
            "--framework",
            metavar="NAME",
            text="Whose rules and defaults hold (megatron-lm); list: tuner presets frameworks",
            panel=RUN,
            complete=_names("frameworks"),
        ),
    ] = None
    release: Annotated[Text, _opt("--release", metavar="TEXT", text="Release of the framework, to choose a calibration", panel=RUN)] = None
    attention: Annotated[
        Text,
        _opt("--attention", metavar="KERNEL", text="flash or unfused (the framework's)", panel=RUN, complete=_words("flash", "unfused")),
    ] = None
    calibration: Annotated[
        Text,
        _opt(
            "--calibration",
            metavar="NAME",
            text="auto (default), none for hardware figures alone, a preset or a file",
            panel=RUN,
            complete=_names("calibrations"),
        ),
    ] = None
    price: Annotated[Text, _opt("--price", metavar="AMOUNT", text="Price of a GPU-hour, like 2.5: gives the cost", panel=RUN)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchOptions:
    """Which plans are looked at, and which of them is best."""

    space: Annotated[
        Text, _opt("--space", metavar="FILE", text="Axes to search: preset or YAML file", panel=SPACE, complete=_names("spaces"))
    ] = None
    fix: Annotated[Texts, _opt("--fix", metavar="KNOB=VALUE", text="Hold a knob: --fix tp=8 (repeatable)", panel=SPACE)] = None
    limit: Annotated[Texts, _opt("--limit", metavar="TEXT", text='Bound a knob: --limit "pp<=16" (repeatable; quote it)', panel=SPACE)] = (
        None
    )
    max_memory: Annotated[
        Text, _opt("--max-memory", metavar="SIZE", text='Memory a GPU may use, like "70 GB" (all of it)', panel=SPACE)
    ] = None
    max_p_oom: Annotated[
        Text, _opt("--max-p-oom", metavar="SHARE", text="A plan fits when it runs out of memory less likely than this (5%)", panel=SPACE)
    ] = None
    current: Annotated[
        Text,
        _opt("--current", metavar="PLAN", text="Your plan, ranked beside the best: tp=8,pp=2,recompute=full", panel=ANSWER),
    ] = None
    objective: Annotated[
        Text,
        _opt("--objective", metavar="NAME", text=f"{', '.join(OBJECTIVES)} (throughput)", panel=ANSWER, complete=_words(*OBJECTIVES)),
    ] = None
    failure_data: Annotated[
        Text,
        _opt(
            "--failure-data",
            metavar="NAME",
            text="How GPUs fail, for --objective goodput (llama3-herd); tuner presets failures",
            panel=ANSWER,
            complete=_names("failures"),
        ),
    ] = None
    deadline: Annotated[
        Text, _opt("--deadline", metavar="TIME", text="With --gpus A..B and --tokens: cheapest count done in, say, 30d", panel=ANSWER)
    ] = None
    export: Annotated[
        Text,
        _opt("--export", metavar="FORMATS", text="Write the best plan's files as `tuner export` does, under --out/best", panel=ANSWER),
    ] = None
    top: Annotated[Text, _opt("--top", "-k", metavar="N", text="Plans to rank (10)", panel=ANSWER)] = None
    all: Annotated[
        bool,
        typer.Option("--all", help="Rank every plan; else the best of those that differ in small knobs only", rich_help_panel=ANSWER),
    ] = False
    strategy: Annotated[
        Text,
        _opt(
            "--strategy",
            metavar="NAME",
            text="exhaustive, grid, tpe, gp; measuring: residual, tpe, gp, random",
            panel=ANSWER,
            complete=_words(*STRATEGIES),
        ),
    ] = None
    trials: Annotated[Text, _opt("--trials", metavar="N", text="Plans that tpe and gp try (200; grid: 5000)", panel=ANSWER)] = None
    seed: Annotated[Text, _opt("--seed", metavar="N", text="Seed of tpe and gp (0)", panel=ANSWER)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureOptions:
    """Whether, how and for how long plans are measured."""

    profile: Annotated[Text, _opt("--profile", metavar="N", text="Run N plans, a few steps each: the most telling ones", panel=MEASURE)] = (
        None
    )
    budget: Annotated[
        Text,
        _opt("--budget", metavar="TIME", text="Or: run plans for this long, like 12gpu-h, or until nothing is to be gained", panel=MEASURE),
    ] = None
    steps: Annotated[Text, _opt("--steps", metavar="N", text="Optimizer steps of a run (8; up to 3 are not timed)", panel=MEASURE)] = None
    trial_time: Annotated[Text, _opt("--trial-time", metavar="TIME", text="A run is stopped past this (30min)", panel=MEASURE)] = None
    runner: Annotated[
        Text,
        _opt(
            "--runner",
            metavar="NAME",
            text="local (default), slurm, command (with --command), or a plugin's",
            panel=MEASURE,
            complete=_words(*RUNNERS),
        ),
    ] = None
    site: Annotated[
        Text, _opt("--site", metavar="FILE", text="YAML: account, partition, container, environment of your cluster", panel=MEASURE)
    ] = None
    command: Annotated[
        Text, _opt("--command", metavar="FILE", text="YAML: your own launch command, with placeholders like {tp}", panel=MEASURE)
    ] = None
    storage: Annotated[
        Text,
        _opt(
            "--storage",
            metavar="URL",
            text="Where trials are kept: sqlite:///..., postgresql://... (a journal in --out)",
            panel=MEASURE,
        ),
    ] = None
    parallel: Annotated[
        Text, _opt("--parallel", metavar="N", text="Runs at once (1): different plans on nodes of their own", panel=MEASURE)
    ] = None
    allocation: Annotated[
        Text,
        _opt("--allocation", metavar="ID", text="Slurm: run in this job's nodes (the one we are in); none: a job each", panel=MEASURE),
    ] = None
    full_steps: Annotated[
        bool,
        typer.Option(
            "--full-steps", help="Run whole steps; else steps of a few micro batches where that saves half", rich_help_panel=MEASURE
        ),
    ] = False
    proxy: Annotated[
        bool,
        typer.Option("--proxy", help="Run a few layers of each plan on one node; the model extrapolates", rich_help_panel=MEASURE),
    ] = False
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="Run plans again that an earlier search on this machine measured", rich_help_panel=MEASURE)
    ] = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The one plan that is asked about."""

    plan: Annotated[
        Text,
        _opt("--plan", "-p", metavar="PLAN", text="tp=8,pp=2,recompute=full; the rest is the framework's default", panel="Plan"),
    ] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureOptions:
    """How GPUs fail, and what the job does about it."""

    failure_data: Annotated[
        Text,
        _opt("--failure-data", metavar="NAME", text="Preset or YAML file (llama3-herd)", panel=FAIL, complete=_names("failures")),
    ] = None
    mtbf: Annotated[Text, _opt("--mtbf", metavar="TIME", text='Time between failures of one GPU, like "50000 h"', panel=FAIL)] = None
    rate_scale: Annotated[Text, _opt("--rate-scale", metavar="X", text="So many times as many failures (1)", panel=FAIL)] = None
    hardware_share: Annotated[
        Text, _opt("--hardware-share", metavar="SHARE", text="Of failures that need a repair, like 78%", panel=FAIL)
    ] = None
    repair: Annotated[Text, _opt("--repair", metavar="TIME", text='Until a broken GPU works again, like "5 d"', panel=FAIL)] = None
    software_repair: Annotated[
        Text, _opt("--software-repair", metavar="TIME", text="Until a GPU is back after a software failure", panel=FAIL)
    ] = None
    blast: Annotated[Text, _opt("--blast", metavar="GPUS", text="GPUs that a failure takes: 4, or shares, 1:0.95,4:0.05", panel=FAIL)] = (
        None
    )
    failed_fraction: Annotated[
        Text, _opt("--failed-fraction", metavar="SHARE", text="Share of GPUs that are down, instead of what the rates give", panel=FAIL)
    ] = None
    detection: Annotated[Text, _opt("--detection", metavar="TIME", text="Until a failure is noticed", panel=GO_ON)] = None
    restart: Annotated[Text, _opt("--restart", metavar="TIME", text="From then until the job runs again", panel=GO_ON)] = None
    checkpoint_write: Annotated[
        Text, _opt("--checkpoint-write", metavar="TIME", text="For which a checkpoint stops the job", panel=GO_ON)
    ] = None
    checkpoint_every: Annotated[
        Text, _opt("--checkpoint-every", metavar="TIME", text="Work between two checkpoints (the best)", panel=GO_ON)
    ] = None
    fallback_tp: Annotated[
        Text,
        _opt("--fallback-tp", metavar="N,..", text="TP degrees to fall back to, like 30,28 (the tp/8 below tp, one at least)", panel=GO_ON),
    ] = None
    fallback_ep: Annotated[Text, _opt("--fallback-ep", metavar="N,..", text="The same of expert-parallel groups", panel=GO_ON)] = None
    power_cap: Annotated[Text, _opt("--power-cap", metavar="X", text="Power a rack can give a GPU, of its normal one", panel=GO_ON)] = None
    in_place: Annotated[
        bool, typer.Option("--in-place", help="Fall back from the peers' state, without a restart (zero 0)", rich_help_panel=GO_ON)
    ] = False
    no_packing: Annotated[
        bool, typer.Option("--no-packing", help="Failed groups stay where they are; else restarts pack them", rich_help_panel=GO_ON)
    ] = False
    spares: Annotated[Text, _opt("--spares", metavar="N", text="Spare groups that stand by (as many as are needed)", panel=GO_ON)] = None
    fixed_batch: Annotated[
        bool, typer.Option("--fixed-batch", help="The minibatch never shrinks: spares make it up, or the job waits", rich_help_panel=GO_ON)
    ] = False
    quantile: Annotated[Text, _opt("--quantile", metavar="SHARE", text="Of the time for which spares suffice (0.99)", panel=GO_ON)] = None
    domains: Annotated[Text, _opt("--domains", metavar="N,..", text="Sizes of NVLink domains to compare (8,16,32,64,72)", panel=GO_ON)] = (
        None
    )
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Simulate failures event by event beside the closed forms", rich_help_panel=SIMULATE)
    ] = False
    days: Annotated[Text, _opt("--days", metavar="N", text="Days of a simulated trace (60)", panel=SIMULATE)] = None
    traces: Annotated[Text, _opt("--traces", metavar="N", text="Traces (48)", panel=SIMULATE)] = None
    seed: Annotated[Text, _opt("--seed", metavar="N", text="Seed of the traces (0)", panel=SIMULATE)] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """The one plan that logs are of."""

    plan: Annotated[
        Text,
        _opt("--plan", "--current", "-p", metavar="PLAN", text="What the logs were run with: tp=8,pp=2,recompute=full", panel="Plan"),
    ] = None


@dataclass(frozen=True, slots=True)
class Without:
    """Beside a group of options (Annotated[JobOptions, Without("price")]): those of it that a verb does not take."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Show:
    """Where the answer goes, and how much is said on the way."""

    json: Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else", rich_help_panel=OUTPUT)] = False
    out: Annotated[Text, _opt("--out", "-o", metavar="PATH", text="Write the answer there as well", panel=OUTPUT)] = None
    no_color: Annotated[bool, typer.Option("--no-color", help="No colours (as NO_COLOR=1)", rich_help_panel=OUTPUT)] = False
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress and no notes", rich_help_panel=OUTPUT)] = False
    verbose: Annotated[
        int,
        typer.Option("--verbose", "-v", count=True, help="More notes; -vv: also tracebacks", rich_help_panel=OUTPUT, show_default=False),
    ] = 0


def named_calibration(text: str) -> Any:
    """Return the option that names a calibration, for a verb that takes no job."""
    return _opt("--calibration", metavar="NAME", text=text, panel="Options", complete=_names("calibrations"))


ARGUMENTS = frozenset(
    f.name for group in (JobOptions, SearchOptions, MeasureOptions, PlanOptions, FailureOptions, Show) for f in dataclasses.fields(group)
)


def given(*groups: Any) -> dict[str, Any]:
    """Return the options of these groups that stand on the command line."""
    values = {f.name: getattr(group, f.name) for group in groups for f in dataclasses.fields(group)}
    return {name: value for name, value in values.items() if value not in (None, False, [], ())}


def _filled(kind: Any, values: dict[str, Any]) -> Any:
    return kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind) if f.name in values})


def _pack(hint: Any) -> tuple[Any, tuple[str, ...]] | None:
    """Return the group of options that a parameter's type is, and those of it that are left out; None for any other type."""
    kind, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    if not dataclasses.is_dataclass(kind):
        return None
    return kind, tuple(name for extra in extras if isinstance(extra, Without) for name in extra.names)


def unpacks(verb: Callable[..., None]) -> Callable[..., None]:
    """Return `verb` with each parameter whose type is one of these dataclasses laid out as its options."""
    hints = get_type_hints(verb, include_extras=True)
    found = {name: pack for name, hint in hints.items() if (pack := _pack(hint)) is not None}
    packs = {name: kind for name, (kind, _) in found.items()}

    def command(**values: Any) -> None:
        packed = {name: _filled(kind, values) for name, kind in packs.items()}
        verb(**packed, **values)

    parameters = []
    for name, parameter in inspect.signature(verb).parameters.items():
        if name not in packs:
            parameters.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        options = get_type_hints(packs[name], include_extras=True)
        for field in (field for field in dataclasses.fields(packs[name]) if field.name not in found[name][1]):
            parameters.append(
                inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=options[field.name])
            )
    command.__name__, command.__doc__ = verb.__name__, verb.__doc__
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command
