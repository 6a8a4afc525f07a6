"""A chart of the HTML report: its numbers and what they mean. `page.js` draws it in the page, `chart_files.py` draws it
with matplotlib for files.

Each series is a table of columns. All series have the same axes: every axis in `xs` can be drawn against every axis in
`ys`. The columns `y:low` and `y:high` are the ends of a band around the column `y`; `name` says what a point is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LINES, POINTS, HEATMAP = "lines", "points", "heatmap"  # kinds of charts
ZERO, DIAGONAL = "zero", "diagonal"  # reference lines
LOW, HIGH, NAME = ":low", ":high", "name"
PERCENT, COUNT, NUMBER = "percent", "count", "number"  # how a value is written
DIGITS = 5  # significant digits in the page

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class ChartAxis:
    key: str  # the column
    label: str
    format: str = NUMBER
    log: bool = False
    limits: tuple[float, float] | None = None
    names: tuple[str, ...] = ()  # the labels of 0, 1, 2, … on an axis of categories


@dataclass(frozen=True)
class ChartSeries:
    label: str
    row: int  # the row of the result table: it sets the colour, and hides the series
    columns: Columns


@dataclass(frozen=True)
class Heatmap:
    """A matrix of counts; None where a count is unknown."""

    label: str
    rows: list[str]
    columns: list[str]
    values: list[list[int | None]]

    @property
    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {"client": name, "class": label, "positives": value}
            for name, line in zip(self.rows, self.values, strict=True)
            for label, value in zip(self.columns, line, strict=True)
        ]


@dataclass(frozen=True, kw_only=True)
class Chart:
    name: str
    title: str
    caption: str
    kind: str  # LINES, POINTS or HEATMAP
    xs: list[ChartAxis] = field(default_factory=list)
    ys: list[ChartAxis] = field(default_factory=list)
    series: list[ChartSeries] = field(default_factory=list)
    reference: str = ""  # ZERO or DIAGONAL: a thin line to compare with
    heatmaps: list[Heatmap] = field(default_factory=list)

    def csv_rows(self, x: ChartAxis, y: ChartAxis) -> list[dict[str, Any]]:
        """The numbers of one view, one row per point."""
        wanted = (NAME, x.key, y.key, y.key + LOW, y.key + HIGH, "count")
        rows = []
        for series in self.series:
            columns = {key: series.columns[key] for key in wanted if key in series.columns}
            for values in zip(*columns.values(), strict=True):
                rows.append({"series": series.label, **dict(zip(columns, values, strict=True))})
        return rows

    @property
    def as_json(self) -> dict[str, Any]:
        """What `page.js` draws."""
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "reference": self.reference,
            "xs": [vars(axis) for axis in self.xs],
            "ys": [vars(axis) for axis in self.ys],
            "series": [
                {
                    "label": series.label,
                    "row": series.row,
                    "columns": {key: [_rounded(value) for value in column] for key, column in series.columns.items()},
                }
                for series in self.series
            ],
            "heatmaps": [vars(heatmap) for heatmap in self.heatmaps],
        }


def _rounded(value: Any) -> Any:
    """Rounded to the digits that the page shows. JSON has no NaN: it becomes null."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
