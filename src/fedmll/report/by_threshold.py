"""Are the probabilities true, and where to cut them: from the kept predictions of the test data, unknowns left out."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.metrics import Confusion, mean_of
from fedmll.report.chart import HIGH, LINES, LOW, NUMBER, PERCENT, Axis, Chart, Columns, Series
from fedmll.report.study import Study
from fedmll.running.predictions import Predictions

BINS = 15  # equally wide, as in Guo et al., On Calibration of Modern Neural Networks, 2017
THRESHOLDS = np.linspace(0, 1, 51)[:-1]
NORMAL = 1.96  # standard deviations on either side: 95 %
CUT = {
    "macro_f1": "macro F1",
    "macro_precision": "macro precision",
    "macro_recall": "macro recall",
    "micro_f1": "micro F1",
    "micro_precision": "micro precision",
    "micro_recall": "micro recall",
}

Floats = NDArray[np.float64]


def calibration(study: Study) -> Chart | None:
    """The seeds' predictions together: a bin's mean probability, and how often the class was there."""
    series, errors = [], []
    for place, row in enumerate(study.rows):
        kept = [run.predictions for run in row.finished if run.predictions is not None]
        if kept:
            columns, error = reliability(kept)
            errors.append(f"{row.label} {error:.2f}")
            series.append(Series(row.label, place, columns))
    if not series:
        return None
    words = (
        "Below the diagonal a model claims more than is true. All classes and seeds together; the band is the 95 % "
        f"interval of the observed share (Wilson). Expected calibration error ({BINS} bins), in percentage points: "
    )
    x = Axis("predicted", "predicted probability", NUMBER, limits=(0, 1))
    y = Axis("observed", "observed share", NUMBER, limits=(0, 1))
    title, words = "Calibration: is a probability what it says", words + ", ".join(errors) + "."
    return Chart("calibration", title, words, LINES, [x], [y], series, line="diagonal")


def reliability(kept: Sequence[Predictions]) -> tuple[Columns, float]:
    """The bins that are not empty, and the expected calibration error in percentage points."""
    known = [one.targets >= 0 for one in kept]
    p = np.concatenate([one.probabilities[there] for one, there in zip(kept, known, strict=True)]).astype(np.float64)
    truth = np.concatenate([one.targets[there] for one, there in zip(kept, known, strict=True)]) == 1
    place = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    count = np.bincount(place, minlength=BINS)
    some = count > 0
    n = count[some]
    predicted = np.bincount(place, p, BINS)[some] / n
    observed = np.bincount(place, truth, BINS)[some] / n
    low, high = wilson(observed, n)
    columns = {"predicted": predicted, "observed": observed, f"observed{LOW}": low, f"observed{HIGH}": high, "count": n}
    error = 100 * float(np.abs(predicted - observed) @ n / max(1, n.sum()))
    return {key: values.tolist() for key, values in columns.items()}, error


def wilson(share: Floats, count: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Wilson's score interval of a share of `count`, 95 %."""
    square = NORMAL**2 / count
    middle = (share + square / 2) / (1 + square)
    half = NORMAL / (1 + square) * np.sqrt(share * (1 - share) / count + square / (4 * count))
    return middle - half, middle + half


def thresholds(study: Study) -> Chart | None:
    series = []
    for place, row in enumerate(study.rows):
        found = [cut(run.predictions) for run in row.finished if run.predictions is not None]
        if found:
            means = {key: np.mean([one[key] for one in found], axis=0).tolist() for key in CUT}
            series.append(Series(row.label, place, {"threshold": THRESHOLDS.tolist(), **means}))
    if not series:
        return None
    words = (
        "A class is predicted if its probability is above the threshold, the same for all classes; the mean over the "
        "seeds. Macro: the mean over the classes that the test data has."
    )
    x = Axis("threshold", "threshold", NUMBER, limits=(0, 1))
    ys = [Axis(key, f"{text}, %", PERCENT) for key, text in CUT.items()]
    return Chart("thresholds", "Where to cut", words, LINES, [x], ys, series)


def cut(kept: Predictions) -> dict[str, Floats]:
    """Each figure, in percent, at each of THRESHOLDS: exactly what `evaluate` gives there, from one count."""
    samples, classes = kept.probabilities.shape
    exceeded = np.searchsorted(THRESHOLDS, kept.probabilities.astype(np.float64))  # how many are below p
    steps, column = len(THRESHOLDS) + 1, np.broadcast_to(np.arange(classes), (samples, classes))

    def above(wanted: int) -> Floats:
        """(thresholds, classes) entries with this target and p > threshold; in the last line all of them."""
        there = kept.targets == wanted
        flat = np.bincount(exceeded[there] * classes + column[there], minlength=steps * classes)
        counts = flat.reshape(steps, classes)
        over = counts[::-1].cumsum(axis=0)[::-1]
        return np.concatenate([over[1:], over[:1]]).astype(np.float64)

    tp, fp = above(1), above(0)
    positives, negatives = tp[-1], fp[-1]
    found: dict[str, list[float]] = {key: [] for key in CUT}
    for hits, wrong in zip(tp[:-1], fp[:-1], strict=True):
        table = Confusion(np.stack([negatives - wrong, wrong, positives - hits, hits]))
        for kind, of in (("macro", table), ("micro", table.pooled())):
            for key, share in (("f1", of.f1), ("precision", of.precision), ("recall", of.recall)):
                found[f"{kind}_{key}"].append(100 * mean_of(share))
    return {key: np.array(values) for key, values in found.items()}
