"""Labels for the tests of partitions."""

from __future__ import annotations

import itertools

import numpy as np
from numpy.typing import NDArray

Labels = NDArray[np.int8]


def synthetic(seed: int, samples: int, classes: int, density: float = 0.15, unknown: float = 0.0) -> Labels:
    """Labels of very different frequencies, some samples without any, some targets unknown."""
    rng = np.random.default_rng(seed)
    rates = density * 2 * rng.random(classes)
    labels = (rng.random((samples, classes)) < rates).astype(np.int8)
    labels[rng.random(labels.shape) < unknown] = -1
    return labels


def singles_and_pairs(classes: int, singles: int, pairs: int) -> Labels:
    """As multi-label CIFAR-10: so many samples of each class alone and of each pair of classes."""
    one = np.eye(classes, dtype=np.int8)
    rows = [np.repeat(one, singles, axis=0)]
    rows += [np.repeat((one[a] + one[b])[None], pairs, axis=0) for a, b in itertools.combinations(range(classes), 2)]
    return np.concatenate(rows)
