"""Curves by round, by bytes and by seconds, from metrics.jsonl: the mean over a row's seeds, and their range."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmll.report.chart import COUNT, HIGH, LINES, LOW, Axis, Chart, Columns, Series
from fedmll.report.metric_names import called, ordered, unit
from fedmll.report.runs import Run, number
from fedmll.report.study import Row, Study

NOT_DRAWN = ("round", "seconds", "bytes_up", "bytes_down", "clients")
MOST_POINTS = 200  # of a curve in the page: as many as can be told apart
AXES = [
    Axis("round", "round", COUNT),
    Axis("megabytes", "MB sent and received, all clients"),
    Axis("seconds", "seconds of this machine"),
]


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """Everything that some round of some run has a figure of, the usual first."""
    found = {name: None for row in rows for run in row.runs for line in run.rows for name in line}
    return ordered([name for name in found if name not in NOT_DRAWN])


def evaluated(study: Study) -> frozenset[str]:
    """What is percent: the metrics of the summaries, and of rounds of runs that have none yet."""
    known = {name for run in study.finished for name in run.summary["metrics"]}
    return frozenset(known or {"map", "macro_auc", "macro_f1", "bacc", "micro_f1", "macro_f1_tuned"})


def curves(study: Study, metrics: Sequence[str] | None = None) -> Chart | None:
    names = metrics_of(study.rows) if metrics is None else list(metrics)
    percent = evaluated(study)
    series = [
        Series(row.label, place, columns)
        for place, row in enumerate(study.rows)
        if len((columns := curve(row.finished or row.runs, names))["round"])
    ]
    names = [name for name in names if any(np.isfinite(one.columns[name]).any() for one in series)]
    if not names:
        return None
    names.sort(key=lambda name: not _is_curve(name, series))  # one that was measured at the end alone is no curve
    ys = [Axis(name, called(name) + (", %" if name in percent else ""), unit(name, percent)) for name in names]
    several = any(len(row.finished or row.runs) > 1 for row in study.rows)
    words = "The line is the mean over the seeds, the band reaches from the lowest to the highest. " if several else ""
    words += "A round is drawn where the model was evaluated: engine.evaluate_every says how often."
    return Chart("curves", "Learning curves", words, LINES, AXES, ys, series)


def curve(runs: Sequence[Run], names: Sequence[str]) -> Columns:
    """One row a round that some run has a figure of."""
    lines = [{row["round"]: row for row in run.rows} for run in runs]
    sums = [_running(run) for run in runs]
    rounds = [n for n in sorted(set().union(*lines)) if any(n in of and _has(of[n], names) for of in lines)]
    rounds = _thinned(rounds)
    columns: Columns = {"round": rounds, "megabytes": [], "seconds": []}
    for key in ("megabytes", "seconds"):
        columns[key] = [_mean([of[n][key] for of in sums if n in of]) for n in rounds]
    for name in names:
        found = [[number(of[n].get(name)) for of in lines if n in of] for n in rounds]
        columns[name] = [_mean(values) for values in found]
        if len(runs) > 1:
            columns[name + LOW] = [_end(values, np.min) for values in found]
            columns[name + HIGH] = [_end(values, np.max) for values in found]
    return columns


def _running(run: Run) -> dict[int, dict[str, float]]:
    """By round, all that it has sent and all the time that it has taken until then."""
    found, megabytes, seconds = {}, 0.0, 0.0
    for row in run.rows:
        megabytes += (number(row.get("bytes_up")) + number(row.get("bytes_down"))) / 1e6
        seconds += number(row.get("seconds"))
        found[row["round"]] = {"megabytes": megabytes, "seconds": seconds}
    return found


def _has(row: dict[str, object], names: Sequence[str]) -> bool:
    return any(np.isfinite(number(row.get(name))) for name in names)


def _is_curve(name: str, series: Sequence[Series]) -> bool:
    """At least half of the rows have it of more than one round."""
    return sum(np.isfinite(one.columns[name]).sum() > 1 for one in series) * 2 >= len(series)


def _mean(values: Sequence[float]) -> float:
    return _end(values, np.mean)


def _end(values: Sequence[float], of: np.ufunc | object) -> float:
    defined = [value for value in values if np.isfinite(value)]
    return float(of(defined)) if defined else float("nan")  # type: ignore[operator]


def _thinned(rounds: list[int]) -> list[int]:
    """At most so many, evenly spread, with the first and the last."""
    if len(rounds) <= MOST_POINTS:
        return rounds
    return [rounds[place] for place in np.linspace(0, len(rounds) - 1, MOST_POINTS).round().astype(int)]
