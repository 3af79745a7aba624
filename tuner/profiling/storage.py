"""Where trials are kept: a journal file in the search's folder, or an SQLite or PostgreSQL database by its URL."""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, unquote_plus

from optuna.exceptions import OptunaError as StorageError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from tuner.errors import InfrastructureError, SpecError, one_problem
from tuner.profiling.driver import FOLDER, RESULT, SAID
from tuner.search.sampler import END, MEMORY, OWN, STEP_S
from tuner.search.trials import DRIVER, REFERENCE

if TYPE_CHECKING:
    from io import BufferedRandom
    from pathlib import Path

    from optuna.storages import BaseStorage

__all__ = ["JOURNAL", "FileLock", "StorageError", "close_storage", "open_storage", "said", "shown"]
JOURNAL = "study.journal"
_SCHEMES = ("sqlite", "postgresql", "mysql")
_TRIES, _PAUSE_S = 4, 0.5  # drivers that start at once make the tables of a new database at once: all but one fail
_PACKAGES = {
    "psycopg": "'psycopg[binary]'", "psycopg2": "psycopg2-binary", "pg8000": "pg8000",
    "mysqldb": "mysqlclient", "pymysql": "pymysql", "mysqlconnector": "mysql-connector-python",
}  # fmt: skip
_OPERATIONS = range(11)  # of Optuna's journal
_WAY_OUT = "move it away: what ran stays in measurements.jsonl and is not run again"
_SQLITE_S = 60.0  # how long a driver waits for another one's write


class FileLock(JournalFileOpenLock):
    """A lock that the kernel gives back when its holder dies; Optuna's own outlive theirs by half a minute. journal: the file that its
    holder appends to: a line that a dead one left half-written there is taken away first.
    """

    def __init__(self, path: Path, journal: Path | None = None) -> None:
        super().__init__(str(path))
        self.path, self.journal = path, journal
        self.file: BufferedRandom | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self.file = self.path.open("ab+")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        if self.journal is not None:
            _whole_lines(self.journal)
        return True

    def release(self) -> None:
        """Give it back."""
        if self.file is not None:
            self.file.close()
            self.file = None

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


def open_storage(url: str, folder: Path) -> BaseStorage:
    """Return the storage of a URL, or the folder's journal where it is "". Raises SpecError and InfrastructureError; neither shows a
    password.
    """
    if not url:
        return _journal(folder / JOURNAL)
    scheme = re.match(r"([a-z0-9]+)(\+[a-z0-9]+)?://", url)
    if scheme is None or scheme[1] not in _SCHEMES:
        raise one_problem("storage", "", shown(url), f"must be a URL of {', '.join(_SCHEMES)}", "like sqlite:///trials.db")
    options: dict[str, Any] = {"connect_args": {"timeout": _SQLITE_S}} if scheme[1] == "sqlite" else {"pool_pre_ping": True}
    _check_url(url)
    for left in reversed(range(_TRIES)):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except Exception as error:  # SQLAlchemy's and the drivers' own, whatever they are
            if not left:
                raise InfrastructureError(f"storage {shown(url)}: cannot be opened: {said(error, url)}") from None
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def _check_url(url: str) -> None:
    """Raise SpecError for a URL that no driver could open, before one is asked: drivers print what they take for the host."""
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError, NoSuchModuleError

    def wrong(rule: str, hint: str) -> SpecError:
        return one_problem("storage", "", shown(url), rule, hint)

    try:
        parsed = make_url(url)
        dialect = parsed.get_dialect()
    except NoSuchModuleError:
        raise wrong("names a driver that does not exist", "like postgresql+psycopg:// or mysql+pymysql://") from None
    except (ArgumentError, ValueError):
        raise wrong("is no URL of a database", "like postgresql+psycopg://USER@HOST:5432/NAME") from None
    if "@" in (parsed.host or ""):
        raise wrong("has an @ in its user or password", "write it as %40")
    if not 0 <= (parsed.port or 0) < 2**16:
        raise wrong(f"has port {parsed.port}", "at most 65535")
    if dialect.is_async:
        raise wrong(f"names an asynchronous driver: {dialect.driver}", "like postgresql+psycopg:// or mysql+pymysql://")
    try:
        dialect.import_dbapi()
    except ImportError as error:
        rule = f"needs a driver that is not installed: {error.name or dialect.driver}"
        raise wrong(rule, f"pip install {_PACKAGES.get(dialect.driver, dialect.driver)}") from None


