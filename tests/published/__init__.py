"""The public training runs that the accuracy table is about: rows.jsonl.gz, one run a line, each with its source.

Values were read from the named sources; what was inferred is said in a row's notes. `file` is the collection a row belongs to.
"""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

ROWS = Path(__file__).parent / "rows.jsonl.gz"


@lru_cache(maxsize=1)
def _all() -> tuple[dict[str, Any], ...]:
    with gzip.open(ROWS, "rt", encoding="utf-8") as file:
        return tuple(json.loads(line) for line in file)


def published(name: str) -> list[dict[str, Any]]:
    """Return the rows of one collection, as its file has them."""
    return [{key: value for key, value in row.items() if key != "file"} for row in _all() if row["file"] == name]


def names() -> list[str]:
    """Return the names of the collections."""
    return list(dict.fromkeys(row["file"] for row in _all()))


def unpack(folder: Path) -> list[Path]:
    """Write each collection as NAME.jsonl and return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.jsonl" for name in names()]
    for path in paths:
        path.write_text("".join(json.dumps(row) + "\n" for row in published(path.stem)), encoding="utf-8")
    return paths
