"""The verbs as functions: each reads its question into specs, asks the cost model or the search, and returns the answer.

Nothing is printed here. `progress` is called with words and counts, and may be left out. Every answer has record(), which is what
--json prints.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from tuner.errors import one_problem
from tuner.load import load_yaml, path_of
from tuner.request import FAILURE_KEYS, JOB_KEYS, MEASURE_KEYS, SEARCH_KEYS, read_request
from tuner.values import Problems, close, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from tuner.accuracy.fields import Skipped
    from tuner.accuracy.machine import MachineAnswer
    from tuner.accuracy.own import OwnCalibration
    from tuner.accuracy.replay import Strategy
    from tuner.answers import EstimateAnswer
    from tuner.checking.checked import CheckAnswer
    from tuner.cost_model.calibration import Calibration
    from tuner.explained import ExplainAnswer
    from tuner.exporting import ExportAnswer
    from tuner.found import SearchAnswer
    from tuner.goodput import FailuresAnswer
    from tuner.health import DoctorAnswer
    from tuner.job import Job
    from tuner.logged import Logged
    from tuner.measurement import Measurement
    from tuner.nonuniform import NonuniformAnswer
    from tuner.plan import Plan
    from tuner.shelf import ClusterFile, PresetsAnswer

    Progress = Callable[..., None]


@dataclass(frozen=True, slots=True)
class ValidateAnswer:
    """Rows with their predictions, the rows that were skipped and why, and the scores; the scores of tables of operators."""

    document: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        return self.document


@dataclass(frozen=True, slots=True)
class ReplayAnswer:
    """How searches would have ended on measured series."""

    document: dict[str, Any]

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        return self.document


def _one_plan(given: dict[str, Any]) -> tuple[Job, Plan, tuple[str, ...], Calibration]:
    from tuner.plan_defaults import asked_plan

    return asked_plan(read_request(given, keys=(*JOB_KEYS, "plan")))


def estimate(**given: Any) -> EstimateAnswer:
    """Return what one plan costs. Arguments are those of the command line: model, cluster, seq_len, global_batch, plan, ..."""
    from tuner.answers import answer_estimate

    return answer_estimate(*_one_plan(given))


def failures(*, progress: Progress | None = None, **given: Any) -> FailuresAnswer:
    """Return what a plan loses to failing GPUs, by policy. Arguments are those of the command line: those of `estimate`, data, mtbf, ..."""
    from tuner.failing import read_question, with_fallback
    from tuner.goodput import answer_failures
    from tuner.plan_defaults import asked_plan

    request = read_request(given, keys=(*JOB_KEYS, "plan", *FAILURE_KEYS))
    problems = Problems()
    read = problems.trying(lambda: asked_plan(request))
    question = problems.trying(lambda: read_question(request))
    problems.raise_any()
    assert read is not None  # noqa: S101 (raise_any has raised otherwise)
    assert question is not None  # noqa: S101
    question, stated = with_fallback(question, read[1], request)
    return answer_failures(*read, question, stated=stated, progress=progress)


def search(*, progress: Progress | None = None, started: Callable[[], None] | None = None, **given: Any) -> SearchAnswer:
    """Return the best plans for a job, ranked. Arguments are those of the command line; `started` is called when a measured search has
    found nothing wrong with its question.

    The answer is returned also when nothing is feasible: its `why_nothing` says why.
    """
    from tuner.searching import run_search

    return run_search(read_request(given, keys=(*JOB_KEYS, *SEARCH_KEYS, *MEASURE_KEYS)), progress, started)


def measures(**given: Any) -> bool:
    """Whether this search's question, its job file's answers filled in, asks for measured runs."""
    from tuner.profiling.measured import wanted

    return wanted(read_request(given, keys=(*JOB_KEYS, *SEARCH_KEYS, *MEASURE_KEYS)))


def folder_name(**given: Any) -> str:
    """Return the folder of a measured search that names none."""
    request = read_request(given, keys=(*JOB_KEYS, *SEARCH_KEYS, *MEASURE_KEYS))
    words = "-".join(Path(str(value)).stem for value in (request.model, request.cluster) if value is not None)
    return "tuner-" + re.sub(r"[^A-Za-z0-9._]+", "-", words)[:80]


def check(
    paths: Any,
    *,
    format: Any = None,  # noqa: A002 (the option's name)
    gap: Any = None,
    no_search: bool = False,
    fix: bool = False,
    progress: Progress | None = None,
    **given: Any,
) -> CheckAnswer:
    """Return the judgement on launch scripts and configurations (files, folders): legal, fitting, how fast, how far from the best.

    format: what every file is taken for; gap: how much slower than the best is too much ("10%"); fix: with the edits that make it the best
    plan. Other arguments are those of the command line, and hold where the files say nothing: model, cluster, gpus, ...
    """
    from tuner.checking.checked import answer_check

    return answer_check(_listed(paths), given, form=str(format or ""), gap=gap, search=not no_search, fix=fix, progress=progress)


def export(
    formats: Any, *, wrap: Any = None, site: Any = None, failed: Any = None, reduced: Any = None, version: Any = "", **given: Any
) -> ExportAnswer:
    """Return the files that launch a plan in these formats ("neutral,deepspeed", or a list); wrap: "slurm,kubernetes", around them, with
    the settings of the `site` file; failed: "0:3,1:5", replica and slot, or reduced: how many replicas fall to the plan's fallback_tp.

    Formats that cannot spell the plan are in `refused`; SpecError is raised where none can.
    """
    from tuner.exporting import answer_export

    request = read_request(given, keys=(*JOB_KEYS, "plan"))
    return answer_export(request, formats, wrap=wrap, site=site, failed=failed, reduced=reduced, version=str(version or ""))


def profile_ntp(*, progress: Progress | None = None, folder: Any = None, **given: Any) -> NonuniformAnswer:
    """Return what nonuniform tensor-parallel steps take on this machine: degrees ("4,3"), model, seq_len, global_batch, micro_batch, steps,
    sequence_parallel, precision, trial_time; folder: keeps the log. With lose=RANK, how a run goes on when that rank is killed.
    """
    from tuner.nonuniform import run_nonuniform

    known = ("degrees", "model", "seq_len", "global_batch", "micro_batch", "steps", "sequence_parallel", "precision", "trial_time", "lose")
    for name in given:
        if name not in known:
            raise one_problem(name, "", "", "is no argument of this verb", ", ".join(known))
    return run_nonuniform({**given, "folder": folder}, progress)


def replay(
    files: Any,
    *,
    runs: Any = 8,
    strategy: str = "residual",
    seed: Any = 0,
    calibration: str = "none",
    progress: Progress | None = None,
) -> ReplayAnswer:
    """Return how good searches of `runs` runs would have been on the measured series of these JSONL files."""
    from tuner.accuracy.replay import STRATEGIES, replay

    problems = Problems()
    names = _listed(files)
    if not names:
        problems.add("files", None, "are missing", "JSONL files with measured rows")
    if strategy not in STRATEGIES:
        problems.add("strategy", strategy, f"must be one of {', '.join(STRATEGIES)}", close(str(strategy), STRATEGIES))
    count = problems.trying(lambda: whole(runs, "runs", most=100_000))
    number = problems.trying(lambda: whole(seed, "seed", at_least=0, most=2**31))
    paths = [path for name in names if (path := problems.trying(lambda name=name: path_of(name))) is not None]  # type: ignore[misc]
    problems.raise_any()
    found = replay(
        paths, runs=count or 8, strategy=cast("Strategy", strategy), seed=number or 0, calibration=str(calibration), progress=progress
    )
    return ReplayAnswer(found)


def question(**given: Any) -> dict[str, Any]:
    """Return a search's question with its job file's answers filled in, as texts: what a job file holds."""
    keys = (*JOB_KEYS, *SEARCH_KEYS, *MEASURE_KEYS)
    request = read_request(given, keys=keys)
    values = {name: getattr(request, name) for name in keys if name not in ("job", "folder")}
    for name in ("site", "command"):  # a job file is read from elsewhere
        if values[name] is not None:
            values[name] = Path(str(values[name])).expanduser().absolute()
    if values["storage"] is not None:
        from tuner.profiling.storage import shown

        values["storage"] = shown(str(values["storage"]))
    return {name: _written(value) for name, value in values.items() if value is not None}


def same_job(folder: Path, **given: Any) -> None:
    """Raise SpecError where a folder holds the measurements of another job than this question's."""
    path = folder / "job.yaml"
    if not path.is_file() or not (folder / "measurements.jsonl").exists():
        return
    kept, asked = load_yaml(path), question(**given)
    differs = [name for name in JOB_KEYS if isinstance(kept, dict) and str(kept.get(name)) != str(asked.get(name))]
    if differs:
        rule = f"holds measurements of another job ({differs[0]} = {kept.get(differs[0])}, not {asked.get(differs[0])})"
        raise one_problem("out", "", str(folder), rule, "another folder")


