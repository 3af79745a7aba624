"""Secrets stay out of logs, wherever an over-long line is cut."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tuner.launch import supervisor
from tuner.launch.logs import LogReader
from tuner.launch.secrets import cut
from tuner.launch.supervisor import Log

if TYPE_CHECKING:
    from pathlib import Path

SECRETS = {"A_TOKEN": "hunter22", "B_TOKEN": "hunter22-and-more", "C_TOKEN": "pässwörter", "PLAIN": "x"}


@pytest.mark.parametrize("secret", [value for name, value in SECRETS.items() if name != "PLAIN"])
@pytest.mark.parametrize("chunk", [1, 3, 64])
def test_a_cut_does_not_part_a_secret(secret: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_LONGEST_LINE", 64)
    for before in range(40, 70):
        path = tmp_path / f"{before}.txt"
        log = Log(path, LogReader("workload"), SECRETS)
        data = ("." * before + secret + "." * 140 + secret + "\n").encode()
        for at in range(0, len(data), chunk):
            log.take(data[at : at + chunk])
        log.close_line()
        log.file.close()
        lines = path.read_text().split("\n")
        assert "".join(lines) == "." * before + "***" + "." * 140 + "***" and len(lines) > 2


def test_where_a_line_may_be_cut() -> None:
    place = cut(SECRETS)
    held = len("hunter22-and-more") - 1
    assert place(b"." * 50) == 50 - held and place(b"...") == 0
    assert place(b"." * 30 + b"hunter22" + b"." * 12) == 38, "behind a value that stands there as a whole"
    assert cut({"PLAIN": "x"})(b"." * 50) == 50
