"""Every metric of the papers, exact and vectorised. Figures are percent; unknown targets (−1) are left out of all.

Which classes an average is over:
  macro_auc, auc, bacc                classes with a positive and a negative among the known entries
  c_ap, map                           classes with a positive
  macro_f1, macro_f1_tuned, c_p, c_r  classes with a positive; one that is never predicted has precision 0
`Report.left_out` names the others. A metric of which nothing is left is NaN, never 0; so are the pooled micro_f1, o_ap,
o_p, o_r and o_f1 where no class has a positive.

A prediction is p > 0.5 for macro_f1, micro_f1, bacc and hamming, and p ≥ 0.5 for c_p, c_r, c_f1, o_p, o_r and o_f1: the
papers differ, and a model that outputs exactly 0.5 notices.

How it is quick: a score and the class (and client) it belongs to are packed into one integer, so that one sort of
integers ranks many classes of many clients at a time, ties included, without a loop over classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.errors import DataError
from fedmll.registry import register

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Entries of the score matrix that are ranked at a time: < 100 MB. (The micro averages also need a copy of the scores.)
BLOCK = 1 << 20


@dataclass(frozen=True)
class Report:
    """values     percent, by metric name
    per_class  (C,) arrays: ap, auc, f1 and bacc (p > 0.5), precision and recall (p ≥ 0.5), all in percent and NaN where
               undefined; positives and known, counts. The mean of f1 is macro_f1, that of precision is c_p.
    left_out   by family, the classes its averages are without: auc, bacc, ap, and f1 for F1, precision and recall"""

    values: dict[str, float]
    per_class: dict[str, NDArray[Any]]
    left_out: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ClientReport:
    """values  client_mean_X and client_worst_X for X = auc, map, macro_f1, over the clients where X is defined
    table   one entry a client: client, samples, auc, map, macro_f1 (percent, NaN where undefined)"""

    values: dict[str, float]
    table: dict[str, NDArray[Any]]


def evaluate(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    classes: Sequence[str],
    thresholds: NDArray[np.floating] | None = None,
) -> Report:
    """All metrics of probabilities (N, C) against targets (N, C) of 1 present, 0 absent, −1 unknown.

    `thresholds` (C,), from `best_thresholds` on validation data, adds macro_f1_tuned, micro_f1_tuned (p > threshold).
    """
    scores, targets = checked(scores, targets, len(classes))
    count = len(classes)
    cut = np.full(count, 0.5) if thresholds is None else np.asarray(thresholds, dtype=np.float64)
    if cut.shape != (count,) or np.isnan(cut).any():
        raise DataError(f"thresholds must be one number a class, {count} in all; they have shape {cut.shape} or NaN.")

    auc, ap = np.empty(count), np.empty(count)
    cells = np.zeros((3, 4, count))  # for each of the three ways to cut
    for block in _blocks(scores, targets, np.zeros(len(scores), dtype=np.int64), 1):
        auc[block.columns], ap[block.columns] = block.levels().areas()
        cells[0, :, block.columns] = block.confusion(block.scores > 0.5)
        cells[1, :, block.columns] = block.confusion(block.scores >= 0.5)
        if thresholds is not None:
            cells[2, :, block.columns] = block.confusion(block.scores > cut[block.columns, None])

    # The micro averages rank all known entries as if they were one class; for one class a score is its own key.
    pooled = _Levels.of(scores[targets == 1], scores[targets == 0], np.zeros(1, dtype=scores.dtype))
    (micro_auc,), (micro_ap,) = pooled.areas()
    above, least, tuned = map(Confusion, cells)
    above_all, least_all = above.pooled(), least.pooled()
    c_p, c_r, o_p, o_r = mean_of(least.precision), mean_of(least.recall), least_all.precision[0], least_all.recall[0]
    values = {
        "macro_auc": mean_of(auc), "micro_auc": micro_auc,
        "macro_f1": mean_of(above.f1), "micro_f1": above_all.f1[0],
        "c_ap": mean_of(ap), "c_p": c_p, "c_r": c_r, "c_f1": _harmonic(c_p, c_r),
        "o_ap": micro_ap, "o_p": o_p, "o_r": o_r, "o_f1": _harmonic(o_p, o_r),
        "bacc": mean_of(above.bacc), "auc": mean_of(auc), "map": mean_of(ap), "hamming": above_all.error[0],
    }  # fmt: skip
    if thresholds is not None:
        values |= {"macro_f1_tuned": mean_of(tuned.f1), "micro_f1_tuned": tuned.pooled().f1[0]}

    shares = {"ap": ap, "auc": auc, "f1": above.f1, "bacc": above.bacc}
    left_out = {
        family: tuple(name for name, out in zip(classes, np.isnan(share), strict=True) if out)
        for family, share in shares.items()
    }
    shares |= {"precision": least.precision, "recall": least.recall}
    per_class: dict[str, NDArray[Any]] = {name: 100 * share for name, share in shares.items()}
    per_class |= {"positives": above.positives.astype(np.int64), "known": above.known.astype(np.int64)}
    report = Report({name: 100 * float(value) for name, value in values.items()}, per_class, left_out)
    for name, metric in registry.added("metric").items():
        found = metric(scores, targets)
        report.values[name], share = found if isinstance(found, tuple) else (found, None)
        if share is not None:
            report.per_class[name] = np.asarray(share)
    return report


def best_thresholds(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> Floats:
    """(C,): the threshold of each class at which `p > threshold` has the highest F1 on this (validation) data, exactly.

    It lies midway between two neighbouring scores. Of equal cuts the highest is taken; a class without a positive here
    tells nothing and keeps the usual 0.5; where it is best to predict the class for every sample and a score is 0, the
    threshold is −0.5.
    """
    scores, targets = checked(scores, targets)
    best = np.full(scores.shape[1], 0.5)
    for block in _blocks(scores, targets, np.zeros(len(scores), dtype=np.int64), 1):
        # A best cut is just below the score of a positive: a cut below a negative gains by moving up past it.
        levels = block.levels()
        rows = np.flatnonzero(levels.positives)
        f1 = 2 * levels.tp / (levels.tp + levels.fp + levels.positives[levels.segment])
        highest = np.zeros(block.segments)
        highest[rows] = np.maximum.reduceat(f1, levels.first[rows])
        winners = np.flatnonzero(f1 == highest[levels.segment])
        chosen = np.zeros(block.segments, dtype=np.uint32)
        # The low half of a key ranks its score. Levels ascend and the last assignment stays: the highest cut.
        chosen[levels.segment[winners]] = levels.key[winners].astype(np.uint32)

        rank, known, cut = block.rank[rows], block.targets[rows] >= 0, chosen[rows, None]
        value = np.where(rank == cut, block.scores[rows], -1).max(axis=1, initial=-1).astype(np.float64)
        lower = np.where(known & (rank < cut), block.scores[rows], -1).max(axis=1, initial=-1).astype(np.float64)
        lower[(lower < 0) & (value > 0)] = 0  # the lowest score of all: midway to 0
        middle = (lower + value) / 2
        best[block.columns][rows] = np.where(middle < value, middle, lower)  # neighbouring floats have no middle
    return best


@register("metric", "accuracy")
def accuracy(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> tuple[float, Floats]:
    """Top-1 accuracy and the accuracy of each class (C,), in percent, for single-label data (softmax).

    Over the samples known to have exactly one positive: one with an unknown target might have a second.
    """
    scores, targets = checked(scores, targets)
    single = ((targets == 1).sum(axis=1) == 1) & (targets >= 0).all(axis=1)
    if not single.any():
        return float("nan"), np.full(scores.shape[1], np.nan)
    truth = targets[single].argmax(axis=1)
    right = scores[single].argmax(axis=1) == truth
    with np.errstate(invalid="ignore"):
        share = np.bincount(truth[right], minlength=scores.shape[1]) / np.bincount(truth, minlength=scores.shape[1])
    return 100 * float(right.mean()), 100 * share


def per_client(
    scores: NDArray[np.floating], targets: NDArray[np.int8], owner: NDArray[np.integer], classes: Sequence[str]
) -> ClientReport:
    """Each client's own metrics on its own samples, as `evaluate` has them: sample n belongs to client `owner[n]`."""
    scores, targets = checked(scores, targets, len(classes))
    owner = np.asarray(owner)
    if owner.shape != (len(scores),) or owner.dtype.kind not in "iu":
        raise DataError(
            f"owner must be one integer a sample, {len(scores)} in all; it is {owner.dtype} of shape {owner.shape}."
        )
    clients, place, samples = np.unique(owner, return_inverse=True, return_counts=True)
    total, defined = np.zeros((3, len(clients))), np.zeros((3, len(clients)))
    for block in _blocks(scores, targets, place, len(clients)):
        auc, ap = block.levels().areas()
        f1 = Confusion(block.confusion(block.scores > 0.5)).f1
        shares = np.stack([auc, ap, f1]).reshape(3, len(block.scores), len(clients))
        total += np.nansum(shares, axis=1)
        defined += np.isfinite(shares).sum(axis=1)
    with np.errstate(invalid="ignore"):
        means = dict(zip(("auc", "map", "macro_f1"), 100 * total / defined, strict=True))
    values = {}
    for name, mean in means.items():
        values[f"client_mean_{name}"] = mean_of(mean)
        values[f"client_worst_{name}"] = float(np.fmin.reduce(mean, initial=np.nan))
    return ClientReport(values, {"client": clients, "samples": samples, **means})


