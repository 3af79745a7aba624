"""Modules that are also verbs: `tuner.search` is the package search/ and the function that searches.

Python binds `tuner.search` to the package once anything in it is imported, so the module itself has to be callable.
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class VerbModule(ModuleType):
    """A module that, when called, runs the verb of its name in tuner.workflow."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the verb."""
        from tuner import workflow

        return getattr(workflow, self.__name__.rpartition(".")[2])(*args, **kwargs)


def callable_module(name: str) -> None:
    """Let the module of this name be called."""
    sys.modules[name].__class__ = VerbModule
