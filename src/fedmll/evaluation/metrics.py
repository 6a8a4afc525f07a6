"""Every metric of the papers, exact and vectorised, in percent. Unknown targets (−1) are left out of all of them.

`metric_definitions.METRICS` says which classes each average is over; `ClassificationReport.left_out` names the other
classes. c_p_all, c_r_all and c_f1_all divide by all C classes (FedLGT, Eq. 7): a class without a positive counts as 0.
A metric for which nothing is left is NaN, never 0. So are the pooled micro_f1, o_ap, o_p, o_r and o_f1 where
no class has a positive. A class that has positives but is never predicted has precision 0.

A prediction is p > 0.5 for macro_f1, micro_f1, bacc and hamming, and p ≥ 0.5 for c_…, o_p, o_r and o_f1. The
papers differ, and it matters for a model that outputs exactly 0.5.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import registry
from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.evaluation import metric_definitions
from fedmll.evaluation.ranking import Floats, ScoreLevels, score_blocks


@dataclass(frozen=True)
class ClassificationReport:
    """The metrics of a model on some data.

    Attributes:
        values: Percent, by metric name.
        per_class: (C,) arrays. ap, auc, f1 and bacc (p > 0.5), precision and recall (p ≥ 0.5) are percent, NaN where
            undefined; positives and known are counts. The mean of f1 is macro_f1, the mean of precision is c_p.
        left_out: The classes that are not in the averages, by family: auc, bacc, ap, and f1 for F1, precision and
            recall.
    """

    values: dict[str, float]
    per_class: dict[str, NDArray[Any]]
    left_out: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class ClientReport:
    """The metrics of each client on its own samples.

    Attributes:
        values: client_mean_X and client_worst_X for X = auc, map, macro_f1, over the clients for which X is defined.
        table: One entry per client: client, samples, auc, map, macro_f1 (percent, NaN where undefined).
    """

    values: dict[str, float]
    table: dict[str, NDArray[Any]]


def evaluate(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    classes: Sequence[str],
    thresholds: NDArray[np.floating] | None = None,
) -> ClassificationReport:
    """Compute all metrics.

    Args:
        scores: (N, C) probabilities.
        targets: (N, C) 1 present, 0 absent, −1 unknown.
        classes: The names of the C classes.
        thresholds: (C,) from `thresholds.best_thresholds` on validation data. They add macro_f1_tuned and
            micro_f1_tuned, for which a prediction is p > threshold.
    """
    scores, targets = validate_scores(scores, targets, len(classes))
    count = len(classes)
    cut = np.full(count, 0.5) if thresholds is None else np.asarray(thresholds, dtype=np.float64)
    if cut.shape != (count,) or np.isnan(cut).any():
        raise DataError(f"thresholds must be one number per class, {count} in all; they have shape {cut.shape} or NaN.")

    auc, ap = np.empty(count), np.empty(count)
    cells = np.zeros((3, 4, count))  # for p > 0.5, p ≥ 0.5 and p > threshold
    for block in score_blocks(scores, targets, np.zeros(len(scores), dtype=np.int64), 1):
        auc[block.columns], ap[block.columns] = block.levels().areas()
        cells[0, :, block.columns] = block.confusion(block.scores > 0.5)
        cells[1, :, block.columns] = block.confusion(block.scores >= 0.5)
        if thresholds is not None:
            cells[2, :, block.columns] = block.confusion(block.scores > cut[block.columns, None])

    # The micro averages rank all known entries as if they were one class; for one class a score is its own key.
    pooled = ScoreLevels.from_keys(scores[targets == 1], scores[targets == 0], np.zeros(1, dtype=scores.dtype))
    (micro_auc,), (micro_ap,) = pooled.areas()
    above, at_least, tuned = map(Confusion, cells)
    above_all, at_least_all = above.pooled(), at_least.pooled()
    c_p, c_r = mean_of_defined(at_least.precision), mean_of_defined(at_least.recall)
    c_p_all, c_r_all = mean_over_all(at_least.precision), mean_over_all(at_least.recall)
    o_p, o_r = at_least_all.precision[0], at_least_all.recall[0]
    values = {
        "macro_auc": mean_of_defined(auc), "micro_auc": micro_auc,
        "macro_f1": mean_of_defined(above.f1), "micro_f1": above_all.f1[0],
        "c_ap": mean_of_defined(ap), "c_p": c_p, "c_r": c_r, "c_f1": harmonic_mean(c_p, c_r),
        "c_p_all": c_p_all, "c_r_all": c_r_all, "c_f1_all": harmonic_mean(c_p_all, c_r_all),
        "o_ap": micro_ap, "o_p": o_p, "o_r": o_r, "o_f1": harmonic_mean(o_p, o_r),
        "bacc": mean_of_defined(above.bacc), "auc": mean_of_defined(auc), "map": mean_of_defined(ap),
        "hamming": above_all.hamming[0],
    }  # fmt: skip
    if thresholds is not None:
        values |= {"macro_f1_tuned": mean_of_defined(tuned.f1), "micro_f1_tuned": tuned.pooled().f1[0]}

    shares = {"ap": ap, "auc": auc, "f1": above.f1, "bacc": above.bacc}
    left_out = undefined_classes(shares, classes)
    shares |= {"precision": at_least.precision, "recall": at_least.recall}
    per_class: dict[str, NDArray[Any]] = {name: 100 * share for name, share in shares.items()}
    per_class |= {"positives": above.positives.astype(np.int64), "known": above.known.astype(np.int64)}
    report = ClassificationReport({name: 100 * float(value) for name, value in values.items()}, per_class, left_out)
    for name, metric in registry.find_added("metric").items():
        found = metric(scores, targets)
        report.values[name], share = found if isinstance(found, tuple) else (found, None)
        if share is not None:
            report.per_class[name] = np.asarray(share)
    return report


def undefined_classes(shares: Mapping[str, Floats], classes: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """By metric, the names of the classes for which it is NaN."""
    return {
        family: tuple(name for name, undefined in zip(classes, np.isnan(share), strict=True) if undefined)
        for family, share in shares.items()
    }


@register("metric", "accuracy")
def accuracy(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> tuple[float, Floats]:
    """Top-1 accuracy and the accuracy of each class (C,), in percent, for single-label data (softmax).

    Only samples that are known to have exactly one positive count: one with an unknown target might have a second.
    """
    scores, targets = validate_scores(scores, targets)
    single = ((targets == 1).sum(axis=1) == 1) & (targets >= 0).all(axis=1)
    if not single.any():
        return float("nan"), np.full(scores.shape[1], np.nan)
    truth = targets[single].argmax(axis=1)
    right = scores[single].argmax(axis=1) == truth
    with np.errstate(invalid="ignore"):
        share = np.bincount(truth[right], minlength=scores.shape[1]) / np.bincount(truth, minlength=scores.shape[1])
    return 100 * float(right.mean()), 100 * share


def evaluate_per_client(
    scores: NDArray[np.floating], targets: NDArray[np.int8], owner: NDArray[np.integer], classes: Sequence[str]
) -> ClientReport:
    """The metrics of each client on its own samples, as `evaluate` computes them.

    Args:
        scores: (N, C) probabilities.
        targets: (N, C) 1 present, 0 absent, −1 unknown.
        owner: (N,) the client that each sample belongs to.
        classes: The names of the C classes.
    """
    scores, targets = validate_scores(scores, targets, len(classes))
    owner = np.asarray(owner)
    if owner.shape != (len(scores),) or owner.dtype.kind not in "iu":
        raise DataError(
            f"owner must be one integer per sample, {len(scores)} in all; it is {owner.dtype} of shape {owner.shape}."
        )
    clients, place, samples = np.unique(owner, return_inverse=True, return_counts=True)
    total, defined = np.zeros((3, len(clients))), np.zeros((3, len(clients)))
    for block in score_blocks(scores, targets, place, len(clients)):
        auc, ap = block.levels().areas()
        f1 = Confusion(block.confusion(block.scores > 0.5)).f1
        shares = np.stack([auc, ap, f1]).reshape(3, len(block.scores), len(clients))
        total += np.nansum(shares, axis=1)
        defined += np.isfinite(shares).sum(axis=1)
    with np.errstate(invalid="ignore"):
        means = dict(zip(("auc", "map", "macro_f1"), 100 * total / defined, strict=True))
    values = {}
    for name, mean in means.items():
        values[metric_definitions.CLIENT_MEAN + name] = mean_of_defined(mean)
        values[metric_definitions.CLIENT_WORST + name] = float(np.fmin.reduce(mean, initial=np.nan))
    return ClientReport(values, {"client": clients, "samples": samples, **means})


class Confusion:
    """Metrics that follow from a confusion matrix, as shares; NaN where undefined.

    Args:
        cells: (4, …, S) true negatives, false positives, false negatives and true positives of S classes.
    """

    def __init__(self, cells: Floats) -> None:
        tn, fp, fn, tp = cells
        self.cells, self.positives, self.known = cells, fn + tp, cells.sum(axis=0)
        with np.errstate(invalid="ignore"):  # 0 / 0: no positive, no negative or nothing known, so NaN is meant
            self.recall = tp / self.positives
            self.f1 = np.where(self.positives > 0, 2 * tp / (2 * tp + fp + fn), np.nan)
            self.bacc = (self.recall + tn / (tn + fp)) / 2
            self.hamming = (fp + fn) / self.known
        # A class that has positives but is never predicted: scikit-learn's zero_division=0.
        self.precision = np.where(self.positives > 0, tp / np.maximum(tp + fp, 1), np.nan)

    @classmethod
    def at_thresholds(
        cls, scores: NDArray[np.floating], targets: NDArray[np.int8], thresholds: NDArray[np.floating]
    ) -> Confusion:
        """Of (N, C) samples with the prediction p > threshold."""
        present, absent, above = targets == 1, targets == 0, scores > thresholds
        cells = (absent & ~above, absent & above, present & ~above, present & above)
        return cls(np.array([cell.sum(axis=0) for cell in cells], np.float64))

    def pooled(self) -> Confusion:
        """All classes as one."""
        return Confusion(self.cells.sum(axis=-1, keepdims=True))


def validate_scores(
    scores: NDArray[Any], targets: NDArray[Any], count: int | None = None
) -> tuple[NDArray[Any], NDArray[np.int8]]:
    """Raise a DataError unless these are probabilities and targets of the same shape (N, C); return them as arrays."""
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


def mean_of_defined(shares: Floats) -> float:
    """The mean of the values that are not NaN; NaN if there are none."""
    defined = shares[~np.isnan(shares)]
    return float(defined.mean()) if len(defined) else float("nan")


def mean_over_all(shares: Floats) -> float:
    """The mean over all classes, where an undefined value counts as 0; NaN if no value is defined."""
    return float("nan") if np.isnan(shares).all() else float(np.nan_to_num(shares).mean())


def harmonic_mean(precision: float, recall: float) -> float:
    return 0.0 if precision + recall == 0 else 2 * precision * recall / (precision + recall)


def _register(name: str) -> None:
    """Make a metric of `evaluate` available under its name alone. It costs as much as all of them together."""

    @register("metric", name)
    def metric(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> float:
        return evaluate(scores, targets, [str(column) for column in range(scores.shape[1])]).values[name]


for _name in metric_definitions.COMPUTED:
    if _name != "accuracy" and not _name.endswith("_tuned"):
        _register(_name)
