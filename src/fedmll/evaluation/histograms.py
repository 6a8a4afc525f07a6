"""Histograms of scores: metrics of data that lies at several sites, without any sample leaving its site.

For each class there is one histogram of the scores of its positives and one of its negatives. Added up over the sites
they say how the model ranks all samples together. A mean of the sites' own metrics does not say that.

Bins are equally wide in logits, so in probabilities they are finer near 0 and 1: 1/128 wide from −6 to 6, where most
scores are, and 1/25.6 beyond. The order inside a bin is lost. AUC and AP are therefore the middle of what is possible,
and their error is at most half of that range. One bin begins at 0.5, so F1, precision, recall and balanced accuracy of
the prediction p ≥ 0.5 are exact.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.metric_definitions import ERROR
from fedmll.evaluation.metrics import (
    ClassificationReport,
    Confusion,
    mean_of_defined,
    undefined_classes,
    validate_scores,
)
from fedmll.evaluation.ranking import Ints, ranking_bounds

BINS = 2048
HALF = BINS // 2  # the bin that begins at 0.5
FINE, LAST = 6, 16  # logits: up to FINE bins are 1/128 wide; beyond LAST float32 has hardly any probabilities
_UPPER = np.concatenate([np.arange(128 * FINE) / 128, np.linspace(FINE, LAST, HALF - 128 * FINE, endpoint=False)])
LOGIT_EDGES = np.concatenate([[-LAST], -_UPPER[:0:-1], _UPPER, [LAST]])  # of all bins; the outer bins are open
EDGES = 1 / (1 + np.exp(-LOGIT_EDGES[1:-1]))  # probabilities between the bins; a bin contains its lower edge
MIDDLES = (np.append(0, EDGES) + np.append(EDGES, 1)) / 2


def score_histograms(scores: NDArray[np.floating], targets: NDArray[np.int8]) -> Ints:
    """(2, C, BINS): how many of the positives, and of the negatives, of each class have a score in each bin. Unknown
    targets (−1) are not counted."""
    scores, targets = validate_scores(scores, targets)
    count = scores.shape[1]
    cell = np.searchsorted(EDGES, scores, side="right") + BINS * np.arange(count)
    return np.stack(
        [np.bincount(cell[targets == label], minlength=count * BINS).reshape(count, BINS) for label in (1, 0)]
    ).astype(np.int64)


def evaluate_histograms(counts: Ints, classes: Sequence[str]) -> ClassificationReport:
    """The metrics that follow from (2, C, BINS) histograms, as `metrics.evaluate` computes them, except that a
    prediction is always p ≥ 0.5. AUC and AP differ from the exact values by at most `auc_error` and `ap_error`; the
    error of an average is the mean of the errors of its classes."""
    low, high = ranking_bounds(counts)
    (auc, ap), (auc_error, ap_error) = (low + high) / 2, (high - low) / 2
    cut = confusion_at_half(counts)
    shares = {"ap": ap, "auc": auc, "f1": cut.f1, "bacc": cut.bacc}
    left_out = undefined_classes(shares, classes)
    shares |= {"precision": cut.precision, "recall": cut.recall, "auc" + ERROR: auc_error, "ap" + ERROR: ap_error}
    means = {
        "macro_auc": auc, "macro_auc" + ERROR: auc_error, "map": ap, "map" + ERROR: ap_error,
        "macro_f1": cut.f1, "bacc": cut.bacc, "c_p": cut.precision, "c_r": cut.recall,
    }  # fmt: skip
    return ClassificationReport(
        {name: 100 * mean_of_defined(share) for name, share in means.items()},
        {name: 100 * share for name, share in shares.items()}
        | {"positives": cut.positives.astype(np.int64), "known": cut.known.astype(np.int64)},
        left_out,
    )


def confusion_at_half(counts: Ints, half: int = HALF) -> Confusion:
    """The confusion matrix of the prediction p ≥ 0.5. `half` is the first bin of such scores."""
    (positives, negatives), (hits, alarms) = counts.sum(axis=2), counts[:, :, half:].sum(axis=2)
    return Confusion(np.stack([negatives - alarms, alarms, positives - hits, hits]).astype(np.float64))
