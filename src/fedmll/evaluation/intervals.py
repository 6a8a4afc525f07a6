"""Intervals of metrics: the bootstrap over test samples, whole patients at a time where samples have one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.evaluation.metrics import Floats
from fedmll.evaluation.redrawn import QUICK, SINGLE, Counts, Redrawn
from fedmll.seeding import numpy_generator

DRAWS = 1000
COVERED = 0.95
COUNTS_AT_ONCE = 1 << 20


def bootstrap(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    classes: Sequence[str],
    seed: int,
    groups: NDArray[np.str_] | None = None,
    thresholds: NDArray[np.floating] | None = None,
    draws: int = DRAWS,
) -> dict[str, tuple[float, float]]:
    """The percentile interval (95 %) of every metric of `evaluate`, over samples drawn with replacement. With `groups`
    (patients) these are drawn instead, each with all its samples: they are not independent of each other."""
    assert scores.shape[1] == len(classes)
    units, unit = (np.arange(len(scores)),) * 2 if groups is None else np.unique(groups, return_inverse=True)
    names = [*(name for name in QUICK if name not in SINGLE), *registry.added("metric")]
    found = distribution(scores, targets, unit, len(units), seed, names, thresholds, draws)
    return {name: limits(values) for name, values in found.items()}


def distribution(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    unit: NDArray[np.int64],
    units: int,
    seed: int,
    names: Sequence[str],
    thresholds: NDArray[np.floating] | None = None,
    draws: int = DRAWS,
) -> dict[str, Floats]:
    """(draws,) values of each metric. Sample n comes with its unit `unit[n]`, of which there are `units`. Whoever asks
    with the same seed and units gets the same drawings: values of two models are paired."""
    redrawn = Redrawn(scores, targets, names, thresholds)
    parts = [redrawn.values(counts[unit]) for counts in drawings(units, seed, draws)]
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def drawings(units: int, seed: int, draws: int) -> Iterator[Counts]:
    """(units, some drawings): how often each unit is drawn, with replacement, as many as there are."""
    generator = numpy_generator(seed, "bootstrap")
    step = max(1, COUNTS_AT_ONCE // units)
    for begin in range(0, draws, step):
        some = [
            np.bincount(generator.integers(units, size=units), minlength=units) for _ in range(min(step, draws - begin))
        ]
        yield np.ascontiguousarray(np.array(some, np.float32).T)


def limits(values: Floats) -> tuple[float, float]:
    """Between them lie 95 % of the values that are defined."""
    defined = values[np.isfinite(values)]
    outside = 50 * (1 - COVERED)
    low, high = np.percentile(defined, [outside, 100 - outside]) if len(defined) else (np.nan, np.nan)
    return float(low), float(high)
