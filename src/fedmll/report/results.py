"""The result table: a row a method, mean ± std over seeds; of a single seed the bootstrap's interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedmll.evaluation.intervals import bootstrap
from fedmll.report.metric_names import LOWER_IS_BETTER, called, ordered
from fedmll.report.runs import Run
from fedmll.report.study import Row, Study
from fedmll.running.comparison import COSTS, SHOWN
from fedmll.running.shown import BY_SITE, TOGETHER

UPPER_BOUND = "centralized"  # trained on all data in one place: no method to choose


@dataclass(frozen=True)
class Figure:
    value: float | None  # what the column is sorted by
    text: str
    spread: str = ""  # ± std, or the interval
    note: str = ""  # each seed's own
    rank: str = ""  # "best", "second" or neither


@dataclass(frozen=True)
class Line:
    label: str
    row: int
    what: str  # "2 of 3 seeds", "failed", or nothing
    figures: list[Figure]


@dataclass(frozen=True)
class Results:
    metrics: list[str]
    headings: list[str]
    usual: list[bool]  # shown at once; the others on request
    lines: list[Line]
    words: str
    several: bool  # some row has more than one seed

    @property
    def rows(self) -> list[dict[str, Any]]:
        """As its CSV has them."""
        return [
            {"method": line.label, "metric": name, "value": one.value, "spread": one.spread, "seeds": one.note}
            for line in self.lines
            for name, one in zip(self.metrics, line.figures, strict=True)
        ]


def results(study: Study, intervals: bool = True) -> Results | None:
    found = {name: None for run in study.finished for name in run.summary["metrics"]}
    metrics = [*ordered([name for name in found if not name.endswith("_error")]), *COSTS]
    if not found:
        return None
    single = all(len(row.finished) <= 1 for row in study.rows)
    limits = {id(row): _limits(row.first) for row in study.rows if intervals and single and row.finished}
    columns = [_column(study, name, limits) for name in metrics]
    lines = [
        Line(row.label, place, _what(row), [column[place] for column in columns])
        for place, row in enumerate(study.rows)
    ]
    usual = {*SHOWN, *TOGETHER, *BY_SITE, *COSTS, "accuracy"}
    words = _ranking(study)
    if not single:
        words += "Percent, mean ± standard deviation over the seeds that are finished."
    elif any(limits.values()):
        words += "Percent; in brackets the 95 % interval (bootstrap over test samples; whole patients where there are)."
    else:
        words += "Percent."
    headings, shown = [called(name) for name in metrics], [name in usual for name in metrics]
    return Results(metrics, headings, shown, lines, words, not single)


def contenders(study: Study) -> list[Row]:
    """The rows that are ranked: all their seeds are there, and they are no upper bound."""
    most = max((len(row.finished) for row in study.rows), default=0)
    return [row for row in study.rows if len(row.finished) == most and row.first.method != UPPER_BOUND]


def _ranking(study: Study) -> str:
    if len(contenders(study)) < 2:
        return ""
    left = [row for row in study.rows if row not in contenders(study)]
    why = ["a row with fewer seeds than others"] if any(row.first.method != UPPER_BOUND for row in left) else []
    why += (
        [f"{UPPER_BOUND}, which has all data in one place"]
        if any(row.first.method == UPPER_BOUND for row in left)
        else []
    )
    return "The best is bold, the second best underlined" + (f"; not ranked: {', and '.join(why)}. " if why else ". ")


def _limits(run: Run) -> dict[str, tuple[float, float]]:
    """The same bootstrap as the model card's; of a run without kept predictions there is none."""
    kept = run.predictions
    if kept is None or not len(kept):
        return {}
    return bootstrap(kept.probabilities, kept.targets, kept.classes, run.seed, kept.patients, run.tuned)


def _what(row: Row) -> str:
    if not row.finished:
        return row.first.state
    return f"{len(row.finished)} of {len(row.runs)} seeds" if len(row.finished) < len(row.runs) else ""


def _column(study: Study, name: str, limits: dict[int, dict[str, tuple[float, float]]]) -> list[Figure]:
    values = [row.values(name) for row in study.rows]
    means = [float(found.mean()) if len(found) else math.nan for found in values]
    ranks_of = contenders(study)
    ranks = ranked(
        [round(mean, 2) if row in ranks_of else math.nan for row, mean in zip(study.rows, means, strict=True)],
        lowest=name in LOWER_IS_BETTER,
    )
    column = []
    for row, found, mean, rank in zip(study.rows, values, means, ranks, strict=True):
        if not len(found):
            column.append(Figure(None, "–"))
            continue
        low, high = limits.get(id(row), {}).get(name, (math.nan, math.nan))
        spread = f"± {np.std(found, ddof=1):.2f}" if len(found) > 1 else ""
        spread = f"[{low:.2f}, {high:.2f}]" if math.isfinite(low) and not spread else spread
        column.append(Figure(mean, f"{mean:,.2f}", spread, _each(row, found), "" if name in COSTS else rank))
    return column


def _each(row: Row, found: np.ndarray) -> str:
    if len(found) != len(row.finished) or len(found) < 2:
        return ""
    return ", ".join(f"seed {run.seed}: {value:.2f}" for run, value in zip(row.finished, found, strict=True))


def ranked(values: list[float], lowest: bool = False) -> list[str]:
    """ "best" for the best, "second" for the next value; equal ones alike, and nothing where there is no contest."""
    order = sorted({value for value in values if math.isfinite(value)}, reverse=not lowest)
    if len(order) < 2:
        return [""] * len(values)
    return [{order[0]: "best", order[1]: "second"}.get(value, "") for value in values]
