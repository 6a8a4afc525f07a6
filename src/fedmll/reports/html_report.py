"""The HTML report of runs and comparisons: one file that contains everything it shows and loads nothing.

Names of classes, methods and folders may come from others, so the template escapes all of them, and the data in the
page is JSON without a `<`.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files as resources
from pathlib import Path

import jinja2
from markupsafe import Markup
from PIL import Image

from fedmll.comparison.compared_runs import ComparedRuns, read_compared_runs
from fedmll.core import files
from fedmll.core.versions import fedmll_version
from fedmll.reports import chart_files
from fedmll.reports.calibration_charts import calibration_chart, threshold_chart
from fedmll.reports.chart import Chart
from fedmll.reports.class_charts import class_chart
from fedmll.reports.client_charts import client_chart, label_heatmaps
from fedmll.reports.curves import learning_curves
from fedmll.reports.descriptions import compare_settings, count_of, describe_study
from fedmll.reports.figure import ReportFigure
from fedmll.reports.result_table import ResultTable, result_table
from fedmll.reports.run_figures import run_figures
from fedmll.runs.formatting import to_json
from fedmll.runs.run_overview import RunRecord

FigureMaker = Callable[[RunRecord], list[ReportFigure]]
SCREEN_RESOLUTION = 130  # dots per inch of figures in the page
PALETTE_SIZE = 256  # colours of a figure in the page


@dataclass(frozen=True)
class ModelFigures:
    """The figures of the model of one row, from its first seed."""

    label: str
    figures: list[ReportFigure]

    @property
    def for_page(self) -> list[dict[str, str]]:
        return [{"title": one.title, "caption": one.caption, "source": data_url(one)} for one in self.figures]


def write_report(
    paths: Sequence[Path],
    out: Path,
    *,
    images: bool = False,
    keep_files: bool = False,
    make_figures: FigureMaker | None = None,
) -> ComparedRuns:
    """Write the report of runs and comparisons.

    Args:
        paths: Folders of runs and comparisons.
        out: The HTML file.
        images: Also show images of the data; needs the data.
        keep_files: Also write every figure as PNG, SVG and CSV, into a folder next to the page.
        make_figures: Makes the figures of a run's model; by default `run_figures`.

    Returns:
        What was read, with the reasons for what is missing.
    """
    study = read_compared_runs(paths)
    charts, table = make_charts(study), result_table(study)
    model_figures = [
        ModelFigures(row.label, figures)
        for row in study.rows
        if row.finished and (figures := make_figures(row.first) if make_figures else run_figures(row.first, images))
    ]
    files.write_atomic(out, render_page(study, charts, table, model_figures))
    if keep_files:
        folder = figure_folder(out)
        chart_files.write_figures(folder, (figure for chart in charts for figure in chart_files.chart_figures(chart)))
        for one in model_figures:
            chart_files.write_figures(folder / chart_files.file_name(one.label), one.figures)
        if table is not None:
            files.write_atomic(folder / "results.csv", chart_files.to_csv(table.csv_rows))
    return study


def figure_folder(out: Path) -> Path:
    """The folder for the figures of a page."""
    return out.with_name(f"{out.stem}-files")


def make_charts(study: ComparedRuns) -> list[Chart]:
    """The charts for which the runs have data."""
    charts = [
        learning_curves(study),
        class_chart(study),
        label_heatmaps(study),
        client_chart(study),
        calibration_chart(study),
        threshold_chart(study),
    ]
    return [chart for chart in charts if chart is not None]


def render_page(
    study: ComparedRuns, charts: Sequence[Chart], table: ResultTable | None, model_figures: Sequence[ModelFigures] = ()
) -> str:
    shared, differing = compare_settings(study.rows)
    runs = len(study.runs) + len(study.trials)
    return load_template("page.html.jinja").render(
        title=study.title,
        about=f"Report of {count_of(runs, 'run')}, written by fedmll {fedmll_version()}.",
        description=describe_study(study),
        labels=[row.label for row in study.rows],
        shared=shared,
        differing=differing if len(study.rows) > 1 else [],
        table=table,
        charts={chart.name: chart for chart in charts},
        model_figures=model_figures,
        missing=[*study.missing, *study.damaged],
        footer="All numbers come from the files in the folders of the runs. This page loads nothing from the network.",
        data=chart_data(charts),
        css=Markup(read_resource("page.css")),
        script=Markup(read_resource("page.js")),
    )


def chart_data(charts: Sequence[Chart]) -> Markup:
    """The numbers of the charts as JSON for `page.js`, safe inside a script element."""
    return Markup(to_json({"charts": [chart.as_json for chart in charts]}).replace("<", "\\u003c"))


def load_template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(read_resource(name))


def read_resource(name: str) -> str:
    return resources("fedmll.reports").joinpath(name).read_text(encoding="utf-8")


def data_url(figure: ReportFigure) -> str:
    """The figure inside the page: as SVG, or as PNG with few colours, whichever is smaller."""
    svg = chart_files.render(figure.figure, "svg")
    with Image.open(io.BytesIO(chart_files.render(figure.figure, "png", SCREEN_RESOLUTION))) as full:
        png = io.BytesIO()
        small = full.convert("RGBA").quantize(PALETTE_SIZE, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        small.save(png, "PNG", optimize=True)  # it stays transparent: the page may be dark
    kind, content = min((("svg+xml", svg), ("png", png.getvalue())), key=lambda one: len(one[1]))
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
