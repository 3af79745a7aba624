"""tuner: the best parallelism configuration for training a large language model, and how sure it is.

Each verb of the command line is a function here, with the same names for its arguments:

    import tuner
    found = tuner.search(model="llama3-70b", cluster="h100x64", seq_len=8192, global_batch=512)
    found.ranking[0].plan, found.record()   # record() is what --json prints

`tuner.presets` and `tuner.search` are modules that can be called. Nothing heavy is imported before a verb is called.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.errors import InfrastructureError, NothingFeasible, PlanError, SpecError, TunerError

if TYPE_CHECKING:
    from tuner.workflow import calibrate, check, doctor, estimate, explain, export, failures, profile_ntp, replay, search, validate

__version__ = "0.1.0"
__all__ = [
    "InfrastructureError",
    "NothingFeasible",
    "PlanError",
    "SpecError",
    "TunerError",
    "__version__",
    "calibrate",
    "check",
    "doctor",
    "estimate",
    "explain",
    "export",
    "failures",
    "profile_ntp",
    "replay",
    "search",
    "validate",
]

_VERBS = frozenset({"calibrate", "check", "doctor", "estimate", "explain", "export", "failures", "profile_ntp", "replay", "validate"})
_CALLABLE_MODULES = frozenset({"presets", "search"})


def __getattr__(name: str) -> Any:
    if name in _CALLABLE_MODULES:
        from importlib import import_module

        return import_module(f"tuner.{name}")
    if name not in _VERBS:
        raise AttributeError(f"module 'tuner' has no attribute {name!r}")
    from tuner import workflow

    return getattr(workflow, name)
