"""Metrics of a federation between machines, from the histograms that its sites send (`histograms.py`): of all sites
together and of each site, with the largest possible error and a 95 % interval.

The interval needs no samples. Each count is replaced by a Poisson number with that mean (the Poisson bootstrap). A sum
of Poisson numbers is a Poisson number, so resampling the sum is the same as resampling every site. Classes are
resampled independently, because histograms do not say which samples have several classes. Where classes occur together,
the interval of a mean over classes is therefore too narrow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmll.core.seeding import numpy_generator
from fedmll.evaluation.bootstrap import DRAWS, mean_over_classes, percentile_interval
from fedmll.evaluation.calibration import reliability_from_histograms
from fedmll.evaluation.histograms import HALF, confusion_at_half
from fedmll.evaluation.metric_definitions import ERROR
from fedmll.evaluation.metrics import mean_of_defined
from fedmll.evaluation.ranking import Floats, Ints, ranking_bounds

HISTOGRAM_METRICS = ("auc", "ap", "f1", "precision", "recall", "bacc", "ece")
LOW, HIGH = "_low", "_high"  # name + LOW, name + HIGH: the ends of the interval
SmallCounts = NDArray[np.int32]  # as sites send histograms, and as the server keeps them


@dataclass(frozen=True, kw_only=True)
class SiteHistograms:
    """What one site sent.

    Attributes:
        test: (2, C, BINS) of its test data.
        validation: (2, C, BINS) of its validation data; None if the site holds out only one kind of samples, and
            thresholds are chosen on its test data.
        min_count: A class with fewer positives, or fewer negatives, is not sent.
        not_sent: The classes that the site annotates but did not send, by "test" and "validation".
        share_limit: None unless its share of all images is too large. Then, in sums over the sites: the factor of its
            counts, and how large they may be in each class, as a multiple of the counts of sites without a limit.
    """

    test: SmallCounts
    validation: SmallCounts | None
    min_count: int
    not_sent: Mapping[str, tuple[str, ...]]
    share_limit: tuple[float, float] | None = None

    @property
    def for_thresholds(self) -> SmallCounts:
        return self.test if self.validation is None else self.validation


@dataclass(frozen=True)
class FederatedHistograms:
    """The histograms of all sites for one model, by the name of the site. Thresholds are chosen for `goal`, and
    probabilities are calibrated with `calibrate` (see `thresholds.py`)."""

    classes: tuple[str, ...]
    sites: Mapping[str, SiteHistograms]
    goal: str = "f1"
    calibrate: str = "none"

    @property
    def test(self) -> Ints:
        return _sum([(site.test, site.share_limit) for site in self.sites.values()])

    @property
    def for_thresholds(self) -> Ints:
        return _sum([(site.for_thresholds, site.share_limit) for site in self.sites.values()])

    def without(self, name: str) -> FederatedHistograms:
        """The histograms of all other sites."""
        return replace(self, sites={other: site for other, site in self.sites.items() if other != name})


def _sum(counts: Sequence[tuple[SmallCounts, tuple[float, float] | None]]) -> Ints:
    """Added one by one: the histograms of 200 sites with 80 classes are 260 MB together."""
    total: Ints = np.zeros(counts[0][0].shape, dtype=np.int64)
    for each, limit in counts:
        if limit is None:
            total += each
    others = total.sum(axis=2)
    for each, limit in counts:
        if limit is not None:
            total += _lower(each, limit[0], limit[1] * others)
    return total


def _lower(counts: SmallCounts, factor: float, most: Floats) -> Ints:
    """Multiply (2, C, BINS) counts by `factor`, or by less, so that their sums are at most `most` (2, C) where that is
    not 0. They are rounded such that the sum up to each bin is off by at most 1/2."""
    upto = np.cumsum(counts, axis=2, dtype=np.int64)
    by_class = np.where(most > 0, np.minimum(factor, most / np.maximum(upto[:, :, -1], 1)), factor)
    lowered: Ints = np.diff(np.rint(by_class[:, :, None] * upto), axis=2, prepend=0.0).astype(np.int64)
    return lowered


@dataclass(frozen=True)
class HistogramMetrics:
    """Percent; NaN where undefined. For every X of HISTOGRAM_METRICS there are X, X_error (X is at most this far from
    the exact value), X_low and X_high (the 95 % interval).

    Attributes:
        by_class: (C,) arrays; also positives and known, which are counts.
        mean: The means over the classes for which X is defined.
    """

    by_class: dict[str, Floats | Ints]
    mean: dict[str, float]


def compute_histogram_metrics(counts: Ints, seed: int, *purpose: str, draws: int = DRAWS) -> HistogramMetrics:
    """All metrics of (2, C, BINS) histograms. The same `seed` and `purpose` give the same random numbers."""
    low, high = metric_bounds(counts)
    value, error = (low + high) / 2, (high - low) / 2
    resampled = np.stack(
        [_resample(counts[:, column], seed, *purpose, column, draws=draws) for column in range(counts.shape[1])]
    )
    by_class: dict[str, Floats | Ints] = {}
    mean: dict[str, float] = {}
    for place, name in enumerate(HISTOGRAM_METRICS):
        drawn = resampled[:, :, place]  # (C, 2, draws)
        ends = np.array([_interval(name, middle, *each) for middle, each in zip(value[place], drawn, strict=True)])
        by_class |= {name: value[place], name + ERROR: error[place], name + LOW: ends[:, 0], name + HIGH: ends[:, 1]}
        known = np.isfinite(value[place])
        middle = mean_of_defined(value[place])
        lowest, highest = _interval(name, middle, *mean_over_classes(drawn[known]))
        mean |= {name: middle, name + ERROR: mean_of_defined(error[place]), name + LOW: lowest, name + HIGH: highest}
    positives, negatives = counts.sum(axis=2)
    return HistogramMetrics(by_class | {"positives": positives, "known": positives + negatives}, mean)


def metric_bounds(counts: Ints, bins: Ints | None = None) -> Floats:
    """(2, HISTOGRAM_METRICS, C): the lowest and the highest possible value, in percent. `bins` are the bins that
    `counts` has, in ascending order; None: all."""
    half = HALF if bins is None else int(np.searchsorted(bins, HALF))
    cut = confusion_at_half(counts, half)
    exact = 100 * np.stack([cut.f1, cut.precision, cut.recall, cut.bacc])
    found = reliability_from_histograms(counts, bins=slice(None) if bins is None else bins)
    ece = np.stack([found.error - found.bound, found.error + found.bound])[:, None]
    return np.concatenate([100 * ranking_bounds(counts), np.stack([exact, exact]), ece], axis=1)


def _resample(counts: Ints, seed: int, *purpose: str | int, draws: int) -> Floats:
    """(2, HISTOGRAM_METRICS, draws) of the (2, BINS) histograms of one class. Empty bins stay empty and are left
    out."""
    bins = np.flatnonzero(counts.any(axis=0))
    if not len(bins):
        return np.full((2, len(HISTOGRAM_METRICS), draws), np.nan)
    generator = numpy_generator(seed, "counted", *purpose)
    return metric_bounds(generator.poisson(counts[:, None, bins], size=(2, draws, len(bins))), bins)


def _interval(name: str, value: float, lowest: Floats, highest: Floats) -> tuple[float, float]:
    """From the lower end of the lowest values to the upper end of the highest. The calibration error of a draw contains
    the noise of the data twice and lies above the value; its interval is therefore reflected at the value (the basic
    bootstrap)."""
    low, high = percentile_interval(lowest)[0], percentile_interval(highest)[1]
    return (max(2 * value - high, 0.0), max(2 * value - low, 0.0)) if name == "ece" else (low, high)
