"""What wraps a launcher's files: the protocol, the script that every wrapper starts on each node, and the registry.

A wrapper adds files beside those of a launcher. They tell each node its place by NNODES, NODE_RANK, GPUS_PER_NODE, MASTER_ADDR and
MASTER_PORT, which launchers' scripts read, and by torchrun's own PET_ variables, which a bare torchrun line reads.
"""

from __future__ import annotations

import importlib
import re
import shlex
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from tuner.cluster import nodes_of
from tuner.errors import Problem, SpecError, nearest, one_problem
from tuner.launch.launchers.launcher import Written
from tuner.launch.script import command_of, needed, secrets_of, task_script
from tuner.launch.site import Site

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tuner.job import Job

BUILT_IN: dict[str, str] = {
    "kubernetes": "tuner.launch.wrappers.kubernetes",
    "skypilot": "tuner.launch.wrappers.skypilot",
    "slurm": "tuner.launch.wrappers.slurm",
    "torchrun": "tuner.launch.wrappers.torchrun",
}
NODE = "node.sh"
PORT = 29500
# torchrun reads its options from these where its command line leaves them out (torch.distributed.argparse_util).
_TORCHRUN = ("NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT")


class Wrap(Protocol):
    """A wrapper: a pure function."""

    def __call__(self, job: Job, written: Written, site: Site, name: str) -> Written:
        """Return the files that start `written`, with their start, programs and notes. name: of the job there. Raises SpecError."""


def wrapper(name: str) -> Wrap:
    """Return the wrapper of this name. Raises SpecError."""
    if name not in BUILT_IN:
        raise one_problem("wrap", "", name, "is no wrapper", nearest(name, BUILT_IN))
    found: Wrap = importlib.import_module(BUILT_IN[name]).wrap
    return found


def node_script(job: Job, written: Written, site: Site, where: str) -> str:
    """Return node.sh: the site's settings, this node's place, and the launch. Secret variables must be in its environment."""
    nodes = nodes_of(job.cluster, where)
    place = [
        f"export NNODES=${{NNODES:-{nodes.count}}}",
        f"export GPUS_PER_NODE=${{GPUS_PER_NODE:-{nodes.each}}}",
        "export NODE_RANK=${NODE_RANK:-${SLURM_NODEID:-0}}",
        "export MASTER_ADDR=${MASTER_ADDR:-localhost}",
        f"export MASTER_PORT=${{MASTER_PORT:-{PORT}}}",
        *(f"export PET_{name}=$" + name for name in _TORCHRUN),
        "export PET_NPROC_PER_NODE=$GPUS_PER_NODE",
    ]
    told = [f': "${{{name}:?is secret and not written here: export it}}"' for name in secrets_of(site)]
    return task_script(site, None, [*place, *told, f"exec {command_of(written.start)}"], what="what each node of the job runs")


def label(name: str, longest: int = 40) -> str:
    """Return a name as DNS labels have it: lower case letters, digits and dashes, starting with a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"t-{plain}")[:longest].strip("-")


def added(files: Mapping[str, str], start: str, *, programs: tuple[str, ...] = (), notes: tuple[str, ...] = ()) -> Written:
    """Return what a wrapper adds."""
    return Written(files=files, programs=(NODE, *programs), start=start, notes=notes)


def wrapped(name: str, job: Job, written: Written, site: Site, label_of: str) -> Written:
    """Return a launcher's files with those of a wrapper. Raises SpecError where they clash, or the wrapper refuses."""
    more = wrapper(name)(job, written, site, label_of)
    twice = sorted(set(more.files) & set(written.files))
    if twice:
        raise one_problem(name, "", ", ".join(twice), "is written by the launcher as well", "export without this wrapper")
    return replace(
        written,
        files={**written.files, **more.files},
        programs=(*written.programs, *more.programs),
        start=more.start,
        notes=(*written.notes, *more.notes),
    )


def wrapped_all(names: Sequence[str], job: Job, launches: Mapping[str, Written], site: Site | None) -> dict[str, Written]:
    """Return each launch (by the name of its format) with all of these wrappers; the first says how it is started, the others in a note.
    Raises SpecError listing all that they refuse.
    """
    problems: list[Problem] = []
    found: dict[str, Written] = {}
    for format_, written in launches.items():
        whole = written
        for name in names:
            try:
                one = wrapped(name, job, written, site or Site(), f"{job.model.name}-{format_}")
            except SpecError as error:
                problems += error.problems
                continue
            first = whole is written
            notes = one.notes[len(written.notes) :]
            whole = replace(
                whole,
                files={**whole.files, **one.files},
                programs=tuple(dict.fromkeys((*whole.programs, *one.programs))),
                start=one.start if first else whole.start,
                notes=(*whole.notes, *notes, *(() if first else (f"{name}: {one.start}",))),
            )
        unset = [name for name in needed(written.files.values()) if site is None or name not in site.environment]
        if unset and whole is not written:
            note = f"{' and '.join(unset)} must be set on the nodes: environment of the --site file, or in theirs"
            whole = replace(whole, notes=(*whole.notes, note))
        found[format_] = whole
    if problems:
        raise SpecError(problems)
    return found


def quoted(value: str) -> str:
    """Return a value as one word of a shell."""
    return shlex.quote(value)
