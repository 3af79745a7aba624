"""A PostgreSQL server of a test's own, in a folder of its own, on a port of its own."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tests.services import missing

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def postgres() -> Iterator[str]:
    """Start a server; yield its URL for SQLAlchemy (postgresql+psycopg://...). Skips where PostgreSQL is not installed."""
    programs = _programs()
    folder = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))  # a socket's path must be short
    as_user = _as_user(folder)
    try:
        data, port = folder / "data", _free_port()
        _run(
            [programs / "initdb", "--pgdata", data, "--username=tuner", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C"],
            as_user,
        )
        options = [
            "-D",
            data,
            "-k",
            folder,
            "-p",
            str(port),
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            "fsync=off",
            "-c",
            "max_connections=60",
        ]
        with (folder / "log.txt").open("wb") as log:
            server = subprocess.Popen([programs / "postgres", *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL, **as_user)
        try:
            _wait_ready(server, programs, port, folder)
            yield f"postgresql+psycopg://tuner@127.0.0.1:{port}/postgres"
        finally:
            server.send_signal(signal.SIGINT)  # fast shutdown: clients are cut off
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.send_signal(signal.SIGQUIT)
                server.wait(15)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _programs() -> Path:
    """Return the folder of the newest server, which Debian keeps out of the PATH."""
    homes = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    found = homes[-1] if homes else Path(shutil.which("postgres") or "/").parent
    if not (found / "initdb").exists():
        missing("PostgreSQL", "postgresql")
    return found


def _as_user(folder: Path) -> dict[str, object]:
    """Return options of Popen that drop root, which the server refuses to run as."""
    if os.geteuid() != 0:
        return {}
    user = pwd.getpwnam("postgres")
    os.chown(folder, user.pw_uid, user.pw_gid)
    return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": [], "cwd": folder}


def _run(argv: list[object], as_user: dict[str, object]) -> None:
    done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, timeout=60, check=False, **as_user)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr


def _wait_ready(server: subprocess.Popen[bytes], programs: Path, port: int, folder: Path) -> None:
    ready = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    deadline = time.monotonic() + 30
    while subprocess.run(ready, check=False).returncode:
        assert server.poll() is None and time.monotonic() < deadline, (folder / "log.txt").read_text()
        time.sleep(0.05)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
