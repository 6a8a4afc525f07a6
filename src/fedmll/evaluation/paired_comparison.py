"""Several models on the same samples: every metric with its interval, and every difference with its own interval.

The bootstrap draws are the same for all models, so differences are paired. Patients are drawn whole where samples have
one. Averages are over the classes with at least MIN_SAMPLES positives and as many negatives, because an interval from
fewer samples would look more certain than it is. The calibration error is computed over the predictions for all these
classes together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.bootstrap import DRAWS, draw_counts, percentile_interval
from fedmll.evaluation.calibration import calibration_error, excess_by_range
from fedmll.evaluation.metrics import Confusion, validate_scores
from fedmll.evaluation.ranking import DrawCounts, Floats, WeightedRanking

MIN_SAMPLES = 10
COMPARED_METRICS = ("ap", "auc", "f1", "ece")  # names of metric_definitions.CLASS_METRICS


@dataclass(frozen=True)
class Estimate:
    """A metric, or the difference of two, in percent (points), with its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def sign(self) -> int:
        """1 or −1 if the interval lies on one side of zero, else 0."""
        return int(self.low > 0) - int(self.high < 0)


@dataclass(frozen=True)
class ModelOutput:
    """The probabilities (N, C) of a model for the samples, and its thresholds (C,): a prediction is p > threshold."""

    probabilities: NDArray[np.floating]
    thresholds: Floats


class PairedComparison:
    """Compare models on the same samples by COMPARED_METRICS.

    Args:
        outputs: What each model predicts, by the name of the model.
        targets: (N, C) 1 present, 0 absent, −1 unknown.
        seed: Seed of the bootstrap draws.
        groups: (N,) the patient of each sample, if known.
        draws: The number of bootstrap draws.
    """

    def __init__(
        self,
        outputs: Mapping[str, ModelOutput],
        targets: NDArray[np.int8],
        seed: int,
        groups: NDArray[np.str_] | None = None,
        draws: int = DRAWS,
    ) -> None:
        units, unit = (np.arange(len(targets)),) * 2 if groups is None else np.unique(groups, return_inverse=True)
        self.positives, self.negatives = (targets == 1).sum(axis=0), (targets == 0).sum(axis=0)
        self.enough_samples = has_enough_samples(targets)
        parts = [np.ones((len(targets), 1), np.float32), *(some[unit] for some in draw_counts(len(units), seed, draws))]
        self._draws = {
            name: _metric_draws(output, targets, self.enough_samples, parts) for name, output in outputs.items()
        }

    def average(self, model: str, metric: str) -> Estimate:
        return _estimate(self._draws[model].averages[metric])

    def of_class(self, model: str, metric: str, column: int) -> Estimate:
        return _estimate(self._draws[model].by_class[metric][column])

    def difference(self, model: str, other: str, metric: str, column: int | None = None) -> Estimate:
        """`model` minus `other`, on average or for the class in `column`."""
        first, second = self._draws[model], self._draws[other]
        if column is None:
            return _estimate(first.averages[metric] - second.averages[metric])
        return _estimate(first.by_class[metric][column] - second.by_class[metric][column])


def has_enough_samples(targets: NDArray[np.int8]) -> NDArray[np.bool_]:
    """(C,): the classes with at least MIN_SAMPLES positives and as many negatives."""
    return np.minimum((targets == 1).sum(axis=0), (targets == 0).sum(axis=0)) >= MIN_SAMPLES


@dataclass(frozen=True)
class _MetricDraws:
    """The metrics of one model in every draw. The first draw is the data itself."""

    by_class: dict[str, Floats]  # (C, draws)
    averages: dict[str, Floats]  # (draws,)


def _metric_draws(
    output: ModelOutput, targets: NDArray[np.int8], enough: NDArray[np.bool_], parts: Sequence[DrawCounts]
) -> _MetricDraws:
    scores, targets = validate_scores(np.asarray(output.probabilities, np.float64), targets)
    samples = np.arange(len(scores))
    rankings = [
        WeightedRanking(scores[:, column], targets[:, column], samples, len(scores))
        for column in range(scores.shape[1])
    ]
    found = [_class_metrics(output, scores, targets, rankings, counts) for counts in parts]
    by_class = {name: np.concatenate([part[name] for part in found], axis=1) for name in COMPARED_METRICS}
    averages = {
        name: by_class[name][enough].mean(axis=0) for name in COMPARED_METRICS if name != "ece" and enough.any()
    }
    if enough.any():  # over the predictions for all classes together; not a mean of the classes' errors
        excess = [excess_by_range(scores[:, enough], targets[:, enough], counts).sum(axis=0) for counts in parts]
        known = [(counts.T @ (targets[:, enough] >= 0)).sum(axis=1) for counts in parts]
        averages["ece"] = np.concatenate(
            [calibration_error(one, total, axis=0) for one, total in zip(excess, known, strict=True)]
        )
    return _MetricDraws(by_class, averages)


def _class_metrics(
    output: ModelOutput,
    scores: Floats,
    targets: NDArray[np.int8],
    rankings: Sequence[WeightedRanking],
    counts: DrawCounts,
) -> dict[str, Floats]:
    """(C, draws) each, in percent; NaN where a draw has no positive, or no negative."""
    present, absent, above = targets == 1, targets == 0, scores > output.thresholds
    cells = (absent & ~above, absent & above, present & ~above, present & above)
    with np.errstate(invalid="ignore", divide="ignore"):
        auc, ap = (np.array(areas) for areas in zip(*(one.areas(counts) for one in rankings), strict=True))
        cut = Confusion(np.array([cell.T.astype(np.float32) @ counts for cell in cells], np.float64))
        known = (targets >= 0).T.astype(np.float32) @ counts
        ece = calibration_error(excess_by_range(scores, targets, counts), known)
    return {"ap": 100 * ap, "auc": 100 * auc, "f1": 100 * cut.f1, "ece": ece}


def _estimate(values: Floats) -> Estimate:
    return Estimate(float(values[0]), *percentile_interval(values[1:]))
