"""Learning curves by round, by bytes and by seconds: the mean over the seeds of a row, and their range. As a chart of
the report; and one curve for `fedmll plot`, in the terminal or as a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns, read_compared_runs
from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import printable, suggest
from fedmll.evaluation import metric_definitions
from fedmll.evaluation.metric_definitions import find_metric, in_table_order, label_of
from fedmll.reports import figure
from fedmll.reports.chart_drawing import draw_chart
from fedmll.reports.charts import COUNT, HIGH, LINES, LOW, NUMBER, PERCENT, Chart, ChartAxis, ChartSeries, Columns
from fedmll.runs.formatting import dicts_to_csv
from fedmll.runs.run_overview import RunRecord, float_or_nan

NO_METRICS = ("round", "seconds", "bytes_up", "bytes_down", "clients")  # columns of metrics.jsonl
MAX_POINTS = 200  # of a curve in the page
AXES = [
    ChartAxis("round", "round", COUNT),
    ChartAxis("megabytes", "MB sent and received, all clients"),
    ChartAxis("seconds", "seconds on this machine"),
]


def curve_metrics(rows: Sequence[ComparedRow]) -> list[str]:
    """All metrics that some run recorded in some round, in the order of the table of metrics."""
    names = {name: None for row in rows for run in row.runs for line in run.rows for name in line}
    return in_table_order(name for name in names if name not in NO_METRICS)


def learning_curves(compared: ComparedRuns, metrics: Sequence[str] | None = None) -> Chart | None:
    """The chart of the metrics; by default of all that the runs recorded. None if there is nothing to draw."""
    names = curve_metrics(compared.rows) if metrics is None else list(metrics)
    series = [
        ChartSeries(row.label, place, columns)
        for place, row in enumerate(compared.rows)
        if len((columns := curve_columns(row.finished or row.runs, names))["round"])
    ]
    names = [name for name in names if any(np.isfinite(one.columns[name]).any() for one in series)]
    if not names:
        return None
    names.sort(key=lambda name: not _has_several_rounds(name, series))
    caption = ""
    if any(len(row.finished or row.runs) > 1 for row in compared.rows):
        caption = "The line is the mean over the seeds; the band is the range from the lowest to the highest seed. "
    return Chart(
        name="curves",
        title="Learning curves",
        caption=caption + "Points are rounds in which the model was evaluated (engine.evaluate_every).",
        kind=LINES,
        xs=AXES,
        ys=[_metric_axis(name, compared) for name in names],
        series=series,
    )


def _metric_axis(name: str, compared: ComparedRuns) -> ChartAxis:
    """In percent if the table of metrics says so, or if the metric (of a plug-in) is in a summary."""
    in_summaries = any(name in run.summary["metrics"] for run in compared.finished)
    percent = find_metric(name).unit == metric_definitions.PERCENT or in_summaries
    return ChartAxis(name, label_of(name) + (", %" if percent else ""), PERCENT if percent else NUMBER)


def curve_columns(runs: Sequence[RunRecord], names: Sequence[str]) -> Columns:
    """One entry per round in which some run has one of the metrics."""
    by_round = [{row["round"]: row for row in run.rows} for run in runs]
    costs = [_cumulative_costs(run) for run in runs]
    rounds = [n for n in sorted(set().union(*by_round)) if any(n in of and _has_any(of[n], names) for of in by_round)]
    rounds = _thin_out(rounds)
    columns: Columns = {"round": rounds}
    for key in ("megabytes", "seconds"):
        columns[key] = [_reduce([of[n][key] for of in costs if n in of], np.mean) for n in rounds]
    for name in names:
        values = [[float_or_nan(of[n].get(name)) for of in by_round if n in of] for n in rounds]
        columns[name] = [_reduce(one, np.mean) for one in values]
        if len(runs) > 1:
            columns[name + LOW] = [_reduce(one, np.min) for one in values]
            columns[name + HIGH] = [_reduce(one, np.max) for one in values]
    return columns


def _cumulative_costs(run: RunRecord) -> dict[int, dict[str, float]]:
    """By round: the megabytes and the seconds up to and including it."""
    costs, megabytes, seconds = {}, 0.0, 0.0
    for row in run.rows:
        megabytes += (float_or_nan(row.get("bytes_up")) + float_or_nan(row.get("bytes_down"))) / 1e6
        seconds += float_or_nan(row.get("seconds"))
        costs[row["round"]] = {"megabytes": megabytes, "seconds": seconds}
    return costs


def _has_any(row: dict[str, Any], names: Sequence[str]) -> bool:
    return any(np.isfinite(float_or_nan(row.get(name))) for name in names)


def _has_several_rounds(name: str, series: Sequence[ChartSeries]) -> bool:
    """At least half of the rows have the metric in more than one round. Others come last: they are no curves."""
    return sum(np.isfinite(one.columns[name]).sum() > 1 for one in series) * 2 >= len(series)


def _reduce(values: Sequence[float], function: Callable[[list[float]], Any]) -> float:
    defined = [value for value in values if np.isfinite(value)]
    return float(function(defined)) if defined else float("nan")


def _thin_out(rounds: list[int]) -> list[int]:
    """At most MAX_POINTS rounds, evenly spread, with the first and the last."""
    if len(rounds) <= MAX_POINTS:
        return rounds
    return [rounds[place] for place in np.linspace(0, len(rounds) - 1, MAX_POINTS).round().astype(int)]


# ---- `fedmll plot`: one curve


def read_curve(paths: Sequence[Path], metric: str, by: str) -> tuple[ComparedRuns, Chart, ChartAxis]:
    """The runs in some folders, the chart of one metric, and its horizontal axis: round, megabytes or seconds."""
    axes = {axis.key: axis for axis in AXES}
    if by not in axes:
        raise ConfigError(f"There is no axis '{by}' (--by){suggest(by, axes)}")
    compared = read_compared_runs(paths)
    known = curve_metrics(compared.rows)
    if metric not in known:
        raise ConfigError(f"No run here has the metric '{metric}' (--metric){suggest(metric, known)}")
    chart = learning_curves(compared, [metric])
    if chart is None:
        raise ConfigError(f"'{metric}' is undefined in every round of these runs: there is no curve to draw.")
    return compared, chart, axes[by]


def write_curve(chart: Chart, x: ChartAxis, out: Path) -> None:
    """Write the first metric of a chart as FILE.png, FILE.svg, … or FILE.csv."""
    y = chart.ys[0]
    if out.suffix == ".csv":
        files.write_atomic(out, dicts_to_csv(chart.csv_rows(x, y)))
    else:
        figure.write_image(out, draw_chart(chart, x, y))


MARKERS = "●▲■◆○△□◇+×"
TERMINAL_HEIGHT = 16
MIN_WIDTH = 30  # characters, without the axis


def draw_in_terminal(chart: Chart, x: ChartAxis, width: int) -> list[str]:
    """The first metric of a chart drawn with characters, in lines of at most `width` characters. The last lines are the
    legend: one line per series, with its last value."""
    y = chart.ys[0]
    drawn = [(series, points) for series in chart.series if (points := _points(series, x, y))]
    (left, right), (low, high) = (_span([point[of] for _, points in drawn for point in points]) for of in (0, 1))
    labels = [f"{low + (high - low) * line / (TERMINAL_HEIGHT - 1):.4g}" for line in range(TERMINAL_HEIGHT)]
    margin = max(map(len, labels))
    columns = max(MIN_WIDTH, width - margin - 3)
    canvas = [[" "] * columns for _ in range(TERMINAL_HEIGHT)]
    for place, (_, points) in enumerate(drawn):
        for column, line in _path(points, (left, right), (low, high), columns):
            canvas[line][column] = MARKERS[place % len(MARKERS)]
    lines = [y.label]
    for line in reversed(range(TERMINAL_HEIGHT)):
        label = labels[line] if line % 5 == 0 else ""
        lines.append(f"{label:>{margin}} {'┤' if label else '│'}{''.join(canvas[line])}".rstrip())
    first, last = f"{left:.4g}", f"{right:.4g}"
    lines.append(" " * (margin + 1) + "└" + "─" * columns)
    lines.append(" " * (margin + 2) + first + f"{x.label:^{columns - len(first) - len(last)}}" + last)
    for place, (series, points) in enumerate(drawn):
        end, value = points[-1]
        text = f"{value:.2f}" if y.format == PERCENT else f"{value:.4g}"
        lines.append(f"{MARKERS[place % len(MARKERS)]} {printable(series.label)}: {text} at {x.key} {end:.4g}")
    return lines


def _points(series: ChartSeries, x: ChartAxis, y: ChartAxis) -> list[tuple[float, float]]:
    pairs = zip(series.columns[x.key], series.columns[y.key], strict=True)
    return [(float(a), float(b)) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def _path(
    points: Sequence[tuple[float, float]], x_span: tuple[float, float], y_span: tuple[float, float], columns: int
) -> list[tuple[int, int]]:
    """The characters (column, line) at the points and between them."""
    xs = [(x - x_span[0]) / (x_span[1] - x_span[0]) * (columns - 1) for x, _ in points]
    ys = [(y - y_span[0]) / (y_span[1] - y_span[0]) * (TERMINAL_HEIGHT - 1) for _, y in points]
    reached = np.unique(np.concatenate([np.arange(math.ceil(xs[0]), math.floor(xs[-1]) + 1), np.round(xs)]))
    return [
        (int(column), round(float(height))) for column, height in zip(reached, np.interp(reached, xs, ys), strict=True)
    ]