class Confusion:
    """What follows from (4, S) counts of true negatives, false positives, false negatives and true positives."""

    def __init__(self, cells: Floats) -> None:
        tn, fp, fn, tp = cells
        self.cells, self.positives, self.known = cells, fn + tp, cells.sum(axis=0)
        with np.errstate(invalid="ignore"):  # 0 / 0: no positive, no negative or nothing known, so NaN is meant
            self.recall = tp / self.positives
            self.f1 = np.where(self.positives > 0, 2 * tp / (2 * tp + fp + fn), np.nan)
            self.bacc = (self.recall + tn / (tn + fp)) / 2
            self.error = (fp + fn) / self.known
        # A class that has positives but is never predicted: scikit-learn's zero_division=0.
        self.precision = np.where(self.positives > 0, tp / np.maximum(tp + fp, 1), np.nan)

    def pooled(self) -> Confusion:
        return Confusion(self.cells.sum(axis=1, keepdims=True))


@dataclass(frozen=True)
class _Levels:
    """The distinct scores of the positives of S segments, ascending in each. A segment is one class of one client."""

    key: NDArray[Any]  # (L,) the segment and the score in one
    segment: Ints  # (L,)
    hits: Ints  # (L,) positives with this very score
    below: Ints  # (L,) negatives of the segment with a lower score
    tied: Ints  # (L,) negatives with this very score
    tp: Ints  # (L,) positives with this score or a higher one
    fp: Ints  # (L,) negatives with this score or a higher one
    first: Ints  # (S,) the first level of each segment
    positives: Ints  # (S,)
    negatives: Ints  # (S,)

    @classmethod
    def of(cls, positive: NDArray[Any], negative: NDArray[Any], starts: NDArray[Any]) -> _Levels:
        """From the keys of the positives and negatives (sorted in place) and the lowest possible key of a segment."""
        key, hits = np.unique(positive, return_counts=True)
        negative.sort()
        first = np.searchsorted(key, starts)
        segment = np.repeat(np.arange(len(starts)), np.diff(first, append=len(key)))
        origin = np.searchsorted(negative, starts)
        negatives = np.diff(origin, append=len(negative))
        below = np.searchsorted(negative, key) - origin[segment]
        tied = np.searchsorted(negative, key, side="right") - origin[segment] - below
        upto = np.append(0, np.cumsum(hits))  # positives ahead of each level, over all segments
        ends = upto[np.append(first[1:], len(key))]
        tp, fp = ends[segment] - upto[:-1], negatives[segment] - below
        return cls(key, segment, hits, below, tied, tp, fp, first, ends - upto[first], negatives)

    def areas(self) -> tuple[Floats, Floats]:
        """AUROC and average precision of each segment, as scikit-learn defines them; NaN where undefined."""
        count = len(self.first)
        auc, ap = np.full(count, np.nan), np.full(count, np.nan)
        some = np.flatnonzero(self.positives)
        starts, positives = self.first[some], self.positives[some]
        # AUROC: the share of (positive, negative) pairs that are in the right order, a tie being half a pair.
        # `reduceat` sums pairwise, so that rounding does not grow with the number of samples; `bincount` would not.
        won = np.add.reduceat(self.hits * (self.below + self.tied / 2), starts)
        with np.errstate(invalid="ignore"):
            auc[some] = won / (positives.astype(np.float64) * self.negatives[some])
        ap[some] = np.add.reduceat(self.hits * (self.tp / (self.tp + self.fp)), starts) / positives
        return auc, ap