def _written(value: Any) -> Any:
    """Return a value as a job file holds it: digits as a number, the rest as text."""
    if isinstance(value, (list, tuple)):
        return [_written(item) for item in value]
    if isinstance(value, (dict, bool)):
        return value
    return int(value) if str(value).isascii() and str(value).isdigit() else str(value)


def explain(*, progress: Progress | None = None, no_search: bool = False, **given: Any) -> ExplainAnswer:
    """Return why a plan costs what it costs, what would make it legal and fit, what one step in each knob changes, and (unless
    no_search) how it differs from the best plan.
    """
    from tuner.explained import answer_explain

    told = None if progress is None else lambda done, of: progress("plans", done, of)
    return answer_explain(*_one_plan(given), search=not no_search, progress=told)


def _listed(given: Any) -> list[str]:
    return [str(name) for name in ([given] if isinstance(given, (str, Path)) else given or ())]


def _rows(names: list[str], problems: Problems) -> list[tuple[Path, tuple[list[Measurement], list[Skipped]]]]:
    """Return each file with its measured rows and the rows that are skipped, or note what is wrong with it."""
    from tuner.accuracy.rows import read_files

    read = [(Path(name), problems.trying(lambda name=name: read_files([path_of(name)]))) for name in names]  # type: ignore[misc]
    return [(path, found or ([], [])) for path, found in read]


