"""Services that tests start themselves: what to do where one is not installed."""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def missing(what: str, package: str) -> NoReturn:
    """Skip, or fail where TUNER_REQUIRE_SERVICES says that the service must be there (CI)."""
    if os.environ.get("TUNER_REQUIRE_SERVICES") == "1":
        pytest.fail(f"{what} is not installed, and TUNER_REQUIRE_SERVICES=1 says that it must be: apt-get install {package}")
    pytest.skip(f"{what} is not installed (apt-get install {package})")
