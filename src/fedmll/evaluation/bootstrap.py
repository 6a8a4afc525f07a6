"""Confidence intervals of metrics: the bootstrap over test samples (whole patients, where samples have one).

A draw says how often each sample is in it. Samples are ranked once (`ranking.WeightedRanking`); a draw then only
changes how much each sample counts, so 1,000 draws cost little more than one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.core import registry
from fedmll.core.seeding import numpy_generator
from fedmll.evaluation.metrics import Confusion, validate_scores
from fedmll.evaluation.ranking import DrawCounts, Floats, WeightedRanking

DRAWS = 1000
CONFIDENCE = 0.95
MAX_COUNTS = 1 << 20  # entries of (units, draws) that are in memory at a time

# Families of metrics that are computed together
RANKING = ("macro_auc", "auc", "map", "c_ap")
MICRO_RANKING = ("micro_auc", "o_ap")
ABOVE_HALF = ("macro_f1", "micro_f1", "bacc", "hamming")  # p > 0.5
AT_LEAST_HALF = ("c_p", "c_r", "c_f1", "o_p", "o_r", "o_f1")  # p ≥ 0.5
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
                auc, ap = (_mean_over_classes(np.array(by_class)) for by_class in areas)
                found |= dict(zip(RANKING, (auc, auc, ap, ap), strict=True))
            if self.micro_ranking is not None:
                found |= dict(zip(MICRO_RANKING, self.micro_ranking.areas(counts), strict=True))
            if self._wants(ABOVE_HALF):
                cut = self._confusion(counts, self.scores > 0.5)
                whole = _pooled(cut)
                shares = (_mean_over_classes(cut.f1.T), whole.f1, _mean_over_classes(cut.bacc.T), whole.hamming)
                found |= dict(zip(ABOVE_HALF, shares, strict=True))
            if self._wants(AT_LEAST_HALF):
                found |= self._at_least_half(counts)
            if self._wants(TUNED):
                cut = self._confusion(counts, self.scores > np.asarray(self.thresholds))
                found |= dict(zip(TUNED, (_mean_over_classes(cut.f1.T), _pooled(cut).f1), strict=True))
            if self._wants(SINGLE_LABEL):
                found["accuracy"] = self._accuracy(counts)
        shares_in_percent = {name: 100 * found[name] for name in self.names if name in found}
        return shares_in_percent | self._plugged_in(counts)

    def _confusion(self, counts: DrawCounts, predicted: NDArray[np.bool_]) -> Confusion:
        """With cells (4, draws, classes)."""
        present, absent = self.targets == 1, self.targets == 0
        cells = (absent & ~predicted, absent & predicted, present & ~predicted, present & predicted)
        return Confusion(np.array([counts.T @ cell.astype(np.float32) for cell in cells], np.float64))

    def _at_least_half(self, counts: DrawCounts) -> dict[str, Floats]:
        cut = self._confusion(counts, self.scores >= 0.5)
        whole, precision, recall = _pooled(cut), _mean_over_classes(cut.precision.T), _mean_over_classes(cut.recall.T)
        by_class = (precision, recall, _harmonic_mean(precision, recall))
        overall = (whole.precision, whole.recall, _harmonic_mean(whole.precision, whole.recall))
        return dict(zip(AT_LEAST_HALF, (*by_class, *overall), strict=True))

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


def _pooled(cut: Confusion) -> Confusion:
    """All classes as one."""
    return Confusion(cut.cells.sum(axis=2))


def _mean_over_classes(shares: Floats) -> Floats:
    """(classes, draws) → (draws,): over the classes that are defined in the draw."""
    defined = ~np.isnan(shares)
    mean: Floats = np.where(defined, shares, 0).sum(axis=0) / defined.sum(axis=0)
    return mean


def _harmonic_mean(precision: Floats, recall: Floats) -> Floats:
    return np.where(precision + recall == 0, 0.0, 2 * precision * recall / (precision + recall))
