"""The commands show, runs, report and plot. They read the folders of runs and comparisons."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.cli.output import console, print_markup, print_table, say, warn
from fedmll.core.errors import ConfigError

if TYPE_CHECKING:
    from fedmll.comparison.compared_runs import ComparedRuns
    from fedmll.runs.run_overview import RunRecord

Folders = Annotated[
    list[Path], typer.Argument(metavar="RUN_OR_COMPARISON…", help="Folders of runs or comparisons, finished or not.")
]


def register(app: typer.Typer) -> None:
    for command in (show, runs, report, plot):
        app.command()(command)


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
    for header, rows in overview.tables:
        print_table(str(folder), header, rows)
    for note in overview.notes:
        print_markup(f"[yellow]note:[/] {escape(note)}")
    if overview.unfinished:
        print_table("not finished", *run_table(overview.unfinished))
        _explain(overview.unfinished)
    finished = len(overview.runs) - len(overview.unfinished)
    say(f"{finished} of {len(overview.runs)} started runs are finished")


def _show_run(run: RunRecord) -> None:
    from fedmll.cli.display import show_by_site
    from fedmll.cli.server import show_site_metrics
    from fedmll.runs.run_folder import RunState
    from fedmll.runs.run_overview import headline_table

    if run.state is not RunState.UNREADABLE:
        title = f"{run.method} on {run.data_name}, seed {run.seed}"
        say(f"{title}: {run.state}, round {run.rounds_done} of {run.rounds}, last written {run.last_written}")
    if run.metrics:
        print_table("" if run.is_finished else f"after round {run.metrics.get('round', '?')}", *headline_table(run))
    if run.is_finished:
        show_by_site(run.summary)
        show_site_metrics(run.folder.path)
    _explain([run])
    _warn_about_damage([run])
    if run.state in (RunState.NOT_STARTED, RunState.STOPPED, RunState.FAILED):
        print_markup(f"continue it with: [bold]fedmll resume {escape(str(run.folder))}[/]")


def _explain(found: list[RunRecord]) -> None:
    """Print why runs failed or cannot be read."""
    from fedmll.runs.run_folder import RunState

    for run in found:
        if run.state in (RunState.FAILED, RunState.UNREADABLE):
            print_markup(f"[yellow]{run.state}:[/] {escape(str(run.folder))}: {escape(run.reason)}")


def _warn_about_damage(found: list[RunRecord]) -> None:
    for run in found:
        for reason in run.damaged:
            warn(f"{run.folder}: {reason}")


def runs(folder: Annotated[Path, typer.Argument(help="A folder with runs.")] = Path("runs")) -> None:
    """List all runs below a folder: method, data, rounds done, state, main metric.

    Examples:  [bold]fedmll runs[/]  ·  [bold]fedmll runs runs/compare-ml-digits[/]
    """
    from fedmll.runs.run_overview import find_runs, run_table

    found = list(find_runs(folder))
    if not found:
        say(f"no runs below {folder}")
        return
    print_table(str(folder), *run_table(found), words=True)
    _explain(found)
    _warn_about_damage(found)


def report(
    runs: Folders,
    out: Annotated[Path, typer.Option(help="The HTML file to write.")] = Path("report.html"),
    keep_files: Annotated[
        bool, typer.Option("--files", help="Also write each figure as PNG, SVG and CSV, in a folder next to the page.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Also include figures with test images, and figures that need them.")
    ] = False,
) -> None:
    """Write an HTML page about runs and comparisons: settings, tables, curves. It works offline and needs no data.

    Examples:  [bold]fedmll report runs/first[/]  ·  [bold]fedmll report runs/compare-1 --out study.html --files[/]
    """
    from fedmll.reports.html_report import figure_folder, write_report

    _warn_about_gaps(write_report(runs, out, images=images, keep_files=keep_files))
    say(f"written: {out}" + (f", and all figures in {figure_folder(out)}" if keep_files else ""))


def plot(
    runs: Folders,
    metric: Annotated[str, typer.Option(help="A metric of metrics.jsonl: map, macro_auc, loss, …")] = "map",
    by: Annotated[str, typer.Option(help="The x axis: round, megabytes or seconds.")] = "round",
    out: Annotated[
        Path | None, typer.Option(help="Write FILE.png, .svg, .pdf, .jpg or .csv instead of printing.")
    ] = None,
) -> None:
    """Plot a metric of runs and comparisons (the mean over seeds), in the terminal or to a file.

    Examples:  [bold]fedmll plot runs/first --metric map[/]  ·  [bold]fedmll plot runs/a runs/b --out map.svg[/]
    """
    from fedmll.reports.curves import draw_in_terminal, read_curve, write_curve

    compared, chart, axis = read_curve(runs, metric, by)
    _warn_about_gaps(compared)
    if out is not None:
        write_curve(chart, axis, out)
        say(f"written: {out}")
        return
    for line in draw_in_terminal(chart, axis, min(console.width, 100)):
        say(line)


def _warn_about_gaps(compared: ComparedRuns) -> None:
    """Name runs that are missing, and files that cannot be read."""
    for name, reason in [*compared.missing, *compared.damaged]:
        warn(f"{name} {reason}")
