"""Charts drawn with matplotlib, for files. In the page `page.js` draws them."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter, ScalarFormatter

from fedmll.reports.charts import (
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
from fedmll.reports.figure import ReportFigure, file_name, new_figure
from fedmll.reports.figures.label_statistics import draw_label_map

COLOURS = ("#0072b2", "#d55e00", "#008a63", "#b1468c", "#b37700", "#2f9bd6", "#7a4a1e", "#5f6670")  # as in page.css
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
MAX_METRICS = 4  # metrics of a chart that are drawn as files
MAX_MARKED = 40  # a line with more points has no markers


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


def draw_chart(chart: Chart, x: ChartAxis, y: ChartAxis) -> Figure:
    figure = new_figure(6.4, 3.8, background="white")
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
        axes.set_xticks(range(len(x.names)), x.names, rotation=25, ha="right", fontsize=8)
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
        style: dict[str, Any] = {"color": colour, "marker": marker, "alpha": 0.8, "linewidths": 0}
        axes.scatter(across[some], up[some], s=18, label=series.label, **style)
        if x.names and some.any():
            axes.hlines(up[some].mean(), across[some].min(), across[some].max(), color=colour, linewidth=2)
        return
    assert kind == LINES
    if y.key + LOW in series.columns:
        low, high = (np.array(series.columns[y.key + end], float)[some] for end in (LOW, HIGH))
        axes.fill_between(across[some], low, high, color=colour, alpha=0.13, linewidth=0)
    dashes = DASHES[series.row // len(COLOURS) % len(DASHES)]
    markers = marker if some.sum() <= MAX_MARKED else ""
    axes.plot(
        across[some], up[some], color=colour, linestyle=dashes, linewidth=1.6, marker=markers, markersize=3.5,
        label=series.label,
    )  # fmt: skip


def _heatmap_figure(chart: Chart, place: int) -> ReportFigure:
    heatmap = chart.heatmaps[place]
    known = np.array([[value is not None for value in line] for line in heatmap.values])
    counts = np.array([[value or 0 for value in line] for line in heatmap.values])
    return ReportFigure(
        name=file_name(f"{chart.name}-{heatmap.label}"),
        title=f"{chart.title}, {heatmap.label}",
        caption=chart.caption,
        figure=draw_label_map(counts, heatmap.rows, heatmap.columns, known),
        rows=heatmap.csv_rows,
    )
