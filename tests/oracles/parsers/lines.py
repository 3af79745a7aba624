"""How a parser's process talks: a case a line in, a verdict a line out. It runs in the parser's environment: no other imports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def answer(version: str, judge: Callable[[dict[str, Any]], str]) -> None:
    """Print the parser's version, then one verdict per case of standard input. judge: raises (SystemExit too) what it refuses, and returns
    which of its checks ran. Whatever the parser itself prints goes to standard error.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps({"version": version}), file=out, flush=True)
    for line in sys.stdin:
        case = json.loads(line)
        try:
            verdict: dict[str, Any] = {"accepted": True, "why": judge(case) or ""}
        except (Exception, SystemExit) as error:
            at = error.__traceback__
            while at and at.tb_next:
                at = at.tb_next
            where = f"{Path(at.tb_frame.f_code.co_filename).name}:{at.tb_lineno}" if at else ""
            verdict = {"accepted": False, "why": f"{type(error).__name__}: {str(error)[:400]}", "where": where}
        print(json.dumps({"name": case["name"], **verdict}), file=out, flush=True)
