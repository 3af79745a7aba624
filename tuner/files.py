"""Files that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path


def write(path: Path, content: str | bytes) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part; it keeps its mode, and gets the
    usual one when it is new. Raises OSError.
    """
    data = content.encode() if isinstance(content, str) else content
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.", suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if path.exists():
            shutil.copymode(path, temporary)
        else:
            Path(temporary).chmod(0o666 & ~_mask())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _mask() -> int:
    """Return the process's file mode creation mask, which can only be read by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask
