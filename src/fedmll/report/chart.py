"""A chart: its numbers and what they mean. The page draws it (page.js), and so does matplotlib (drawn.py) for files.

Every series is a table of columns. Which of them can be x and which y is said once for all series; `y:low` and `y:high`
are the ends of a band around `y`; `name` says what a point is.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

LINES, DOTS, MAP = "lines", "dots", "map"
LOW, HIGH, NAME = ":low", ":high", "name"
PERCENT, COUNT, NUMBER = "percent", "count", "number"  # how a figure is written
DIGITS = 5  # significant ones, in the page

Columns = dict[str, list[Any]]


@dataclass(frozen=True)
class Axis:
    key: str
    label: str
    format: str = NUMBER
    log: bool = False
    limits: tuple[float, float] | None = None
    names: tuple[str, ...] = ()  # of 0, 1, 2, …: an axis of things, not of numbers


@dataclass(frozen=True)
class Series:
    label: str
    row: int  # of the results: its colour, and what hides it
    columns: Columns


@dataclass(frozen=True)
class Sheet:
    """One map: a value a cell, None where there is none to know."""

    label: str
    rows: list[str]
    columns: list[str]
    values: list[list[int | None]]

    @property
    def cells(self) -> list[dict[str, Any]]:
        """As its CSV has them."""
        return [
            {"client": name, "class": label, "positives": value}
            for name, line in zip(self.rows, self.values, strict=True)
            for label, value in zip(self.columns, line, strict=True)
        ]


@dataclass(frozen=True)
class Chart:
    name: str
    title: str
    words: str
    kind: str
    xs: list[Axis] = field(default_factory=list)
    ys: list[Axis] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    line: str = ""  # a thin one to compare with: "zero" or "diagonal"
    sheets: list[Sheet] = field(default_factory=list)

    def rows_of(self, x: Axis, y: Axis) -> list[dict[str, Any]]:
        """The numbers of one view, as its CSV has them: a row a point."""
        wanted = (NAME, x.key, y.key, y.key + LOW, y.key + HIGH, "count")
        found = []
        for series in self.series:
            columns = {key: series.columns[key] for key in wanted if key in series.columns}
            for values in zip(*columns.values(), strict=True):
                found.append({"series": series.label, **dict(zip(columns, values, strict=True))})
        return found

    @property
    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "title": self.title,
            "kind": self.kind,
            "line": self.line,
            "xs": [vars(axis) for axis in self.xs],
            "ys": [vars(axis) for axis in self.ys],
            "series": [
                {
                    "label": series.label,
                    "row": series.row,
                    "columns": {key: [_short(value) for value in column] for key, column in series.columns.items()},
                }
                for series in self.series
            ],
            "sheets": [vars(sheet) for sheet in self.sheets],
        }


def _short(value: Any) -> Any:
    """As many digits as are drawn; NaN is no JSON."""
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return float(f"{value:.{DIGITS}g}")
