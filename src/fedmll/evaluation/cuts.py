"""Thresholds from sums: where to cut each class's scores, from histograms (histograms.py) of validation data that may
lie at many places. A cut lies on the edge of a bin, so what is said of it is exact on that data.

A prediction is p > threshold, as everywhere; a threshold is therefore just below its bin's edge.
"""

from __future__ import annotations

import numpy as np

from fedmll.errors import ConfigError
from fedmll.evaluation.histograms import BINS, EDGES, MIDDLES
from fedmll.evaluation.metrics import Confusion, Floats, Ints

USUAL = 0.5  # of a class that the data says nothing about
NEVER = 1.0  # p > 1: no cut reaches what is wanted
# The threshold of "this bin and all above it": the first bin is everything
THRESHOLDS = np.concatenate([[-0.5], np.nextafter(EDGES, 0)])


def best_f1(counts: Ints) -> Floats:
    """(C,): the highest F1. Of equal cuts the highest, but midway to the next lower score, as `best_thresholds` has it:
    what is new lies on both sides. A class without a positive keeps the usual threshold."""
    hits, alarms = _reached(counts)
    positives = hits[:, :1]
    place = _highest(2 * hits / np.maximum(hits + alarms + positives, 1))
    bins, some = np.arange(BINS), counts.any(axis=0)
    below = np.where(some & (bins < place[:, None]), bins, -1).max(axis=1)  # the next bin with a score; −1: none
    middle = (MIDDLES[place] + np.where(below < 0, 0, MIDDLES[below])) / 2
    midway = np.clip(np.searchsorted(EDGES, middle, side="right"), below + 1, place)
    return np.where(positives[:, 0] > 0, THRESHOLDS[midway], USUAL)


def wanted_recall(counts: Ints, recall: float) -> Floats:
    """(C,): the highest cut that finds at least this share of the positives of this data. It says nothing of other
    data: see `controlled_recall`."""
    hits, _ = _reached(_share("recall", recall, counts))
    positives = hits[:, :1]
    enough = hits >= np.ceil(np.round(recall * positives, 9))
    return np.where(positives[:, 0] > 0, THRESHOLDS[_highest(enough)], USUAL)


def wanted_precision(counts: Ints, precision: float) -> Floats:
    """(C,): the lowest cut above which at least this share are positives, which finds the most of them. NEVER where
    there is none; the usual threshold for a class without a positive."""
    hits, alarms = _reached(_share("precision", precision, counts))
    right = (hits > 0) & (hits >= precision * (hits + alarms) - 1e-9)
    cut = np.where(right.any(axis=1), THRESHOLDS[np.argmax(right, axis=1)], NEVER)
    return np.where(hits[:, 0] > 0, cut, USUAL)


def controlled_recall(counts: Ints, recall: float) -> Floats:
    """(C,): a cut that finds a new positive with at least this probability, whatever the model and the data are like
    (split conformal prediction: Vovk et al., 2005; Sadinle, Lei and Wasserman, 2019). With n positives here that are
    exchangeable with the new one, the k-th lowest of their scores, k = ⌊(1 − recall)(n + 1)⌋, is such a cut; here it is
    the lower edge of its bin. With too few positives (k = 0) only predicting always is certain, and the answer.

    The guarantee is of each class, on average over validation data and new samples; a site whose patients differ from
    the others' has it for its own counts, not for the sum of all.
    """
    positives = _share("recall", recall, counts)[0]
    allowed = np.floor(np.round((1 - recall) * (positives.sum(axis=1) + 1), 9))
    upto = np.cumsum(positives, axis=1)
    place = np.where(allowed > 0, np.argmax(upto >= allowed[:, None], axis=1), 0)
    return THRESHOLDS[place]


def cut_by(counts: Ints, thresholds: Floats) -> Confusion:
    """What thresholds (C,) that lie on edges, as those above, give on this data: exact."""
    above = np.nextafter(thresholds, -1)[:, None] <= THRESHOLDS  # 0.5 is the edge itself: its bin counts too
    (hits, alarms), (positives, negatives) = (counts * above).sum(axis=2), counts.sum(axis=2)
    return Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]).astype(np.float64))


def _share(name: str, value: float, counts: Ints) -> Ints:
    if not 0 < value < 1:
        raise ConfigError(f"A wanted {name} lies between 0 and 1, for example 0.9; it is {value:g}.")
    return counts


def _reached(counts: Ints) -> tuple[Ints, Ints]:
    """(C, BINS) each: the positives, and the negatives, in a bin and all above it."""
    positives, negatives = np.cumsum(counts[:, :, ::-1], axis=2)[:, :, ::-1]
    return positives, negatives


def _highest(worth: np.ndarray) -> Ints:
    """(C,): the highest bin of the greatest worth."""
    place: Ints = BINS - 1 - np.argmax(worth[:, ::-1], axis=1)
    return place
