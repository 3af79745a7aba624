"""Where trials are kept: what is opened, what is refused, what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiling.searches import candidates, opened, searched
from tuner.errors import InfrastructureError, SpecError
from tuner.profiling.storage import JOURNAL, FileLock, close_storage, open_storage, shown


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("trials.db", "must be a URL of sqlite, postgresql, mysql"),
        ("redis://host/0", "must be a URL"),
        ("postgresql+nosuchdriver://me:s3cret@host/db", "cannot be opened|needs a driver"),
        ("postgresql+psycopg://me:s3cret@127.0.0.1:1/db?connect_timeout=1", "cannot be opened"),
        ("sqlite:////no/such/folder/trials.db", "cannot be opened"),
    ],
)
def test_what_cannot_be_opened_is_said_without_its_password(url: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tuner.profiling.storage._PAUSE_S", 0.0)
    with pytest.raises((SpecError, InfrastructureError), match=says) as caught:
        open_storage(url, tmp_path)
    assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["postgresql://me:a@b:c/d@host/db", "postgresql://host/db?user=me&password=a@b:c/d&x=1", "mysql://me:a@b:c/d@[::1]:3/db"]
)
def test_passwords_are_not_shown(url: str) -> None:
    assert "a@b" not in shown(url) and "c/d" not in shown(url) and "***" in shown(url)


def test_a_torn_journal_is_whole_again_for_drivers_at_work_too(tmp_path: Path) -> None:
    of = candidates(6)
    with opened(of, tmp_path) as study:
        study.set_user_attr("a", 1)
        with (tmp_path / JOURNAL).open("ab") as file:
            file.write(b'{"op_code": 2, "us')
        study.set_user_attr("b", 2)
        assert study.user_attrs == {"a": 1, "b": 2}
    with opened(of, tmp_path) as study:
        assert study.user_attrs == {"a": 1, "b": 2}


def test_a_file_that_is_no_journal(tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text("hello\nworld\n")
    with pytest.raises(InfrastructureError, match=r"study.journal: is no journal of trials any more"):
        open_storage("", tmp_path)


def test_a_lock_ends_with_its_holder(tmp_path: Path) -> None:
    lock = FileLock(tmp_path / "lock")
    with lock:
        assert lock.file is not None
    assert lock.file is None
    with FileLock(tmp_path / "lock"):
        pass


def test_a_database_that_goes_away_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of = candidates(6)
    path = tmp_path / "trials.db"
    storage = open_storage(f"sqlite:///{path}", tmp_path)
    close_storage(storage)
    path.write_bytes(b"no database any more" * 100)
    with pytest.raises(InfrastructureError, match="cannot be opened"):
        searched(tmp_path, of, url=f"sqlite:///{path}", runs=2)
