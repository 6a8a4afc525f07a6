"""Metrics of many drawings at once: against each drawing written out and evaluated on its own."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll import registry
from fedmll.evaluation import redrawn
from fedmll.evaluation.intervals import bootstrap, distribution, drawings, limits
from fedmll.evaluation.metrics import accuracy, evaluate
from fedmll.evaluation.redrawn import QUICK, Redrawn


def data(samples: int = 60, classes: int = 5) -> tuple[np.ndarray, np.ndarray]:
    """With ties, unknown targets, a rare class and one without a negative."""
    generator = np.random.default_rng(1)
    targets = generator.choice(np.array([-1, 0, 1], np.int8), size=(samples, classes), p=[0.2, 0.5, 0.3])
    targets[:, 0] = -1
    targets[:4, 0] = (1, 0, 0, 1)
    targets[:, 1] = 1
    scores = generator.random((samples, classes)).round(1).astype(np.float32)
    return scores, targets


def test_every_metric_of_every_drawing_is_that_of_the_samples_written_out() -> None:
    scores, targets = data()
    thresholds = np.array([0.1, 0.3, 0.5, 0.7, 0.9])
    (counts,) = drawings(len(scores), 3, 40)
    assert counts.shape == (60, 40) and (counts.sum(axis=0) == 60).all()
    found = Redrawn(scores, targets, QUICK, thresholds).values(counts)
    for place, drawing in enumerate(counts.T):
        rows = np.repeat(np.arange(60), drawing.astype(int))
        expected = evaluate(scores[rows], targets[rows], list("abcde"), thresholds).values
        assert set(found) == expected.keys() | {"accuracy"}
        for name, value in expected.items():
            assert found[name][place] == pytest.approx(value, rel=1e-12, nan_ok=True), name
    present = counts[[0, 3]].sum(axis=0) > 0  # class 0 has a positive in some drawings, and only there it counts
    assert present.any() and not present.all()


def test_accuracy_of_single_labels() -> None:
    generator = np.random.default_rng(0)
    scores = generator.random((50, 4))
    targets = np.eye(4, dtype=np.int8)[generator.integers(4, size=50)]
    targets[:5] = 1  # these have more than one
    (counts,) = drawings(50, 0, 10)
    found = Redrawn(scores, targets, ["accuracy"]).values(counts)
    for place, drawing in enumerate(counts.T):
        rows = np.repeat(np.arange(50), drawing.astype(int))
        assert found["accuracy"][place] == pytest.approx(accuracy(scores[rows], targets[rows])[0])


def test_nothing_defined_is_nan_and_not_asked_is_not_there() -> None:
    scores, targets = data()
    (counts,) = drawings(60, 0, 3)
    nothing = Redrawn(scores, np.full_like(targets, -1), ["macro_auc", "map", "micro_auc", "macro_f1"]).values(counts)
    assert all(np.isnan(values).all() for values in nothing.values()) and len(nothing) == 4
    assert Redrawn(scores, targets, ["map", "macro_f1_tuned"]).values(counts).keys() == {"map"}  # no thresholds


def test_many_levels_are_held_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores, targets = data()
    (counts,) = drawings(60, 0, 9)
    whole = Redrawn(scores, targets, QUICK).values(counts)
    monkeypatch.setattr(redrawn, "LEVELS_AT_ONCE", 20)
    parts = Redrawn(scores, targets, QUICK).values(counts)
    for name, values in whole.items():
        assert parts[name] == pytest.approx(values, nan_ok=True)


def test_a_metric_of_a_plug_in_sees_the_samples_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    def mean_score(scores: np.ndarray, targets: np.ndarray) -> tuple[float, np.ndarray]:
        return float(scores.mean()), scores.mean(axis=0)

    monkeypatch.setattr(registry, "added", lambda kind: {"mean_score": mean_score})
    scores, targets = data()
    (counts,) = drawings(60, 0, 4)
    found = Redrawn(scores, targets, ["mean_score", "map"]).values(counts)["mean_score"]
    assert found == pytest.approx(counts.T @ scores.mean(axis=1) / 60, rel=1e-5)


def test_the_interval_is_that_of_a_plain_loop_with_the_same_draws() -> None:
    """Patients: the drawings, the metrics and the percentiles, all in the plainest way."""
    scores, targets = data()
    patients = np.array([f"p{n % 17:02d}" for n in range(60)])
    found = bootstrap(scores, targets, list("abcde"), 5, patients, draws=30)
    values: dict[str, list[float]] = {}
    for counts in np.concatenate([part.T for part in drawings(17, 5, 30)]):
        own = [np.flatnonzero(patients == f"p{unit:02d}") for unit in range(17)]
        rows = [row for samples, times in zip(own, counts, strict=True) for row in samples.repeat(int(times))]
        for name, value in evaluate(scores[rows], targets[rows], list("abcde")).values.items():
            values.setdefault(name, []).append(value)
    assert found.keys() == values.keys()
    for name, all_of in values.items():
        assert found[name] == pytest.approx(tuple(np.percentile(all_of, [2.5, 97.5]))), name


def test_who_asks_twice_gets_the_same_drawings_in_any_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = np.concatenate(list(drawings(8, 2, 12)), axis=1)
    from fedmll.evaluation import intervals

    monkeypatch.setattr(intervals, "COUNTS_AT_ONCE", 24)
    parts = list(drawings(8, 2, 12))
    assert [part.shape for part in parts] == [(8, 3)] * 4
    assert (np.concatenate(parts, axis=1) == whole).all()
    assert (np.concatenate(list(drawings(8, 3, 12)), axis=1) != whole).any()
    scores, targets = data()
    unit = np.arange(60)
    first, second = (distribution(scores, targets, unit, 60, 0, ["map"], draws=7)["map"] for _ in range(2))
    assert first.shape == (7,) and (first == second).all()


def test_limits_leave_out_what_is_undefined() -> None:
    assert limits(np.array([np.nan, *range(101)])) == pytest.approx((2.5, 97.5))
    assert np.isnan(limits(np.array([np.nan, np.nan]))).all()
