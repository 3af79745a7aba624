"""Where trials are kept: a journal file in the search's folder, or an SQLite or PostgreSQL database by its URL."""

from __future__ import annotations

import fcntl
import os
import re
import time
from typing import TYPE_CHECKING, Any

from optuna.exceptions import OptunaError as StorageError
from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from tuner.errors import InfrastructureError, one_problem

if TYPE_CHECKING:
    from io import BufferedRandom
    from pathlib import Path

    from optuna.storages import BaseStorage

__all__ = ["JOURNAL", "FileLock", "StorageError", "close_storage", "open_storage", "said", "shown"]
JOURNAL = "study.journal"
_SCHEMES = ("sqlite", "postgresql", "mysql")
_TRIES, _PAUSE_S = 4, 0.5  # drivers that start at once make the tables of a new database at once: all but one fail
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
    for left in reversed(range(_TRIES)):
        try:
            return RDBStorage(url, engine_kwargs=options)
        except ImportError as error:
            rule = f"needs a driver that is not installed: {error.name}"
            raise one_problem("storage", "", shown(url), rule, "pip install 'psycopg[binary]'") from None
        except Exception as error:  # SQLAlchemy's and the drivers' own, whatever they are
            if not left:
                raise InfrastructureError(f"storage {shown(url)}: cannot be opened: {said(error, url)}") from None
            time.sleep(_PAUSE_S)
    raise AssertionError("the last try returns or raises")


def close_storage(storage: BaseStorage) -> None:
    """Give back a database's connections."""
    if isinstance(storage, RDBStorage):
        storage.remove_session()
        storage.engine.dispose()


def _journal(path: Path) -> JournalStorage:
    lock = FileLock(path.with_suffix(".lock"), path)
    try:
        with lock:
            pass
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    except OSError as error:
        raise InfrastructureError(f"{path}: cannot be opened: {error.strerror or error}") from None
    except (ValueError, KeyError) as error:  # json's, and Optuna's for lines that are none of its own
        raise InfrastructureError(f"{path}: is no journal of trials any more: {said(error)}: measure into another folder") from None


def said(error: BaseException, url: str = "") -> str:
    """Return the first line of an error, without the URL's password."""
    words = (str(error).splitlines() or [type(error).__name__])[0]
    return (words.replace(url, shown(url)) if url else words)[:300]


def shown(url: str) -> str:
    """Return a URL without its password."""
    hidden = re.sub(r"(://[^:/@]*):.*@", r"\1:***@", url)
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
