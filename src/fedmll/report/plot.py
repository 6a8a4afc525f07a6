"""One curve of some runs: drawn in the terminal, or written as a picture or as its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fedmll import files
from fedmll.errors import ConfigError, nearest
from fedmll.report import drawn, terminal
from fedmll.report.chart import Axis, Chart
from fedmll.report.curves import AXES, curves, metrics_of
from fedmll.report.study import Study, gather

KINDS = (".png", ".svg", ".csv")


def curve_of(paths: Sequence[Path], metric: str, by: str) -> tuple[Study, Chart, Axis]:
    """The runs, the chart of this metric alone, and the axis that it is drawn by."""
    axes = {axis.key: axis for axis in AXES}
    if by not in axes:
        raise ConfigError(f"There is no axis '{by}' (--by){nearest(by, axes)}")
    study = gather(paths)
    known = metrics_of(study.rows)
    if metric not in known:
        raise ConfigError(f"No run here has the metric '{metric}' (--metric){nearest(metric, known)}")
    chart = curves(study, [metric])
    if chart is None:
        raise ConfigError(f"'{metric}' is undefined in every round of these runs: there is no curve to draw.")
    return study, chart, axes[by]


def in_terminal(chart: Chart, x: Axis, width: int) -> list[str]:
    return terminal.drawing(chart, x, chart.ys[0], width)


def write(chart: Chart, x: Axis, out: Path) -> None:
    y = chart.ys[0]
    if out.suffix not in KINDS:
        raise ConfigError(f"--out takes FILE.png, FILE.svg or FILE.csv; '{out}' ends in none of them.")
    if out.suffix == ".csv":
        files.write(out, drawn.as_csv(chart.rows_of(x, y)))
    else:
        files.write(out, drawn.rendered(drawn.draw(chart, x, y), out.suffix[1:]))
