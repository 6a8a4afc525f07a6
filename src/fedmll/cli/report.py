"""The commands that show what happened: report, plot."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from fedmll.cli.tables import console, errors, say

if TYPE_CHECKING:
    from fedmll.report.study import Study

Runs = Annotated[
    list[Path], typer.Argument(metavar="RUN_OR_COMPARISON…", help="Folders of runs or comparisons, finished or not.")
]


def register(app: typer.Typer) -> None:
    app.command()(report)
    app.command()(plot)


def report(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", help="The page.")] = Path("report.html"),
    keep_files: Annotated[
        bool, typer.Option("--files", help="Also every picture as PNG, SVG and CSV, in a folder beside the page.")
    ] = False,
    images: Annotated[
        bool, typer.Option("--images", help="Also thumbnails of the data (needs the data); without it, figures alone.")
    ] = False,
) -> None:
    """One HTML page of runs and comparisons: what was run, tables, curves. It works offline and needs no data.

    Examples:  [bold]fedmll report runs/first[/]  ·  [bold]fedmll report runs/compare-1 --out study.html --files[/]
    """
    from fedmll.report.page import files_beside, write_report

    study = write_report(runs, out, images=images, keep_files=keep_files)
    warn(study)
    say(f"written: {out}" + (f", and every picture in {files_beside(out)}" if keep_files else ""))


def plot(
    runs: Runs,
    metric: Annotated[str, typer.Option("--metric", help="As metrics.jsonl calls it: map, macro_auc, loss.")] = "map",
    by: Annotated[str, typer.Option("--by", help="round, megabytes or seconds.")] = "round",
    out: Annotated[Path | None, typer.Option("--out", help="FILE.png, .svg or .csv, instead of the terminal.")] = None,
) -> None:
    """One curve of runs and comparisons, in the terminal or as a file: the mean over the seeds.

    Examples:  [bold]fedmll plot runs/first --metric map[/]  ·  [bold]fedmll plot runs/a runs/b --out map.svg[/]
    """
    from fedmll.report import plot as plots

    study, chart, axis = plots.curve_of(runs, metric, by)
    warn(study)
    if out is not None:
        plots.write(chart, axis, out)
        say(f"written: {out}")
        return
    for line in plots.in_terminal(chart, axis, min(console.width, 100)):
        console.print(escape(line), highlight=False, soft_wrap=True)


def warn(study: Study) -> None:
    """Name what is not in the figures."""
    for name, why in [*study.lost, *study.damaged]:
        errors.print(f"[yellow]warning:[/] {escape(name)} {escape(why)}", highlight=False, soft_wrap=True)
