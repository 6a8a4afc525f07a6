"""What each class is worth, against how often it is seen in training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmll.report.chart import DOTS, NAME, PERCENT, Axis, Chart, Series
from fedmll.report.runs import Run, number
from fedmll.report.study import Row, Study

SHARES = {"ap": "average precision", "auc": "AUC", "f1": "F1 (p > 0.5)"}


def by_class(study: Study) -> Chart | None:
    series = []
    for place, row in enumerate(study.rows):
        runs = [run for run in row.finished if run.per_class]
        names = [line["class"] for line in runs[0].per_class] if runs else []
        runs = [run for run in runs if [line["class"] for line in run.per_class] == names]
        if names:
            columns = {NAME: names, "frequency": _frequency(runs[0], names)}
            columns |= {key: _means(runs, key) for key in SHARES}
            series.append(Series(row.label, place, columns))
    ys = [
        Axis(key, f"{text}, %", PERCENT)
        for key, text in SHARES.items()
        if any(np.isfinite(one.columns[key]).any() for one in series)
    ]
    if not ys:
        return None
    where = "the training data" if _trained_on(_first(study.rows)) else "the test data"
    x = Axis("frequency", f"share of {where} that has the class, %", PERCENT, log=True)
    words = "A dot is a class, the mean over the seeds. Rare classes are to the left."
    return Chart("classes", "Classes: how good, how frequent", words, DOTS, [x], ys, series)


def _first(rows: Sequence[Row]) -> Run:
    return next(run for row in rows for run in row.finished if run.per_class)


def _trained_on(run: Run) -> dict[str, float]:
    """Percent of the training samples by class, where that is known here."""
    facts = run.facts
    samples = number(facts.get("samples"))
    if not samples > 0:
        return {}
    return {name: 100 * number(n) / samples for name, n in zip(facts["classes"], facts["present"], strict=True)}


def _frequency(run: Run, names: list[str]) -> list[float]:
    shares = _trained_on(run)
    if set(names) <= shares.keys():
        return [shares[name] for name in names]
    return [100 * line["positives"] / max(1.0, line["known"]) for line in run.per_class]


def _means(runs: Sequence[Run], key: str) -> list[float]:
    found = np.array([[number(line.get(key)) for line in run.per_class] for run in runs])
    counts = np.isfinite(found).sum(axis=0)
    with np.errstate(invalid="ignore"):
        means: list[float] = (np.nansum(found, axis=0) / np.where(counts, counts, np.nan)).tolist()
    return means
