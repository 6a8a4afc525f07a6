"""Where the command line prints, and tables: what needs no torch, so that lists are there at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmll.errors import printable

console = Console()
errors = Console(stderr=True)
if not (console.is_terminal or console.is_jupyter):
    console.width = 200  # a file or a pipe has no width: cut no column


def say(text: str) -> None:
    """A line as it is, however long."""
    console.print(escape(printable(text, 4000)), highlight=False, soft_wrap=True)


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> Table:
    """Figures are aligned to the right; the first column, `words` and what a row is to the left."""
    table = Table(title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if words or i == 0 or name == "what it is" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def options_table(title: str, options: Mapping[str, Any]) -> Table:
    return plain_table(title, ("option", "default"), [(name, str(value)) for name, value in options.items()])
