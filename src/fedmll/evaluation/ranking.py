"""Ranking metrics: the area under the ROC curve (AUROC) and average precision (AP), ties included.

Each metric has one formula here. With l running over the distinct scores of the positives ("levels"):

    AUROC = Σ_l hits_l · below_l / (P · N)
    AP    = Σ_l hits_l · TP_l / (TP_l + FP_l) / P

hits_l       positives with exactly the score l
below_l      negatives with a lower score; a negative with the same score counts half
TP_l, FP_l   positives and negatives with this score or a higher one
P, N         all positives, all negatives

The formulas are used in three forms. `ScoreLevels` counts samples, for many classes and clients at once.
`WeightedRanking` weights samples, for many bootstrap draws at once. `ranking_bounds` knows only histograms of scores,
in which the order inside a bin is lost, and returns the lowest and the highest possible value.

`ScoreLevels` is fast because a score and the class and client that it belongs to are packed into one integer. One sort
of integers then ranks many classes of many clients, without a loop over classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
DrawCounts = NDArray[np.float32]  # (samples, draws): how often each sample is in each bootstrap draw
Dot = Callable[[Any, Any], Any]  # Σ_l a_l · b_l

MAX_ENTRIES = 1 << 20  # entries of the score matrix that are ranked at a time: less than 100 MB
MAX_LEVEL_DRAWS = 1 << 22  # entries of (levels, draws) that are in memory at a time
EXACT_TERMS = 32  # terms of a sum of reciprocals that are added one by one; the others come from a formula


def auroc(hits: Any, below: Any, positives: Any, negatives: Any, dot: Dot) -> Any:
    return dot(hits, below) / (positives * negatives)


def average_precision(hits: Any, tp: Any, fp: Any, positives: Any, dot: Dot) -> Any:
    return dot(hits, tp / np.maximum(tp + fp, 1)) / positives


@dataclass(frozen=True, kw_only=True)
class ScoreLevels:
    """The distinct scores of the positives of S segments, ascending in each. A segment is one class of one client."""

    key: NDArray[Any]  # (L,) the segment and the score in one integer
    segment: Ints  # (L,)
    hits: Ints  # (L,) positives with exactly this score
    below: Ints  # (L,) negatives of the segment with a lower score
    tied: Ints  # (L,) negatives with exactly this score
    tp: Ints  # (L,) positives with this score or a higher one
    fp: Ints  # (L,) negatives with this score or a higher one
    first: Ints  # (S,) the first level of each segment
    positives: Ints  # (S,)
    negatives: Ints  # (S,)

    @classmethod
    def from_keys(cls, positive: NDArray[Any], negative: NDArray[Any], starts: NDArray[Any]) -> ScoreLevels:
        """Build the levels.

        Args:
            positive: The keys of the positives.
            negative: The keys of the negatives; they are sorted in place.
            starts: (S,) the lowest possible key of each segment.
        """
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
        return cls(
            key=key,
            segment=segment,
            hits=hits,
            below=below,
            tied=tied,
            tp=tp,
            fp=fp,
            first=first,
            positives=ends - upto[first],
            negatives=negatives,
        )

    def areas(self) -> tuple[Floats, Floats]:
        """AUROC and AP of each segment, as scikit-learn defines them; NaN where undefined."""
        auc, ap = np.full(len(self.first), np.nan), np.full(len(self.first), np.nan)
        some = np.flatnonzero(self.positives)
        starts, positives = self.first[some], self.positives[some].astype(np.float64)

        def dot(a: Any, b: Any) -> Any:
            # `reduceat` sums pairwise, so rounding does not grow with the number of samples; `bincount` would not.
            return np.add.reduceat(a * b, starts)

        with np.errstate(invalid="ignore"):
            auc[some] = auroc(self.hits, self.below + self.tied / 2, positives, self.negatives[some], dot)
        ap[some] = average_precision(self.hits, self.tp, self.fp, positives, dot)
        return auc, ap


@dataclass(frozen=True, kw_only=True)
class ScoreBlock:
    """Some columns of the score and target matrices, transposed to (R, N), and the segment of each entry."""

    columns: slice
    scores: NDArray[Any]
    targets: NDArray[np.int8]
    segment: Ints
    segments: int
    rank: NDArray[np.uint32]  # integers that are ordered as the scores are

    def levels(self) -> ScoreLevels:
        keys = self.segment.astype(np.uint64) << np.uint64(32) | self.rank
        starts = np.arange(self.segments, dtype=np.uint64) << np.uint64(32)
        return ScoreLevels.from_keys(keys[self.targets == 1], keys[self.targets == 0], starts)

    def confusion(self, predicted: NDArray[np.bool_]) -> Floats:
        """The (4, S) cells of a `Confusion`, from one bincount over (segment, target, prediction)."""
        cell = 6 * self.segment + 2 * (self.targets + np.int8(1)) + predicted
        return np.bincount(cell.ravel(), minlength=6 * self.segments).reshape(-1, 6).T[2:].astype(np.float64)


def score_blocks(scores: NDArray[Any], targets: NDArray[np.int8], client: Ints, clients: int) -> Iterator[ScoreBlock]:
    """Yield as many columns at a time as fit into MAX_ENTRIES entries. The segment of an entry is column · clients +
    client, where `client` (N,) says whose each sample is."""
    samples, count = scores.shape
    step = max(1, MAX_ENTRIES // max(1, samples))
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
        yield ScoreBlock(
            columns=columns,
            scores=part,
            targets=np.ascontiguousarray(targets[:, columns].T),
            segment=segment,
            segments=width * clients,
            rank=rank,
        )


class WeightedRanking:
    """The scores of one class (or of all classes as one), ranked once. A bootstrap draw only changes the weights.

    Args:
        scores: (N,) the scores of the entries.
        targets: (N,) 1 present, 0 absent, −1 unknown.
        sample: (N,) the sample that each entry belongs to; the entry has the weight of its sample.
        samples: The number of samples.
    """

    def __init__(
        self, scores: NDArray[np.floating], targets: NDArray[np.int8], sample: NDArray[np.int64], samples: int
    ) -> None:
        from scipy.sparse import csr_matrix  # here: most commands never need it

        present, absent = targets == 1, targets == 0
        level, place = np.unique(-scores[present], return_inverse=True)
        below = -scores[absent]
        gap = np.searchsorted(level, below)  # the first level whose FP it is in; after the last: in none
        tied = np.append(level, np.nan)[gap] == below

        def sum_matrix(row: NDArray[np.int64], column: NDArray[np.int64], rows: int) -> Any:
            return csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=(rows, samples))

        self.levels = len(level)
        self.hits = sum_matrix(place, sample[present], self.levels)
        self.gaps = sum_matrix(gap, sample[absent], self.levels + 1)
        self.tied = sum_matrix(gap[tied], sample[absent][tied], self.levels) if tied.any() else None

    def areas(self, counts: DrawCounts) -> tuple[Floats, Floats]:
        """AUROC and AP of each draw; NaN where undefined."""
        draws = counts.shape[1]
        if not self.levels:
            return np.full(draws, np.nan), np.full(draws, np.nan)
        step = max(1, MAX_LEVEL_DRAWS // self.levels)
        parts = [self._areas(counts[:, begin : begin + step]) for begin in range(0, draws, step)]
        auc, ap = (np.concatenate(part) for part in zip(*parts, strict=True))
        return auc, ap

    def _areas(self, counts: DrawCounts) -> tuple[Floats, Floats]:
        hits = (self.hits @ counts).astype(np.float64)
        tp, fp = hits.cumsum(axis=0), (self.gaps @ counts).cumsum(axis=0, dtype=np.float64)
        positives, negatives, fp = tp[-1], fp[-1], fp[:-1]
        below = negatives - fp
        if self.tied is not None:
            below += (self.tied @ counts) / 2

        def dot(a: Floats, b: Floats) -> Floats:
            return np.einsum("ld,ld->d", a, b)

        return auroc(hits, below, positives, negatives, dot), average_precision(hits, tp, fp, positives, dot)


def ranking_bounds(counts: Ints) -> Floats:
    """The lowest and the highest AUROC and AP that histograms allow.

    Args:
        counts: (2, C, bins) histograms of each class's positives and negatives, bins in ascending order of scores.

    Returns:
        (2, 2, C): lowest and highest × AUROC and AP × classes, as shares; NaN where undefined.
    """
    with np.errstate(invalid="ignore"):  # 0 / 0 is NaN: undefined
        return np.stack([_auroc_bounds(counts), _ap_bounds(counts)], axis=1)


def _dot_bins(a: Floats, b: Floats) -> Floats:
    total: Floats = (a * b).sum(axis=1)
    return total


def _auroc_bounds(counts: Ints) -> Floats:
    """(2, C). The pairs inside a bin may all be in the wrong order, or all in the right one."""
    positives, negatives = counts.astype(np.float64)
    below = np.cumsum(negatives, axis=1) - negatives
    sums = positives.sum(axis=1), negatives.sum(axis=1)
    return np.stack([auroc(positives, lower, *sums, _dot_bins) for lower in (below, below + negatives)])


def _ap_bounds(counts: Ints) -> Floats:
    """(2, C). In the worst case the negatives of a bin come first, and its positives follow one after the other. In the
    best case its positives come first and share one score, so each of them has the precision of the last."""
    positives, negatives = counts.astype(np.float64)
    above, false = (np.cumsum(side[:, ::-1], axis=1)[:, ::-1] - side for side in (positives, negatives))
    wrong, total = false + negatives, positives.sum(axis=1)
    worst = positives - wrong * _reciprocals(above + wrong, positives)  # Σ t / (t + wrong) over t = above + 1, 2, …
    return np.stack(
        [worst.sum(axis=1) / total, average_precision(positives, above + positives, false, total, _dot_bins)]
    )


def _reciprocals(start: Floats, count: Floats) -> Floats:
    """1/(start + 1) + … + 1/(start + count), in bounded memory. After the first terms the Euler–Maclaurin formula is
    used, whose error is below 10⁻¹¹ there."""
    total = np.zeros_like(start)
    for term in range(1, min(EXACT_TERMS, int(count.max(initial=0))) + 1):
        total += np.where(term <= count, 1 / (start + term), 0)
    first = start + EXACT_TERMS
    last = np.maximum(start + count, first)

    def correction(end: Floats) -> Floats:
        return 1 / (2 * end) - 1 / (12 * end**2) + 1 / (120 * end**4)

    return total + np.log1p((last - first) / first) + correction(last) - correction(first)
