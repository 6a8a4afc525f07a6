"""The commands show and runs: the contents of run folders. They only read."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.runs.formatting import TextTable
    from fedmll.runs.run_overview import RunRecord


def register(app: typer.Typer) -> None:
    app.command()(show)
    app.command()(runs)


def show(folder: Annotated[Path, typer.Argument(help="The folder of a run or of a comparison.")]) -> None:
    """Show a run or a comparison, finished or not: its state and its metrics so far.

    Examples:  [bold]fedmll show runs/first[/]  ·  [bold]fedmll show runs/compare-ml-digits[/]
    """
    from fedmll.comparison.comparison_folder import ComparisonFolder
    from fedmll.runs.run_folder import RunFolder
    from fedmll.runs.run_overview import read_run, run_table

    if not folder.is_dir():
        raise ConfigError(f"There is no folder {folder}. `fedmll runs` lists all runs.")
    if RunFolder(folder).is_run:
        _show_run(read_run(folder))
        return
    overview = ComparisonFolder(folder).read_overview()
    for table in overview.tables:
        _print(str(folder), table)
    for note in overview.notes:
        _say(f"[yellow]note:[/] {escape(note)}")
    if overview.unfinished:
        _print("not finished", run_table(overview.unfinished))
        _explain(overview.unfinished)
    finished = len(overview.runs) - len(overview.unfinished)
    _say(f"{finished} of {len(overview.runs)} started runs are finished")


def runs(
    folder: Annotated[Path, typer.Argument(help="A folder with runs.")] = Path("runs"),
) -> None:
    """List all runs below a folder: method, data, rounds done, state, main metric.

    Examples:  [bold]fedmll runs[/]  ·  [bold]fedmll runs runs/compare-ml-digits[/]
    """
    from fedmll.runs.run_overview import find_runs, run_table

    found = list(find_runs(folder))
    if not found:
        _say(f"no runs below {escape(str(folder))}")
        return
    _print(str(folder), run_table(found), words=True)
    _explain(found)


def _show_run(run: RunRecord) -> None:
    from fedmll.cli.server import show_site_metrics
    from fedmll.runs.run_folder import RunState
    from fedmll.runs.run_overview import headline_table

    if run.state is not RunState.UNREADABLE:
        title = f"{run.method} on {run.data_name}, seed {run.seed}"
        rounds = f"round {run.rounds_done} of {run.rounds}"
        _say(f"{escape(title)}: {run.state}, {rounds}, last written {run.last_written}")
    if run.metrics:
        _print("" if run.is_finished else f"after round {run.metrics.get('round', '?')}", headline_table(run))
    if run.is_finished:
        show_site_metrics(run.folder.path)
    _explain([run])
    if run.state in (RunState.NOT_STARTED, RunState.STOPPED, RunState.FAILED):
        _say(f"continue it with: [bold]fedmll resume {escape(str(run.folder))}[/]")


def _explain(found: list[RunRecord]) -> None:
    """Print why runs failed or cannot be read."""
    from fedmll.runs.run_folder import RunState

    for run in found:
        if run.state in (RunState.FAILED, RunState.UNREADABLE):
            _say(f"[yellow]{run.state}:[/] {escape(str(run.folder))}: {escape(run.reason)}")


def _print(title: str, table: TextTable, words: bool = False) -> None:
    from fedmll.cli.output import console, plain_table

    header, rows = table
    console.print(plain_table(escape(title), header, [[escape(text) for text in row] for row in rows], words))


def _say(text: str) -> None:
    from fedmll.cli.output import console

    console.print(text, soft_wrap=True, highlight=False)
