"""Whether probabilities mean what they say, and how to make them so: from sums (histograms.py) of data that may lie at
many places.

A bin's samples are taken to lie in its middle. A probability is then wrong by at most half of its bin's width, at most
1/1024, and so is the calibration error, whose bound is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import expit

from fedmll.evaluation.histograms import BINS, ENDS
from fedmll.evaluation.metrics import Floats, Ints

RANGES = 15  # of equal width in probability, as Guo et al. (2017) have them
LOGITS = (ENDS[:-1] + ENDS[1:]) / 2  # the middle of each bin, of logits
LOWEST, HIGHEST = np.append(-np.inf, ENDS[1:-1]), np.append(ENDS[1:-1], np.inf)  # the logits that a bin can have
STEPS, SHORTEST = 100, 1e-9  # of Newton's method; a step below the latter ends it


@dataclass(frozen=True)
class Reliability:
    """(C, RANGES) each: of the samples with a probability in a range its mean, the share of positives among them, and
    how many they are; NaN where there are none. error, bound: (C,), the expected calibration error in percent, and the
    most that it can be away from the exact one with ranges that end where bins end."""

    predicted: Floats
    observed: Floats
    samples: Ints
    error: Floats
    bound: Floats


def reliability(counts: Ints, by: Floats | None = None, bins: Ints | slice = slice(None)) -> Reliability:
    """Of (2, C, K) counts in these `bins`, in ascending order; of σ(a z + b) with the a > 0 and b (C, 2) in `by`."""
    scale, shift = np.hsplit(np.array([[1.0, 0.0]]) if by is None else by, 2)
    low, high = (expit(scale * ends[bins] + shift) for ends in (LOWEST, HIGHEST))  # (1 or C, K)
    middle, half = (low + high) / 2, (high - low) / 2
    starts = np.array([np.searchsorted(row, np.arange(RANGES + 1) / RANGES) for row in middle])
    starts[:, -1] = middle.shape[1]
    positives, negatives = counts
    both = positives + negatives

    def by_range(values: Floats | Ints) -> Floats:
        upto = np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)
        return np.diff(np.take_along_axis(upto, np.broadcast_to(starts, (len(values), RANGES + 1)), axis=1))

    samples, total = by_range(both), both.sum(axis=1)
    with np.errstate(invalid="ignore"):  # 0 / 0: NaN is meant
        predicted, observed = by_range(both * middle) / samples, by_range(positives) / samples
        gaps = np.where(samples > 0, np.abs(predicted - observed), 0) * samples
        error, bound = gaps.sum(axis=1) / total, (both * half).sum(axis=1) / total
    return Reliability(predicted, observed, samples.astype(np.int64), 100 * error, 100 * bound)


def fitted(counts: Ints, kind: Literal["platt", "temperature"]) -> Floats:
    """(C, 2): a and b of p = σ(a z + b), z the model's logit, with the least log-loss on this data.

    platt        two numbers a class (Platt, 1999, with his targets (N₊+1)/(N₊+2) and 1/(N₋+2)); a class without a
                 positive or without a negative stays as it is
    temperature  b = 0 and one a for all classes, 1/T (Guo et al., 2017)
    """
    if kind == "temperature":
        scale = _newton(counts.sum(axis=1)[:, None], np.ones((1, 1)), np.array([[0.0, 1.0]]))[0, 0]
        return np.tile([scale, 0.0], (counts.shape[1], 1)) if counts.any() else _unchanged(counts)
    positives, negatives = counts.sum(axis=2)
    targets = np.stack([1 / (negatives + 2), (positives + 1) / (positives + 2)], axis=1)
    found = _newton(counts, np.tile([1.0, 0.0], (counts.shape[1], 1)), targets)
    return np.where(((positives > 0) & (negatives > 0))[:, None], found, _unchanged(counts))


def _unchanged(counts: Ints) -> Floats:
    return np.tile([1.0, 0.0], (counts.shape[1], 1))


def _newton(counts: Ints, start: Floats, targets: Floats) -> Floats:
    """The least Σ log-loss by (C, 1 or 2) parameters, class by class; `targets` (C, 2) of negatives and of positives. A
    step that does not lower the loss is halved: the loss is convex, so this finds its only minimum."""
    design = np.stack([LOGITS, np.ones(BINS)][: start.shape[1]])  # (P, BINS)
    positives, negatives = counts
    number, taught = positives + negatives, positives * targets[:, 1:] + negatives * targets[:, :1]

    def loss(at: Floats) -> Floats:
        return (number * np.logaddexp(0, at @ design) - taught * (at @ design)).sum(axis=1)

    now, lowest = start, loss(start)
    for _ in range(STEPS):
        p = expit(now @ design)
        slope = (number * p - taught) @ design.T
        bend = np.einsum("pb,cb,qb->cpq", design, number * p * (1 - p), design)
        bend += 1e-9 * np.eye(len(design))  # of a class whose scores are all alike
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
        if np.abs(step).max(initial=0) < SHORTEST:
            break
    return now
