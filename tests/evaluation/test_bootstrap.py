"""The bootstrap: each draw against `evaluate` on the drawn samples; intervals against theory."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll.core import registry
from fedmll.evaluation import bootstrap, ranking
from fedmll.evaluation.bootstrap import (
    VECTORISED,
    BootstrapMetrics,
    bootstrap_distribution,
    bootstrap_intervals,
    draw_counts,
    percentile_interval,
)
from fedmll.evaluation.metrics import accuracy, evaluate


def data(samples: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """With ties, unknown targets, a rare class and one without a negative."""
    generator = np.random.default_rng(1)
    targets = generator.choice(np.array([-1, 0, 1], np.int8), size=(samples, classes), p=[0.2, 0.5, 0.3])
    targets[:, 0] = -1
    targets[:4, 0] = (1, 0, 0, 1)
    targets[:, 1] = 1
    scores = generator.random((samples, classes)).round(1).astype(np.float32)
    return scores, targets


def test_every_metric_of_every_draw_is_that_of_evaluate_on_the_drawn_samples() -> None:
    scores, targets = data()
    thresholds = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    (counts,) = draw_counts(len(scores), 3, 40)
    assert counts.shape == (60, 40) and (counts.sum(axis=0) == 60).all()
    found = BootstrapMetrics(scores, targets, VECTORISED, thresholds).values(counts)
    for place, draw in enumerate(counts.T):
        rows = np.repeat(np.arange(60), draw.astype(int))
        expected = evaluate(scores[rows], targets[rows], list("abcde"), thresholds).values
        assert set(found) == expected.keys() | {"accuracy"}
        for name, value in expected.items():
            assert found[name][place] == pytest.approx(value, rel=1e-12, nan_ok=True), name
    present = counts[[0, 3]].sum(axis=0) > 0  # class 0 has a positive in some draws only, and counts only there
    assert present.any() and not present.all()


def test_accuracy_of_single_labels() -> None:
    generator = np.random.default_rng(0)
    scores = generator.random((50, 4))
    targets = np.eye(4, dtype=np.int8)[generator.integers(4, size=50)]
    targets[:5] = 1  # these have more than one
    (counts,) = draw_counts(50, 0, 10)
    found = BootstrapMetrics(scores, targets, ["accuracy"]).values(counts)
    for place, draw in enumerate(counts.T):
        rows = np.repeat(np.arange(50), draw.astype(int))
        assert found["accuracy"][place] == pytest.approx(accuracy(scores[rows], targets[rows])[0])


def test_undefined_metrics_are_nan_and_metrics_that_were_not_wanted_are_absent() -> None:
    scores, targets = data()
    (counts,) = draw_counts(60, 0, 3)
    nothing = BootstrapMetrics(scores, np.full_like(targets, -1), ["macro_auc", "map", "micro_auc", "macro_f1"]).values(
        counts
    )
    assert all(np.isnan(values).all() for values in nothing.values()) and len(nothing) == 4
    assert BootstrapMetrics(scores, targets, ["map", "macro_f1_tuned"]).values(counts).keys() == {
        "map"
    }  # no thresholds


def test_the_draws_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = data()
    (counts,) = draw_counts(60, 0, 9)
    whole = BootstrapMetrics(scores, targets, VECTORISED).values(counts)
    monkeypatch.setattr(ranking, "MAX_LEVEL_DRAWS", 20)
    parts = BootstrapMetrics(scores, targets, VECTORISED).values(counts)
    for name, values in whole.items():
        assert parts[name] == pytest.approx(values, nan_ok=True)


def test_a_metric_of_a_plug_in_gets_the_drawn_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_score(scores: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
        return float(scores.mean()), scores.mean(axis=0)

    monkeypatch.setattr(registry, "find_added", lambda kind: {"mean_score": mean_score})
    scores, targets = data()
    (counts,) = draw_counts(60, 0, 4)
    found = BootstrapMetrics(scores, targets, ["mean_score", "map"]).values(counts)["mean_score"]
    assert found == pytest.approx(counts.T @ scores.mean(axis=1) / 60, rel=1e-5)


def test_the_interval_is_that_of_a_plain_loop_with_the_same_draws() -> None:
    """With patients: draws, metrics and percentiles in a plain loop."""
    scores, targets = data()
    patients = np.array([f"p{n % 17:02d}" for n in range(60)])
    found = bootstrap_intervals(scores, targets, list("abcde"), 5, patients, draws=30)
    values: dict[str, list[float]] = {}
    for counts in np.concatenate([part.T for part in draw_counts(17, 5, 30)]):
        own = [np.flatnonzero(patients == f"p{unit:02d}") for unit in range(17)]
        rows = [row for samples, times in zip(own, counts, strict=True) for row in samples.repeat(int(times))]
        for name, value in evaluate(scores[rows], targets[rows], list("abcde")).values.items():
            values.setdefault(name, []).append(value)
    assert found.keys() == values.keys()
    for name, all_of in values.items():
        assert found[name] == pytest.approx(tuple(np.percentile(all_of, [2.5, 97.5]))), name


def test_the_same_seed_gives_the_same_draws_in_parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(draw_counts(8, 2, 12)), axis=1)
    monkeypatch.setattr(bootstrap, "MAX_COUNTS", 24)
    parts = list(draw_counts(8, 2, 12))
    assert [part.shape for part in parts] == [(8, 3)] * 4
    assert (np.concatenate(parts, axis=1) == whole).all()
    assert (np.concatenate(list(draw_counts(8, 3, 12)), axis=1) != whole).any()
    scores, targets = data()
    unit = np.arange(60)
    first, second = (bootstrap_distribution(scores, targets, unit, 60, 0, ["map"], draws=7)["map"] for _ in range(2))
    assert first.shape == (7,) and (first == second).all()


def test_undefined_values_are_not_in_the_interval() -> None:
    assert percentile_interval(np.array([np.nan, *range(101)])) == pytest.approx((2.5, 97.5))
    assert np.isnan(percentile_interval(np.array([np.nan, np.nan]))).all()


# ---- intervals


def hits(count: int, wrong: int) -> tuple[np.ndarray, np.ndarray]:
    """One class that is always present and `wrong` times not predicted; hamming is then the share of wrong samples."""
    scores = np.full((count, 1), 0.9, np.float32)
    scores[:wrong] = 0.1
    return scores, np.ones((count, 1), np.int8)


def test_the_interval_of_a_share_is_the_binomial_interval() -> None:
    scores, targets = hits(400, 100)
    low, high = bootstrap_intervals(scores, targets, ("a",), 0)["hamming"]
    half = 1.96 * np.sqrt(0.25 * 0.75 / 400) * 100  # 4.24
    assert low == pytest.approx(25 - half, abs=0.9) and high == pytest.approx(25 + half, abs=0.9)
    assert bootstrap_intervals(scores, targets, ("a",), 0)["hamming"] == (low, high)
    assert bootstrap_intervals(scores, targets, ("a",), 1)["hamming"] != (low, high)


def test_patients_are_drawn_whole() -> None:
    """All samples of a patient are equal, so 400 samples of 80 patients say as much as 80 samples."""
    scores, targets = hits(400, 100)
    patients = np.repeat([f"p{number:02d}" for number in range(80)], 5)
    low, high = bootstrap_intervals(scores, targets, ("a",), 0, patients)["hamming"]
    half = 1.96 * np.sqrt(0.25 * 0.75 / 80) * 100  # 9.5
    assert high - low == pytest.approx(2 * half, rel=0.2)
    order = np.random.default_rng(0).permutation(400)
    shuffled = bootstrap_intervals(scores[order], targets[order], ("a",), 0, patients[order])["hamming"]
    assert shuffled == pytest.approx((low, high))


def test_tuned_thresholds_and_undefined_metrics() -> None:
    scores, targets = hits(50, 50)
    found = bootstrap_intervals(scores, targets, ("a",), 0, thresholds=np.array([0.05]), draws=5)
    assert found["macro_f1_tuned"] == (100, 100) and found["macro_f1"] == (0, 0)
    assert np.isnan(found["macro_auc"]).all()  # there is no negative