def validate(
    files: Any = (), *, operators: Any = (), calibration: str = "auto", cross: bool = False, progress: Progress | None = None
) -> ValidateAnswer:
    """Return how wrong the model is on the measured rows of these JSONL files, and on these Parquet tables of measured operators (also
    those among `files`, known by their names' end); with `cross` also where each row is told by a calibration that has not seen its
    series, its model or its source.
    """
    from tuner.accuracy.validate import calibrations, document, score, summary

    rows, tables = _listed(files), _listed(operators)
    names = [name for name in rows if not name.lower().endswith(".parquet")]
    tables += [name for name in rows if name not in names]
    if not names and not tables:
        raise one_problem("files", "", None, "are missing", "JSONL files with measured rows, or --operators with Parquet tables")
    problems = Problems()
    read = _rows(names, problems)
    found_tables = _operator_tables(tables, str(calibration), problems, progress)
    problems.raise_any()
    if not names:
        if cross:
            raise one_problem("--cross", "", None, "is about measured rows", "JSONL files beside the tables")
        return ValidateAnswer(found_tables)
    scored, skipped = [], []
    for done, (path, (measurements, left_out)) in enumerate(read):
        if progress is not None:
            progress(f"scoring {path.name}: file", done + 1, len(read))
        scored += score(measurements, str(calibration))
        skipped += left_out
    answer = {**document(scored, skipped), **found_tables}
    if cross:
        from tuner.accuracy.cross import told_without

        told = told_without(scored, calibrations(str(calibration)), progress)
        answer["cross"] = {left: summary(items) for left, items in told.items()}
    return ValidateAnswer(answer)


def _operator_tables(names: list[str], calibration: str, problems: Problems, progress: Progress | None) -> dict[str, Any]:
    """Return the scores of tables of operators and what was left out, or nothing when no table was given."""
    if not names:
        return {}
    from tuner.accuracy.operators import score_table

    tables, left_out = [], []
    for done, name in enumerate(names):
        if progress is not None:
            progress(f"scoring {Path(name).name}: table", done + 1, len(names))
        found = problems.trying(lambda name=name: score_table(path_of(name), calibration))  # type: ignore[misc]
        if found is not None:
            tables += found[0]
            left_out += found[1]
    return {"tables": tables, "left_out": left_out}


