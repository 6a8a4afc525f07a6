"""Metrics of data that lies at several places, from sums: for each class a histogram of the scores of its positives and
one of its negatives. Added up they say how the model ranks all samples together, which no mean of the places' own
metrics does.

Bins are of logits, so they are the finer in probabilities the nearer these are to 0 and 1: 1/128 wide from −6 to 6,
where most scores are, and 1/25.6 beyond. Inside a bin the order is lost: AUC and AP are the middle of what is possible,
and their error is at most half of that range. A bin begins at 0.5, so F1, precision, recall and BACC of the prediction
p ≥ 0.5 are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.metrics import Confusion, Floats, Ints, Report, checked, mean_of

BINS = 2048
HALF = BINS // 2  # the bin that begins at 0.5
FINE, LAST = 6, 16  # logits: up to where bins are 1/128 wide, and beyond which float32 has hardly any probabilities
_UPPER = np.concatenate([np.arange(128 * FINE) / 128, np.linspace(FINE, LAST, HALF - 128 * FINE, endpoint=False)])
ENDS = np.concatenate([[-LAST], -_UPPER[:0:-1], _UPPER, [LAST]])  # bin n: from ENDS[n] to ENDS[n + 1]; all beyond too
EDGES = 1 / (1 + np.exp(-ENDS[1:-1]))  # between the bins; a bin has its lower edge
MIDDLES = (np.append(0, EDGES) + np.append(EDGES, 1)) / 2
ONE_BY_ONE = 32  # terms of a sum of reciprocals; the others by a formula


def histograms(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> Ints:
    """(2, C, BINS): how many of each class's positives, and of its negatives, have a score in each bin. Unknown targets
    (−1) count nowhere."""
    scores, targets = checked(scores, targets)
    count = scores.shape[1]
    cell = np.searchsorted(EDGES, scores, side="right") + BINS * np.arange(count)
    return np.stack(
        [np.bincount(cell[targets == label], minlength=count * BINS).reshape(count, BINS) for label in (1, 0)]
    ).astype(np.int64)


def few(counts: Ints, smallest: int) -> NDArray[np.bool_]:
    """(C,): the classes of which there are some, but fewer than `smallest`, positives or negatives."""
    sums = counts.sum(axis=2)
    return ((sums > 0) & (sums < smallest)).any(axis=0)


def evaluate_counts(counts: Ints, classes: Sequence[str]) -> Report:
    """What follows from (2, C, BINS) counts; as `metrics.evaluate` has it, but that a prediction is p ≥ 0.5 everywhere.
    `auc_error` and `ap_error`, beside AUC and AP, are the most that these can be away from the exact ones; an average
    has the mean of its classes' errors."""
    low, high = ranked(counts)
    (auc, ap), (auc_error, ap_error) = (low + high) / 2, (high - low) / 2
    cut = halved(counts)
    shares = {"ap": ap, "auc": auc, "f1": cut.f1, "bacc": cut.bacc}
    left_out = {
        family: tuple(name for name, out in zip(classes, np.isnan(share), strict=True) if out)
        for family, share in shares.items()
    }
    shares |= {"precision": cut.precision, "recall": cut.recall, "auc_error": auc_error, "ap_error": ap_error}
    means = {
        "macro_auc": auc, "macro_auc_error": auc_error, "map": ap, "map_error": ap_error,
        "macro_f1": cut.f1, "bacc": cut.bacc, "c_p": cut.precision, "c_r": cut.recall,
    }  # fmt: skip
    return Report(
        {name: 100 * mean_of(share) for name, share in means.items()},
        {name: 100 * share for name, share in shares.items()}
        | {"positives": cut.positives.astype(np.int64), "known": cut.known.astype(np.int64)},
        left_out,
    )


def ranked(counts: Ints) -> Floats:
    """(2, 2, C): the least, and the most, that AUC and AP can be, as shares. The columns may be some bins only."""
    return np.stack([_possible_auc(counts), _possible_ap(counts)], axis=1)


def halved(counts: Ints, half: int = HALF) -> Confusion:
    """Of the prediction p ≥ 0.5; `half`: the first column of such scores."""
    (positives, negatives), (hits, alarms) = counts.sum(axis=2), counts[:, :, half:].sum(axis=2)
    return Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]).astype(np.float64))


def _possible_auc(counts: Ints) -> Floats:
    """(2, C): the least and the most. The pairs in a bin may all be in the wrong order, or all in the right one."""
    positives, negatives = counts.astype(np.float64)
    below = np.cumsum(negatives, axis=1) - negatives
    right, open_pairs = (positives * below).sum(axis=1), (positives * negatives).sum(axis=1)
    with np.errstate(invalid="ignore"):  # 0 / 0: NaN is meant
        return np.stack([right, right + open_pairs]) / (positives.sum(axis=1) * negatives.sum(axis=1))


def _possible_ap(counts: Ints) -> Floats:
    """(2, C): the least and the most. A positive's precision is counted down to its score, ties included. At worst a
    bin's negatives come first and its positives follow one after the other; at best its positives come first and all
    have one score, so that each of them has the precision of the last."""
    positives, negatives = counts.astype(np.float64)
    above, false = (np.cumsum(side[:, ::-1], axis=1)[:, ::-1] - side for side in (positives, negatives))
    wrong = false + negatives
    worst = positives - wrong * _reciprocals(above + wrong, positives)  # Σ t / (t + wrong) over t = above + 1, 2, …
    reached = above + positives
    best = positives * reached / np.maximum(reached + false, 1)
    with np.errstate(invalid="ignore"):
        return np.stack([worst.sum(axis=1), best.sum(axis=1)]) / positives.sum(axis=1)


def _reciprocals(start: Floats, count: Floats) -> Floats:
    """1/(start + 1) + … + 1/(start + count), in bounded memory: after the first terms by Euler and Maclaurin's formula,
    whose error is below 10⁻¹¹ there."""
    total = np.zeros_like(start)
    for term in range(1, min(ONE_BY_ONE, int(count.max(initial=0))) + 1):
        total += np.where(term <= count, 1 / (start + term), 0)
    first = start + ONE_BY_ONE
    last = np.maximum(start + count, first)

    def correction(end: Floats) -> Floats:
        return 1 / (2 * end) - 1 / (12 * end**2) + 1 / (120 * end**4)

    return total + np.log1p((last - first) / first) + correction(last) - correction(first)
