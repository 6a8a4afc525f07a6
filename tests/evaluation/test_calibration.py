"""Reliability and calibration from histograms, against plain loops, scikit-learn and SciPy on the samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from fedmll.evaluation.calibration import LOGITS, MIDDLES, RANGES, calibrated, fitted, reliability
from fedmll.evaluation.histograms import BINS, EDGES, histograms


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, np.ndarray]:
    """Scores that are too sure of themselves: the truth follows σ(0.5 z − 0.3)."""
    generator = np.random.default_rng(0)
    z = generator.normal(size=(4000, 3)) * 3
    targets = (generator.random(z.shape) < expit(0.5 * z - 0.3)).astype(np.int8)
    targets[:300, 1] = -1
    return expit(z).astype(np.float32), targets


def test_middles_lie_between_the_edges() -> None:
    assert (MIDDLES[1:] > EDGES).all()
    assert (MIDDLES[:-1] < EDGES).all()


def test_the_calibration_error(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    found = reliability(histograms(scores, targets))
    for column in range(3):
        known = targets[:, column] >= 0
        p, y = scores[known, column], targets[known, column]
        # ranges that end where bins end: as a sample's bin says
        middle = MIDDLES[np.searchsorted(EDGES, p, side="right")]
        error = 0.0
        for place in range(RANGES):
            inside = (middle >= place / RANGES) & (middle < (place + 1) / RANGES)
            assert found.samples[column, place] == inside.sum()
            if inside.any():
                assert found.observed[column, place] == pytest.approx(y[inside].mean())
                assert found.predicted[column, place] == pytest.approx(p[inside].mean(), abs=1 / 256)
                error += abs(p[inside].mean() - y[inside].mean()) * inside.mean()
        assert abs(found.error[column] - 100 * error) <= found.bound[column] < 0.4
    assert found.error.min() > 5


def test_nothing_known() -> None:
    found = reliability(np.zeros((2, 1, BINS), np.int64))
    assert np.isnan(found.error).all()
    assert np.isnan(found.observed).all()
    assert (fitted(np.zeros((2, 2, BINS), np.int64), "platt") == [1, 0]).all()
    assert (fitted(np.zeros((2, 2, BINS), np.int64), "temperature") == [1, 0]).all()


def test_platt_is_the_logistic_regression_with_his_targets(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    counts = histograms(scores, targets)
    found = fitted(counts, "platt")
    for column in range(3):
        positives, negatives = counts[:, column]
        high, low = (positives.sum() + 1) / (positives.sum() + 2), 1 / (negatives.sum() + 2)
        weight = np.concatenate([positives * high + negatives * low, positives * (1 - high) + negatives * (1 - low)])
        z, y = np.tile(LOGITS, 2)[:, None], np.repeat([1, 0], BINS)
        fit = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(z, y, sample_weight=weight)
        np.testing.assert_allclose(found[column], [fit.coef_[0, 0], fit.intercept_[0]], atol=1e-5)
    np.testing.assert_allclose(found, np.tile([0.5, -0.3], (3, 1)), atol=0.1)  # what the data was made with


def test_one_temperature_for_all(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    known = targets >= 0
    z, y = logit(scores[known].astype(np.float64)), targets[known]
    best = minimize(lambda a: (np.logaddexp(0, a * z) - y * a * z).sum(), [1.0], tol=1e-12).x[0]
    found = fitted(histograms(scores, targets), "temperature")
    assert found[:, 0] == pytest.approx(best, abs=2e-3)
    assert (found[:, 0] == found[0, 0]).all()
    assert (found[:, 1] == 0).all()


def test_a_class_that_separates_stays_finite() -> None:
    counts = np.zeros((2, 2, BINS), np.int64)
    counts[0, 0, 900], counts[1, 0, 100] = 20, 20
    counts[0, 1, 700] = 20  # no negative: as it is
    found = fitted(counts, "platt")
    assert np.isfinite(found).all()
    assert found[0, 0] > 0
    assert found[1].tolist() == [1, 0]


def test_calibrated_histograms_are_those_of_calibrated_scores(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    counts = histograms(scores, targets)
    by = np.array([[0.5, -0.3], [2.0, 1.0], [1.0, 0.0]])
    moved = calibrated(counts, by)
    np.testing.assert_array_equal(moved[:, 2], counts[:, 2])
    again = expit(by[:, 0] * logit(scores.astype(np.float64)) + by[:, 1])
    expected = histograms(again, targets)
    for column in range(3):
        assert moved[:, column].sum() == counts[:, column].sum()
        for side in (0, 1):  # a bin's middle stands for it: each count at most the stretched bin away
            apart = np.abs(np.cumsum(moved[side, column]) - np.cumsum(expected[side, column])).max()
            assert apart <= counts[side, column].max() * 2
    assert reliability(moved).error[0] < reliability(counts).error[0] / 3
