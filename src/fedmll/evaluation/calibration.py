"""Calibration: whether probabilities match observed frequencies, and how to make them match.

The expected calibration error has one formula, `calibration_error`. It is used on samples (`reliability`), on bootstrap
draws of samples (`excess_by_range`) and on histograms of scores (`reliability_from_histograms`, for data at many
sites).

In a histogram the samples of a bin are taken to lie in its middle. A probability is then wrong by at most half of the
bin's width, at most 1/1024. The calibration error has the same bound, which is returned with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.special import expit
from torch import Tensor

from fedmll.evaluation.histograms import BINS, LOGIT_EDGES
from fedmll.evaluation.ranking import DrawCounts, Floats, Ints

RANGES = 15  # ranges of equal width in probability, as in Guo et al. (2017)
BIN_LOGITS = (LOGIT_EDGES[:-1] + LOGIT_EDGES[1:]) / 2  # the middle of each histogram bin
LOWEST_LOGITS = np.append(-np.inf, LOGIT_EDGES[1:-1])  # the lowest and the highest logit that a bin can contain
HIGHEST_LOGITS = np.append(LOGIT_EDGES[1:-1], np.inf)
MAX_STEPS, SHORTEST_STEP = 100, 1e-9  # of Newton's method; a shorter step ends it
LEAST_PROBABILITY = 1e-7  # its logit is finite, also in float32 near 1


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """The reliability curve of each class, and its calibration error.

    Attributes:
        predicted: (C, RANGES) the mean probability of the samples in each range; NaN where there are none.
        observed: (C, RANGES) the share of positives among them.
        samples: (C, RANGES) their number.
        error: (C,) the expected calibration error, in percent.
        bound: (C,) `error` is at most this far from the exact value; 0 if it was computed from samples.
    """

    predicted: Floats
    observed: Floats
    samples: Ints
    error: Floats
    bound: Floats


def calibration_error(excess: Floats, samples: NDArray[Any], axis: int = 1) -> Floats:
    """The expected calibration error in percent: Σ_ranges |Σ p − Σ y| / n.

    Args:
        excess: Σ p − Σ y of the samples in each range (Σ p: sum of probabilities, Σ y: number of positives).
        samples: The number of samples in all ranges.
        axis: The axis of `excess` that runs over the ranges.
    """
    error: Floats = 100 * np.abs(excess).sum(axis=axis) / samples
    return error


def range_of(probabilities: NDArray[np.floating]) -> Ints:
    """The range, from 0 to RANGES − 1, that each probability lies in."""
    return np.minimum((probabilities * RANGES).astype(np.int64), RANGES - 1)


def reliability(probabilities: NDArray[np.floating], targets: NDArray[np.int8]) -> Reliability:
    """The reliability of (N, C) probabilities. Unknown targets (−1) are left out."""
    p, count = np.asarray(probabilities, np.float64), probabilities.shape[1]
    known = targets >= 0
    cell = (range_of(p) + RANGES * np.arange(count))[known]

    def by_range(values: NDArray[np.floating] | None = None) -> Floats:
        return np.bincount(cell, values, count * RANGES).reshape(count, RANGES).astype(np.float64)

    return _reliability(by_range(), by_range(p[known]), by_range((targets[known] == 1).astype(np.float64)))


def _reliability(samples: Floats, predicted: Floats, positives: Floats, bound: Floats | None = None) -> Reliability:
    """From (C, RANGES) sums by range."""
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: no sample
        return Reliability(
            predicted=predicted / samples,
            observed=positives / samples,
            samples=samples.astype(np.int64),
            error=calibration_error(predicted - positives, samples.sum(axis=1)),
            bound=np.zeros(len(samples)) if bound is None else bound,
        )


def excess_by_range(scores: Floats, targets: NDArray[np.int8], counts: DrawCounts) -> Floats:
    """(C, RANGES, draws): Σ p − Σ y of the samples in each range, for each bootstrap draw."""
    place = range_of(scores)
    excess = np.where(targets >= 0, scores - targets, 0).astype(np.float32)
    ranges = [(np.where(place == number, excess, 0).T @ counts) for number in range(RANGES)]
    return np.stack(ranges, axis=1).astype(np.float64)


def reliability_from_histograms(
    counts: Ints, calibration: Floats | None = None, bins: Ints | slice = slice(None)
) -> Reliability:
    """The reliability of data that is known only by histograms. Ranges end where bins end.

    Args:
        counts: (2, C, K) histograms of positives and negatives.
        calibration: (C, 2) a > 0 and b of the probabilities σ(a z + b); None: the network's own probabilities σ(z).
        bins: The K bins that `counts` has, in ascending order.
    """
    scale, shift = np.hsplit(np.array([[1.0, 0.0]]) if calibration is None else calibration, 2)
    low, high = (expit(scale * ends[bins] + shift) for ends in (LOWEST_LOGITS, HIGHEST_LOGITS))  # (1 or C, K)
    middle, half = (low + high) / 2, (high - low) / 2
    starts = np.array([np.searchsorted(row, np.arange(RANGES + 1) / RANGES) for row in middle])
    starts[:, -1] = middle.shape[1]
    positives, negatives = counts
    both = positives + negatives

    def by_range(values: Floats | Ints) -> Floats:
        upto = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        return np.diff(np.take_along_axis(upto, np.broadcast_to(starts, (len(values), RANGES + 1)), axis=1))

    with np.errstate(invalid="ignore"):
        bound = 100 * (both * half).sum(axis=1) / both.sum(axis=1)
    return _reliability(by_range(both), by_range(both * middle), by_range(positives), bound)


def fit_calibration(counts: Ints, kind: Literal["platt", "temperature"]) -> Floats:
    """Fit p = σ(a z + b), z being the network's logit, so that the log-loss on this data is lowest.

    platt        two numbers per class (Platt, 1999, with his targets (N₊+1)/(N₊+2) and 1/(N₋+2)); a class without a
                 positive or without a negative is not changed
    temperature  b = 0 and one a for all classes, 1/T (Guo et al., 2017)

    Args:
        counts: (2, C, BINS) histograms of positives and negatives.
        kind: "platt" or "temperature".

    Returns:
        (C, 2): a and b of each class.
    """
    if kind == "temperature":
        scale = _newton(counts.sum(axis=1)[:, None], np.ones((1, 1)), np.array([[0.0, 1.0]]))[0, 0]
        return np.tile([scale, 0.0], (counts.shape[1], 1)) if counts.any() else no_calibration(counts.shape[1])
    positives, negatives = counts.sum(axis=2)
    targets = np.stack([1 / (negatives + 2), (positives + 1) / (positives + 2)], axis=1)
    unchanged = no_calibration(counts.shape[1])
    fitted = _newton(counts, unchanged, targets)
    return np.where(((positives > 0) & (negatives > 0))[:, None], fitted, unchanged)


def no_calibration(classes: int) -> Floats:
    """(C, 2): a = 1 and b = 0."""
    return np.tile([1.0, 0.0], (classes, 1))


def _newton(counts: Ints, start: Floats, targets: Floats) -> Floats:
    """Minimise Σ log-loss over (C, 1 or 2) parameters, class by class, with Newton's method. `targets` (C, 2) are the
    targets of negatives and of positives. A step that does not lower the loss is halved. The loss is convex, so this
    finds its only minimum."""
    design = np.stack([BIN_LOGITS, np.ones(BINS)][: start.shape[1]])  # (P, BINS)
    positives, negatives = counts
    number, positive_mass = positives + negatives, positives * targets[:, 1:] + negatives * targets[:, :1]

    def loss(at: Floats) -> Floats:
        return (number * np.logaddexp(0, at @ design) - positive_mass * (at @ design)).sum(axis=1)

    now, lowest = start, loss(start)
    for _ in range(MAX_STEPS):
        p = expit(now @ design)
        slope = (number * p - positive_mass) @ design.T
        bend = np.einsum("pb,cb,qb->cpq", design, number * p * (1 - p), design)
        bend += 1e-9 * np.eye(len(design))  # a class whose scores are all equal
        step = np.linalg.solve(bend, slope[:, :, None])[:, :, 0]
        for _ in range(30):
            further = loss(now - step)
            worse = further > lowest
            if not worse.any():
                break
            step[worse] /= 2
        else:
            step[worse], further[worse] = 0, lowest[worse]
        now, lowest = now - step, further
        if np.abs(step).max(initial=0) < SHORTEST_STEP:
            break
    return now


def apply_calibration(p: NDArray[np.floating], calibration: NDArray[np.float64]) -> NDArray[np.float64]:
    """σ(a z + b) of probabilities (N, C) with logits z; `calibration` (C, 2) has a and b of each class."""
    return calibrate_tensor(torch.as_tensor(p, dtype=torch.float64), torch.from_numpy(calibration)).numpy()


def calibrate_tensor(p: Tensor, calibration: Tensor) -> Tensor:
    """The same on tensors, as part of an exported network."""
    return torch.sigmoid(torch.logit(p, eps=LEAST_PROBABILITY) * calibration[:, 0] + calibration[:, 1])
