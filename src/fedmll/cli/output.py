"""Printing: consoles, tables and warnings. Needs no torch, so that lists appear quickly."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedmll.core.text import printable

console = Console()
errors = Console(stderr=True)
if not (console.is_terminal or console.is_jupyter):
    console.width = 200  # a file or a pipe has no width: do not cut columns


def say(text: str) -> None:
    """Print one line as it is."""
    print_markup(escape(printable(text, 4000)))


def warn(text: object) -> None:
    """Print one line to standard error."""
    errors.print(f"[yellow]warning:[/] {escape(printable(text, 4000))}", highlight=False, soft_wrap=True)


def print_markup(text: str) -> None:
    """Print one line with Rich's markup, without wrapping."""
    console.print(text, highlight=False, soft_wrap=True)


@contextmanager
def warnings_of(kind: type[Warning]) -> Iterator[None]:
    """Print warnings of this kind as one line without the location in the code; others as Python does."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", kind)
        usual = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> None:
            if issubclass(category, kind):
                warn(message)
            else:
                usual(message, category, *place, **more)

        warnings.showwarning = show
        yield


def plain_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str | Text]], words: bool = False) -> Table:
    """A table. Numbers are aligned to the right, the first column, descriptions and `words` to the left. Text is shown
    as it is: class names may look like markup."""
    table = Table(title=escape(title))
    for i, name in enumerate(header):
        table.add_column(escape(name), justify="left" if words or i == 0 or name == "description" else "right")
    for row in rows:
        table.add_row(*(escape(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str | Text]], words: bool = False) -> None:
    console.print(plain_table(title, header, rows, words))