@dataclass(frozen=True, slots=True)
class CalibrateAnswer:
    """What a person's runs gave: the ways of using them that were tried, the best, and the calibration file's text ("": declined)."""

    own: OwnCalibration
    skipped: list[Skipped]
    logs: list[Logged]

    @property
    def text(self) -> str:
        """The calibration file, or "" where the runs do not clearly help."""
        return self.own.text

    def record(self) -> dict[str, Any]:
        """Return the answer as JSON's types."""
        from tuner.accuracy.own import WORDS

        own = self.own
        tried = [{"way": w, "words": WORDS[w], "median_abs_err": s.median, "p90_abs_err": s.p90} for w, s in own.scores.items()]
        skipped = [{"id": item.id, "why": item.why} for item in self.skipped]
        return {
            "framework": own.framework,
            "rows": own.rows,
            "plans": own.plans,
            "tried": tried,
            "way": own.way,
            "helps": bool(own.text),
            "too_few": own.too_few,
            "skipped": skipped,
            "logs": [logged.record() | {"predicted_s": own.predicted_s.get(logged.log)} for logged in self.logs],
        }


def calibrate(files: Any, *, name: str = "own", progress: Progress | None = None, **given: Any) -> CalibrateAnswer:
    """Return the calibration of measured runs, where it clearly helps: rows of JSONL files, trainers' logs, and YAML files that name logs.

    given: what the logs are of, with the arguments of the command line: model, cluster, seq_len, global_batch, framework, plan, ...
    """
    from tuner.accuracy.own import own_calibration
    from tuner.logged import kind_of, left_out, read_logs

    paths = [path_of(item) for item in _listed(files)]
    if not paths:
        raise one_problem("runs", "", None, "are missing", "JSONL files with measured rows, trainers' logs, or a YAML file that names logs")
    problems = Problems()
    kinds = [kind_of(path) for path in paths]
    of_logs = [path for path, kind in zip(paths, kinds, strict=True) if kind in ("log", "runs")]
    if given and set(kinds) == {"rows"}:
        problems.add(next(iter(given)), None, "is about trainers' logs, and no file is one", "rows of JSONL state their own job")
    read = _rows([str(path) for path, kind in zip(paths, kinds, strict=True) if kind in ("rows", "unread")], problems)
    measured, logs = problems.trying(lambda: read_logs(of_logs, given)) or ([], [])
    problems.raise_any()
    rows = [row for _, (measurements, _) in read for row in measurements] + measured
    skipped = [item for _, (_, unstated) in read for item in unstated] + left_out(logs)
    if not rows and skipped:
        raise one_problem(
            "runs",
            skipped[0].id,
            f"{len(skipped)} runs, all skipped" if len(skipped) > 1 else "skipped",
            f"must tell enough: {skipped[0].why}",
        )
    if progress is not None:
        progress(f"foretelling each of {len(rows)} runs without itself", 0, 1)
    return CalibrateAnswer(own_calibration(rows, name), skipped, logs)


def calibrate_machine(
    *,
    measure: bool = False,
    nccl_log: Any = (),
    timings: Any = (),
    cluster: str | None = None,
    precision: str | None = None,
    budget: Any = None,
    name: str = "own",
    progress: Progress | None = None,
) -> MachineAnswer:
    """Return the calibration of a machine: of what is measured here (`measure`), of logs of nccl-tests, and of timings taken before."""
    from tuner.measuring import read_and_measure

    return read_and_measure(
        _listed(nccl_log),
        _listed(timings),
        measure=measure,
        cluster=cluster,
        precision=precision,
        budget=budget,
        name=name,
        progress=progress,
    )


def presets(kind: str | None = None, name: str | None = None) -> PresetsAnswer:
    """Return the kinds of presets, the presets of a kind, or one preset with every figure and its source."""
    from tuner.shelf import look

    return look(kind, name)


def cluster_file(name: str) -> ClusterFile:
    """Return a cluster as the text of its file: a preset, one with a count of GPUs, or this machine ("local")."""
    from tuner.shelf import cluster_file as written

    return written(name)


def doctor() -> DoctorAnswer:
    """Return what works on this machine."""
    from tuner.health import examine

    return examine()
