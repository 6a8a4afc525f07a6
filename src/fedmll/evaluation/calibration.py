"""Whether probabilities mean what they say, and how to make them so: from sums (histograms.py) of data that may lie at
many places.

A bin's samples are taken to have its middle logit. A probability is then wrong by at most half of its bin's width, at
most 1/256, and so is the calibration error, whose bound is said beside it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.special import expit

from fedmll.evaluation.histograms import BINS, EDGES, HALF, WIDTH
from fedmll.evaluation.metrics import Floats, Ints

RANGES = 15  # of equal width in probability, as Guo et al. (2017) have them
LOGITS = WIDTH * (np.arange(BINS) - HALF + 0.5)  # the middle of each bin
MIDDLES = expit(LOGITS)
WIDTHS = np.diff(EDGES, prepend=0, append=1)
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


def reliability(counts: Ints) -> Reliability:
    place = np.minimum((MIDDLES * RANGES).astype(int), RANGES - 1)
    positives, negatives = counts
    both = positives + negatives

    def by_range(values: Floats | Ints) -> Floats:
        found = np.zeros((len(values), RANGES))
        np.add.at(found.T, place, values.T)
        return found

    samples, total = by_range(both), both.sum(axis=1)
    with np.errstate(invalid="ignore"):  # 0 / 0: NaN is meant
        predicted, observed = by_range(both * MIDDLES) / samples, by_range(positives) / samples
        gaps = np.where(samples > 0, np.abs(predicted - observed), 0) * samples
        error, bound = gaps.sum(axis=1) / total, (both * WIDTHS / 2).sum(axis=1) / total
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


def calibrated(counts: Ints, by: Floats) -> Ints:
    """The histograms of σ(a z + b): each bin moves to where its middle goes."""
    place = np.clip(np.floor((by[:, :1] * LOGITS + by[:, 1:]) / WIDTH).astype(int) + HALF, 0, BINS - 1)
    moved = np.zeros_like(counts)
    rows = np.broadcast_to(np.arange(counts.shape[1])[:, None], place.shape)
    for side in (0, 1):
        np.add.at(moved[side], (rows, place), counts[side])
    return moved


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
