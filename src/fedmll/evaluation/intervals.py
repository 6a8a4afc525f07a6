"""Intervals of metrics: the bootstrap over test samples, whole patients at a time where samples have one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.metrics import evaluate
from fedmll.seeding import numpy_generator

DRAWS = 200
COVERED = 0.95


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
    generator = numpy_generator(seed, "bootstrap")
    members = [np.array([row]) for row in range(len(scores))]
    if groups is not None:
        _, number = np.unique(groups, return_inverse=True)
        members = np.split(np.argsort(number, kind="stable"), np.cumsum(np.bincount(number))[:-1])
    found: dict[str, list[float]] = {}
    for _ in range(draws):
        rows = np.concatenate([members[place] for place in generator.integers(len(members), size=len(members))])
        for name, value in evaluate(scores[rows], targets[rows], classes, thresholds).values.items():
            found.setdefault(name, []).append(value)
    outside = 50 * (1 - COVERED)
    limits = {}
    for name, values in found.items():
        defined = np.array(values)[np.isfinite(values)]
        low, high = np.percentile(defined, [outside, 100 - outside]) if len(defined) else (np.nan, np.nan)
        limits[name] = (float(low), float(high))
    return limits
