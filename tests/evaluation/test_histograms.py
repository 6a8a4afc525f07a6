"""Metrics from sums of histograms: against scikit-learn on the scores themselves, always within the stated error."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    precision_score,
    recall_score,
    roc_auc_score,
)

from fedmll.core.errors import DataError
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import BINS, MIDDLES, evaluate_histograms, score_histograms
from fedmll.evaluation.ranking import _reciprocals

ROUNDING = 1e-9  # percent


def column(*values: float) -> np.ndarray:
    return np.array(values)[:, None]


def counts_of(**bins: tuple[int, int]) -> np.ndarray:
    """One class: `b7=(2, 1)` are two positives and a negative in bin 7."""
    counts = np.zeros((2, 1, BINS), np.int64)
    for name, pair in bins.items():
        counts[:, 0, int(name[1:])] = pair
    return counts


def test_bins_are_of_logits_and_open_at_the_ends() -> None:
    logits = np.array([-20, -16.01, -15.99, -15.96, -6.001, -0.001, 0, 0.001, 0.0079, 5.999, 6.001, 15.96, 15.97, 40])
    scores = column(*(1 / (1 + np.exp(-logits))))
    found = score_histograms(scores, np.ones((len(logits), 1), np.int8))
    assert found.shape == (2, 1, 2048)
    assert found.dtype == np.int64
    assert not found[1].any()
    expected = np.bincount([0, 0, 0, 1, 255, 1023, 1024, 1024, 1025, 1791, 1792, 2046, 2047, 2047], minlength=2048)
    assert found[0, 0].tolist() == expected.tolist()
    ends = score_histograms(column(0.0, 1.0, 0.5).astype(np.float32), np.zeros((3, 1), np.int8))
    assert np.flatnonzero(ends[1, 0]).tolist() == [0, 1024, 2047]


def test_middles_of_bins_are_midway_between_their_edges() -> None:
    """The edges as logits: the outer bins end at 0 and at 1, an inner bin is 1/128 wide, and 10/256 beyond 6."""
    outer = 1 / (1 + np.exp(16 - 10 / 256))
    first, second = 0.5, 1 / (1 + np.exp(-1 / 128))
    found = MIDDLES[[0, 1023, 1024, 2047]]
    np.testing.assert_allclose(found[:2], [outer / 2, 1 - (first + second) / 2], rtol=1e-9)
    np.testing.assert_allclose(1 - found[2:], [1 - (first + second) / 2, outer / 2], rtol=1e-6)


def test_unknown_targets_count_nowhere_and_classes_do_not_mix() -> None:
    scores = np.array([[0.5, 0.0], [0.5, 1.0], [0.5, 1.0]])
    targets = np.array([[1, 0], [-1, 1], [0, -1]], np.int8)
    found = score_histograms(scores, targets)
    assert found.sum(axis=2).tolist() == [[1, 1], [1, 1]]
    assert [found[0, 0, 1024], found[1, 0, 1024], found[0, 1, 2047], found[1, 1, 0]] == [1, 1, 1, 1]
    assert not score_histograms(np.zeros((0, 3)), np.zeros((0, 3), np.int8)).any()
    with pytest.raises(DataError, match="outside"):
        score_histograms(column(np.nan), np.ones((1, 1), np.int8))


def test_histogram_metrics_by_hand() -> None:
    """Above: a positive. Then a bin of two positives and a negative. Then two negatives, one below 0.5."""
    report = evaluate_histograms(counts_of(b1900=(1, 0), b1800=(2, 1), b1700=(0, 1), b100=(0, 1)), ["a"])
    table = {name: float(values[0]) for name, values in report.per_class.items()}
    # pairs: 9, of which 7 right for certain and 2 open
    assert table["auc"] == pytest.approx(100 * 8 / 9)
    assert table["auc_error"] == pytest.approx(100 * 1 / 9)
    # worst: 1, then behind the negative 2/3 and 3/4; best: 1, 1, 1
    worst, best = (1 + 2 / 3 + 3 / 4) / 3, 1.0
    assert table["ap"] == pytest.approx(50 * (worst + best))
    assert table["ap_error"] == pytest.approx(50 * (best - worst))
    assert table["recall"] == pytest.approx(100)
    assert table["precision"] == pytest.approx(60)
    assert table["f1"] == pytest.approx(75)
    assert table["bacc"] == pytest.approx(50 * (1 + 1 / 3))
    assert (table["positives"], table["known"]) == (3, 6)
    assert report.left_out == {"ap": (), "auc": (), "f1": (), "bacc": ()}


def test_tied_positives_can_be_better_than_any_order_of_them() -> None:
    """A negative on top and two positives in one bin: in any order 1/2 and 2/3, tied 2/3 and 2/3."""
    report = evaluate_histograms(counts_of(b900=(0, 1), b800=(2, 0)), ["a"])
    low, high = (1 / 2 + 2 / 3) / 2, 2 / 3
    assert report.values["map"] == pytest.approx(50 * (low + high))
    assert report.values["map_error"] == pytest.approx(50 * (high - low))
    assert report.values["macro_auc_error"] == 0


def test_both_bounds_can_be_reached() -> None:
    """The stated error is not larger than it must be."""
    inside = [0.6, 0.6001, 0.6002, 0.6003, 0.6004]  # one bin
    for targets, scores in (([0, 0, 1, 1, 1], inside[::-1]), ([0, 0, 1, 1, 1], [0.6, 0.6, 0.6002, 0.6002, 0.6002])):
        top = [0.9], [0]
        p, y = column(*top[0], *scores), np.array([*top[1], *targets], np.int8)[:, None]
        report = evaluate_histograms(score_histograms(p, y), ["a"])
        away = 100 * average_precision_score(y, p) - report.values["map"]
        assert abs(away) == pytest.approx(report.values["map_error"])
        away = 100 * roc_auc_score(y, p) - report.values["macro_auc"]
        assert abs(away) == pytest.approx(report.values["macro_auc_error"])


def test_undefined_metrics_are_nan_and_their_classes_are_named() -> None:
    counts = np.concatenate([counts_of(), counts_of(b600=(4, 0)), counts_of(b600=(0, 4)), counts_of(b600=(1, 1))], 1)
    report = evaluate_histograms(counts, ["nothing", "positive", "negative", "both"])
    assert report.left_out == {
        "ap": ("nothing", "negative"),
        "auc": ("nothing", "positive", "negative"),
        "f1": ("nothing", "negative"),
        "bacc": ("nothing", "positive", "negative"),
    }
    assert report.values["macro_auc"] == 50
    assert report.values["macro_auc_error"] == 50
    assert report.values["map"] == pytest.approx((100 + 75) / 2)
    assert report.per_class["known"].tolist() == [0, 4, 4, 2]
    assert all(np.isnan(value) for value in evaluate_histograms(counts[:, :1], ["nothing"]).values.values())


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """One class, with ties inside and across bins, rare and frequent, good and bad, spread and squeezed."""
    draw = np.random.default_rng(seed)
    size, share = int(draw.integers(2, 300)), draw.uniform(0.02, 0.98)
    targets = (draw.random(size) < share).astype(np.int8)
    targets[:2] = 0, 1
    spread = 10 ** draw.uniform(-3, 1)
    logits = spread * (draw.standard_normal(size) + draw.uniform(-1, 3) * targets) + draw.uniform(-8, 8)
    step = spread / draw.choice([0.3, 2, 20, 2000])
    return 1 / (1 + np.exp(-np.round(logits / step) * step)), targets


def test_always_within_the_stated_error_of_scikit_learn() -> None:
    wide = tied = 0
    for seed in range(400):
        scores, targets = drawn(seed)
        values = evaluate_histograms(score_histograms(scores[:, None], targets[:, None]), ["a"]).values
        auc, ap = 100 * roc_auc_score(targets, scores), 100 * average_precision_score(targets, scores)
        assert abs(values["macro_auc"] - auc) <= values["macro_auc_error"] + ROUNDING, seed
        assert abs(values["map"] - ap) <= values["map_error"] + ROUNDING, seed
        wide += values["macro_auc_error"] > 1
        tied += len(np.unique(scores[targets == 1])) < (targets == 1).sum() / 2
    assert wide > 50  # the error is not always 0 …
    assert tied > 50  # … and there are ties


def test_metrics_at_one_half_are_exact() -> None:
    for seed in range(30):
        scores, targets = drawn(seed)
        values = evaluate_histograms(score_histograms(scores[:, None], targets[:, None]), ["a"]).values
        predicted = scores >= 0.5
        assert values["macro_f1"] == pytest.approx(100 * f1_score(targets, predicted, zero_division=0))
        assert values["c_p"] == pytest.approx(100 * precision_score(targets, predicted, zero_division=0))
        assert values["c_r"] == pytest.approx(100 * recall_score(targets, predicted))
        assert values["bacc"] == pytest.approx(100 * balanced_accuracy_score(targets, predicted))


def test_sums_over_sites_equal_all_data_and_are_close_to_the_exact_metrics() -> None:
    draw = np.random.default_rng(0)
    targets = (draw.random((3000, 4)) < [0.01, 0.05, 0.3, 0.6]).astype(np.int8)
    scores = 1 / (1 + np.exp(-(2 * draw.standard_normal((3000, 4)) + 2 * targets - 3)))
    places = draw.integers(0, 20, 3000)
    total = sum(score_histograms(scores[places == place], targets[places == place]) for place in range(20))
    assert isinstance(total, np.ndarray)
    assert np.array_equal(total, score_histograms(scores, targets))
    found, exact = evaluate_histograms(total, list("abcd")), metrics.evaluate(scores, targets, list("abcd"))
    assert np.abs(found.per_class["auc"] - exact.per_class["auc"]).max() < 0.1
    assert np.abs(found.per_class["ap"] - exact.per_class["ap"]).max() < 0.2
    for name in ("f1", "bacc", "precision", "recall"):
        assert found.per_class[name] == pytest.approx(exact.per_class[name])
    for name in ("macro_f1", "bacc", "c_p", "c_r"):
        assert found.values[name] == pytest.approx(exact.values[name])


def test_sums_of_reciprocals() -> None:
    for start in (0, 1, 5, 31, 32, 1000):
        for count in (0, 1, 31, 32, 33, 100, 5000):
            exact = (1 / (start + 1 + np.arange(count))).sum()
            found = _reciprocals(np.array([float(start)]), np.array([float(count)]))
            assert found[0] == pytest.approx(exact, abs=1e-11)
