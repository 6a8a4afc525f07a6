"""Charts as files: a chart's views drawn by matplotlib, for papers; PNG, SVG and CSV of every picture."""

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

from fedmll import files
from fedmll.analysis import label_map
from fedmll.analysis.picture import Picture
from fedmll.report.chart import COUNT, DOTS, HIGH, LINES, LOW, MAP, Axis, Chart, Series

COLOURS = ("#0072b2", "#d55e00", "#008a63", "#b1468c", "#b37700", "#2f9bd6", "#7a4a1e", "#5f6670")  # as in page.css
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
MOST_VIEWS = 4  # metrics of a chart that are drawn; its CSV has all
SMALL = 40  # points of a line that are also marked
RESOLUTION = 200  # dots an inch
SAME_SVG: Any = {"svg.hashsalt": "fedmll", "svg.fonttype": "none"}  # text stays text; the same picture, the same bytes


def pictures(chart: Chart) -> list[Picture]:
    """A chart as pictures: every x with the first y, and the first x with the others."""
    if chart.kind == MAP:
        return [_map(chart, place) for place in range(len(chart.sheets))]
    views = [(x, chart.ys[0]) for x in chart.xs] + [(chart.xs[0], y) for y in chart.ys[1:MOST_VIEWS]]
    return [
        Picture(_file(chart, x, y), f"{chart.title}: {y.label}", chart.words, draw(chart, x, y), chart.rows_of(x, y))
        for x, y in views
    ]


def _file(chart: Chart, x: Axis, y: Axis) -> str:
    parts = [chart.name, *([y.key] if len(chart.ys) > 1 else []), *([x.key] if len(chart.xs) > 1 else [])]
    return safe("-".join(parts))


def safe(name: str) -> str:
    """A name that is a file's everywhere."""
    return re.sub(r"[^\w.=+-]+", "-", name, flags=re.ASCII).strip("-.")[:100] or "picture"


def plain(text: str) -> str:
    """As it is: matplotlib would set what is between two dollars as mathematics, or fail to."""
    return text.replace("$", r"\$")


def draw(chart: Chart, x: Axis, y: Axis) -> Figure:
    figure = Figure(figsize=(6.4, 3.8), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for series in chart.series:
        _draw_series(axes, chart.kind, series, x, y)
    if chart.line == "zero":
        axes.axhline(0, color="0.45", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    if chart.line == "diagonal":
        axes.plot([0, 1], [0, 1], color="0.45", linewidth=0.8, linestyle=(0, (4, 4)), zorder=1)
    if x.log:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_formatter(NullFormatter())
    elif x.format == COUNT:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x.names:
        axes.set_xticks(range(len(x.names)), [plain(name) for name in x.names], rotation=25, ha="right", fontsize=8)
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


def _draw_series(axes: Axes, kind: str, series: Series, x: Axis, y: Axis) -> None:
    across, up = (np.array(series.columns[axis.key], float) for axis in (x, y))
    some = np.isfinite(across) & np.isfinite(up) & ((across > 0) if x.log else True)
    colour, marker = COLOURS[series.row % len(COLOURS)], MARKERS[series.row % len(MARKERS)]
    if kind == DOTS:
        axes.scatter(
            across[some],
            up[some],
            s=18,
            color=colour,
            marker=marker,
            alpha=0.8,
            linewidths=0,
            label=plain(series.label),
        )
        if x.names and some.any():
            axes.hlines(up[some].mean(), across[some].min(), across[some].max(), color=colour, linewidth=2)
        return
    assert kind == LINES
    if y.key + LOW in series.columns:
        low, high = (np.array(series.columns[y.key + end], float)[some] for end in (LOW, HIGH))
        axes.fill_between(across[some], low, high, color=colour, alpha=0.13, linewidth=0)
    style = DASHES[series.row // len(COLOURS) % len(DASHES)]
    shown = marker if some.sum() <= SMALL else ""
    axes.plot(
        across[some], up[some], color=colour, linestyle=style, linewidth=1.6, marker=shown, markersize=3.5,
        label=plain(series.label),
    )  # fmt: skip


def _map(chart: Chart, place: int) -> Picture:
    sheet = chart.sheets[place]
    known = np.array([[value is not None for value in line] for line in sheet.values])
    counts = np.array([[value or 0 for value in line] for line in sheet.values])
    names, classes = [plain(name) for name in sheet.rows], [plain(name) for name in sheet.columns]
    figure = label_map.figure_of(counts, names, classes, known)
    return Picture(
        safe(f"{chart.name}-{sheet.label}"), f"{chart.title}, {sheet.label}", chart.words, figure, sheet.cells
    )


def write(folder: Path, found: Iterable[Picture]) -> int:
    """NAME.png, NAME.svg and NAME.csv of each; how many pictures."""
    names: set[str] = set()
    for picture in found:
        name = safe(picture.name)
        while name in names:
            name += "-2"
        names.add(name)
        for kind in ("png", "svg"):
            files.write(folder / f"{name}.{kind}", rendered(picture.figure, kind))
        if picture.rows:
            files.write(folder / f"{name}.csv", as_csv(picture.rows))
    return len(names)


def rendered(figure: Figure, kind: str, resolution: int = RESOLUTION) -> bytes:
    """PNG or SVG, without the date: the same picture is the same bytes."""
    content = io.BytesIO()
    with rc_context(SAME_SVG):
        figure.savefig(content, format=kind, dpi=resolution, metadata={"Date": None} if kind == "svg" else None)
    return content.getvalue()


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(key for row in rows for key in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _cell(value) for key, value in row.items()} for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """What is undefined is empty; no figure is rounded."""
    return "" if value is None or (isinstance(value, float) and not np.isfinite(value)) else value
