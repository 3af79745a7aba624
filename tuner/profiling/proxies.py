"""A runner that answers for plans by their proxies, each of which runs once: plans alike but for pp and dp share one."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import time
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tuner.errors import InfrastructureError
from tuner.launch.orders import save_result
from tuner.launch.supervised import Ended, prepare
from tuner.plan_text import plan_record
from tuner.profiling.ledger import Entry, append, key_of, read
from tuner.profiling.proxy import Cropped, extrapolated, proxy_of, spreads

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from tuner.cost_model.calibration import Calibration
    from tuner.job import Job
    from tuner.launch.runner import Runner, Running
    from tuner.launch.trial import Result, Trial
    from tuner.plan import Plan
    from tuner.profiling.proxy import Proxy

LEDGER = "proxies.jsonl"
SAMPLE = 16  # candidates by which the errors of extrapolating are told: making a proxy takes a tenth of a second
_KEPT = ("ok", "oom", "failed")  # ends that another plan of the same proxy would meet as well


@dataclass(frozen=True, slots=True)
class Extrapolated:
    """A proxy's run; its result is what it says of the plan. spread: see `spreads`; keep: is told the proxy's own result."""

    inner: Running
    proxy: Proxy
    spread: float
    keep: Callable[[Result], None]

    def poll(self) -> Result | None:
        """Return the plan's result once the proxy has one."""
        result = self.inner.poll()
        if result is None:
            return None
        self.keep(result)
        return extrapolated(result, self.proxy, self.spread)

    def stop(self, why: str) -> Result:
        """End the proxy's run; return what it says of the plan."""
        return extrapolated(self.inner.stop(why), self.proxy, self.spread)


@dataclass(frozen=True, kw_only=True)
class ProxyRunner:
    """inner: what runs the proxies; job, plans: of the search; software: what else than job and plan a measurement depends on; shared: a
    ledger of measurements of other searches (None: they are not used); study, folder: the search's name and where it is kept.
    """

    inner: Runner
    job: Job
    plans: tuple[Plan, ...]
    calibration: Calibration
    software: str
    shared: Path | None = None
    study: str = ""
    folder: Path = Path()
    made: dict[Plan, Proxy] = field(default_factory=dict)

    def of_search(self, study: str, folder: Path) -> ProxyRunner:
        """Return the runner for a search."""
        return dataclasses.replace(self, study=study, folder=folder)

    @property
    def told(self) -> str:
        """What else than job and plan an extrapolated time depends on: that proxies were run, and the model."""
        digest = hashlib.sha256(self.calibration.model_dump_json().encode()).hexdigest()[:12]
        return f"{self.software} proxy {digest}"

    @property
    def ledgers(self) -> tuple[Path, ...]:
        """Files of what proxies measured: the search's own first."""
        return (self.folder / LEDGER, *(() if self.shared is None else (self.shared,)))

    @property
    def name(self) -> str:
        """Its name in reports."""
        return f"{self.inner.name} (proxies)"

    @property
    def parallel(self) -> int:
        """How many trials may run at once."""
        return self.inner.parallel

    @cached_property
    def spreads(self) -> tuple[float, float]:
        """The standard deviations of what extrapolations have in common, and of each one's own part, by some of the candidates."""
        chosen = self.plans[:: max(1, len(self.plans) // SAMPLE)][:SAMPLE]
        return spreads(self.calibration.kernel, [(Cropped(self.job, plan), self._proxy(plan).of) for plan in chosen])

    def start(self, trial: Trial) -> Running:
        """Answer from a ledger where this proxy ran, else run it. Raises what the inner runner does."""
        proxy = self._proxy(trial.plan)
        asked = _asked(trial, proxy)
        known = self._known(proxy)
        if known is None:
            return self._wrapped(self.inner.start(asked), asked, proxy)
        prepare(asked, ("known:", known.study, str(known.number)), {}, os.environ)
        now = time.time()
        return Extrapolated(
            Ended(save_result(asked.folder, known.result.replace(started=now, ended=now))), proxy, self.spreads[1], lambda _: None
        )

    def attach(self, trial: Trial) -> Running | None:
        """Return the proxy's run that an interrupted search left behind."""
        proxy = self._proxy(trial.plan)
        asked = _asked(trial, proxy)
        running = self.inner.attach(asked)
        return None if running is None else self._wrapped(running, asked, proxy)

    def _proxy(self, plan: Plan) -> Proxy:
        if plan not in self.made:
            self.made[plan] = proxy_of(self.job, plan, self.calibration)
        return self.made[plan]

    def _key(self, proxy: Proxy) -> str:
        return key_of(proxy.of.job, proxy.of.plan, self.software)

    def _optional(self, path: Path) -> AbstractContextManager[None]:
        """Go on without the shared ledger where it cannot be read or written; the folder's own must be."""
        return suppress(InfrastructureError) if path == self.shared else nullcontext()

    def _known(self, proxy: Proxy) -> Entry | None:
        key = self._key(proxy)
        entries: list[Entry] = []
        for path in self.ledgers:
            with self._optional(path):
                entries += read(path, {key})
        return next((entry for entry in entries if entry.result.end in _KEPT), None)

    def _wrapped(self, running: Running, asked: Trial, proxy: Proxy) -> Extrapolated:
        def keep(result: Result) -> None:
            plan = plan_record(proxy.of.plan, proxy.of.job.gpus)
            entry = Entry(key=self._key(proxy), study=self.study, number=asked.number, plan=plan, result=result)
            if result.end in _KEPT and self._known(proxy) is None:
                for path in self.ledgers:
                    with self._optional(path):
                        append(path, entry)

        return Extrapolated(running, proxy, self.spreads[1], keep)


def _asked(trial: Trial, proxy: Proxy) -> Trial:
    """Return the trial of the proxy, in the plan's folder."""
    return dataclasses.replace(trial, job=proxy.of.job, plan=proxy.of.plan, short=None)
