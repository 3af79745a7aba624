"""What a site asks of whoever runs jobs there, written down once: account, partition, container, environment."""

from __future__ import annotations

import re
import shlex
import sys
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from tuner.errors import printable
from tuner.load import load_file
from tuner.spec import Name, Spec

if TYPE_CHECKING:
    from pathlib import Path

GpuDirective = Literal["gpus-per-node", "gres", "gpus-per-task", "none"]


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        raise ValueError("a variable's name has letters, digits and _ only")
    if name.startswith("TUNER_"):
        raise ValueError("names that start with TUNER_ are the tuner's own")
    return name


def _value(text: str) -> str:
    if "\0" in text:
        raise ValueError("must not hold a NUL")
    return text


def _option(text: str) -> str:
    if not re.match(r"--[a-z]", text) or text != printable(text):
        raise ValueError('must be one long option like "--mem=0"')
    name = text[2:].partition("=")[0]
    if name in _OURS:
        raise ValueError(f"--{name} is set by the tuner itself")
    return text


def _mount(text: str) -> str:
    if "," in text:
        raise ValueError("is one mount, source:target or source:target:flags (write several as a list)")
    return text


_OURS = {"wrap", "array", "dependency", "output", "error", "job-name", "chdir", "parsable", "nodes", "ntasks", "ntasks-per-node", "wait",
         "jobid", "overlap", "test-only", "time", "export", "requeue", "no-requeue", "exclude", "nodelist", "comment", "hold"}  # fmt: skip
Variable = Annotated[str, AfterValidator(_variable)]
Value = Annotated[str, Field(max_length=20_000), AfterValidator(_value)]
Option = Annotated[str, Field(max_length=200), AfterValidator(_option)]
Mount = Annotated[Name, AfterValidator(_mount)]
ShellLine = Annotated[str, Field(min_length=1, max_length=20_000), AfterValidator(_value)]


class Container(Spec):
    """An image that pyxis (enroot) starts for each step. mounts: source:target[:flags]; the trial's folder is mounted besides."""

    image: Name
    mounts: tuple[Mount, ...] = ()


class Site(Spec):
    """Settings of a machine or cluster. All are optional.

    account, partition, qos, constraint, reservation: as Slurm names them; gpus: the directive that asks for accelerators ("none" where
    nodes are handed out whole), gpu_type: its type, where the site wants one; cpus_per_task: of a node's task; requeue: a job whose node
    fails, or that is preempted, is queued once more. slurm_options: further options of sbatch and srun.
    python: the interpreter on the nodes that has this package and torch; modules: loaded before all else; environment: variables;
    pre_commands: lines of shell, run as they stand before each trial on each node, so trusted like any script of yours.
    queue_s: how long a job may wait in the queue before it is given up (None: for ever).
    """

    name: Name = "site"
    account: Name | None = None
    partition: Name | None = None
    qos: Name | None = None
    constraint: Name | None = None
    reservation: Name | None = None
    gpus: GpuDirective = "gpus-per-node"
    gpu_type: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,60}$")] | None = None
    cpus_per_task: Annotated[int, Field(ge=1, le=4096, strict=True)] | None = None
    requeue: bool = True
    slurm_options: tuple[Option, ...] = ()
    container: Container | None = None
    python: Name = sys.executable
    modules: tuple[Name, ...] = ()
    environment: dict[Variable, Value] = Field(default_factory=dict)
    pre_commands: tuple[ShellLine, ...] = ()
    queue_s: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _modules_are_names(self) -> Self:
        for name in self.modules:
            if name.startswith("-"):
                raise ValueError(f"modules: {shlex.quote(name)} is an option, not a module")
        return self


def read_site(path: Path) -> Site:
    """Return the site in a YAML file. Raises SpecError."""
    return load_file(Site, path)
