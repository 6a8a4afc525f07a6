"""Bootstrap intervals: against theory where there is one, and whole patients at a time."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll.evaluation.intervals import bootstrap


def hits(count: int, wrong: int) -> tuple[np.ndarray, np.ndarray]:
    """One class, all present; `wrong` of them are not found. Then hamming is the share of wrong ones."""
    scores = np.full((count, 1), 0.9, np.float32)
    scores[:wrong] = 0.1
    return scores, np.ones((count, 1), np.int8)


def test_the_interval_of_a_share_is_the_binomial_one() -> None:
    scores, targets = hits(400, 100)
    low, high = bootstrap(scores, targets, ("a",), 0)["hamming"]
    half = 1.96 * np.sqrt(0.25 * 0.75 / 400) * 100  # 4.24
    assert low == pytest.approx(25 - half, abs=0.9) and high == pytest.approx(25 + half, abs=0.9)
    assert bootstrap(scores, targets, ("a",), 0)["hamming"] == (low, high)
    assert bootstrap(scores, targets, ("a",), 1)["hamming"] != (low, high)


def test_patients_are_drawn_whole() -> None:
    """All samples of a patient are alike: 400 samples of 80 patients are worth 80."""
    scores, targets = hits(400, 100)
    patients = np.repeat([f"p{number:02d}" for number in range(80)], 5)
    low, high = bootstrap(scores, targets, ("a",), 0, patients)["hamming"]
    half = 1.96 * np.sqrt(0.25 * 0.75 / 80) * 100  # 9.5
    assert high - low == pytest.approx(2 * half, rel=0.2)
    order = np.random.default_rng(0).permutation(400)
    shuffled = bootstrap(scores[order], targets[order], ("a",), 0, patients[order])["hamming"]
    assert shuffled == pytest.approx((low, high))


def test_tuned_thresholds_and_what_is_undefined() -> None:
    scores, targets = hits(50, 50)
    found = bootstrap(scores, targets, ("a",), 0, thresholds=np.array([0.05]), draws=5)
    assert found["macro_f1_tuned"] == (100, 100) and found["macro_f1"] == (0, 0)
    assert np.isnan(found["macro_auc"]).all()  # there is no negative
