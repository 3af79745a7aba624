"""Trials on this machine: torchrun over its own accelerators (or processes on its CPUs)."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tuner.launch import supervised
from tuner.launch.logs.formats import WORKLOAD
from tuner.launch.script import task_script
from tuner.launch.site import Site

if TYPE_CHECKING:
    from tuner.launch.runner import Running, Setup
    from tuner.launch.trial import Trial

MODULE = "tuner.launch.workload"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunner:
    """parallel: trials at once; they share the machine, and slow each other down. module: what each rank runs (with --trial FOLDER).
    grace_s, error_s: see Orders.
    """

    site: Site = field(default_factory=Site)
    parallel: int = 1
    module: str = MODULE
    grace_s: float = 5.0
    error_s: float = 3.0

    @property
    def name(self) -> str:
        """Its name in the registry."""
        return "local"

    def start(self, trial: Trial) -> Running:
        """Start torchrun under a supervisor. Raises InfrastructureError."""
        folder = str(trial.folder.absolute())
        body = [torchrun(self.site, self.module, folder, f"--standalone --nnodes=1 --nproc-per-node={trial.job.gpus}")]
        script = task_script(self.site, str(supervised.ROOT), body)
        return supervised.start_here(trial, script, self.site, launcher=WORKLOAD, grace_s=self.grace_s, error_s=self.error_s)

    def attach(self, trial: Trial) -> Running | None:
        """Return the trial's result if it has one; else end what is left of it."""
        return supervised.attach(trial, WORKLOAD, self.grace_s)


def torchrun(site: Site, module: str, folder: str, options: str) -> str:
    """Return the lines that run a module on the ranks of a node. options: torchrun's, ready for the shell."""
    threads = 'export PYTHONUNBUFFERED=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"'
    return f"{threads}\nexec {shlex.quote(site.python)} -m torch.distributed.run {options} -m {module} --trial {shlex.quote(folder)}"


def open_runner(setup: Setup) -> LocalRunner:
    """Return the runner for a setup."""
    return LocalRunner(site=setup.site, parallel=setup.parallel)
