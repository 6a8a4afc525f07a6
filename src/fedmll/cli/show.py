"""The commands show and runs: what lies in a folder, finished or not. They only read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.running.comparison import Table
    from fedmll.running.overview import Shown


def register(app: typer.Typer) -> None:
    app.command()(show)
    app.command()(runs)


def show(folder: Annotated[Path, typer.Argument(help="A run's folder, or a comparison's.")]) -> None:
    """Show a run or a comparison, finished or not: where it is, and its figures so far. It only reads.

    Examples:  [bold]fedmll show runs/first[/]  ·  [bold]fedmll show runs/compare-ml-digits[/]
    """
    from fedmll.running import overview

    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. `fedmll runs` lists what there is.")
    if overview.is_run(folder):
        _show_run(overview.read(folder))
        return
    found = overview.read_comparison(folder)
    for table in found.tables:
        _print(str(folder), table)
    for note in found.notes:
        _say(f"[yellow]note:[/] {escape(note)}")
    if found.open:
        _print("not finished", overview.run_table(found.open, folder))
        _explain(found.open)
    finished = len(found.runs) - len(found.open)
    _say(f"{finished} of {len(found.runs)} runs that have begun are finished")


def runs(
    folder: Annotated[Path, typer.Argument(help="All runs below it.")] = Path("runs"),
) -> None:
    """List all runs below a folder: method, data, rounds done, state, main metric. It only reads.

    Examples:  [bold]fedmll runs[/]  ·  [bold]fedmll runs runs/compare-ml-digits[/]
    """
    from fedmll.running import overview

    found = list(overview.runs_below(folder))
    if not found:
        _say(f"no runs below {escape(str(folder))}")
        return
    _print(str(folder), overview.run_table(found, folder), words=True)
    _explain(found)


def _show_run(run: Shown) -> None:
    from fedmll.cli.federation import show_by_site
    from fedmll.running import overview

    if run.state != overview.UNREADABLE:
        seed = f"{run.method} on {run.data}, seed {run.seed}"
        _say(f"{escape(seed)}: {run.state}, round {run.done} of {run.rounds}, last written {run.day}")
    if run.metrics:
        title = "" if run.state == "finished" else f"after round {run.metrics.get('round', '?')}"
        _print(title, overview.headline_table(run))
    if run.state == "finished":
        show_by_site(run.folder)
    _explain([run])
    if run.state in ("stopped", "failed"):
        _say(f"go on with: [bold]fedmll resume {escape(str(run.folder))}[/]")


def _explain(found: list[Shown]) -> None:
    for run in found:
        if run.reason:
            _say(f"[yellow]{run.state}:[/] {escape(str(run.folder))}: {escape(run.reason)}")


def _print(title: str, table: Table, words: bool = False) -> None:
    from fedmll.cli.tables import console, plain_table

    header, rows = table
    console.print(plain_table(escape(title), header, [[escape(text) for text in row] for row in rows], words))


def _say(text: str) -> None:
    from fedmll.cli.tables import console

    console.print(text, soft_wrap=True, highlight=False)
