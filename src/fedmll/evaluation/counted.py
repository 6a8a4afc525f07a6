"""Every figure that follows from sums (histograms.py), of all places together or of one: its value, the most that it
can be away from the exact one, and where 95 % of it lie when the data is drawn again.

Drawing again needs no samples either: each count becomes a Poisson number with that mean. Sums of Poisson numbers are
such numbers, so drawing the sum is drawing every place by itself. Classes are drawn independently of each other (which
of a class's samples are another's too is not in the counts), so the interval of a mean over classes is too narrow where
classes come together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.calibration import reliability
from fedmll.evaluation.histograms import HALF, halved, ranked
from fedmll.evaluation.intervals import DRAWS, limits
from fedmll.evaluation.metrics import Floats, Ints, mean_of
from fedmll.seeding import numpy_generator

FIGURES = ("auc", "ap", "f1", "precision", "recall", "bacc", "ece")
Table = dict[str, Floats | Ints]
Small = NDArray[np.int32]  # as they travel, and are kept of every site


@dataclass(frozen=True)
class SiteCounts:
    """What a site sent: histograms (2, C, BINS) of its test data, and of its validation data (None: it holds out one
    kind of rows, and thresholds are chosen on what is tested)."""

    test: Small
    validation: Small | None
    min_count: int  # a class with fewer positives, or negatives, is not sent
    not_sent: Mapping[str, tuple[str, ...]]  # classes that it annotates, by "test" and "validation"

    @property
    def tuning(self) -> Small:
        return self.test if self.validation is None else self.validation


@dataclass(frozen=True)
class Counted:
    """The sites' counts of one model, by name."""

    classes: tuple[str, ...]
    sites: Mapping[str, SiteCounts]
    goal: str = "f1"  # thresholds are chosen for it …
    calibrate: str = "none"  # … and probabilities changed by it: running/thresholds.py

    @property
    def test(self) -> Ints:
        return _sum([site.test for site in self.sites.values()])

    @property
    def tuning(self) -> Ints:
        return _sum([site.tuning for site in self.sites.values()])


def _sum(counts: Sequence[Small]) -> Ints:
    """One at a time: of 200 sites with 80 classes they are 260 MB together."""
    total: Ints = counts[0].astype(np.int64)
    for each in counts[1:]:
        total += each
    return total


@dataclass(frozen=True)
class Figures:
    """In percent, NaN where undefined. by_class has (C,) arrays, mean the means over the classes where a figure is
    defined: X, X_error (X is at most so far from the exact one), X_low and X_high for every X of FIGURES. by_class also
    has positives and known."""

    by_class: Table
    mean: dict[str, float]


def figures(counts: Ints, seed: int, *purpose: str, draws: int = DRAWS) -> Figures:
    """Of (2, C, BINS) counts. `purpose` names the drawings: the same name, the same numbers."""
    low, high = possible(counts)
    value, error = (low + high) / 2, (high - low) / 2
    redrawn = np.stack(
        [_redrawn(counts[:, column], seed, *purpose, column, draws=draws) for column in range(counts.shape[1])]
    )
    by_class: Table = {}
    mean: dict[str, float] = {}
    for place, name in enumerate(FIGURES):
        drawn = redrawn[:, :, place]  # (C, 2, draws)
        ends = np.array([_interval(name, middle, *each) for middle, each in zip(value[place], drawn, strict=True)])
        by_class |= {name: value[place], f"{name}_error": error[place], f"{name}_low": ends[:, 0]}
        by_class[f"{name}_high"] = ends[:, 1]
        known = np.isfinite(value[place])
        middle = mean_of(value[place])
        lowest, highest = _interval(name, middle, *_means(drawn[known]))
        mean |= {name: middle, f"{name}_error": mean_of(error[place]), f"{name}_low": lowest, f"{name}_high": highest}
    positives, negatives = counts.sum(axis=2)
    return Figures(by_class | {"positives": positives, "known": positives + negatives}, mean)


def possible(counts: Ints, bins: Ints | None = None) -> Floats:
    """(2, FIGURES, C): the least and the most in percent. `bins`: the columns are these, in ascending order."""
    half = HALF if bins is None else int(np.searchsorted(bins, HALF))
    cut = halved(counts, half)
    exact = 100 * np.stack([cut.f1, cut.precision, cut.recall, cut.bacc])
    found = reliability(counts, bins=slice(None) if bins is None else bins)
    ece = np.stack([found.error - found.bound, found.error + found.bound])[:, None]
    return np.concatenate([100 * ranked(counts), np.stack([exact, exact]), ece], axis=1)


def _redrawn(counts: Ints, seed: int, *purpose: str | int, draws: int) -> Floats:
    """(2, FIGURES, draws) of one class's (2, BINS) counts: its empty bins stay empty, and are left out."""
    bins = np.flatnonzero(counts.any(axis=0))
    if not len(bins):
        return np.full((2, len(FIGURES), draws), np.nan)
    generator = numpy_generator(seed, "counted", *purpose)
    return possible(generator.poisson(counts[:, None, bins], size=(2, draws, len(bins))), bins)


def _means(drawn: Floats) -> Floats:
    """(C, 2, draws) → (2, draws): over the classes that are defined in a drawing."""
    defined = np.isfinite(drawn)
    with np.errstate(invalid="ignore"):
        return np.where(defined, drawn, 0).sum(axis=0) / defined.sum(axis=0)


def _interval(name: str, value: float, least: Floats, most: Floats) -> tuple[float, float]:
    """From the lower end of the least to the upper end of the most. A drawing's calibration error has the data's noise
    twice and lies above the data's own; its interval is therefore reflected at the value (the basic bootstrap)."""
    low, high = limits(least)[0], limits(most)[1]
    return (max(2 * value - high, 0.0), max(2 * value - low, 0.0)) if name == "ece" else (low, high)
