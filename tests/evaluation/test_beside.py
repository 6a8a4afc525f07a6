"""Models beside each other: the values of scikit-learn, intervals of paired drawings done by hand."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fedmll.evaluation.beside import FEW, Beside, Figure, Told
from fedmll.evaluation.intervals import drawings
from fedmll.report.by_threshold import reliability
from fedmll.running.predictions import Predictions

N, C, DRAWS = 150, 4, 60
CUTS = np.array([0.3, 0.5, 0.6, 0.4])


@pytest.fixture(scope="module")
def world() -> tuple[dict[str, Told], np.ndarray]:
    """Class 2 has unknown targets, class 3 has three positives."""
    generator = np.random.default_rng(4)
    targets = (generator.random((N, C)) < 0.3).astype(np.int8)
    targets[:40, 2] = -1
    targets[:, 3] = 0
    targets[:3, 3] = 1
    scores = np.clip(0.35 * targets + generator.random((2, N, C)) * 0.6, 0, 1)
    scores[1, :, 0] = np.round(scores[1, :, 0], 1)  # ties
    return {"a": Told(scores[0], np.full(C, 0.5)), "b": Told(scores[1].astype(np.float32), CUTS)}, targets


def ece(scores: np.ndarray, targets: np.ndarray) -> float:
    rows, classes = np.arange(len(scores)), tuple(map(str, range(scores.shape[1])))
    return reliability([Predictions(classes, scores, targets, rows, None, None)])[1]


def by_hand(told: Told, targets: np.ndarray, column: int) -> dict[str, float]:
    known = targets[:, column] >= 0
    y, p = targets[known, column], np.asarray(told.probabilities, np.float64)[known, column]
    return {
        "map": 100 * average_precision_score(y, p),
        "auc": 100 * roc_auc_score(y, p),
        "f1": 100 * f1_score(y, p > told.thresholds[column]),
        "ece": ece(p[:, None], y[:, None]),
    }


def test_values_are_the_exact_ones(world: tuple[dict[str, Told], np.ndarray]) -> None:
    told, targets = world
    beside = Beside(told, targets, seed=1, draws=DRAWS)
    assert beside.enough.tolist() == [True, True, True, False]  # three positives are fewer than FEW
    assert FEW == 10
    for name, one in told.items():
        exact = [by_hand(one, targets, column) for column in range(C)]
        for metric in ("map", "auc", "f1", "ece"):
            for column in range(C):
                figure = beside.of_class(name, metric, column)
                assert figure.value == pytest.approx(exact[column][metric], abs=1e-4), (name, metric, column)
            if metric != "ece":
                mean = np.mean([exact[column][metric] for column in range(3)])
                assert beside.average(name, metric).value == pytest.approx(mean, abs=1e-4)
        together = ece(np.asarray(one.probabilities, np.float64)[:, :3], targets[:, :3])
        assert beside.average(name, "ece").value == pytest.approx(together, abs=1e-4)


def test_differences_are_paired(world: tuple[dict[str, Told], np.ndarray]) -> None:
    """Each drawing written out, for both models; the ends are those of the differences."""
    told, targets = world
    beside = Beside(told, targets, seed=1, draws=DRAWS)
    differences = []
    for counts in drawings(N, 1, DRAWS):
        for drawing in counts.T:
            rows = np.repeat(np.arange(N), drawing.astype(int))
            each = [
                np.mean([by_hand(Told(t.probabilities[rows], t.thresholds), targets[rows], c)["map"] for c in range(3)])
                for t in told.values()
            ]
            differences.append(each[1] - each[0])
    low, high = np.percentile(differences, [2.5, 97.5])
    found = beside.difference("b", "a", "map")
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert found.value == pytest.approx(beside.average("b", "map").value - beside.average("a", "map").value)
    alone = beside.average("b", "map")
    assert found.high - found.low != pytest.approx(alone.high - alone.low, rel=0.01)


def test_patients_are_drawn_whole(world: tuple[dict[str, Told], np.ndarray]) -> None:
    """Every sample five times: as five of one patient the interval is as wide as without the copies."""
    told, targets = world
    once = Beside(told, targets, seed=1, draws=DRAWS).of_class("a", "auc", 0)
    five = {name: Told(np.repeat(one.probabilities, 5, axis=0), one.thresholds) for name, one in told.items()}
    names = np.repeat([f"{number:03d}" for number in range(N)], 5)
    patients = Beside(five, np.repeat(targets, 5, axis=0), 1, names, DRAWS).of_class("a", "auc", 0)
    samples = Beside(five, np.repeat(targets, 5, axis=0), 1, None, DRAWS).of_class("a", "auc", 0)
    assert patients.high - patients.low == pytest.approx(once.high - once.low, rel=1e-3)
    assert samples.high - samples.low < 0.7 * (once.high - once.low)


def test_which_side_of_zero() -> None:
    assert [Figure(1, *ends).sign for ends in ((0.5, 2), (-2, -0.5), (-1, 2), (0.0, 1))] == [1, -1, 0, 0]
    assert Figure(float("nan"), float("nan"), float("nan")).sign == 0


def test_nothing_is_said_where_every_class_is_small(world: tuple[dict[str, Told], np.ndarray]) -> None:
    told, targets = world
    beside = Beside({"a": Told(told["a"].probabilities[:12], CUTS)}, targets[:12], 0, draws=5)
    assert not beside.enough.any()
