"""Printing: consoles, tables and warnings. Needs no torch, so that lists appear quickly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedmll.core.text import printable

console = Console()
errors = Console(stderr=True)
if not (console.is_terminal or console.is_jupyter):
    console.width = 200  # a file or a pipe has no width: do not cut columns


def say(text: str) -> None:
    """Print one line without wrapping."""
    console.print(escape(printable(text, 4000)), highlight=False, soft_wrap=True)


@contextmanager
def warnings_of(kind: type[Warning]) -> Iterator[None]:
    """Print warnings of this kind as one line without the location in the code; others as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", kind)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, kind):
                errors.print(f"[yellow]warning:[/] {escape(printable(message, 4000))}", soft_wrap=True, highlight=False)
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]], words: bool = False) -> Table:
    """A table. Numbers are aligned to the right, the first column, descriptions and `words` to the left."""
    table = Table(title=title)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if words or i == 0 or name == "description" else "right")
    for row in rows:
        table.add_row(*row)
    return table


def options_table(title: str, options: Mapping[str, Any]) -> Table:
    return plain_table(title, ("option", "default"), [(name, str(value)) for name, value in options.items()])
