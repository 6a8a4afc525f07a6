"""Metrics of many drawings of the same samples at once. A drawing says how often each sample is in it; the samples are
ranked once, and a drawing then only changes how much each of them counts:

AP  = Σ_l h_l · TP_l / (TP_l + FP_l) / P        h_l: weight of the positives with the l-th highest distinct score
AUC = Σ_l h_l · (N − FP_l + t_l / 2) / (P · N)  t_l: weight of the negatives with that very score

TP_l, FP_l: weight of the positives and negatives with that score or a higher one; P, N: of all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from fedmll import registry
from fedmll.evaluation.metrics import Confusion, Floats, checked

LEVELS_AT_ONCE = 1 << 22  # entries of (levels, drawings) that are held at a time

Counts = NDArray[np.float32]  # (samples, drawings)

RANKED = ("macro_auc", "auc", "map", "c_ap")
POOLED = ("micro_auc", "o_ap")
ABOVE = ("macro_f1", "micro_f1", "bacc", "hamming")  # p > 0.5
LEAST = ("c_p", "c_r", "c_f1", "o_p", "o_r", "o_f1")  # p ≥ 0.5
TUNED = ("macro_f1_tuned", "micro_f1_tuned")
SINGLE = ("accuracy",)
QUICK = (*RANKED, *POOLED, *ABOVE, *LEAST, *TUNED, *SINGLE)


class Redrawn:
    """`values` gives the metrics of `evaluate` for every drawing; `names`: only these (and not what they lack)."""

    def __init__(
        self,
        scores: NDArray[np.floating],
        targets: NDArray[np.int8],
        names: Sequence[str],
        thresholds: NDArray[np.floating] | None = None,
    ) -> None:
        self.scores, self.targets = checked(scores, targets)
        self.names = [name for name in names if name not in TUNED or thresholds is not None]
        self.thresholds = thresholds
        samples, classes = self.scores.shape
        place = np.arange(samples)
        self.classes = [
            Ranks(self.scores[:, column], self.targets[:, column], place, samples)
            for column in range(classes if self._asked(RANKED) else 0)
        ]
        self.pooled = None
        if self._asked(POOLED):
            every = np.repeat(place, classes)
            self.pooled = Ranks(self.scores.ravel(), self.targets.ravel(), every, samples)

    def _asked(self, family: Sequence[str]) -> bool:
        return any(name in family for name in self.names)

    def values(self, counts: Counts) -> dict[str, Floats]:
        """By metric, in percent: one value a drawing, NaN where it is undefined there."""
        found: dict[str, Floats] = {}
        with np.errstate(invalid="ignore", divide="ignore"):  # 0 / 0 is NaN: undefined in that drawing
            if self.classes:
                auc, ap = (
                    _mean(np.array(areas)) for areas in zip(*(c.areas(counts) for c in self.classes), strict=True)
                )
                found |= dict(zip(RANKED, (auc, auc, ap, ap), strict=True))
            if self.pooled is not None:
                found |= dict(zip(POOLED, self.pooled.areas(counts), strict=True))
            if self._asked(ABOVE):
                cut = self._confusion(counts, self.scores > 0.5)
                whole = _whole(cut)
                found |= dict(zip(ABOVE, (_mean(cut.f1.T), whole.f1, _mean(cut.bacc.T), whole.error), strict=True))
            if self._asked(LEAST):
                found |= self._least(counts)
            if self._asked(TUNED):
                cut = self._confusion(counts, self.scores > np.asarray(self.thresholds))
                found |= dict(zip(TUNED, (_mean(cut.f1.T), _whole(cut).f1), strict=True))
            if self._asked(SINGLE):
                found["accuracy"] = self._accuracy(counts)
        shares = {name: 100 * found[name] for name in self.names if name in found}
        return shares | self._plugged_in(counts)

    def _confusion(self, counts: Counts, predicted: NDArray[np.bool_]) -> Confusion:
        """Of cells (4, drawings, classes)."""
        present, absent = self.targets == 1, self.targets == 0
        cells = (absent & ~predicted, absent & predicted, present & ~predicted, present & predicted)
        return Confusion(np.array([counts.T @ cell.astype(np.float32) for cell in cells], np.float64))

    def _least(self, counts: Counts) -> dict[str, Floats]:
        cut = self._confusion(counts, self.scores >= 0.5)
        whole, precision, recall = _whole(cut), _mean(cut.precision.T), _mean(cut.recall.T)
        by_class = (precision, recall, _harmonic(precision, recall))
        overall = (whole.precision, whole.recall, _harmonic(whole.precision, whole.recall))
        return dict(zip(LEAST, (*by_class, *overall), strict=True))

    def _accuracy(self, counts: Counts) -> Floats:
        single = ((self.targets == 1).sum(axis=1) == 1) & (self.targets >= 0).all(axis=1)
        right = single & (self.scores.argmax(axis=1) == self.targets.argmax(axis=1))
        share: Floats = (right @ counts).astype(np.float64) / (single @ counts)
        return share

    def _plugged_in(self, counts: Counts) -> dict[str, Floats]:
        """A plug-in's metric knows no weights: each drawing is written out for it, and takes its time."""
        others = {name: metric for name, metric in registry.added("metric").items() if name in self.names}
        found: dict[str, list[float]] = {name: [] for name in others}
        for drawing in counts.T if others else ():
            rows = np.repeat(np.arange(len(drawing)), drawing.astype(np.int64))
            for name, metric in others.items():
                value = metric(self.scores[rows], self.targets[rows])
                found[name].append(float(value[0] if isinstance(value, tuple) else value))
        return {name: np.array(values) for name, values in found.items()}


