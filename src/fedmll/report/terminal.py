"""A curve drawn with characters, for a terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedmll.errors import printable
from fedmll.report.chart import PERCENT, Axis, Chart, Series

MARKS = "●▲■◆○△□◇+×"
HEIGHT = 16
LEAST = 30  # columns of the drawing itself


def drawing(chart: Chart, x: Axis, y: Axis, width: int) -> list[str]:
    """Lines of at most `width` characters: the drawing with its axes, then a line a series with its last figure."""
    shown = [(series, points) for series in chart.series if (points := _points(series, x, y))]
    (left, right), (low, high) = (_span([point[of] for _, points in shown for point in points]) for of in (0, 1))
    labels = [f"{low + (high - low) * line / (HEIGHT - 1):.4g}" for line in range(HEIGHT)]
    margin = max(map(len, labels))
    columns = max(LEAST, width - margin - 3)
    canvas = [[" "] * columns for _ in range(HEIGHT)]
    for place, (_, points) in enumerate(shown):
        for column, line in _path(points, (left, right), (low, high), columns):
            canvas[line][column] = MARKS[place % len(MARKS)]
    lines = [y.label]
    for line in reversed(range(HEIGHT)):
        label = labels[line] if line % 5 == 0 else ""
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{''.join(canvas[line])}".rstrip())
    first, last = f"{left:.4g}", f"{right:.4g}"
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(" " * (margin + 2) + first + f"{x.label:^{columns - len(first) - len(last)}}" + last)
    for place, (series, points) in enumerate(shown):
        end, value = points[-1]
        figure = f"{value:.2f}" if y.format == PERCENT else f"{value:.4g}"
        lines.append(f"{MARKS[place % len(MARKS)]} {printable(series.label)}: {figure} at {x.key} {end:.4g}")
    return lines


def _points(series: Series, x: Axis, y: Axis) -> list[tuple[float, float]]:
    pairs = zip(series.columns[x.key], series.columns[y.key], strict=True)
    return [(float(a), float(b)) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _path(
    points: Sequence[tuple[float, float]], across: tuple[float, float], up: tuple[float, float], columns: int
) -> list[tuple[int, int]]:
    """The characters between and at the points: column, line."""
    xs = [(x - across[0]) / (across[1] - across[0]) * (columns - 1) for x, _ in points]
    ys = [(y - up[0]) / (up[1] - up[0]) * (HEIGHT - 1) for _, y in points]
    reached = np.unique(np.concatenate([np.arange(math.ceil(xs[0]), math.floor(xs[-1]) + 1), np.round(xs)]))
    return [
        (int(column), round(float(height))) for column, height in zip(reached, np.interp(reached, xs, ys), strict=True)
    ]
