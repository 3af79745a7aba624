"""Files that are written whole or not at all."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tuner.files import write

if TYPE_CHECKING:
    from pathlib import Path


def test_a_new_file_has_the_mode_of_the_day_and_an_old_one_keeps_its_own(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    before = os.umask(0o027)
    try:
        write(path, "one")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o640
    path.chmod(0o600)
    write(path, b"two")
    assert (path.read_text(), path.stat().st_mode & 0o777) == ("two", 0o600)
    assert os.umask(before) == before


def test_what_cannot_be_written_leaves_nothing_and_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.txt"
    write(path, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="No space"):
        write(path, "new")
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]
    assert path.read_text() == "old"
