"""Reliability and calibration from histograms, against plain loops, scikit-learn and SciPy on the samples."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize
from scipy.special import expit, logit
from sklearn.linear_model import LogisticRegression

from fedmll.evaluation.calibration import (
    BIN_LOGITS,
    RANGES,
    apply_calibration,
    excess_by_range,
    fit_calibration,
    reliability,
    reliability_from_histograms,
)
from fedmll.evaluation.histograms import BINS, EDGES, LOGIT_EDGES, MIDDLES, score_histograms


@pytest.fixture(scope="module")
def sample() -> tuple[np.ndarray, np.ndarray]:
    """Overconfident scores: the true probability is σ(0.5 z − 0.3)."""
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
    found = reliability_from_histograms(score_histograms(scores, targets))
    for column in range(3):
        known = targets[:, column] >= 0
        p, y = scores[known, column], targets[known, column]
        # ranges end where bins end, so the bin of a sample decides
        middle = MIDDLES[np.searchsorted(EDGES, p, side="right")]
        error = 0.0
        for place in range(RANGES):
            inside = (middle >= place / RANGES) & (middle < (place + 1) / RANGES)
            assert found.samples[column, place] == inside.sum()
            if inside.any():
                assert found.observed[column, place] == pytest.approx(y[inside].mean())
                assert found.predicted[column, place] == pytest.approx(p[inside].mean(), abs=1 / 1024)
                error += abs(p[inside].mean() - y[inside].mean()) * inside.mean()
        assert abs(found.error[column] - 100 * error) <= found.bound[column] < 0.1
    assert found.error.min() > 5


def test_without_known_targets_the_error_is_nan_and_calibration_changes_nothing() -> None:
    found = reliability_from_histograms(np.zeros((2, 1, BINS), np.int64))
    assert np.isnan(found.error).all()
    assert np.isnan(found.observed).all()
    assert (fit_calibration(np.zeros((2, 2, BINS), np.int64), "platt") == [1, 0]).all()
    assert (fit_calibration(np.zeros((2, 2, BINS), np.int64), "temperature") == [1, 0]).all()


def test_platt_is_the_logistic_regression_with_his_targets(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    counts = score_histograms(scores, targets)
    found = fit_calibration(counts, "platt")
    for column in range(3):
        positives, negatives = counts[:, column]
        high, low = (positives.sum() + 1) / (positives.sum() + 2), 1 / (negatives.sum() + 2)
        weight = np.concatenate([positives * high + negatives * low, positives * (1 - high) + negatives * (1 - low)])
        z, y = np.tile(BIN_LOGITS, 2)[:, None], np.repeat([1, 0], BINS)
        fit = LogisticRegression(C=np.inf, tol=1e-10, max_iter=1000).fit(z, y, sample_weight=weight)
        np.testing.assert_allclose(found[column], [fit.coef_[0, 0], fit.intercept_[0]], atol=1e-5)
    np.testing.assert_allclose(found, np.tile([0.5, -0.3], (3, 1)), atol=0.1)  # what the data was made with


def test_one_temperature_for_all(sample: tuple[np.ndarray, np.ndarray]) -> None:
    scores, targets = sample
    known = targets >= 0
    z, y = logit(scores[known].astype(np.float64)), targets[known]
    best = minimize(lambda a: (np.logaddexp(0, a * z) - y * a * z).sum(), [1.0], tol=1e-12).x[0]
    found = fit_calibration(score_histograms(scores, targets), "temperature")
    assert found[:, 0] == pytest.approx(best, abs=2e-3)
    assert (found[:, 0] == found[0, 0]).all()
    assert (found[:, 1] == 0).all()


def test_the_calibration_of_a_separable_class_is_finite() -> None:
    counts = np.zeros((2, 2, BINS), np.int64)
    counts[0, 0, 900], counts[1, 0, 100] = 20, 20
    counts[0, 1, 700] = 20  # no negative: it is not changed
    found = fit_calibration(counts, "platt")
    assert np.isfinite(found).all()
    assert found[0, 0] > 0
    assert found[1].tolist() == [1, 0]


def test_the_calibration_error_of_calibrated_scores(sample: tuple[np.ndarray, np.ndarray]) -> None:
    """The same, within the bound, as if the score of every sample were calibrated."""
    scores, targets = sample
    counts = score_histograms(scores, targets)
    by = np.array([[0.5, -0.3], [2.0, 1.0], [1.0, 0.0]])
    found, before = reliability_from_histograms(counts, by), reliability_from_histograms(counts)
    again = expit(by[:, 0] * logit(scores.astype(np.float64)) + by[:, 1])
    ends = np.append(-np.inf, LOGIT_EDGES[1:-1]), np.append(EDGES, 1)
    for column in range(3):
        known = targets[:, column] >= 0
        p, y = again[known, column], targets[known, column]
        place = np.searchsorted(EDGES, scores[known, column], side="right")
        low, high = (expit(by[column, 0] * z + by[column, 1]) for z in (ends[0][place], logit(ends[1][place])))
        inside = np.minimum(((low + high) / 2 * RANGES).astype(int), RANGES - 1)
        gaps = [abs((p - y)[inside == number].sum()) for number in range(RANGES)]
        assert abs(found.error[column] - 100 * sum(gaps) / len(p)) <= found.bound[column] < 0.8
        assert found.samples[column].tolist() == np.bincount(inside, minlength=RANGES).tolist()
    assert found.error[0] < before.error[0] / 3
    assert found.error[2] == before.error[2]


@pytest.mark.parametrize("place", [0, 1, 300, 1023, 1024, 1400, 2046, 2047])
@pytest.mark.parametrize("end", [0, 1])
def test_the_bound_holds_at_the_ends_of_a_bin(place: int, end: int) -> None:
    """All samples at one end of one bin, all positive or all negative: no score is further from the middle of a bin."""
    ends = np.append(np.append(0, EDGES), 1)
    p = float(ends[place + end])
    for target in (0, 1):
        counts = np.zeros((2, 1, BINS), np.int64)
        counts[1 - target, 0, place] = 7
        found = reliability_from_histograms(counts)
        assert abs(found.error[0] - 100 * abs(p - target)) <= found.bound[0] + 1e-9
        assert found.bound[0] == pytest.approx(50 * (ends[place + 1] - ends[place]))


def test_some_bins_only(sample: tuple[np.ndarray, np.ndarray]) -> None:
    counts = score_histograms(*sample)
    bins = np.flatnonzero(counts.any(axis=(0, 1)))
    assert len(bins) < BINS
    some, whole = reliability_from_histograms(counts[:, :, bins], bins=bins), reliability_from_histograms(counts)
    np.testing.assert_allclose(some.error, whole.error)
    np.testing.assert_array_equal(some.samples, whole.samples)


def test_the_reliability_of_samples_and_of_draws(sample: tuple[np.ndarray, np.ndarray]) -> None:
    """Against a plain loop. The excess of one draw with every sample once gives the same error."""
    scores, targets = sample
    found = reliability(scores, targets)
    excess = excess_by_range(scores.astype(np.float64), targets, np.ones((len(scores), 1), np.float32))
    for column in range(3):
        known = targets[:, column] >= 0
        p, y = scores[known, column].astype(np.float64), targets[known, column]
        inside = np.minimum((p * RANGES).astype(int), RANGES - 1)
        gaps = [(p - y)[inside == number].sum() for number in range(RANGES)]
        assert found.error[column] == pytest.approx(100 * np.abs(gaps).sum() / len(p))
        assert found.samples[column].tolist() == np.bincount(inside, minlength=RANGES).tolist()
        assert excess[column, :, 0] == pytest.approx(np.array(gaps), abs=1e-2)
    assert (found.bound == 0).all()


def test_a_calibrated_probability_by_hand() -> None:
    # the logit of 0.8 is log 4: half of it is log 2, and σ(log 2) = 2/3; twice it minus log 2 is log 8, and σ = 8/9
    found = apply_calibration(np.array([[0.8, 0.8]]), np.array([[0.5, 0.0], [2.0, -np.log(2)]]))
    np.testing.assert_allclose(found, [[2 / 3, 8 / 9]], rtol=1e-12)


def test_probabilities_of_0_and_1_are_calibrated_to_finite_logits() -> None:
    """They are taken as 10⁻⁷ and 1 − 10⁻⁷."""
    found = apply_calibration(np.array([[0.0], [1.0]]), np.array([[1.0, 0.0]]))
    np.testing.assert_allclose(found, [[1e-7], [1 - 1e-7]], rtol=1e-9)
