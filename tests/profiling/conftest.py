"""Searches of tests look at their runs more often than people's."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.profiling.campaign.POLL_S", 0.005)
