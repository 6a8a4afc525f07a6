"""Thresholds and probabilities of a finished run's model, chosen again on its validation data: from histograms, which
need no images and may be sums over many places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedmll.errors import ConfigError
from fedmll.evaluation import calibration, cuts
from fedmll.evaluation.histograms import histograms
from fedmll.evaluation.metrics import Confusion, Floats, Ints
from fedmll.running.folder import PREDICTIONS
from fedmll.running.model import SavedModel, load_model, recalibrated, write_model
from fedmll.running.predictions import read_predictions
from fedmll.running.saved import SavedRun

GOALS: dict[str, Callable[[Ints, float], Floats]] = {
    "recall": cuts.wanted_recall,
    "precision": cuts.wanted_precision,
    "find": cuts.controlled_recall,
}
GUARANTEE = (
    "Of new samples' positives at least the wanted share is found in each class, on average over validation data and "
    "new samples, as long as these are like each other. A threshold of -0.5 (always predicted) means too few "
    "positives to promise it otherwise."
)
Calibration = Literal["none", "platt", "temperature"]


@dataclass(frozen=True)
class Tuned:
    """classes × …: thresholds, and what they give on the validation data (shares; NaN where undefined)."""

    classes: tuple[str, ...]
    goal: str
    thresholds: Floats
    cut: Confusion
    before: calibration.Reliability
    after: calibration.Reliability | None  # None: not calibrated


def thresholds_for(goal: str) -> Callable[[Ints], Floats]:
    """`f1`, `recall=0.9`, `precision=0.8` or `find=0.9`."""
    name, equals, share = goal.partition("=")
    if goal == "f1":
        return cuts.best_f1
    try:
        if not equals:
            raise ValueError
        chosen, value = GOALS[name], float(share)
        return lambda counts: chosen(counts, value)
    except (KeyError, ValueError):
        raise ConfigError(
            f"Thresholds are chosen for f1, recall=0.9, precision=0.8 or find=0.9 (shares of your own); not '{goal}'."
        ) from None


def tune(run: SavedRun, goal: str = "f1", calibrate: Calibration = "none") -> Tuned:
    """Choose the thresholds of a run's model, and write them into it. With `calibrate` its probabilities change too, in
    everything that uses the file: prediction, export.

    f1          the highest F1 of each class, on the validation data
    recall=r    the highest threshold that finds the share r of that data's positives
    precision=r the lowest at which the share r of what is predicted is right
    find=r      at least the share r of the positives of *new* data is found, on average: see cuts.controlled_recall
    """
    choose = thresholds_for(goal)
    kept = read_predictions(run.folder / PREDICTIONS, "validation")  # as they were before any calibration
    counts = histograms(kept.probabilities, kept.targets)
    cut = Confusion(np.stack(_cells(counts, choose(counts))).astype(np.float64))
    thresholds, by = chosen(counts, choose, calibrate)
    _store(run.model, thresholds, by, goal)
    before = calibration.reliability(counts)
    after = None if by is None else calibration.reliability(calibration.calibrated(counts, by))
    return Tuned(kept.classes, goal, thresholds, cut, before, after)


def chosen(counts: Ints, choose: Callable[[Ints], Floats], calibrate: Calibration) -> tuple[Floats, Floats | None]:
    """Thresholds, and a and b of σ(a z + b) if it is calibrated, after which the thresholds are of those values."""
    thresholds = choose(counts)
    if calibrate == "none":
        return thresholds, None
    by = calibration.fitted(counts, calibrate)
    by[by[:, 0] <= 0] = (1, 0)  # the model ranks such a class the wrong way round: no probability says that
    inside = (thresholds > 0) & (thresholds < 1)
    return np.where(inside, recalibrated(thresholds[None], by)[0], thresholds), by


def _cells(counts: Ints, thresholds: Floats) -> tuple[Ints, ...]:
    """True negatives, false positives, false negatives, true positives of each class."""
    above = np.nextafter(thresholds, -1)[:, None] <= cuts.THRESHOLDS  # 0.5 is the edge itself: its bin counts too
    (hits, alarms), (positives, negatives) = (counts * above).sum(axis=2), counts.sum(axis=2)
    return negatives - alarms, alarms, positives - hits, hits


def _store(model: SavedModel, thresholds: Floats, by: Floats | None, goal: str) -> None:
    """Into the file as it is now: everything else in it stays."""
    as_it_is = load_model(model.file)
    chosen = {
        "thresholds": thresholds.tolist(),
        "thresholds_for": goal,
        "calibration": None if by is None else by.tolist(),
    }
    write_model(model.file, as_it_is.weights, as_it_is.description | chosen)
