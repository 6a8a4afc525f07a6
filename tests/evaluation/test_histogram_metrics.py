"""Metrics from histograms against those of the samples: values, error bounds and intervals."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from fedmll.evaluation import metrics
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.evaluation.calibration import RANGES
from fedmll.evaluation.histogram_metrics import (
    HISTOGRAM_METRICS,
    FederatedHistograms,
    SiteHistograms,
    _lower,
    compute_histogram_metrics,
    metric_bounds,
)
from fedmll.evaluation.histograms import BINS, EDGES, score_histograms


def sample(samples: int, classes: int, seed: int, better: float = 2.0) -> tuple[np.ndarray, np.ndarray]:
    draw = np.random.default_rng(seed)
    targets = (draw.random((samples, classes)) < np.linspace(0.1, 0.5, classes)).astype(np.int8)
    logits = 2 * draw.standard_normal(targets.shape) + better * targets - 1
    targets[draw.random(targets.shape) < 0.1] = -1
    return 1 / (1 + np.exp(-logits)), targets


def test_every_metric_is_within_its_error_of_the_exact_value() -> None:
    scores, targets = sample(900, 3, 0)
    found, exact = (
        compute_histogram_metrics(score_histograms(scores, targets), 0, draws=5),
        metrics.evaluate(scores, targets, list("abc")),
    )
    for name in ("auc", "ap", "f1", "precision", "recall", "bacc"):
        away = np.abs(found.by_class[name] - exact.per_class[name])
        assert (away <= found.by_class[f"{name}_error"] + 1e-9).all(), name
    for name in ("f1", "precision", "recall", "bacc"):
        assert (found.by_class[f"{name}_error"] == 0).all()
    assert found.by_class["positives"].tolist() == exact.per_class["positives"].tolist()
    assert found.by_class["known"].tolist() == exact.per_class["known"].tolist()
    names = {"auc": "macro_auc", "ap": "map", "f1": "macro_f1", "precision": "c_p", "recall": "c_r", "bacc": "bacc"}
    for name, mean in names.items():
        assert abs(found.mean[name] - exact.values[mean]) <= found.mean[f"{name}_error"] + 1e-9
    for column in range(3):
        known = targets[:, column] >= 0
        p, y = scores[known, column], targets[known, column]
        place = np.searchsorted(EDGES, p, side="right")
        middle = (np.append(0, EDGES)[place] + np.append(EDGES, 1)[place]) / 2
        inside = np.floor(middle * RANGES)
        ece = 100 * sum(abs((p - y)[inside == number].sum()) for number in range(RANGES)) / len(p)
        assert 0 < abs(found.by_class["ece"][column] - ece) <= found.by_class["ece_error"][column]


@pytest.mark.parametrize("seed", range(8))
def test_any_order_inside_one_bin_stays_within_the_error(seed: int) -> None:
    """Scores inside one bin in the worst, the best, a tied and a random order, and some scores outside."""
    draw = np.random.default_rng(seed)
    y = (draw.random(60) < draw.uniform(0.1, 0.9)).astype(np.int8)
    y[:2] = 0, 1
    inside = np.linspace(EDGES[600] + 1e-6, EDGES[601] - 1e-6, 60)
    outside = draw.random(60) < 0.2
    orders = [inside[np.argsort(np.argsort(sign * y + 1e-3 * draw.random(60)))] for sign in (1, -1, 0)]
    tied = [np.where(y == side, inside[0], inside[9]) for side in (0, 1)]
    one = np.full(60, inside[5])
    for p in (*orders, *tied, one):
        p = np.where(outside, draw.random(60), p)
        table = compute_histogram_metrics(score_histograms(p[:, None], y[:, None]), 0, draws=2).by_class
        assert abs(table["auc"][0] - 100 * roc_auc_score(y, p)) <= table["auc_error"][0] + 1e-9
        assert abs(table["ap"][0] - 100 * average_precision_score(y, p)) <= table["ap_error"][0] + 1e-9


def test_intervals_from_histograms_are_those_of_the_samples() -> None:
    """Compared with the bootstrap over the samples, for one class."""
    scores, targets = sample(1500, 1, 3)
    found, exact = (
        compute_histogram_metrics(score_histograms(scores, targets), 0).by_class,
        bootstrap_intervals(scores, targets, ["a"], 0),
    )
    pairs = {"auc": "macro_auc", "ap": "map", "f1": "macro_f1", "bacc": "bacc", "precision": "c_p", "recall": "c_r"}
    for name, other in pairs.items():
        low, high = found[f"{name}_low"][0], found[f"{name}_high"][0]
        assert low < found[name][0] < high
        assert (low, high) == pytest.approx(exact[other], abs=0.15 * (high - low) + found[f"{name}_error"][0]), name
    assert found["ece_low"][0] <= found["ece"][0] <= found["ece_high"][0]


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """80 random samples of 300 with a known AUC, Φ(1/√2) of two normal distributions one deviation apart: 95 % would
    be 76; fewer than 70 has a probability of 1 in 500."""
    truth, covered = 76.0250, 0
    for seed in range(80):
        draw = np.random.default_rng(seed)
        y = (draw.random(300) < 0.4).astype(np.int8)
        p = 1 / (1 + np.exp(-(draw.standard_normal(300) + y)))
        table = compute_histogram_metrics(score_histograms(p[:, None], y[:, None]), seed, draws=200).by_class
        covered += table["auc_low"][0] <= truth <= table["auc_high"][0]
    assert covered >= 70


def test_the_interval_of_a_calibrated_model_reaches_zero() -> None:
    """The true error is 0. The interval reaches it, although the error of no draw does."""
    draw = np.random.default_rng(1)
    p = draw.random((2000, 1))
    y = (draw.random(p.shape) < p).astype(np.int8)
    table = compute_histogram_metrics(score_histograms(p, y), 0, draws=300).by_class
    assert table["ece_low"][0] < 0.3 < table["ece"][0] < table["ece_high"][0]


def test_the_interval_of_the_calibration_error_is_reflected_at_its_value() -> None:
    """For an overconfident model, compared with the basic bootstrap over the samples."""
    draw = np.random.default_rng(2)
    z = 3 * draw.standard_normal(800)
    p, y = 1 / (1 + np.exp(-z)), (draw.random(800) < 1 / (1 + np.exp(-z / 3))).astype(np.int8)

    def ece(rows: np.ndarray) -> float:
        inside = np.floor(p[rows] * RANGES)
        return 100 * sum(abs((p - y)[rows][inside == number].sum()) for number in range(RANGES)) / len(rows)

    low, high = np.percentile([ece(draw.integers(800, size=800)) for _ in range(400)], [2.5, 97.5])
    table, value = compute_histogram_metrics(score_histograms(p[:, None], y[:, None]), 0).by_class, ece(np.arange(800))
    assert 10 < value < 25
    assert table["ece_low"][0] == pytest.approx(2 * value - high, abs=1)
    assert table["ece_high"][0] == pytest.approx(2 * value - low, abs=1)
    certain = compute_histogram_metrics(
        score_histograms(np.full((50, 1), 1e-6), np.zeros((50, 1), np.int8)), 0, draws=20
    ).by_class
    assert certain["ece_high"][0] < 0.01


def test_a_mean_has_the_mean_error_and_an_interval_of_means() -> None:
    scores, targets = sample(600, 4, 7)
    counts = score_histograms(scores, targets)
    found, low_high = compute_histogram_metrics(counts, 0), metric_bounds(counts)
    for place, name in enumerate(HISTOGRAM_METRICS):
        low, high = low_high[:, place]
        np.testing.assert_allclose(found.by_class[f"{name}_error"], (high - low) / 2)
        assert found.mean[f"{name}_error"] == pytest.approx(((high - low) / 2).mean())
        widths = found.by_class[f"{name}_high"] - found.by_class[f"{name}_low"]
        width = found.mean[f"{name}_high"] - found.mean[f"{name}_low"]
        assert found.mean[f"{name}_low"] < found.mean[name] < found.mean[f"{name}_high"]
        assert width == pytest.approx(np.sqrt((widths**2).sum()) / 4, rel=0.25)  # of four that are independent


def test_the_same_purpose_gives_the_same_interval_and_empty_histograms_give_nan() -> None:
    counts = score_histograms(*sample(300, 2, 5))
    counts[:, 0] = 0
    first, again, other = (compute_histogram_metrics(counts, 0, name, draws=50) for name in ("a", "a", "b"))
    for key, values in first.by_class.items():
        np.testing.assert_array_equal(values, again.by_class[key])
    assert first.by_class["auc_low"][1] != other.by_class["auc_low"][1]
    assert all(
        np.isnan(first.by_class[f"{name}{end}"][0]) for name in HISTOGRAM_METRICS for end in ("", "_error", "_low")
    )
    assert first.mean["auc"] == first.by_class["auc"][1]
    assert first.mean["auc_high"] == pytest.approx(first.by_class["auc_high"][1])
    empty = compute_histogram_metrics(np.zeros((2, 1, BINS), np.int64), 0, draws=3)
    assert all(np.isnan(value) for value in empty.mean.values())


def test_leaving_out_empty_bins_changes_nothing() -> None:
    counts = score_histograms(*sample(200, 2, 6))
    bins = np.flatnonzero(counts.any(axis=(0, 1)))
    np.testing.assert_allclose(metric_bounds(counts[:, :, bins], bins), metric_bounds(counts))


def test_sites_are_summed_and_thresholds_may_have_their_own_histograms() -> None:
    one, two, three = (score_histograms(*sample(50, 2, seed)).astype(np.int32) for seed in range(3))
    sites = {
        "a": SiteHistograms(test=one, validation=None, min_count=10, not_sent={}),
        "b": SiteHistograms(test=two, validation=three, min_count=10, not_sent={}),
    }
    federation = FederatedHistograms(("x", "y"), sites)
    np.testing.assert_array_equal(federation.test, one + two)
    np.testing.assert_array_equal(federation.for_thresholds, one + three)


def test_a_site_with_too_large_a_share_is_lowered_in_the_sum() -> None:
    """Site b counts by half, and in each class at most twice as much as the site without a limit."""

    def site(bins: dict[tuple[int, int], int], share_limit: tuple[float, float] | None = None) -> SiteHistograms:
        counts = np.zeros((2, 1, BINS), np.int32)
        for (side, place), number in bins.items():
            counts[side, 0, place] = number
        return SiteHistograms(test=counts, validation=None, min_count=1, not_sent={}, share_limit=share_limit)

    a = site({(0, 10): 4, (1, 5): 6})
    b = site({(0, 20): 4, (0, 30): 6, (1, 7): 30, (1, BINS - 1): 10}, share_limit=(0.5, 2.0))
    federation = FederatedHistograms(("x",), {"b": b, "a": a})
    # its 10 positives: 5 are fewer than 2 · 4; its 40 negatives: 20 are more than 2 · 6 = 12
    expected = site({(0, 10): 4, (1, 5): 6, (0, 20): 2, (0, 30): 3, (1, 7): 9, (1, BINS - 1): 3}).test
    np.testing.assert_array_equal(federation.test, expected)
    np.testing.assert_array_equal(federation.without("b").test, a.test)
    # without other positives and negatives there is nothing to compare with: half of its own
    alone = site({(0, 20): 2, (0, 30): 3, (1, 7): 15, (1, BINS - 1): 5}).test
    np.testing.assert_array_equal(federation.without("a").test, alone)


@pytest.mark.parametrize(
    ("counts", "factor", "most", "expected"),
    [
        ([3, 0, 2], 1.0, 0.0, [3, 0, 2]),  # nothing to compare with
        ([3, 0, 2], 1.0, 5.0, [3, 0, 2]),
        ([4, 0, 4], 0.5, 9.0, [2, 0, 2]),
        ([4, 0, 4], 0.5, 1.0, [0, 0, 1]),  # an eighth: the sums up to each bin, 0.5 and 1, are rounded to even
        ([1, 0, 0], 1.0, 0.8, [1, 0, 0]),  # 0.8 of one sample
        ([0, 0, 0], 1.0, 3.0, [0, 0, 0]),
    ],
)
def test_counts_are_lowered_to_their_factor_and_limit(
    counts: list[int], factor: float, most: float, expected: list[int]
) -> None:
    given = np.array(counts, np.int32)[None, None]
    assert _lower(given, factor, np.array([[most]]))[0, 0].tolist() == expected