class Ranks:
    """Scores of one class (or of all as one), ranked. An entry counts as its sample does."""

    def __init__(
        self, scores: NDArray[np.floating], targets: NDArray[np.int8], sample: NDArray[np.int64], samples: int
    ) -> None:
        present, absent = targets == 1, targets == 0
        level, place = np.unique(-scores[present], return_inverse=True)
        below = -scores[absent]
        gap = np.searchsorted(level, below)  # the first level whose FP it is in; after the last: in none
        tied = np.append(level, np.nan)[gap] == below

        def summing(row: NDArray[np.int64], column: NDArray[np.int64], rows: int) -> csr_matrix:
            return csr_matrix((np.ones(len(row), np.float32), (row, column)), shape=(rows, samples))

        self.levels = len(level)
        self.hits = summing(place, sample[present], self.levels)
        self.gaps = summing(gap, sample[absent], self.levels + 1)
        self.tied = summing(gap[tied], sample[absent][tied], self.levels) if tied.any() else None

    def areas(self, counts: Counts) -> tuple[Floats, Floats]:
        """AUROC and average precision of every drawing."""
        drawings = counts.shape[1]
        if not self.levels:
            return np.full(drawings, np.nan), np.full(drawings, np.nan)
        step = max(1, LEVELS_AT_ONCE // self.levels)
        parts = [self._areas(counts[:, begin : begin + step]) for begin in range(0, drawings, step)]
        auc, ap = (np.concatenate(part) for part in zip(*parts, strict=True))
        return auc, ap

    def _areas(self, counts: Counts) -> tuple[Floats, Floats]:
        hits = (self.hits @ counts).astype(np.float64)
        tp, fp = hits.cumsum(axis=0), (self.gaps @ counts).cumsum(axis=0, dtype=np.float64)
        positives, negatives, fp = tp[-1], fp[-1], fp[:-1]
        passed = negatives - fp
        if self.tied is not None:
            passed += (self.tied @ counts) / 2
        auc = np.einsum("ld,ld->d", hits, passed) / (positives * negatives)
        ap = np.einsum("ld,ld->d", hits, tp / np.maximum(tp + fp, 1)) / positives
        return auc, ap


def _whole(cut: Confusion) -> Confusion:
    """All classes as one."""
    return Confusion(cut.cells.sum(axis=2))


def _mean(shares: Floats) -> Floats:
    """(classes, drawings) → (drawings,): over the classes that are defined in the drawing."""
    defined = ~np.isnan(shares)
    mean: Floats = np.where(defined, shares, 0).sum(axis=0) / defined.sum(axis=0)
    return mean


def _harmonic(precision: Floats, recall: Floats) -> Floats:
    return np.where(precision + recall == 0, 0.0, 2 * precision * recall / (precision + recall))
