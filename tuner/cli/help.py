"""Help pages: plain text that reads the same in a pipe and in a terminal, options in named groups."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup

NAMES = 28


class Verb(TyperCommand):
    """A command whose options stand in sections, by their rich_help_panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write each section of options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx)
            if record is not None:
                words = record[1].replace("  [required]", "")
                panel = getattr(param, "rich_help_panel", None) or ("Arguments" if param.param_type_name == "argument" else "Options")
                sections.setdefault(panel, []).append((record[0], words))
        for title, records in sections.items():
            aligned = [(names.ljust(NAMES), words) for names, words in records]
            with formatter.section(title):
                formatter.write_dl(aligned, col_max=NAMES)


class Group(TyperGroup):
    """The verbs, in the order in which they were registered."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the verbs' names."""
        del ctx
        return list(self.commands)
