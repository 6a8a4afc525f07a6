"""The chart of classes: how well each class is predicted, against how frequent it is in the training data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedmll.comparison.compared_runs import ComparedRuns
from fedmll.evaluation.metric_definitions import CLASS_METRICS
from fedmll.reports.chart import NAME, PERCENT, POINTS, Chart, ChartAxis, ChartSeries, Columns
from fedmll.runs.run_overview import RunRecord, float_or_nan

SHOWN_METRICS = ("ap", "auc", "f1")


def class_chart(study: ComparedRuns) -> Chart | None:
    """None if no finished run has metrics per class."""
    series = []
    for place, row in enumerate(study.rows):
        runs = [run for run in row.finished if run.per_class]
        names = _class_names(runs[0]) if runs else []
        runs = [run for run in runs if _class_names(run) == names]
        if names:
            columns: Columns = {NAME: list(names), "frequency": _frequencies(runs[0], names)}
            columns |= {key: _means(runs, key) for key in SHOWN_METRICS}
            series.append(ChartSeries(row.label, place, columns))
    ys = [
        ChartAxis(key, f"{CLASS_METRICS[key].label}, %", PERCENT)
        for key in SHOWN_METRICS
        if any(np.isfinite(one.columns[key]).any() for one in series)
    ]
    if not ys:
        return None
    first = next(run for row in study.rows for run in row.finished if run.per_class)
    where = "training" if _training_frequencies(first) else "test"
    return Chart(
        name="classes",
        title="Performance by class frequency",
        caption="One point per class: the mean over the seeds. Rare classes are on the left.",
        kind=POINTS,
        xs=[ChartAxis("frequency", f"{where} samples with the class, %", PERCENT, log=True)],
        ys=ys,
        series=series,
    )


def _class_names(run: RunRecord) -> list[str]:
    return [line["class"] for line in run.per_class]


def _training_frequencies(run: RunRecord) -> dict[str, float]:
    """The percentage of training samples with each class; empty if the run does not know it."""
    data = run.training_data
    samples = float_or_nan(data.get("samples"))
    if not samples > 0:
        return {}
    return {name: 100 * float_or_nan(n) / samples for name, n in zip(data["classes"], data["present"], strict=True)}


def _frequencies(run: RunRecord, names: list[str]) -> list[float]:
    in_training = _training_frequencies(run)
    if set(names) <= in_training.keys():
        return [in_training[name] for name in names]
    return [100 * line["positives"] / max(1.0, line["known"]) for line in run.per_class]


def _means(runs: Sequence[RunRecord], key: str) -> list[float]:
    values = np.array([[float_or_nan(line.get(key)) for line in run.per_class] for run in runs])
    counts = np.isfinite(values).sum(axis=0)
    with np.errstate(invalid="ignore"):
        means: list[float] = (np.nansum(values, axis=0) / np.where(counts, counts, np.nan)).tolist()
    return means
