"""Bars: as wide as the page allows, in proportion, plain characters."""

from __future__ import annotations

import pytest

from tuner.report.chart import bars
from tuner.report.table import Page

ROWS = [
    ("8", "drop", 0.1, "10 %"),
    ("8", "ntp", 0.05, "5 %"),
    ("16", "drop", 0.2, "20 %"),
    ("16", "ntp", 0.0001, "0.01 %"),
    ("16", "none", 0.0, "0 %"),
]


@pytest.mark.parametrize("width", [40, 60, 120])
def test_bars_are_in_proportion_and_fit(width: int) -> None:
    lines = bars("title", ROWS, Page(width=width))
    assert lines[0] == "title"
    assert max(map(len, lines)) <= width
    lengths = [line.count("#") for line in lines[1:]]
    assert lengths[0] * 2 == pytest.approx(lengths[2], abs=1)
    assert lengths[1] * 4 == pytest.approx(lengths[2], abs=2)
    assert lengths[2] > width / 3
    assert " . 0.01 %" in lines[4]  # something, though too little for a bar
    assert lines[5].endswith("none  0 %")
    assert [line[:2] for line in lines[1:]] == [" 8", "  ", "16", "  ", "  "]
    assert "".join(lines).isascii()
