"""Charts and figures as files for papers: PNG, SVG, and a CSV of the numbers. Charts are drawn with matplotlib."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from fedmll.core import files
from fedmll.reports.chart import (
    COUNT,
    DIAGONAL,
    HEATMAP,
    HIGH,
    LINES,
    LOW,
    POINTS,
    ZERO,
    Chart,
    ChartAxis,
    ChartSeries,
)
from fedmll.reports.figure import ReportFigure
from fedmll.reports.figures import label_map

COLOURS = ("#0072b2", "#d55e00", "#008a63", "#b1468c", "#b37700", "#2f9bd6", "#7a4a1e", "#5f6670")  # as in page.css
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_METRICS = 4  # metrics of a chart that are drawn as files
MAX_MARKED = 40  # a line with more points has no markers
RESOLUTION = 200  # dots per inch
SVG_SETTINGS: Any = {"svg.hashsalt": "fedmll", "svg.fonttype": "none"}  # same figure, same bytes; text stays text


def chart_figures(chart: Chart) -> list[ReportFigure]:
    """The views of a chart: every x axis with the first y axis, and the first x axis with the other y axes."""
    if chart.kind == HEATMAP:
        return [_heatmap_figure(chart, place) for place in range(len(chart.heatmaps))]
    views = [(x, chart.ys[0]) for x in chart.xs] + [(chart.xs[0], y) for y in chart.ys[1:MAX_METRICS]]
    return [
        ReportFigure(
            name=_view_name(chart, x, y),
            title=f"{chart.title}: {y.label}",
            caption=chart.caption,
            figure=draw_chart(chart, x, y),
            rows=chart.csv_rows(x, y),
        )
        for x, y in views
    ]


def _view_name(chart: Chart, x: ChartAxis, y: ChartAxis) -> str:
    parts = [chart.name, *([y.key] if len(chart.ys) > 1 else []), *([x.key] if len(chart.xs) > 1 else [])]
    return file_name("-".join(parts))


def file_name(text: str) -> str:
    """Text as a file name that every operating system accepts."""
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.")[:100] or "figure"


def escape_dollars(text: str) -> str:
    """Text without mathematics: matplotlib would typeset what is between two dollar signs, or fail."""
    return text.replace("$", r"\$")


def draw_chart(chart: Chart, x: ChartAxis, y: ChartAxis) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for series in chart.series:
        _draw_series(axes, chart.kind, series, x, y)
    if chart.reference == ZERO:
        axes.axhline(0, color="0.45", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    if chart.reference == DIAGONAL:
        axes.plot([0, 1], [0, 1], color="0.45", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    if x.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif x.format == COUNT:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x.names:
        axes.set_xticks(
            range(len(x.names)), [escape_dollars(name) for name in x.names], rotation=25, ha="right", fontsize=8
        )
    for axis, setting in ((x, axes.set_xlim), (y, axes.set_ylim)):
        if axis.limits:
            setting(*axis.limits)
    axes.set_xlabel("" if x.names else x.label)
    axes.set_ylabel(y.label)
    axes.grid(axis="y", color="0.9", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    if len(chart.series) > 1 and not x.names:
        figure.legend(loc="outside upper left", ncols=3, frameon=False, fontsize=8)
    return figure


def _draw_series(axes: Axes, kind: str, series: ChartSeries, x: ChartAxis, y: ChartAxis) -> None:
    across, up = (np.array(series.columns[axis.key], float) for axis in (x, y))
    some = np.isfinite(across) & np.isfinite(up) & ((across > 0) if x.log else True)
    colour, marker = COLOURS[series.row % len(COLOURS)], MARKERS[series.row % len(MARKERS)]
    if kind == POINTS:
        axes.scatter(
            across[some],
            up[some],
            s=18,
            color=colour,
            marker=marker,
            alpha=0.8,
            linewidths=0,
            label=escape_dollars(series.label),
        )
        if x.names and some.any():
            axes.hlines(up[some].mean(), across[some].min(), across[some].max(), color=colour, linewidth=2)
        return
    assert kind == LINES
    if y.key + LOW in series.columns:
        low, high = (np.array(series.columns[y.key + end], float)[some] for end in (LOW, HIGH))
        axes.fill_between(across[some], low, high, color=colour, alpha=0.13, linewidth=0)
    style = DASHES[series.row // len(COLOURS) % len(DASHES)]
    markers = marker if some.sum() <= MAX_MARKED else ""
    axes.plot(
        across[some], up[some], color=colour, linestyle=style, linewidth=1.6, marker=markers, markersize=3.5,
        label=escape_dollars(series.label),
    )  # fmt: skip


def _heatmap_figure(chart: Chart, place: int) -> ReportFigure:
    heatmap = chart.heatmaps[place]
    known = np.array([[value is not None for value in line] for line in heatmap.values])
    counts = np.array([[value or 0 for value in line] for line in heatmap.values])
    names, classes = ([escape_dollars(name) for name in of] for of in (heatmap.rows, heatmap.columns))
    return ReportFigure(
        name=file_name(f"{chart.name}-{heatmap.label}"),
        title=f"{chart.title}, {heatmap.label}",
        caption=chart.caption,
        figure=label_map.draw_label_map(counts, names, classes, known),
        rows=heatmap.csv_rows,
    )


def write_figures(folder: Path, figures: Iterable[ReportFigure]) -> int:
    """Write NAME.png, NAME.svg and NAME.csv for each figure. Returns the number of figures."""
    names: set[str] = set()
    for figure in figures:
        name = file_name(figure.name)
        while name in names:
            name += "-2"
        names.add(name)
        for kind in ("png", "svg"):
            files.write_atomic(folder / f"{name}.{kind}", render(figure.figure, kind))
        if figure.rows:
            files.write_atomic(folder / f"{name}.csv", to_csv(figure.rows))
    return len(names)


def render(figure: Figure, kind: str, resolution: int = RESOLUTION) -> bytes:
    """The bytes of a "png" or "svg" file, without a date: the same figure has the same bytes."""
    content = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(content, format=kind, dpi=resolution, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def to_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """NaN and None are empty cells; no number is rounded."""
    return "" if value is None or (isinstance(value, float) and not np.isfinite(value)) else value
