"""Confidence intervals of metrics, and of the differences between models on the same samples (`PairedComparison`).

The bootstrap draws test samples, or whole patients where samples have one.

A draw says how often each sample is in it. Samples are ranked once (`ranking.WeightedRanking`); a draw then only
changes how much each sample counts, so 1,000 draws cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmll.core import registry
from fedmll.core.seeding import numpy_generator
from fedmll.evaluation.calibration import calibration_error, excess_by_range
from fedmll.evaluation.metrics import Confusion, validate_scores
from fedmll.evaluation.ranking import DrawCounts, Floats, WeightedRanking

DRAWS = 1000
CONFIDENCE = 0.95
MAX_COUNTS = 1 << 20  # entries of (units, draws) that are in memory at a time

# Families of metrics that are computed together
RANKING = ("macro_auc", "auc", "map", "c_ap")
MICRO_RANKING = ("micro_auc", "o_ap")
ABOVE_HALF = ("macro_f1", "micro_f1", "bacc", "hamming")  # p > 0.5
AT_LEAST_HALF = ("c_p", "c_r", "c_f1", "c_p_all", "c_r_all", "c_f1_all", "o_p", "o_r", "o_f1")  # p ≥ 0.5
TUNED = ("macro_f1_tuned", "micro_f1_tuned")
SINGLE_LABEL = ("accuracy",)
VECTORISED = (*RANKING, *MICRO_RANKING, *ABOVE_HALF, *AT_LEAST_HALF, *TUNED, *SINGLE_LABEL)


def bootstrap_intervals(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    classes: Sequence[str],
    seed: int,
    groups: NDArray[np.str_] | None = None,
    thresholds: NDArray[np.floating] | None = None,
    draws: int = DRAWS,
) -> dict[str, tuple[float, float]]:
    """The 95 % percentile interval of every metric of `evaluate`.

    Args:
        scores: (N, C) probabilities.
        targets: (N, C) 1 present, 0 absent, −1 unknown.
        classes: The names of the C classes.
        seed: The same seed and the same number of samples give the same draws.
        groups: (N,) the patient of each sample. Patients are then drawn instead of samples, each with all its samples,
            because samples of one patient are not independent.
        thresholds: (C,) for the tuned metrics; without them these are left out.
        draws: The number of bootstrap draws.
    """
    assert scores.shape[1] == len(classes)
    units, unit = (np.arange(len(scores)),) * 2 if groups is None else np.unique(groups, return_inverse=True)
    names = [*(name for name in VECTORISED if name not in SINGLE_LABEL), *registry.find_added("metric")]
    found = bootstrap_distribution(scores, targets, unit, len(units), seed, names, thresholds, draws)
    return {name: percentile_interval(values) for name, values in found.items()}


def bootstrap_distribution(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    unit: NDArray[np.int64],
    units: int,
    seed: int,
    names: Sequence[str],
    thresholds: NDArray[np.floating] | None = None,
    draws: int = DRAWS,
) -> dict[str, Floats]:
    """The (draws,) values of each metric. Two models that are evaluated with the same seed and units get the same
    draws, so their values are paired.

    Args:
        scores: (N, C) probabilities.
        targets: (N, C) 1 present, 0 absent, −1 unknown.
        unit: (N,) the unit (sample or patient) that each sample is drawn with.
        units: The number of units.
        seed: See `draw_counts`.
        names: The metrics to compute.
        thresholds: (C,) for the tuned metrics.
        draws: The number of bootstrap draws.
    """
    metrics = BootstrapMetrics(scores, targets, names, thresholds)
    parts = [metrics.values(counts[unit]) for counts in draw_counts(units, seed, draws)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def draw_counts(units: int, seed: int, draws: int) -> Iterator[DrawCounts]:
    """Yield (units, some draws): how often each unit is drawn, with replacement, as many as there are."""
    generator = numpy_generator(seed, "bootstrap")
    step = max(1, MAX_COUNTS // units)
    for begin in range(0, draws, step):
        some = [
            np.bincount(generator.integers(units, size=units), minlength=units) for _ in range(min(step, draws - begin))
        ]
        yield np.ascontiguousarray(np.array(some, np.float32).T)


def percentile_interval(values: Floats) -> tuple[float, float]:
    """The ends of the interval that contains 95 % of the values that are defined."""
    defined = values[np.isfinite(values)]
    outside = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(defined, [outside, 100 - outside]) if len(defined) else (np.nan, np.nan)
    return float(low), float(high)


class BootstrapMetrics:
    """The metrics `names` of `evaluate`, for many draws of the same samples. Tuned metrics need `thresholds`; without
    them they are left out."""

    def __init__(
        self,
        scores: NDArray[np.floating],
        targets: NDArray[np.int8],
        names: Sequence[str],
        thresholds: NDArray[np.floating] | None = None,
    ) -> None:
        self.scores, self.targets = validate_scores(scores, targets)
        self.names = [name for name in names if name not in TUNED or thresholds is not None]
        self.thresholds = thresholds
        samples, classes = self.scores.shape
        place = np.arange(samples)
        self.rankings = [
            WeightedRanking(self.scores[:, column], self.targets[:, column], place, samples)
            for column in range(classes if self._wants(RANKING) else 0)
        ]
        self.micro_ranking = None
        if self._wants(MICRO_RANKING):
            sample = np.repeat(place, classes)
            self.micro_ranking = WeightedRanking(self.scores.ravel(), self.targets.ravel(), sample, samples)

    def _wants(self, family: Sequence[str]) -> bool:
        return any(name in family for name in self.names)

    def values(self, counts: DrawCounts) -> dict[str, Floats]:
        """By metric, in percent: one value per draw, NaN where it is undefined in that draw."""
        found: dict[str, Floats] = {}
        with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN: undefined in that draw
            if self.rankings:
                areas = zip(*(ranking.areas(counts) for ranking in self.rankings), strict=True)
                auc, ap = (mean_over_classes(np.array(by_class)) for by_class in areas)
                found |= dict(zip(RANKING, (auc, auc, ap, ap), strict=True))
            if self.micro_ranking is not None:
                found |= dict(zip(MICRO_RANKING, self.micro_ranking.areas(counts), strict=True))
            if self._wants(ABOVE_HALF):
                cut = draw_confusion(self.targets, self.scores > 0.5, counts)
                micro = cut.pooled()
                macro_f1, bacc = mean_over_classes(cut.f1.T), mean_over_classes(cut.bacc.T)
                found |= dict(zip(ABOVE_HALF, (macro_f1, micro.f1[:, 0], bacc, micro.hamming[:, 0]), strict=True))
            if self._wants(AT_LEAST_HALF):
                found |= self._at_least_half(counts)
            if self._wants(TUNED):
                cut = draw_confusion(self.targets, self.scores > np.asarray(self.thresholds), counts)
                found |= dict(zip(TUNED, (mean_over_classes(cut.f1.T), cut.pooled().f1[:, 0]), strict=True))
            if self._wants(SINGLE_LABEL):
                found["accuracy"] = self._accuracy(counts)
        shares_in_percent = {name: 100 * found[name] for name in self.names if name in found}
        return shares_in_percent | self._plugged_in(counts)

    def _at_least_half(self, counts: DrawCounts) -> dict[str, Floats]:
        cut = draw_confusion(self.targets, self.scores >= 0.5, counts)
        by_class = mean_over_classes(cut.precision.T), mean_over_classes(cut.recall.T)
        over_all = mean_over_all_classes(cut.precision.T), mean_over_all_classes(cut.recall.T)
        overall = cut.pooled().precision[:, 0], cut.pooled().recall[:, 0]
        values = [value for pair in (by_class, over_all, overall) for value in (*pair, _harmonic_mean(*pair))]
        return dict(zip(AT_LEAST_HALF, values, strict=True))

    def _accuracy(self, counts: DrawCounts) -> Floats:
        single = ((self.targets == 1).sum(axis=1) == 1) & (self.targets >= 0).all(axis=1)
        right = single & (self.scores.argmax(axis=1) == self.targets.argmax(axis=1))
        share: Floats = (right @ counts).astype(np.float64) / (single @ counts)
        return share

    def _plugged_in(self, counts: DrawCounts) -> dict[str, Floats]:
        """Metrics of plug-ins. They know no weights, so the samples of each draw are copied, which is slow."""
        others = {name: metric for name, metric in registry.find_added("metric").items() if name in self.names}
        found: dict[str, list[float]] = {name: [] for name in others}
        for draw in counts.T if others else ():
            rows = np.repeat(np.arange(len(draw)), draw.astype(np.int64))
            for name, metric in others.items():
                value = metric(self.scores[rows], self.targets[rows])
                found[name].append(float(value[0] if isinstance(value, tuple) else value))
        return {name: np.array(values) for name, values in found.items()}


def draw_confusion(targets: NDArray[np.int8], predicted: NDArray[np.bool_], counts: DrawCounts) -> Confusion:
    """The confusion matrices of (N, C) predictions in all draws, with cells (4, draws, classes)."""
    present, absent = targets == 1, targets == 0
    cells = (absent & ~predicted, absent & predicted, present & ~predicted, present & predicted)
    return Confusion(np.array([counts.T @ cell.astype(np.float32) for cell in cells], np.float64))


def mean_over_classes(shares: Floats) -> Floats:
    """(classes, …, draws) → (…, draws): over the classes that are defined in the draw; NaN if there are none."""
    defined = ~np.isnan(shares)
    with np.errstate(invalid="ignore"):
        mean: Floats = np.where(defined, shares, 0).sum(axis=0) / defined.sum(axis=0)
    return mean


def mean_over_all_classes(shares: Floats) -> Floats:
    """As `mean_over_classes`, but divided by the number of all classes: an undefined value counts as 0."""
    mean: Floats = np.where(np.isnan(shares).all(axis=0), np.nan, np.nan_to_num(shares).mean(axis=0))
    return mean


def _harmonic_mean(precision: Floats, recall: Floats) -> Floats:
    return np.where(precision + recall == 0, 0.0, 2 * precision * recall / (precision + recall))


# ---- paired comparison

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
    with np.errstate(invalid="ignore", divide="ignore"):
        auc, ap = (np.array(areas) for areas in zip(*(one.areas(counts) for one in rankings), strict=True))
        f1 = draw_confusion(targets, scores > output.thresholds, counts).f1.T
        known = (targets >= 0).T.astype(np.float32) @ counts
        ece = calibration_error(excess_by_range(scores, targets, counts), known)
    return {"ap": 100 * ap, "auc": 100 * auc, "f1": 100 * f1, "ece": ece}


def _estimate(values: Floats) -> Estimate:
    return Estimate(float(values[0]), *percentile_interval(values[1:]))