@dataclass(frozen=True)
class _Block:
    """Some columns of the matrices, transposed to (R, N), and the segment of each entry."""

    columns: slice
    scores: NDArray[Any]
    targets: NDArray[np.int8]
    segment: Ints
    segments: int
    rank: NDArray[np.uint32]  # integers that are ordered as the scores are

    def levels(self) -> _Levels:
        keys = self.segment.astype(np.uint64) << np.uint64(32) | self.rank
        starts = np.arange(self.segments, dtype=np.uint64) << np.uint64(32)
        return _Levels.of(keys[self.targets == 1], keys[self.targets == 0], starts)

    def confusion(self, predicted: NDArray[np.bool_]) -> Floats:
        """(4, S): see Confusion. One bincount over (segment, target, prediction) for all."""
        cell = 6 * self.segment + 2 * (self.targets + np.int8(1)) + predicted
        return np.bincount(cell.ravel(), minlength=6 * self.segments).reshape(-1, 6).T[2:].astype(np.float64)


def _blocks(scores: NDArray[Any], targets: NDArray[np.int8], client: Ints, clients: int) -> Iterator[_Block]:
    """As many columns at a time as fit in BLOCK entries; the segment of an entry is column · clients + client."""
    samples, count = scores.shape
    step = max(1, BLOCK // max(1, samples))
    for begin in range(0, count, step):
        columns = slice(begin, min(begin + step, count))
        width = columns.stop - begin
        part = np.ascontiguousarray(scores[:, columns].T)
        if part.dtype == np.float32:
            # The bits of floats that are not negative are ordered as the floats are; adding 0 turns −0 into 0.
            rank = (part + np.float32(0)).view(np.uint32)
        else:
            rank = np.unique(part, return_inverse=True)[1].reshape(part.shape).astype(np.uint32)
        segment = np.arange(width)[:, None] * clients + client
        yield _Block(columns, part, np.ascontiguousarray(targets[:, columns].T), segment, width * clients, rank)


def checked(
    scores: NDArray[Any], targets: NDArray[Any], count: int | None = None
) -> tuple[NDArray[Any], NDArray[np.int8]]:
    scores, targets = np.asarray(scores), np.asarray(targets)
    if scores.ndim != 2 or scores.shape != targets.shape or count not in (None, scores.shape[1]):
        wanted = "" if count is None else f", with C = {count} classes"
        raise DataError(
            f"scores and targets must both be (samples, classes){wanted}; they are {scores.shape} and {targets.shape}."
        )
    if scores.dtype not in (np.float32, np.float64) or targets.dtype.kind not in "biu":
        raise DataError(
            "scores must be float32 or float64 probabilities and targets integers (1 present, 0 absent, -1 unknown); "
            f"they are {scores.dtype} and {targets.dtype}."
        )
    if not scores.size:
        return scores, targets.astype(np.int8)
    low, high = scores.min(), scores.max()  # NaN comes through, and fails the comparison
    if not (low >= 0 and high <= 1 + 1e-6):  # a mean of probabilities may round to just over 1
        raise DataError(
            f"scores are NaN, infinite or outside [0, 1]: the lowest is {low} and the highest {high}. Metrics need "
            "probabilities: apply a sigmoid or softmax to logits. NaN means that training diverged: try a lower "
            "learning rate."
        )
    if targets.min() < -1 or targets.max() > 1:
        raise DataError(
            f"targets must be 1 (present), 0 (absent) or -1 (unknown); they go from {targets.min()} to {targets.max()}."
        )
    return scores, np.asarray(targets, np.int8)


def mean_of(shares: Floats) -> float:
    defined = shares[~np.isnan(shares)]
    return float(defined.mean()) if len(defined) else float("nan")


def _built_in(name: str) -> None:
    """Under its name alone it is computed like the others, all together, and costs as much as all of them."""

    @register("metric", name)
    def metric(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> float:
        return evaluate(scores, targets, [str(column) for column in range(scores.shape[1])]).values[name]


for _name in (
    *("macro_auc", "micro_auc", "macro_f1", "micro_f1", "c_ap", "c_p", "c_r", "c_f1", "o_ap", "o_p", "o_r", "o_f1"),
    *("bacc", "auc", "map", "hamming"),
):
    _built_in(_name)


def _harmonic(precision: float, recall: float) -> float:
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)
