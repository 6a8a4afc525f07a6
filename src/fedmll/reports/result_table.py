"""The result table: one row per method, mean ± standard deviation over the seeds. If every row has a single seed, the
bootstrap interval instead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmll.comparison.compared_runs import ComparedRow, ComparedRuns
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.evaluation.metric_definitions import (
    COSTS,
    ERROR,
    REPORT,
    in_table_order,
    label_of,
    lower_is_better,
    metrics_in,
)
from fedmll.runs.run_overview import RunRecord

UPPER_BOUND = "centralized"  # trained on all data in one place: it is not a method that one could choose
BEST, SECOND = "best", "second"

Interval = tuple[float, float]


@dataclass(frozen=True)
class ResultCell:
    value: float | None  # what the column is sorted by
    text: str
    spread: str = ""  # ± standard deviation, or the interval
    tooltip: str = ""  # the value of each seed
    rank: str = ""  # BEST, SECOND or empty


@dataclass(frozen=True)
class ResultRow:
    label: str
    row: int  # the place in the study
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


def result_table(study: ComparedRuns, intervals: bool = True) -> ResultTable | None:
    """None if no run is finished. `intervals` False leaves out the bootstrap, which takes a few seconds."""
    names = {name: None for run in study.finished for name in run.summary["metrics"]}
    if not names:
        return None
    metrics = [*in_table_order(name for name in names if not name.endswith(ERROR)), *COSTS]
    single = all(len(row.finished) <= 1 for row in study.rows)
    found = {id(row): _intervals(row.first) for row in study.rows if intervals and single and row.finished}
    columns = [_column(study, name, found) for name in metrics]
    visible = metrics_in(REPORT)
    caption = _ranking_note(study)
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
            for place, row in enumerate(study.rows)
        ],
        caption=caption,
        several_seeds=not single,
    )


def ranked_rows(study: ComparedRuns) -> list[ComparedRow]:
    """The rows that compete: none of their seeds is missing, and they are not an upper bound."""
    most = max((len(row.finished) for row in study.rows), default=0)
    return [row for row in study.rows if len(row.finished) == most and row.first.method != UPPER_BOUND]


def _ranking_note(study: ComparedRuns) -> str:
    ranked = ranked_rows(study)
    if len(ranked) < 2:
        return ""
    others = [row for row in study.rows if row not in ranked]
    reasons = []
    if any(row.first.method != UPPER_BOUND for row in others):
        reasons.append("rows with fewer seeds than others")
    if any(row.first.method == UPPER_BOUND for row in others):
        reasons.append(f"{UPPER_BOUND}, which has all data in one place")
    note = "The best value is bold, the second best is underlined"
    return note + (f"; not ranked: {', and '.join(reasons)}. " if reasons else ". ")


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


def _column(study: ComparedRuns, name: str, intervals: dict[int, dict[str, Interval]]) -> list[ResultCell]:
    values = [row.values(name) for row in study.rows]
    means = [float(found.mean()) if len(found) else math.nan for found in values]
    ranked = ranked_rows(study)
    ranks = rank_values(
        [round(mean, 2) if row in ranked else math.nan for row, mean in zip(study.rows, means, strict=True)],
        lowest_first=lower_is_better(name),
    )
    column = []
    for row, found, mean, rank in zip(study.rows, values, means, ranks, strict=True):
        if not len(found):
            column.append(ResultCell(None, "–"))
            continue
        low, high = intervals.get(id(row), {}).get(name, (math.nan, math.nan))
        spread = f"± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
        spread = f"[{low:.2f}, {high:.2f}]" if math.isfinite(low) and not spread else spread
        column.append(ResultCell(mean, f"{mean:,.2f}", spread, _each_seed(row, found), "" if name in COSTS else rank))
    return column


def _each_seed(row: ComparedRow, found: np.ndarray) -> str:
    if len(found) != len(row.finished) or len(found) < 2:
        return ""
    return ", ".join(f"seed {run.seed}: {value:.2f}" for run, value in zip(row.finished, found, strict=True))


def rank_values(values: list[float], lowest_first: bool = False) -> list[str]:
    """BEST for the best value and SECOND for the next; equal values have equal ranks. Empty if all values are equal."""
    order = sorted({value for value in values if math.isfinite(value)}, reverse=not lowest_first)
    if len(order) < 2:
        return [""] * len(values)
    return [{order[0]: BEST, order[1]: SECOND}.get(value, "") for value in values]