def close_storage(storage: BaseStorage) -> None:
    """Give back a database's connections."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def _journal(path: Path) -> JournalStorage:
    lock = FileLock(path.with_suffix(".lock"), path)
    try:
        with lock:
            _check_journal(path)
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be opened: {error.strerror or error}") from None
    except SpecError:
        raise
    except Exception as error:  # Optuna's, for lines that do not follow from those before them, whatever it trips over
        raise one_problem(str(path), "", None, f"is no journal of Optuna ({type(error).__name__})", _WAY_OUT) from None


def _check_journal(path: Path) -> None:
    """Raise SpecError for a line that is none of Optuna's."""
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not _is_operation(line):
                raise one_problem(str(path), "", None, f"is no journal of Optuna (line {number})", _WAY_OUT)


def _is_operation(line: bytes) -> bool:
    try:
        record = json.loads(line, parse_constant=_finite, parse_float=_finite)
    except (ValueError, RecursionError):
        return False
    if not isinstance(record, dict) or not isinstance(record.get("worker_id"), str) or type(record.get("op_code")) is not int:
        return False
    told = [record.get(name, {}) for name in ("user_attr", "user_attrs")]
    return record["op_code"] in _OPERATIONS and all(map(_are_attributes, told))


def _are_attributes(told: Any) -> bool:
    """Whether what a driver reads of a trial's attributes is of the type that it wrote."""
    return isinstance(told, dict) and all(name not in _ATTRIBUTES or _ATTRIBUTES[name](value) for name, value in told.items())


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(text)
    return number


def _is_step(value: Any) -> bool:
    return _is_number(value) and value > 0


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e308


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


_ATTRIBUTES: dict[str, Callable[[Any], bool]] = {
    STEP_S: _is_step,
    MEMORY: _is_number,
    OWN: _is_number,
    RESULT: lambda value: isinstance(value, dict),
    SAID: lambda value: isinstance(value, list) and len(value) == 3 and all(map(_is_number, value)),
    REFERENCE: lambda value: type(value) is int and value >= 0,
} | dict.fromkeys((END, FOLDER, DRIVER), _is_text)


def said(error: BaseException, url: str = "") -> str:
    """Return the first line of an error, without the URL's password or what a driver took for other parts of the URL."""
    words = (str(error).splitlines() or [type(error).__name__])[0]
    for secret in _secrets(url):
        # A short one may stand in other words.
        pattern = re.escape(secret) if len(secret) > 3 else rf"(?<!\w){re.escape(secret)}(?!\w)"
        words = re.sub(pattern, "***", words)
    return words[:300]


def _secrets(url: str) -> list[str]:
    """Return the passwords of a URL, the parts that an @, : or / cuts them into, and what all of them stand for, the longest first."""
    login = re.match(r"[^:]*://[^:]*:(.*)@", url, re.DOTALL)
    whole = ([login[1]] if login else []) + re.findall(r"(?i)(?:password|passwd|pwd)=([^&]*)", url)
    told = {form for one in whole for form in (one, unquote(one), unquote_plus(one))}
    return sorted({part for one in told for part in (one, *re.split(r"[@:/?#&=]", one)) if part}, key=len, reverse=True)


def shown(url: str) -> str:
    """Return a URL without its password."""
    hidden = re.sub(r"(?s)(://[^:]*):.*@", r"\1:***@", url)
    return re.sub(r"(?i)((?:password|passwd|pwd)=)[^&]*", r"\1***", hidden)[:200]


def _whole_lines(path: Path) -> None:
    """Take away a line that a kill left half-written: Optuna would take it and the next for one. What stood in it was not acknowledged."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        file.seek(-1, os.SEEK_END)
        if file.read(1) == b"\n":
            return
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
