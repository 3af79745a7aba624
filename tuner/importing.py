"""From what a launcher's files say to a job and a plan: what they leave out is taken from the options, or done as the framework does.

Where a file and an option say different things, the file holds and the difference is told. What nobody says is asked for by name.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner import presets
from tuner.answers import Broken, broken_by
from tuner.cluster import Cluster, Domain
from tuner.cost_model.rules import broken as broken_rules
from tuner.errors import Problem, SpecError
from tuner.job import PEAK_OF, Job, RampUp
from tuner.launch.detection import named_cluster
from tuner.launch.launchers.launcher import Found
from tuner.load import load_spec
from tuner.model import Model, Moe
from tuner.plan_defaults import filled
from tuner.plan_text import KNOBS, parse_knobs
from tuner.request import DEFAULT_FRAMEWORK, Request, job_values, read_job
from tuner.values import Problems, read_ramp_up, whole

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tuner.plan import Plan

CORE = ("layers", "hidden", "heads")
NEEDED = ("layers", "hidden", "ffn_hidden", "heads", "kv_heads", "head_dim", "vocab")
SHAPE = ("layers", "hidden", "heads", "ffn_hidden", "kv_heads")
_COUNTED = re.compile(r"(.+?)\s*[x*:]\s*(\d{1,9})")
# What a request says that its framework's files do too. The first of each is how a file says it.
_JOB = ("precision", "attention", "task", "release", "lora_rank", "tokens")
_ROOMY = 720_720  # a number that every degree up to 16 divides
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


def request_found(path: str, text: str, defaults: Request) -> tuple[Found, Request]:
    """Return what a job file with a plan says, and the options below it. Raises SpecError."""
    from tuner.load import parse_yaml

    keys = tuple(name for name in Request.__dataclass_fields__ if name != "job")
    data: Any = parse_yaml(text, path)
    values = job_values(data, Path(path), keys)
    plan = values.pop("plan", None)
    plan = values.pop("current", None) if plan is None else plan
    knobs: Any = plan
    if plan is not None and not isinstance(plan, dict):
        from tuner.plan_text import split_knobs

        texts = plan if isinstance(plan, list) else [plan]
        knobs = {key: value for item in texts for key, value in split_knobs(str(item), f"{path}: plan").items()}
    cluster = values.get("cluster")
    kind, count = counted(str(cluster)) if cluster is not None else ("", None)
    named = values.get("gpus")
    problems = Problems()
    gpus = problems.trying(lambda: whole(named, "gpus")) if named is not None else count
    if cluster is not None and gpus is None and (own := problems.trying(lambda: named_cluster(kind))) is not None:
        gpus = own.gpus  # as the other verbs take a cluster whose count nobody names
    job = {name: values[name] for name in ("seq_len", "global_batch", "ramp_up", *_JOB) if name in values}
    for name in ("seq_len", "global_batch"):
        if name in job:
            job[name] = problems.trying(lambda name=name: whole(job[name], name, thousand=1024 if name == "seq_len" else 0))  # type: ignore[misc]
    if problems.found:
        raise SpecError([dataclasses.replace(p, where=path, path=p.where) for p in problems.found])
    found = Found(
        framework=str(values.get("framework", defaults.framework or DEFAULT_FRAMEWORK)),
        release=str(values.get("release", "")),
        model={"preset": values["model"]} if "model" in values else {},
        job=job,
        plan=knobs or {},
        gpus=gpus,
        gpu=kind,
    )
    kept = {name: values[name] for name in ("calibration", "price", "tokens") if name in values}
    return found, dataclasses.replace(defaults, **kept)


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
        known = _certain(found, framework, model, cluster, values, knobs) if framework is not None and knobs is not None else ()
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
            (option, "the option's model") if option is not None else (_like(told, self.words), "a known model of these dimensions")
        )
        if option is not None:
            apart = [name for name in SHAPE if told.get(name, getattr(option, name)) != getattr(option, name)]
            if apart:
                mine = ", ".join(f"{name} {told[name]}" for name in apart)
                self.differs("model", mine, f"{option.name} ({', '.join(f'{name} {getattr(option, name)}' for name in apart)})")
                like = _like(told, self.words)
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
        if told and (in_file := _kind(told)) is not None:
            if option is not None and base is None and (given := _kind(kind)) is not None and given.gpu.name != in_file.gpu.name:
                self.differs("cluster", in_file.gpu.name, kind)
            elif option is not None and base is None:
                in_file = _kind(kind) or in_file  # the same GPU, in the cluster that was named
            base = in_file
        if base is None and option is not None:
            base = named_cluster(kind)
        asked = whole(defaults.gpus, "gpus") if defaults.gpus is not None else number
        if base is not None and asked is None and option is not None and number is None and _is_file(str(option)):
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
            fitted = _with_nodes_of(base, per_node)
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
        for name in _JOB:
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


def counted(text: str) -> tuple[str, int | None]:
    """Return the kind and count of "h100x64" (count None: none named)."""
    if _is_file(text) or presets_name(text):
        return text, None
    match = _COUNTED.fullmatch(text.strip()) if len(text) < 120 else None
    return (match[1], int(match[2])) if match else (text, None)


def presets_name(text: str) -> bool:
    """Whether a text is a cluster preset's own name."""
    return text.strip().lower() in presets.names("clusters")


def _is_file(text: str) -> bool:
    return "/" in text or text.lower().endswith((".yaml", ".yml", ".json")) or text.startswith("local")


