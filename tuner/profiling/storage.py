"""Where trials are kept: a journal file in the search's folder, or an SQLite or PostgreSQL database by its URL."""

from __future__ import annotations

import fcntl
import re
from typing import TYPE_CHECKING, Any

from optuna.storages import JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock

from tuner.errors import InfrastructureError, one_problem

if TYPE_CHECKING:
    from io import BufferedRandom
    from pathlib import Path

    from optuna.storages import BaseStorage

JOURNAL = "study.journal"
_SCHEMES = ("sqlite", "postgresql", "mysql")


class FileLock(JournalFileOpenLock):
    """A lock that the kernel gives back when its holder dies; Optuna's own outlive theirs by half a minute."""

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self.path = path
        self.file: BufferedRandom | None = None

    def acquire(self) -> bool:
        """Wait for the lock."""
        self.file = self.path.open("ab+")
        fcntl.flock(self.file, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        """Give it back."""
        if self.file is not None:
            self.file.close()
            self.file = None


def open_storage(url: str, folder: Path) -> BaseStorage:
    """Return the storage of a URL, or the folder's journal where it is "". Raises SpecError and InfrastructureError; neither shows a
    password.
    """
    if not url:
        path = folder / JOURNAL
        lock = FileLock(path.with_suffix(".lock"))
        lock.acquire()
        _whole_lines(path)
        lock.release()
        return JournalStorage(JournalFileBackend(str(path), lock_obj=lock))
    scheme = re.match(r"([a-z0-9]+)(\+[a-z0-9]+)?://", url)
    if scheme is None or scheme[1] not in _SCHEMES:
        raise one_problem("storage", "", shown(url), f"must be a URL of {', '.join(_SCHEMES)}", "like sqlite:///trials.db")
    options: dict[str, Any] = {} if scheme[1] == "sqlite" else {"pool_pre_ping": True}
    try:
        return RDBStorage(url, engine_kwargs=options)
    except ImportError as error:
        raise one_problem(
            "storage", "", shown(url), f"needs a driver that is not installed: {error.name}", "pip install 'psycopg[binary]'"
        ) from None
    except Exception as error:  # SQLAlchemy's and the drivers' own, whatever they are
        words = str(error).splitlines()[0].replace(url, shown(url))
        raise InfrastructureError(f"storage {shown(url)}: cannot be opened: {words[:300]}") from None


def shown(url: str) -> str:
    """Return a URL without its password."""
    return re.sub(r"(://[^:/@]*):[^@]*@", r"\1:***@", url)[:200]


def _whole_lines(path: Path) -> None:
    """End a line that a kill left half-written: Optuna would take it and the next for one. What stood in it was not acknowledged."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        data = file.read()
        if not data.endswith(b"\n"):
            file.truncate(data.rfind(b"\n") + 1)
