"""Charts of probabilities: reliability curves, and metrics by threshold, from the predictions on the test data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.comparison.compared_runs import ComparedRuns
from fedmll.evaluation.calibration import RANGES, reliability
from fedmll.evaluation.metrics import Confusion, mean_of_defined
from fedmll.evaluation.ranking import Floats
from fedmll.reports.chart import (
    DIAGONAL,
    HIGH,
    LINES,
    LOW,
    NUMBER,
    PERCENT,
    Chart,
    ChartAxis,
    ChartSeries,
    Columns,
)
from fedmll.runs.predictions import Predictions

THRESHOLDS = np.linspace(0, 1, 51)[:-1]
NORMAL_QUANTILE = 1.96  # standard deviations on either side of the mean: 95 %
THRESHOLD_METRICS = tuple(
    f"{average}_{name}" for average in ("macro", "micro") for name in ("f1", "precision", "recall")
)


def calibration_chart(study: ComparedRuns) -> Chart | None:
    """The reliability curve of each row, over all classes and seeds together."""
    series, errors = [], []
    for place, row in enumerate(study.rows):
        predictions = [run.predictions for run in row.finished if run.predictions is not None]
        if predictions:
            columns, error = reliability_curve(predictions)
            errors.append(f"{row.label} {error:.2f}")
            series.append(ChartSeries(row.label, place, columns))
    if not series:
        return None
    return reliability_chart(
        "Calibration",
        series,
        "Below the diagonal the predicted probabilities are too high. All classes and seeds are taken "
        "together; the band is the 95 % interval of the observed frequency (Wilson). Expected calibration error "
        f"({RANGES} bins) in percentage points: {', '.join(errors)}.",
    )


def reliability_chart(title: str, series: list[ChartSeries], caption: str) -> Chart:
    return Chart(
        name="calibration",
        title=title,
        caption=caption,
        kind=LINES,
        xs=[ChartAxis("predicted", "predicted probability", NUMBER, limits=(0, 1))],
        ys=[ChartAxis("observed", "observed frequency", NUMBER, limits=(0, 1))],
        series=series,
        reference=DIAGONAL,
    )


def reliability_curve(predictions: Sequence[Predictions]) -> tuple[Columns, float]:
    """The ranges of probabilities that contain samples, and the expected calibration error in percentage points."""
    probabilities = np.concatenate([one.probabilities.ravel() for one in predictions])[:, None]
    targets = np.concatenate([one.targets.ravel() for one in predictions])[:, None]
    found = reliability(probabilities, targets)
    samples = found.samples[0]
    some = samples > 0
    observed = found.observed[0, some]
    low, high = wilson_interval(observed, samples[some])
    columns = {
        "predicted": found.predicted[0, some],
        "observed": observed,
        f"observed{LOW}": low,
        f"observed{HIGH}": high,
        "count": samples[some],
    }
    return {key: values.tolist() for key, values in columns.items()}, float(np.nan_to_num(found.error[0]))


def wilson_interval(share: Floats, count: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """The 95 % score interval of Wilson for a share of `count` samples."""
    square = NORMAL_QUANTILE**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL_QUANTILE / (1 + square) * np.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def threshold_chart(study: ComparedRuns) -> Chart | None:
    """F1, precision and recall of each row by threshold."""
    series = []
    for place, row in enumerate(study.rows):
        found = [metrics_by_threshold(run.predictions) for run in row.finished if run.predictions is not None]
        if found:
            means = {key: np.mean([one[key] for one in found], axis=0).tolist() for key in THRESHOLD_METRICS}
            series.append(ChartSeries(row.label, place, {"threshold": THRESHOLDS.tolist(), **means}))
    if not series:
        return None
    labels = {key: key.replace("_", " ").replace("f1", "F1") for key in THRESHOLD_METRICS}
    return Chart(
        name="thresholds",
        title="Metrics by threshold",
        caption=(
            "A class is predicted if its probability is above the threshold, which is the same for all classes. The "
            "lines are means over the seeds. Macro: the mean over the classes with a positive in the test data."
        ),
        kind=LINES,
        xs=[ChartAxis("threshold", "threshold", NUMBER, limits=(0, 1))],
        ys=[ChartAxis(key, f"{label}, %", PERCENT) for key, label in labels.items()],
        series=series,
    )


def metrics_by_threshold(predictions: Predictions) -> dict[str, Floats]:
    """Each of THRESHOLD_METRICS in percent at each of THRESHOLDS: exactly what `evaluate` gives there, from one
    count."""
    samples, classes = predictions.probabilities.shape
    exceeded = np.searchsorted(THRESHOLDS, predictions.probabilities.astype(np.float64))  # how many are below p
    steps, column = len(THRESHOLDS) + 1, np.broadcast_to(np.arange(classes), (samples, classes))

    def count_above(target: int) -> Floats:
        """(thresholds, classes) entries with this target and p > threshold; in the last line all of them."""
        chosen = predictions.targets == target
        flat = np.bincount(exceeded[chosen] * classes + column[chosen], minlength=steps * classes)
        counts = flat.reshape(steps, classes)
        above = counts[::-1].cumsum(axis=0)[::-1]
        return np.concatenate([above[1:], above[:1]]).astype(np.float64)

    tp, fp = count_above(1), count_above(0)
    positives, negatives = tp[-1], fp[-1]
    found: dict[str, list[float]] = {key: [] for key in THRESHOLD_METRICS}
    for hits, alarms in zip(tp[:-1], fp[:-1], strict=True):
        cut = Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]))
        for average, of in (("macro", cut), ("micro", cut.pooled())):
            for key, share in (("f1", of.f1), ("precision", of.precision), ("recall", of.recall)):
                found[f"{average}_{key}"].append(100 * mean_of_defined(share))
    return {key: np.array(values) for key, values in found.items()}
