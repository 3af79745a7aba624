"""From what a launcher's files say to a job and a plan: what they leave out is taken from the options, or done as the framework does.

Where a file and an option say different things, the file holds and the difference is told. What nobody says is asked for by name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.answers import Broken, broken_by
from tuner.checking.alike import SHAPE, counted, is_file, kind_of, model_like, with_nodes_of
from tuner.checking.certainty import certain
from tuner.checking.request_files import JOB
from tuner.cluster import Cluster
from tuner.errors import Problem, SpecError
from tuner.job import PEAK_OF, Job, RampUp
from tuner.launch.detection import named_cluster
from tuner.launch.launchers.launcher import Found
from tuner.load import load_spec
from tuner.model import Model
from tuner.plan_defaults import filled
from tuner.plan_text import KNOBS, parse_knobs
from tuner.request import Request, read_job
from tuner.values import read_ramp_up, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.plan import Plan

NEEDED = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab")
# The rule that is broken where a launcher itself finds a contradiction, by words of the key it found it at.
_RULE_OF_KEY = (
    ("num_layers_per_virtual", "layers-pp-vpp"),
    ("pipeline_model_parallel_layout", "layers-pp-vpp"),
    ("pipeline_num_layers", "layers-pp-vpp"),
    ("num_query_groups", "kv-heads"),
    ("expert_model_parallel", "dense-experts"),
    ("tp_comm_overlap", "tp-overlap-sp"),
    ("overlap_param_gather", "dp-overlap"),
    ("recompute", "recompute"),
    ("cuda_graph", "cuda-graphs"),
    ("offload", "offload"),
    ("batch", "batch"),
    ("sharding", "zero"),
    ("fsdp", "zero"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """What a launch comes to. job, plan: None where something is missing; missing: what has to be told, or cannot be read; broken: rules
    that the launch breaks (where something is missing: whatever that is); assumed: {what: why}; contradictions: between files and options.
    """

    framework: str
    job: Job | None = None
    plan: Plan | None = None
    missing: tuple[Problem, ...] = ()
    broken: tuple[Broken, ...] = ()
    assumed: Mapping[str, str] = field(default_factory=dict)
    contradictions: tuple[str, ...] = ()

    @property
    def legal(self) -> bool:
        """Whether the framework runs it, as far as is known."""
        return all(item.severity != "error" for item in self.broken)


def imported(found: Found, defaults: Request, where: str, *, words: str = "", needs_plan: bool = False) -> Imported:
    """Return the job and plan of what files say. where: the file that names the launch; words: its text, where it may name a model;
    defaults: the options, of which the files take what they do not say themselves; needs_plan: whether a plan of no knobs is none.
    """
    read = _Reading(where, found, words)
    framework = read.framework(defaults)
    model = read.model(defaults)
    cluster = read.cluster(defaults)
    knobs = read.knobs(needs_plan)
    values = read.numbers(defaults, knobs or {}, cluster)
    if framework is not None:
        read.contradicted(framework.name, model)
    job = None
    if framework is not None and model is not None and cluster is not None and not read.missing:
        job = read.job(framework, model, cluster, values, defaults)
    if job is None or knobs is None:
        known = certain(found, framework, model, cluster, values, knobs) if framework is not None and knobs is not None else ()
        return read.done(None, None, (*read.broken, *known))
    plan, assumed = filled(job, knobs)
    read.assume(assumed, plan, job)
    found_broken = (*_stated_dp(job, knobs, plan), *broken_by(job, plan))
    return read.done(job, plan, (*read.broken, *found_broken))


@dataclass(slots=True)
class _Reading:
    """Collects what is missing, assumed and contradictory while the parts of a launch are read."""

    where: str
    found: Found
    words: str
    missing: list[Problem] = field(default_factory=list)
    broken: tuple[Broken, ...] = ()
    assumed: dict[str, str] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)
    name: str = ""

    def __post_init__(self) -> None:
        self.assumed = dict(self.found.assumed)

    def done(self, job: Job | None, plan: Plan | None, broken: tuple[Broken, ...]) -> Imported:
        return Imported(
            framework=self.name or self.found.framework,
            job=job,
            plan=plan,
            missing=tuple(self.missing),
            broken=_once(broken),
            assumed=self.assumed,
            contradictions=tuple(self.contradictions),
        )

    def ask(self, what: str, hint: str) -> None:
        self.missing.append(Problem(where=self.where, path=what, value="", rule="is not said", hint=hint))

    def wrong(self, error: SpecError, what: str) -> None:
        self.missing += [
            dataclasses.replace(p, where=self.where, path=p.path or what) if p.where in ("", what, "job") or p.where.startswith(what) else p
            for p in error.problems
        ]

    def differs(self, what: str, file: object, option: object) -> None:
        self.contradictions.append(f"{what}: the file says {file}, the option {option}: the file holds")

    def contradicted(self, framework: str, model: Model | None) -> None:
        """Take note of what the launcher found contradictory; what has no place in a file needs what it is not told."""
        for problem in self.found.problems:
            if problem.where != "files":
                self.broken += (_contradiction(problem, framework),)
            elif model is not None:
                self.assumed.setdefault(problem.path, f"what {framework} does when not told: {problem.rule}")

    def framework(self, defaults: Request) -> Any:
        told, option = self.found.framework, defaults.framework
        try:
            mine = presets.framework(told)
        except SpecError as error:
            self.wrong(error, "framework")
            return None
        if option is not None:
            asked = presets.framework(str(option))
            alike = set(asked.rules) & set(mine.rules) or told == "generic" or asked.name == mine.name
            if alike:
                mine = asked
            else:
                self.differs("framework", mine.name, asked.name)
        self.name = mine.name
        return mine

    def model(self, defaults: Request) -> Model | None:
        told = {name: value for name, value in self.found.model.items() if value is not None}
        preset = told.pop("preset", "")
        option = presets.model(str(defaults.model)) if defaults.model is not None else None
        if preset:
            try:
                named = presets.model(str(preset))
            except SpecError as error:
                if option is None:
                    self.wrong(error, "model")
                    return None
                self.assumed["model"] = f"{option.name}: {preset} is no model that is known"
                return option
            if option is not None and option.name != named.name:
                self.differs("model", named.name, option.name)
            return _with_told(named, {k: v for k, v in told.items() if k == "mtp_layers"})
        if not any(name in told for name in NEEDED):
            if option is None:
                self.ask("model", "-m, a preset, a YAML file or a Hugging Face config.json")
            else:
                self.assumed["model"] = f"{option.name}: the option's, as no file says it"
            return option
        return self._architecture(told, option)

    def _architecture(self, told: dict[str, Any], option: Model | None) -> Model | None:
        """Return the model of told dimensions. What is left out is that of the option's model or of a known one of these dimensions."""
        base, what = (
            (option, "the option's model") if option is not None else (model_like(told, self.words), "a known model of these dimensions")
        )
        if option is not None:
            apart = [name for name in SHAPE if told.get(name, getattr(option, name)) != getattr(option, name)]
            if apart:
                mine = ", ".join(f"{name} {told[name]}" for name in apart)
                self.differs("model", mine, f"{option.name} ({', '.join(f'{name} {getattr(option, name)}' for name in apart)})")
                like = model_like(told, self.words)
                base, what = (like, "a known model of these dimensions") if like else (option, what)
        fields = dict(told)
        if "heads" in told:
            fields.setdefault("kv_heads", base.kv_heads if base and base.heads == told["heads"] else told["heads"])
        if "hidden" in told and "heads" in told and told["heads"]:
            fields.setdefault(
                "head_dim", base.head_dim if base and base.heads == told["heads"] else max(told["hidden"] // told["heads"], 1)
            )
        for name in NEEDED:
            if name not in fields and base is not None:
                fields[name] = getattr(base, name)
                self.assumed[f"model.{name}"] = f"{fields[name]}: as in {base.name}, {what}"
        if base is not None and "gated_mlp" not in told and "norm" not in told:
            traits = ("gated_mlp", "tied_embeddings", "norm", "positions", "biases", "qkv_bias", "qk_norm", "moe", "mla")
            fields = {name: getattr(base, name) for name in traits} | fields
        lacking = [name for name in NEEDED if name not in fields]
        if lacking:
            self.ask(f"model ({', '.join(lacking)})", "-m, a model that has it: a preset, a YAML file or a Hugging Face config.json")
            return None
        same = base is not None and all(fields[name] == getattr(base, name) for name in NEEDED)
        if same and base is not None and fields.get("name") in (None, "model", "config"):  # a folder's name, no model's
            fields["name"] = base.name
        fields.setdefault("name", _plain(self.where))
        if isinstance(fields.get("moe"), dict):
            fields["moe"] = {name: value for name, value in fields["moe"].items() if value is not None}
        try:
            return load_spec(Model, fields, "model", units=False)
        except SpecError as error:
            self.wrong(error, "model")
            return None

    def cluster(self, defaults: Request) -> Cluster | None:
        """Return the cluster: the kind of GPU that the file or the option names, as many as the file or the option says."""
        option = defaults.cluster
        kind, number = ("", None) if option is None else counted(str(option)) if not isinstance(option, Cluster) else ("", option.gpus)
        base = option if isinstance(option, Cluster) else None
        told = self.found.gpu
        if told and (in_file := kind_of(told)) is not None:
            if option is not None and base is None and (given := kind_of(kind)) is not None and given.gpu.name != in_file.gpu.name:
                self.differs("cluster", in_file.gpu.name, kind)
            elif option is not None and base is None:
                in_file = kind_of(kind) or in_file  # the same GPU, in the cluster that was named
            base = in_file
        if base is None and option is not None:
            base = named_cluster(kind)
        asked = whole(defaults.gpus, "gpus") if defaults.gpus is not None else number
        if base is not None and asked is None and option is not None and number is None and is_file(str(option)):
            asked = base.gpus
        plan = self.found.plan
        gpus = self.found.gpus
        if gpus is None and plan.get("dp") and asked is None:
            gpus = math.prod(int(plan.get(name) or 1) for name in ("tp", "pp", "cp", "dp"))
            self.assumed["gpus"] = f"{gpus}: the product of the degrees"
        if gpus is not None and asked is not None and asked != gpus:
            self.differs("gpus", gpus, asked)
        gpus = asked if gpus is None else gpus
        if base is None and told:
            self.missing.append(
                Problem(where=self.where, path="GPU", value=repr(told)[:80], rule="is no cluster that is known", hint="-c h100")
            )
        elif base is None:
            self.ask("GPU", "-c, the kind of GPU or cluster, like -c h100 (`tuner presets clusters`)")
        if gpus is None:
            self.ask("gpus", "-g, the count of GPUs (or -c h100x64)")
        if base is None or gpus is None:
            return None
        return self._sized(base, gpus)

    def _sized(self, base: Cluster, gpus: int) -> Cluster | None:
        per_node = self.found.gpus_per_node
        if per_node and per_node != base.gpus_per_node and per_node < gpus:
            fitted = with_nodes_of(base, per_node)
            if fitted is None:
                self.contradictions.append(
                    f"gpus per node: the file says {per_node}, {base.name} has {base.gpus_per_node}: the cluster holds"
                )
            else:
                base = fitted
                self.assumed["gpus_per_node"] = f"{per_node}: the file's, in place of the cluster's"
        try:
            return base if base.gpus == gpus else presets.with_gpus(base, gpus, "gpus")
        except SpecError as error:
            self.wrong(error, "gpus")
            return None

    def numbers(self, defaults: Request, knobs: Mapping[str, int], cluster: Cluster | None) -> dict[str, int]:
        """Return sequence length and global batch. A batch that nobody tells is one micro batch of each replica, where that is a step."""
        found: dict[str, int] = {}
        hints = {"seq_len": "-s, tokens of a sequence", "global_batch": "-b, sequences of a step over all GPUs"}
        for name, hint in hints.items():
            option = getattr(defaults, name)
            asked = whole(option, name, thousand=1024 if name == "seq_len" else 0) if option is not None else None
            told = self.found.job.get(name)
            try:
                mine = whole(told, name) if told is not None else None
            except SpecError as error:
                self.wrong(error, name)
                continue
            if name in self.found.assumed and asked is not None:  # the framework's own default, which an option tells better
                mine = None
                self.assumed.pop(name, None)
            if mine is not None and asked is not None and mine != asked:
                self.differs(name, mine, asked)
            value = asked if mine is None else mine
            if value is None and name == "global_batch" and cluster is not None and "micro_batch" in knobs and knobs.get("pp", 1) == 1:
                ranks = knobs.get("tp", 1) * knobs.get("cp", 1)
                value = knobs["micro_batch"] * max(cluster.gpus // ranks, 1)
                self.assumed[name] = f"{value}: micro batches of {knobs['micro_batch']}, one a step of each replica, as nothing tells more"
            if value is None:
                self.ask(name, hint)
            else:
                found[name] = value
        return found

    def knobs(self, needs_plan: bool) -> dict[str, int] | None:
        """Return the plan's fields as far as told."""
        told = {name: value for name, value in self.found.plan.items() if name in KNOBS or name not in ("edp", "idle_tp")}
        if needs_plan and not told:
            self.ask("plan", "plan: {tp: 8, pp: 4}")
            return None
        try:
            return parse_knobs(told, self.where)
        except SpecError as error:
            self.missing += error.problems
            return None

    def job(self, framework: Any, model: Model, cluster: Cluster, values: Mapping[str, int], defaults: Request) -> Job | None:
        fields: dict[str, Any] = {"model": model, "cluster": cluster, "framework": framework, **values}
        for name in JOB:
            option, told = getattr(defaults, name), self.found.job.get(name, self.found.release or None if name == "release" else None)
            if told is not None and option is not None and str(told) != str(option):
                self.differs(name, told, option)
            value = option if told is None else told
            if value is not None and not (name == "lora_rank" and (self.found.job.get("task") or defaults.task) != "lora"):
                fields[name] = value
        precision = str(fields.get("precision", "bf16"))
        if precision in PEAK_OF and not any(peak in cluster.gpu.peak for peak in PEAK_OF[precision]):
            text = f"{cluster.gpu.name} has no {precision}: it has {', '.join(cluster.gpu.peak)}"
            self.broken += (Broken(rule="precision", severity="error", text=text, source="the GPU's data sheet"),)
            return None
        fields |= {"calibration": defaults.calibration, "price": defaults.price if defaults.tokens is not None else None}
        if model.positions == "learned" and model.max_positions and values["seq_len"] > model.max_positions:
            fields["model"] = model.replace(max_positions=values["seq_len"])
            self.assumed["model.max_positions"] = f"{values['seq_len']}: as many as the sequence has"
        try:
            job = read_job(Request(**fields))
        except SpecError as error:
            names = set(Request.__dataclass_fields__)
            self.missing += [
                dataclasses.replace(p, where=self.where, path=".".join(filter(None, (p.where, p.path))))
                if p.where in names | {"job"}
                else p
                for p in error.problems
            ]
            return None
        if "precision" not in self.found.job and defaults.precision is None:
            self.assumed["precision"] = f"{job.precision}: no file says it"
        ramp = self.found.job.get("ramp_up", defaults.ramp_up)
        return job if ramp is None else self._ramped(job, ramp)

    def _ramped(self, job: Job, ramp: Any) -> Job:
        try:
            read = read_ramp_up(ramp)
            checked = Job(**{name: getattr(job, name) for name in Job.model_fields} | {"ramp_up": RampUp(**read)})
        except (SpecError, ValueError) as error:
            text = (
                error.problems[0].rule
                if isinstance(error, SpecError)
                else f"the batch ramp-up {ramp} must reach global_batch = {job.global_batch}"
            )
            self.broken += (Broken(rule="ramp-up", severity="error", text=text, source="Megatron-LM num_microbatches_calculator.py"),)
            return job
        return checked

    def assume(self, names: tuple[str, ...], plan: Plan, job: Job) -> None:
        """Note the knobs that took the framework's default."""
        from tuner.plan_text import plan_record

        record = plan_record(plan, job.gpus)
        for name in names:
            value = record.get(name)
            shown = ("on" if value else "off") if isinstance(value, bool) else value
            self.assumed.setdefault(name, f"{shown}: what {job.framework.name} does when not told")


def _with_told(model: Model, told: Mapping[str, Any]) -> Model:
    changed = {name: value for name, value in told.items() if getattr(model, name) != value}
    return model.replace(**changed) if changed else model


def _plain(where: str) -> str:
    return re.sub(r"[^A-Za-z0-9._-]+", "-", Path(where.split(":")[0]).stem)[:60] or "model"


def _contradiction(problem: Problem, framework: str) -> Broken:
    key = re.sub(r"[-.]", "_", problem.path.lstrip("-"))
    rule = next((rule for words, rule in _RULE_OF_KEY if words in key), "contradiction")
    if rule == "dense-experts" and "divide" in problem.rule:
        rule = "experts-ep"
    value = f" {problem.value}" if problem.value else ""
    hint = f"; {problem.hint}" if problem.hint else ""
    return Broken(rule=rule, severity="error", text=f"{problem.where}: {problem.path}{value}: {problem.rule}{hint}", source=framework)


def _once(broken: tuple[Broken, ...]) -> tuple[Broken, ...]:
    """Return the rules with each named once: as the rule says it, rather than as the launcher found it."""
    found: dict[str, Broken] = {}
    for item in broken:
        found[item.rule] = item
    return tuple(found.values())


def _stated_dp(job: Job, knobs: Mapping[str, int], plan: Plan) -> tuple[Broken, ...]:
    ranks = int(plan.tp) * int(plan.pp) * int(plan.cp)
    dp = knobs.get("dp")
    if dp is None or job.gpus % ranks or dp == job.gpus // ranks:
        return ()
    text = f"dp = {dp} must be {job.gpus // ranks}: gpus = {job.gpus} over tp*pp*cp = {plan.tp}*{plan.pp}*{plan.cp}"
    return (Broken(rule="mesh", severity="error", text=text, source="the product of the degrees is the number of GPUs"),)
