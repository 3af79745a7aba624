"""One process a parser, which takes many cases."""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PARSERS = Path(__file__).parent / "parsers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What a parser said of a case. why: its message; where: file and line that raised it."""

    accepted: bool
    why: str
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a parser said of all its cases."""

    version: str
    verdicts: Mapping[str, Verdict]
    seconds: float


def judged(python: Path, parser: str, cases: Sequence[Mapping[str, Any]], wall_s: float = 600.0) -> Answer:
    """Return the verdicts of parsers/parse_PARSER.py under this interpreter. Raises RuntimeError with its last words if it
    does not answer all.
    """
    start = time.monotonic()
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LD_LIBRARY_PATH")}
    environment = kept | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [str(python), str(PARSERS / f"parse_{parser}.py")],
        input="".join(json.dumps(case) + "\n" for case in cases),
        env=environment,
        capture_output=True, text=True, timeout=wall_s,
    )  # fmt: skip
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    if ran.returncode or len(lines) != len(cases) + 1:
        raise RuntimeError(f"{parser}: {len(lines)} answers to {len(cases)} cases, exit status {ran.returncode}\n{ran.stderr[-3000:]}")
    verdicts = {line["name"]: Verdict(accepted=line["accepted"], why=line["why"], where=line.get("where", "")) for line in lines[1:]}
    return Answer(version=lines[0]["version"], verdicts=verdicts, seconds=time.monotonic() - start)
