"""Choose thresholds and calibration on validation data.

`best_thresholds` uses the samples themselves: it gives the "tuned" F1 of every evaluation. `choose_thresholds` uses
histograms (`histograms.py`) and a goal that the user sets. It works the same way for a run on one machine (`fedmll
tune`) and for a federation between machines, whose samples stay at their sites. Its thresholds lie on the edges of
bins, so what is said of them is exact on that data.

A prediction is p > threshold everywhere. A threshold is therefore just below the edge of its bin.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError
from fedmll.evaluation.calibration import apply_calibration, fit_calibration
from fedmll.evaluation.histograms import BINS, EDGES, MIDDLES
from fedmll.evaluation.metrics import Confusion, validate_scores
from fedmll.evaluation.ranking import Floats, Ints, score_blocks

DEFAULT_THRESHOLD = 0.5  # of a class for which the data has no positive
NEVER_PREDICTED = 1.0  # p > 1 is never true: no threshold reaches the goal
ALWAYS_PREDICTED = -0.5
# THRESHOLDS[n]: bin n and all bins above it are predicted; with the first, everything is
THRESHOLDS = np.concatenate([[ALWAYS_PREDICTED], np.nextafter(EDGES, 0)])


def best_thresholds(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> Floats:
    """The threshold of each class (C,) at which `p > threshold` has the highest F1 on these validation samples,
    exactly.

    It lies midway between two neighbouring scores. Of equally good thresholds the highest is taken. A class without a
    positive keeps 0.5. Where it is best to predict the class for every sample, and a score is 0, the threshold is −0.5.
    """
    scores, targets = validate_scores(scores, targets)
    best = np.full(scores.shape[1], 0.5)
    for block in score_blocks(scores, targets, np.zeros(len(scores), dtype=np.int64), 1):
        # The best threshold is just below the score of a positive: one below a negative gains by moving up past it.
        levels = block.levels()
        rows = np.flatnonzero(levels.positives)
        f1 = 2 * levels.tp / (levels.tp + levels.fp + levels.positives[levels.segment])
        highest = np.zeros(block.segments)
        highest[rows] = np.maximum.reduceat(f1, levels.first[rows])
        winners = np.flatnonzero(f1 == highest[levels.segment])
        chosen = np.zeros(block.segments, dtype=np.uint32)
        # The low half of a key ranks its score. Levels ascend and the last assignment stays: the highest threshold.
        chosen[levels.segment[winners]] = levels.key[winners].astype(np.uint32)

        rank, known, cut = block.rank[rows], block.targets[rows] >= 0, chosen[rows, None]
        value = np.where(rank == cut, block.scores[rows], -1).max(axis=1, initial=-1).astype(np.float64)
        lower = np.where(known & (rank < cut), block.scores[rows], -1).max(axis=1, initial=-1).astype(np.float64)
        lower[(lower < 0) & (value > 0)] = 0  # the lowest score of all: midway to 0
        middle = (lower + value) / 2
        best[block.columns][rows] = np.where(middle < value, middle, lower)  # neighbouring floats have no middle
    return best


def best_f1_thresholds(counts: Ints) -> Floats:
    """(C,): the thresholds with the highest F1. Of equally good ones it takes the highest, moved midway to the next
    lower score, as `best_thresholds` does. A class without a positive keeps the default threshold."""
    hits, alarms = _predicted_from(counts)
    positives = hits[:, :1]
    place = _highest_bin(2 * hits / np.maximum(hits + alarms + positives, 1))
    bins, some = np.arange(BINS), counts.any(axis=0)
    below = np.where(some & (bins < place[:, None]), bins, -1).max(axis=1)  # the next bin with a score; −1: none
    middle = (MIDDLES[place] + np.where(below < 0, 0, MIDDLES[below])) / 2
    midway = np.clip(np.searchsorted(EDGES, middle, side="right"), below + 1, place)
    return np.where(positives[:, 0] > 0, THRESHOLDS[midway], DEFAULT_THRESHOLD)


def thresholds_for_recall(counts: Ints, recall: float) -> Floats:
    """(C,): the highest thresholds that find at least this share of the positives of this data. They promise nothing
    for other data; see `conformal_recall_thresholds`."""
    hits, _ = _predicted_from(_check_share("recall", recall, counts))
    positives = hits[:, :1]
    enough = hits >= np.ceil(np.round(recall * positives, 9))
    return np.where(positives[:, 0] > 0, THRESHOLDS[_highest_bin(enough)], DEFAULT_THRESHOLD)


def thresholds_for_precision(counts: Ints, precision: float) -> Floats:
    """(C,): the lowest thresholds above which at least this share are positives; they find the most positives.
    NEVER_PREDICTED where no threshold reaches it; the default threshold for a class without a positive."""
    hits, alarms = _predicted_from(_check_share("precision", precision, counts))
    right = (hits > 0) & (hits >= precision * (hits + alarms) - 1e-9)
    cut = np.where(right.any(axis=1), THRESHOLDS[np.argmax(right, axis=1)], NEVER_PREDICTED)
    return np.where(hits[:, 0] > 0, cut, DEFAULT_THRESHOLD)


def conformal_recall_thresholds(counts: Ints, recall: float) -> Floats:
    """(C,): thresholds that find a new positive with at least this probability, whatever the model and the data are
    (split conformal prediction: Vovk et al., 2005; Sadinle, Lei and Wasserman, 2019).

    Let there be n positives here that are exchangeable with the new one. The threshold is the k-th lowest of their
    scores, k = ⌊(1 − recall)(n + 1)⌋; here it is the lower edge of that score's bin. With too few positives (k = 0)
    only ALWAYS_PREDICTED is certain.

    The guarantee holds for each class, on average over validation data and new samples. A site whose patients differ
    from the others' has it for thresholds from its own histograms, not for those from the sum of all sites.
    """
    positives = _check_share("recall", recall, counts)[0]
    allowed = np.floor(np.round((1 - recall) * (positives.sum(axis=1) + 1), 9))
    upto = np.cumsum(positives, axis=1)
    place = np.where(allowed > 0, np.argmax(upto >= allowed[:, None], axis=1), 0)
    return THRESHOLDS[place]


def confusion_at(counts: Ints, thresholds: Floats) -> Confusion:
    """The confusion matrix of this data at thresholds (C,) that lie on edges of bins, as those above do. It is
    exact."""
    above = np.nextafter(thresholds, -1)[:, None] <= THRESHOLDS  # 0.5 is the edge itself: its bin counts too
    (hits, alarms), (positives, negatives) = (counts * above).sum(axis=2), counts.sum(axis=2)
    return Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]).astype(np.float64))


def format_threshold(value: float) -> str:
    """With four significant digits of the distance to 0 or 1, whichever is nearer: 0.3421, 0.00001234, 0.999998765."""
    distance = min(value, 1 - value)
    return f"{value:g}" if distance <= 0 else f"{value:.{max(4, 3 - math.floor(math.log10(distance)))}f}"


def _check_share(name: str, value: float, counts: Ints) -> Ints:
    if not 0 < value < 1:
        raise ConfigError(f"The {name} of a threshold goal must lie between 0 and 1, for example 0.9; it is {value:g}.")
    return counts


def _predicted_from(counts: Ints) -> tuple[Ints, Ints]:
    """(C, BINS) each: the positives, and the negatives, in a bin and all bins above it."""
    positives, negatives = np.cumsum(counts[:, :, ::-1], axis=2)[:, :, ::-1]
    return positives, negatives


def _highest_bin(value: np.ndarray) -> Ints:
    """(C,): the highest of the bins with the largest value."""
    place: Ints = BINS - 1 - np.argmax(value[:, ::-1], axis=1)
    return place


GOALS: dict[str, Callable[[Ints, float], Floats]] = {
    "recall": thresholds_for_recall,
    "precision": thresholds_for_precision,
    "conformal_recall": conformal_recall_thresholds,
}
GUARANTEE = (
    "In each class at least the wanted share of the positives of new samples is found, on average over validation data "
    "and new samples, as long as both come from the same distribution. A threshold of -0.5, or of 0 in a federation, "
    "means that the class is always predicted: there are too few positives to promise it with a higher one."
)
Calibration = Literal["none", "platt", "temperature"]


@dataclass(frozen=True, kw_only=True)
class ThresholdChoice:
    """Thresholds and calibration of a model.

    Attributes:
        goal: What the thresholds are chosen for: "f1", "recall=0.9", …
        raw_thresholds: (C,) for the network's own probabilities.
        thresholds: (C,) the same for the calibrated probabilities.
        calibration: (C, 2) a and b of the calibration σ(a z + b); None without calibration.
    """

    goal: str
    raw_thresholds: Floats
    thresholds: Floats
    calibration: Floats | None

    @property
    def description(self) -> dict[str, Any]:
        """As a model file stores it."""
        return {
            "thresholds": self.thresholds.tolist(),
            "thresholds_for": self.goal,
            "calibration": None if self.calibration is None else self.calibration.tolist(),
        }

    def within_0_and_1(self) -> ThresholdChoice:
        """The same with 0 instead of a lower threshold: p > 0 predicts the class for all but a probability of 0."""
        raw, thresholds = np.maximum(self.raw_thresholds, 0.0), np.maximum(self.thresholds, 0.0)
        return replace(self, raw_thresholds=raw, thresholds=thresholds)

    def where(self, use_this: NDArray[np.bool_], other: ThresholdChoice) -> ThresholdChoice:
        """This choice for the classes in `use_this` (C,) and `other` for the rest. Both are calibrated, or neither."""
        calibration = None
        if self.calibration is not None and other.calibration is not None:
            calibration = np.where(use_this[:, None], self.calibration, other.calibration)
        return ThresholdChoice(
            goal=self.goal,
            raw_thresholds=np.where(use_this, self.raw_thresholds, other.raw_thresholds),
            thresholds=np.where(use_this, self.thresholds, other.thresholds),
            calibration=calibration,
        )


def choose_thresholds(counts: Ints, goal: str, calibrate: str) -> ThresholdChoice:
    """Choose thresholds and calibration on validation data.

    Args:
        counts: (2, C, BINS) histograms of the validation data.
        goal: "f1", "recall=0.9", "precision=0.8" or "conformal_recall=0.9".
        calibrate: "none", "platt" or "temperature".
    """
    raw = parse_goal(goal)(counts)
    if validate_calibration(calibrate) == "none":
        return ThresholdChoice(goal=goal, raw_thresholds=raw, thresholds=raw, calibration=None)
    calibration = fit_calibration(counts, calibrate)  # type: ignore[arg-type]
    calibration[calibration[:, 0] <= 0] = (1, 0)  # the model ranks such a class in the wrong order: leave it as it is
    moved = np.where((raw > 0) & (raw < 1), apply_calibration(raw[None], calibration)[0], raw)
    return ThresholdChoice(goal=goal, raw_thresholds=raw, thresholds=moved, calibration=calibration)


def validate_calibration(name: str) -> str:
    if name not in get_args(Calibration):
        raise ConfigError(f"--calibrate takes platt, temperature or none; it got '{name}'.")
    return name


def parse_goal(goal: str) -> Callable[[Ints], Floats]:
    """The function that chooses thresholds for a goal: `f1`, `recall=0.9`, `precision=0.8`, `conformal_recall=0.9`."""
    name, equals, share = goal.partition("=")
    if goal == "f1":
        return best_f1_thresholds
    try:
        if not equals:
            raise ValueError
        chosen, value = GOALS[name], float(share)
        return lambda counts: chosen(counts, value)
    except (KeyError, ValueError):
        raise ConfigError(
            "Thresholds are chosen for f1, recall=0.9, precision=0.8 or conformal_recall=0.9 (or another share); "
            f"not '{goal}'."
        ) from None
