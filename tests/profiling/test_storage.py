"""Where trials are kept: what is opened, what is refused, what is never shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.profiling.searches import candidates, ledger, opened, searched
from tuner.errors import InfrastructureError, SpecError
from tuner.profiling.storage import JOURNAL, FileLock, close_storage, open_storage, said, shown


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("trials.db", "must be a URL of sqlite, postgresql, mysql"),
        ("redis://host/0", "must be a URL"),
        ("postgresql+nosuchdriver://me:s3cret@host/db", "names a driver that does not exist"),
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
    with pytest.raises(SpecError, match=r"study.journal: is no journal of Optuna \(line 1\) \(move it away: .*measurements.jsonl"):
        open_storage("", tmp_path)


@pytest.mark.parametrize(
    "junk",
    [
        "garbage", '{"op_code": 99, "worker_id":"a"}', '{"op_code": true, "worker_id":"a"}', "[]", "5", "null", "", "\0\0", "[" * 5000,
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"step_s": NaN}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"step_s": 1e999}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"step_s": "1"}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"step_s": 0}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": []}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"said": [1.0]}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"result": []}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"end": []}}',
        '{"op_code": 8, "worker_id": "a", "trial_id": 0, "user_attr": {"reference": "x"}}',
    ],
)  # fmt: skip
def test_a_line_that_is_none_of_optunas_is_named_and_what_ran_is_not_run_again(junk: str, tmp_path: Path) -> None:
    of = candidates(6)
    searched(tmp_path, of, runs=3)
    journal = tmp_path / JOURNAL
    lines = len(journal.read_text().splitlines())
    with journal.open("a") as file:
        file.write(junk + "\n")
    with pytest.raises(SpecError, match=rf"study.journal: is no journal of Optuna \(line {lines + 1}\)"):
        open_storage("", tmp_path)
    journal.rename(tmp_path / "aside")
    ended = searched(tmp_path, of, runs=3)
    assert (ended.known, len(ended.ran), len({one.index for one in ended.ran})) == (3, 6, 6)
    assert len({entry.key for entry in ledger(tmp_path)}) == len(ledger(tmp_path)) == 6


@pytest.mark.parametrize("line", ['{"op_code": 0, "worker_id": "a"}', '{"op_code": 1, "worker_id": "a"}'])
def test_a_line_that_does_not_follow_from_the_others_is_said(line: str, tmp_path: Path) -> None:
    (tmp_path / JOURNAL).write_text(line + "\n")
    with pytest.raises(SpecError, match=r"study.journal: is no journal of Optuna \("):
        open_storage("", tmp_path)


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("postgresql+psycopg://u:hunt@er2secret@127.0.0.1:1/x", "has an @ in its user or password .*%40"),
        ("postgresql://u:er2secret@host:notaport/x", "is no URL of a database"),
        ("postgresql://u:er2secret@host:99999/x", "has port 99999"),
        ("postgresql+nosuch://u:er2secret@host/x", "names a driver that does not exist"),
        ("postgresql+asyncpg://u:er2secret@host/x", "names an asynchronous driver"),
    ],
)
def test_a_url_that_no_driver_can_open(url: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=says) as caught:
        open_storage(url, tmp_path)
    assert "er2secret" not in str(caught.value) and "hunt" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "dialect", "module", "says"),
    [
        ("mysql+pymysql://host/x", "mysql.pymysql.MySQLDialect_pymysql", "pymysql", "not installed: pymysql .*pip install pymysql"),
        ("mysql://host/x", "mysql.mysqldb.MySQLDialect_mysqldb", None, "not installed: mysqldb .*pip install mysqlclient"),
        ("postgresql+psycopg://host/x", "postgresql.psycopg.PGDialect_psycopg", None, r"not installed: psycopg .*'psycopg\[binary\]'"),
    ],
)
def test_a_driver_that_is_not_installed_is_named(
    url: str, dialect: str, module: str | None, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object) -> None:
        raise ImportError("no library", name=module)

    monkeypatch.setattr(f"sqlalchemy.dialects.{dialect}.import_dbapi", missing)
    with pytest.raises(SpecError, match=says):
        open_storage(url, tmp_path)


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("postgresql://u:hunt@er2secret@127.0.0.1/x", "failed to resolve host 'er2secret@127.0.0.1', hunt"),
        ("postgresql://u:hunt%40er2secret@127.0.0.1/x", "no login with 'hunt@er2secret'"),
        ("postgresql://host/x?user=u&password=hunt/er2secret", "no host hunt, er2secret"),
    ],
)
def test_no_part_of_a_password_is_in_a_drivers_words(url: str, words: str) -> None:
    told = said(ValueError(words), url)
    assert "er2secret" not in told and "hunt" not in told and "***" in told
    assert said(ValueError("cannot open it"), "postgresql://u:a@host/x") == "cannot open it"


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
