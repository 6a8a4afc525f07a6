"""The result table: one row per method, mean ± standard deviation over the seeds. If every row has a single seed, the
bootstrap interval instead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.comparison.tables import RankableRow, rank_values, ranking_note
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.evaluation.metric_definitions import (
    COSTS,
    ERROR,
    REPORT,
    in_table_order,
    label_of,
    metrics_in,
)
from fedmll.runs.run_overview import RunRecord

Interval = tuple[float, float]


@dataclass(frozen=True)
class ResultCell:
    value: float | None  # what the column is sorted by
    text: str
    spread: str = ""  # ± standard deviation, or the interval
    tooltip: str = ""  # the value of each seed
    rank: str = ""  # tables.BEST, tables.SECOND or empty


@dataclass(frozen=True)
class ResultRow:
    label: str
    row: int  # its place among the rows
    state: str  # "2 of 3 seeds", "failed", or empty
    cells: list[ResultCell]


@dataclass(frozen=True, kw_only=True)
class ResultTable:
    metrics: list[str]
    headings: list[str]
    visible: list[bool]  # False: the column is only shown on request
    rows: list[ResultRow]
    caption: str
    several_seeds: bool

    @property
    def csv_rows(self) -> list[dict[str, Any]]:
        return [
            {"method": row.label, "metric": name, "value": cell.value, "spread": cell.spread, "seeds": cell.tooltip}
            for row in self.rows
            for name, cell in zip(self.metrics, row.cells, strict=True)
        ]


def result_table(compared: ComparedRuns, intervals: bool = True) -> ResultTable | None:
    """None if no run is finished. `intervals` False leaves out the bootstrap, which takes a few seconds."""
    names = {name: None for run in compared.finished for name in run.summary["metrics"]}
    if not names:
        return None
    metrics = [*in_table_order(name for name in names if not name.endswith(ERROR)), *COSTS]
    single = all(len(row.finished) <= 1 for row in compared.rows)
    found = {id(row): _intervals(row.first) for row in compared.rows if intervals and single and row.finished}
    columns = [_column(compared, name, found) for name in metrics]
    visible = metrics_in(REPORT)
    caption = f"{ranking_note(rankable(compared))} ".lstrip()
    if not single:
        caption += "Percent; mean ± standard deviation over the finished seeds."
    elif any(found.values()):
        caption += "Percent; in brackets the 95 % interval (bootstrap over the test samples, or over whole patients)."
    else:
        caption += "Percent."
    return ResultTable(
        metrics=metrics,
        headings=[label_of(name) for name in metrics],
        visible=[name in visible for name in metrics],
        rows=[
            ResultRow(row.label, place, _state(row), [column[place] for column in columns])
            for place, row in enumerate(compared.rows)
        ],
        caption=caption,
        several_seeds=not single,
    )


def rankable(compared: ComparedRuns) -> list[RankableRow]:
    return [RankableRow(row.first.method, len(row.finished)) for row in compared.rows]


def _intervals(run: RunRecord) -> dict[str, Interval]:
    """The same bootstrap as in the model card; empty for a run without stored predictions."""
    stored = run.predictions
    if stored is None or not len(stored):
        return {}
    return bootstrap_intervals(
        stored.probabilities, stored.targets, stored.classes, run.seed, stored.patients, run.tuned_thresholds
    )


def _state(row: ComparedRow) -> str:
    if not row.finished:
        return str(row.first.state)
    return f"{len(row.finished)} of {len(row.runs)} seeds" if len(row.finished) < len(row.runs) else ""


def _column(compared: ComparedRuns, name: str, intervals: dict[int, dict[str, Interval]]) -> list[ResultCell]:
    values = [row.values(name) for row in compared.rows]
    means = [float(found.mean()) if len(found) else math.nan for found in values]
    complete = [len(found) == len(row.finished) for row, found in zip(compared.rows, values, strict=True)]
    whole = [mean if is_whole else math.nan for mean, is_whole in zip(means, complete, strict=True)]
    ranks = rank_values(name, rankable(compared), whole)
    column = []
    for row, found, mean, rank in zip(compared.rows, values, means, ranks, strict=True):
        if not len(found):
            column.append(ResultCell(None, "–"))
            continue
        low, high = intervals.get(id(row), {}).get(name, (math.nan, math.nan))
        spread = f"± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
        spread = f"[{low:.2f}, {high:.2f}]" if math.isfinite(low) and not spread else spread
        column.append(ResultCell(mean, f"{mean:,.2f}", spread, _each_seed(row, found), rank))
    return column


def _each_seed(row: ComparedRow, found: np.ndarray) -> str:
    if len(found) != len(row.finished) or len(found) < 2:
        return ""
    return ", ".join(f"seed {run.seed}: {value:.2f}" for run, value in zip(row.finished, found, strict=True))
