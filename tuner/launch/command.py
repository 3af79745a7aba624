"""Trials by a person's own launch command: a template, with files that are written for each plan."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Literal

import yaml
from pydantic import AfterValidator, Field

from tuner.errors import InfrastructureError, Problem, SpecError, nearest, one_problem
from tuner.files import write
from tuner.launch import supervised
from tuner.launch.launchers.launcher import Written, chosen, launchers, open_launcher
from tuner.launch.logs.formats import FORMATS
from tuner.launch.orders import COMMAND, ENVIRONMENT, LOG, ORDERS, OWN_LOG, RESULT, STOP, SUPERVISOR, TRIAL
from tuner.launch.script import TASK, task_script
from tuner.launch.site import Site
from tuner.launch.template import PLAN, check, fill_command, fill_file, values
from tuner.load import load_file
from tuner.plan_text import plan_record
from tuner.spec import Name, Spec

if TYPE_CHECKING:
    from tuner.job import Job
    from tuner.launch.runner import Running, Setup
    from tuner.launch.trial import Trial
    from tuner.plan import Plan

_OURS = {COMMAND, ENVIRONMENT, LOG, ORDERS, OWN_LOG, PLAN, RESULT, STOP, SUPERVISOR, TASK, TRIAL, "job.json", "job.sh", "exit.txt"}


def _file_name(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.name or name.startswith("-"):
        raise ValueError("must be a path inside the trial's folder")
    if name in _OURS:
        raise ValueError("is a file that the tuner writes itself")
    return name


def _launcher(name: str) -> str:
    if name not in FORMATS:
        raise ValueError(f"is no log format that is known ({nearest(name, FORMATS)})")
    return name


def _export(name: str) -> str:
    if name not in launchers():
        raise ValueError(f"is no format that is known ({nearest(name, launchers())})")
    if name == "neutral":
        raise ValueError(f"launches nothing: {PLAN} holds the plan of each trial anyway")
    return name


Launcher = Annotated[Name, AfterValidator(_launcher)]
Export = Annotated[Name, AfterValidator(_export)]
FileName = Annotated[Name, AfterValidator(_file_name)]
Text = Annotated[str, Field(min_length=1, max_length=1_000_000)]


class Command(Spec):
    """A launch command of one's own, run by bash as it stands once its placeholders are filled in: trusted like any script of yours.

    launcher: whose log format it writes; folder: where it runs (default: the trial's folder); per: on Slurm, whether it runs once on the
    first node ("job": it calls srun itself), once on each node ("node": torchrun) or once for each accelerator ("gpu");
    export: a format of `tuner export`, whose files for the plan are written into the trial's folder; framework_version: of it (the last);
    files: name in the trial's folder -> template of its content, which takes the place of an exported file of that name.
    """

    launcher: Launcher
    command: Text
    folder: Name | None = None
    per: Literal["job", "node", "gpu"] = "job"
    export: Export | None = None
    framework_version: Name | None = None
    files: dict[FileName, Text] = Field(default_factory=dict)

    def task(self, trial: Trial, site: Site, where: str, *, before: tuple[str, ...] = ()) -> str:
        """Write the trial's files; return the script that runs the command. Raises SpecError, InfrastructureError."""
        facts = values(trial)
        body = fill_command(self.command, facts, where).strip()
        written = self.exported(trial.job, trial.plan)
        contents = dict(written.files) | {name: fill_file(text, facts, name, where) for name, text in self.files.items()}
        contents[PLAN] = yaml.safe_dump(plan_record(trial.plan, trial.job.gpus), sort_keys=False)
        try:
            for name, text in contents.items():
                path = trial.folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write(path, text)
                if name in written.programs:
                    path.chmod(path.stat().st_mode | 0o111)
        except OSError as error:
            raise InfrastructureError(f"{trial.folder}: cannot be written: {error.strerror}") from None
        return task_script(site, self.folder or str(trial.folder.absolute()), [body], before=before)

    def exported(self, job: Job, plan: Plan) -> Written:
        """Return the files of `export` for a plan (none without it). Raises SpecError for a plan that the format cannot spell."""
        if self.export is None:
            return Written(files={})
        return open_launcher(self.export).write(job, plan, self.framework_version or "")

    def spells(self, job: Job, plan: Plan) -> bool:
        """Whether the format of `export` can spell a plan (always without it)."""
        try:
            self.exported(job, plan)
        except SpecError:
            return False
        return True


def read_command(path: Path) -> Command:
    """Return the launch command in a YAML file. Raises SpecError that names every unknown placeholder."""
    command = load_file(Command, path)
    problems = check(command.command, str(path), "command")
    problems += [problem for name, text in command.files.items() for problem in check(text, str(path), f"files.{name}")]
    if command.framework_version is not None and command.export is None:
        problems.append(Problem(where=str(path), path="framework_version", value=command.framework_version, rule="is that of `export`"))
    if command.export is not None:
        try:
            chosen(open_launcher(command.export), command.framework_version or "")
        except SpecError as error:
            problems += [dataclasses.replace(one, where=str(path), path="framework_version") for one in error.problems]
    if command.folder and not Path(command.folder).is_dir():
        problems.append(Problem(where=str(path), path="folder", value=command.folder, rule="is no folder"))
    if problems:
        raise SpecError(problems)
    return command


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandRunner:
    """Runs the command on this machine, once a trial. grace_s, error_s: see Orders."""

    command: Command
    site: Site = field(default_factory=Site)
    parallel: int = 1
    grace_s: float = 5.0
    error_s: float = 3.0

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return "command"

    def start(self, trial: Trial) -> Running:
        """Start the command under a supervisor. Raises SpecError, InfrastructureError."""
        script = self.command.task(trial, self.site, "command")
        return supervised.start_here(trial, script, self.site, launcher=self.command.launcher, grace_s=self.grace_s, error_s=self.error_s)

    def attach(self, trial: Trial) -> Running | None:
        """Return the trial's result if it has one; else end what is left of it."""
        return supervised.attach(trial, self.command.launcher, self.grace_s)


def open_runner(setup: Setup) -> CommandRunner:
    """Return the runner for a setup. Raises SpecError."""
    if setup.command is None:
        raise one_problem("command", "command", None, "there is no launch command", "name a file with one")
    return CommandRunner(command=setup.command, site=setup.site, parallel=setup.parallel)