def _kind(text: str) -> Cluster | None:
    try:
        return named_cluster(counted(text)[0]) if not _is_file(text) or Path(text).exists() else None
    except SpecError:
        return None


def _with_nodes_of(base: Cluster, per_node: int) -> Cluster | None:
    """Return a cluster with nodes of another size, whose fastest links are those of a node; None where its links are not the nodes'."""
    first = base.domains[0]
    if first.size != base.gpus_per_node or per_node > base.gpus_per_node:
        return None
    domains: tuple[Domain, ...] = (first.replace(size=per_node), *base.domains[1:])
    fields = {name: getattr(base, name) for name in Cluster.model_fields}
    try:
        return load_spec(Cluster, fields | {"gpus_per_node": per_node, "domains": domains, "gpus": per_node * 2}, "cluster", units=False)
    except SpecError:
        return None


@cache
def _shapes() -> tuple[Model, ...]:
    return tuple(presets.model(name) for name in presets.names("models"))


def _like(told: Mapping[str, Any], words: str = "") -> Model | None:
    """Return the known model whose dimensions are all those that are told. Of several: one whose family `words` names, else the one with
    the largest vocabulary, which needs the most memory.
    """
    if not all(name in told for name in CORE):
        return None
    moe = told.get("moe") or {}
    alike = [
        model
        for model in _shapes()
        if all(getattr(model, name) == told[name] for name in (*SHAPE, "vocab") if name in told)
        and (model.moe is not None) == bool(moe)
        and (not moe or model.moe is None or model.moe.experts == moe.get("experts", model.moe.experts))
    ]
    text = re.sub(r"[^a-z0-9]", "", words.lower())
    return max(alike, key=lambda m: (_family(m) in text, m.vocab), default=None)


def _family(model: Model) -> str:
    """Return "llama3" of llama3-70b and llama3.1-70b."""
    return re.sub(r"[^a-z0-9]", "", re.split(r"[-.]", model.name.lower())[0])


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


# -- what is broken whatever the missing parts are


def _certain(
    found: Found, framework: Any, model: Model | None, cluster: Cluster | None, values: Mapping[str, int], knobs: Mapping[str, int]
) -> tuple[Broken, ...]:
    """Return the error rules that a plan breaks for any value of what is not told: those that it breaks where each missing dimension is one
    that everything divides, and the GPUs are as many as the degrees want.
    """
    try:
        job = _roomy(found, framework, model, cluster, values, knobs)
        plan, _ = filled(job, knobs)
    except (SpecError, ValueError):
        return ()
    told = {"dp"} & set(knobs)
    ours = [(rule, text) for rule, text in broken_rules(job, plan) if rule.severity == "error" and not (rule.id == "batch" and told)]
    return tuple(Broken(rule=rule.id, severity="error", text=text, source=rule.source) for rule, text in ours)


def _roomy(
    found: Found, framework: Any, model: Model | None, cluster: Cluster | None, values: Mapping[str, int], knobs: Mapping[str, int]
) -> Job:
    degree = {name: max(int(knobs.get(name, 1)), 1) for name in ("tp", "pp", "cp", "ep", "etp", "dp", "vpp", "micro_batch")}
    whole_of = math.lcm(degree["tp"] * degree["pp"] * degree["cp"] * degree["dp"], degree["etp"] * degree["ep"] * degree["pp"])
    told = dict(found.model) if model is None else {}
    told.pop("preset", None)
    every = math.lcm(_ROOMY, *degree.values())
    layers = degree["pp"] * degree["vpp"] * max(2520 // (degree["pp"] * degree["vpp"]), 1)
    moe_told = told.get("moe") or {}
    experts = {"experts": every, "top_k": 1, "expert_ffn_hidden": every, **{k: v for k, v in moe_told.items() if v is not None}}
    dense = bool(told) and not moe_told and any(name in told for name in CORE)
    fields: dict[str, Any] = {
        "name": "told-in-part", "layers": layers, "hidden": every * 128, "ffn_hidden": every, "heads": every, "kv_heads": every,
        "head_dim": 128, "vocab": every, **{name: value for name, value in told.items() if value is not None},
    }  # fmt: skip
    if "heads" in told and "kv_heads" not in told:
        fields["kv_heads"] = told["heads"]
    if "kv_heads" in told and "heads" not in told:
        fields["heads"] = math.lcm(every, told["kv_heads"])
    fields["moe"] = None if dense or (degree["ep"] == 1 and not moe_told) else Moe(**experts)
    architecture = model or load_spec(Model, fields, "model", units=False)
    gpus = found.gpus or (cluster.gpus if cluster else whole_of)
    base = presets.cluster("dgx-h100") if cluster is None else cluster
    node = next(n for n in (8, 4, 2, 1) if gpus % n == 0)
    if cluster is None:
        base = (_with_nodes_of(base, node) or base) if node < 8 and gpus > 8 else base
        base = base if base.gpus == gpus else presets.with_gpus(base, gpus, "gpus")
    batch = values.get("global_batch") or degree["micro_batch"] * degree["pp"] * max(
        gpus // (degree["tp"] * degree["pp"] * degree["cp"]), 1
    )
    return Job(
        model=architecture,
        cluster=base,
        framework=framework,
        seq_len=values.get("seq_len") or min(2 * every, 100_000_000),
        global_batch=min(batch, 100_000_000),
        attention=framework.defaults.attention.value,
    )
