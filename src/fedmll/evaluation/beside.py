"""Several models beside each other on the same few samples: every metric with its interval, and every difference with
an interval of its own. Drawings are the same for all models, so differences are paired; whole patients are drawn where
samples have one.

Averages are over the classes with at least FEW positives and FEW negatives: an interval from fewer says more than it
knows. The calibration error is of all these classes' predictions together, in RANGES ranges of equal width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.calibration import RANGES
from fedmll.evaluation.intervals import DRAWS, drawings, limits
from fedmll.evaluation.metrics import Confusion, Floats, checked
from fedmll.evaluation.redrawn import Counts, Ranks

FEW = 10
METRICS = ("map", "auc", "f1", "ece")
LOWER_IS_BETTER = frozenset({"ece"})


@dataclass(frozen=True)
class Figure:
    """A metric, or a difference between two, in percent (points): its value and the 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or −1 where the interval is on one side of zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class Told:
    """What a model says of the samples: probabilities (N, C), and where each class is cut (p > threshold)."""

    probabilities: NDArray[np.floating]
    thresholds: Floats


class Beside:
    """`by_class[metric]` (C,) and `averages[metric]` are of a model; `difference` is of two. Metrics are METRICS."""

    def __init__(
        self,
        told: Mapping[str, Told],
        targets: NDArray[np.int8],
        seed: int,
        groups: NDArray[np.str_] | None = None,
        draws: int = DRAWS,
    ) -> None:
        units, unit = (np.arange(len(targets)),) * 2 if groups is None else np.unique(groups, return_inverse=True)
        positives, negatives = (targets == 1).sum(axis=0), (targets == 0).sum(axis=0)
        self.positives, self.negatives = positives, negatives
        self.enough = (positives >= FEW) & (negatives >= FEW)
        parts = [np.ones((len(targets), 1), np.float32), *(some[unit] for some in drawings(len(units), seed, draws))]
        self.found = {name: _drawn(one, targets, self.enough, parts) for name, one in told.items()}

    def average(self, model: str, metric: str) -> Figure:
        return _figure(self.found[model].averages[metric])

    def of_class(self, model: str, metric: str, column: int) -> Figure:
        return _figure(self.found[model].by_class[metric][column])

    def difference(self, model: str, other: str, metric: str, column: int | None = None) -> Figure:
        """How much more `model` has than `other`, on average or of a class."""
        first, second = self.found[model], self.found[other]
        if column is None:
            return _figure(first.averages[metric] - second.averages[metric])
        return _figure(first.by_class[metric][column] - second.by_class[metric][column])


@dataclass(frozen=True)
class _Drawn:
    """The first drawing is the data itself."""

    by_class: dict[str, Floats]  # (C, drawings)
    averages: dict[str, Floats]  # (drawings,)


def _drawn(told: Told, targets: NDArray[np.int8], enough: NDArray[np.bool_], parts: Sequence[Counts]) -> _Drawn:
    scores, targets = checked(np.asarray(told.probabilities, np.float64), targets)
    ranks = [Ranks(scores[:, c], targets[:, c], np.arange(len(scores)), len(scores)) for c in range(scores.shape[1])]
    found = [_shares(told, scores, targets, ranks, counts) for counts in parts]
    by_class = {name: 100 * np.concatenate([part[name] for part in found], axis=1) for name in METRICS}
    averages = {name: by_class[name][enough].mean(axis=0) for name in METRICS if name != "ece" and enough.any()}
    if enough.any():  # over the classes' predictions together, not a mean of the classes' errors
        gaps = [_gaps(scores[:, enough], targets[:, enough], counts).sum(axis=0) for counts in parts]
        known = [(counts.T @ (targets[:, enough] >= 0)).sum(axis=1) for counts in parts]
        averages["ece"] = 100 * np.concatenate(
            [np.abs(gap).sum(axis=0) / total for gap, total in zip(gaps, known, strict=True)]
        )
    return _Drawn(by_class, averages)


def _shares(
    told: Told, scores: Floats, targets: NDArray[np.int8], ranks: Sequence[Ranks], counts: Counts
) -> dict[str, Floats]:
    """(C, drawings) each; NaN where a drawing has no positive, or no negative."""
    present, absent, above = targets == 1, targets == 0, scores > told.thresholds
    cells = (absent & ~above, absent & above, present & ~above, present & above)
    with np.errstate(invalid="ignore", divide="ignore"):
        auc, ap = (np.array(areas) for areas in zip(*(one.areas(counts) for one in ranks), strict=True))
        cut = Confusion(np.array([cell.T.astype(np.float32) @ counts for cell in cells], np.float64))
        gaps = np.abs(_gaps(scores, targets, counts)).sum(axis=1)
        return {"map": ap, "auc": auc, "f1": cut.f1, "ece": gaps / ((targets >= 0).T.astype(np.float32) @ counts)}


def _gaps(scores: Floats, targets: NDArray[np.int8], counts: Counts) -> Floats:
    """(C, RANGES, drawings): how much more is predicted than is there, summed over the samples of a range."""
    place = np.minimum((scores * RANGES).astype(np.int64), RANGES - 1)
    excess = np.where(targets >= 0, scores - targets, 0).astype(np.float32)
    ranges = [(np.where(place == number, excess, 0).T @ counts) for number in range(RANGES)]
    return np.stack(ranges, axis=1).astype(np.float64)


def _figure(values: Floats) -> Figure:
    return Figure(float(values[0]), *limits(values[1:]))
