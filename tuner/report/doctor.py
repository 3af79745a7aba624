"""What works on this machine, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.report.table import Page, wrapped

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = 18


def doctor_text(record: dict[str, Any], page: Page) -> str:
    """Return one line for each check, and the verdict."""
    styles: dict[str, Callable[[str], str]] = {"ok": page.good, "warn": page.warn, "fail": page.bad}
    lines = []
    for check in record["checks"]:
        head = f"{check['status']:<5} {check['name']:<{NAME}} "
        first, *rest = wrapped(check["found"], Page(width=page.width - len(head)))
        lines.append(styles[check["status"]](head[:5]) + head[5:] + first)
        lines += [" " * len(head) + line for line in rest]
    return "\n".join([*lines, "", "everything works" if record["healthy"] else "something is broken: see the lines that say fail"])
