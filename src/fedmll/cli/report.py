"""The commands report and plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.cli.output import console, errors, say

if TYPE_CHECKING:
    from fedmll.comparison.compared_runs import ComparedRuns

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN_OR_COMPARISON…", help="Folders of runs or comparisons, finished or not.")
]


def register(app: typer.Typer) -> None:
    app.command()(report)
    app.command()(plot)


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", help="The HTML file to write.")] = Path("report.html"),
    keep_files: Annotated[
        bool, typer.Option("--files", help="Also write each figure as PNG, SVG and CSV, in a folder next to the page.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Also include thumbnails of the data (needs the data).")
    ] = False,
) -> None:
    """Write an HTML page about runs and comparisons: settings, tables, curves. It works offline and needs no data.

    Examples:  [bold]fedmll report runs/first[/]  ·  [bold]fedmll report runs/compare-1 --out study.html --files[/]
    """
    from fedmll.reports.html_report import figure_folder, write_report

    study = write_report(runs, out, images=images, keep_files=keep_files)
    warn(study)
    say(f"written: {out}" + (f", and all figures in {figure_folder(out)}" if keep_files else ""))


def plot(
    runs: Runs,
    metric: Annotated[str, typer.Option("--metric", help="A metric of metrics.jsonl: map, macro_auc, loss, …")] = "map",
    by: Annotated[str, typer.Option("--by", help="The x axis: round, megabytes or seconds.")] = "round",
    out: Annotated[Path | None, typer.Option("--out", help="Write FILE.png, .svg or .csv instead of printing.")] = None,
) -> None:
    """Plot a metric of runs and comparisons (the mean over seeds), in the terminal or to a file.

    Examples:  [bold]fedmll plot runs/first --metric map[/]  ·  [bold]fedmll plot runs/a runs/b --out map.svg[/]
    """
    from fedmll.reports.curves import draw_in_terminal, read_curve, write_curve

    study, chart, axis = read_curve(runs, metric, by)
    warn(study)
    if out is not None:
        write_curve(chart, axis, out)
        say(f"written: {out}")
        return
    for line in draw_in_terminal(chart, axis, min(console.width, 100)):
        console.print(escape(line), highlight=False, soft_wrap=True)


def warn(study: ComparedRuns) -> None:
    """Name runs that are missing in the report, and files that cannot be read."""
    for name, why in [*study.missing, *study.damaged]:
        errors.print(f"[yellow]warning:[/] {escape(name)} {escape(why)}", highlight=False, soft_wrap=True)
