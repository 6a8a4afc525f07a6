"""Several models on the same samples: values against scikit-learn, intervals of paired differences against a plain
loop."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, f1_score, roc_auc_score

from fedmll.evaluation.bootstrap import (
    MIN_SAMPLES,
    Estimate,
    ModelOutput,
    PairedComparison,
    draw_counts,
    has_enough_samples,
)
from fedmll.evaluation.calibration import reliability

N, C, DRAWS = 150, 4, 60
CUTS = np.array([0.3, 0.5, 0.6, 0.4])


@pytest.fixture(scope="module")
def models() -> tuple[dict[str, ModelOutput], np.ndarray]:
    """Class 2 has unknown targets, class 3 has three positives."""
    generator = np.random.default_rng(4)
    targets = (generator.random((N, C)) < 0.3).astype(np.int8)
    targets[:40, 2] = -1
    targets[:, 3] = 0
    targets[:3, 3] = 1
    scores = np.clip(0.35 * targets + generator.random((2, N, C)) * 0.6, 0, 1)
    scores[1, :, 0] = np.round(scores[1, :, 0], 1)  # ties
    return {"a": ModelOutput(scores[0], np.full(C, 0.5)), "b": ModelOutput(scores[1].astype(np.float32), CUTS)}, targets


def ece(scores: np.ndarray, targets: np.ndarray) -> float:
    """Over all entries as one class."""
    return float(reliability(scores.reshape(-1, 1), targets.reshape(-1, 1)).error[0])


def by_hand(output: ModelOutput, targets: np.ndarray, column: int) -> dict[str, float]:
    known = targets[:, column] >= 0
    y, p = targets[known, column], np.asarray(output.probabilities, np.float64)[known, column]
    return {
        "ap": 100 * average_precision_score(y, p),
        "auc": 100 * roc_auc_score(y, p),
        "f1": 100 * f1_score(y, p > output.thresholds[column]),
        "ece": ece(p[:, None], y[:, None]),
    }


def test_values_are_the_exact_ones(models: tuple[dict[str, ModelOutput], np.ndarray]) -> None:
    outputs, targets = models
    compared = PairedComparison(outputs, targets, seed=1, draws=DRAWS)
    assert compared.enough_samples.tolist() == [True, True, True, False]  # three positives are fewer than MIN_SAMPLES
    assert MIN_SAMPLES == 10
    for name, one in outputs.items():
        exact = [by_hand(one, targets, column) for column in range(C)]
        for metric in ("ap", "auc", "f1", "ece"):
            for column in range(C):
                figure = compared.of_class(name, metric, column)
                assert figure.value == pytest.approx(exact[column][metric], abs=1e-4), (name, metric, column)
            if metric != "ece":
                mean = np.mean([exact[column][metric] for column in range(3)])
                assert compared.average(name, metric).value == pytest.approx(mean, abs=1e-4)
        together = ece(np.asarray(one.probabilities, np.float64)[:, :3], targets[:, :3])
        assert compared.average(name, "ece").value == pytest.approx(together, abs=1e-4)


def test_differences_are_paired(models: tuple[dict[str, ModelOutput], np.ndarray]) -> None:
    """A plain loop over the draws, for both models; the interval is that of the differences."""
    outputs, targets = models
    compared = PairedComparison(outputs, targets, seed=1, draws=DRAWS)
    differences = []
    for counts in draw_counts(N, 1, DRAWS):
        for draw in counts.T:
            rows = np.repeat(np.arange(N), draw.astype(int))
            each = [
                np.mean(
                    [
                        by_hand(ModelOutput(t.probabilities[rows], t.thresholds), targets[rows], c)["ap"]
                        for c in range(3)
                    ]
                )
                for t in outputs.values()
            ]
            differences.append(each[1] - each[0])
    low, high = np.percentile(differences, [2.5, 97.5])
    found = compared.difference("b", "a", "ap")
    assert (found.low, found.high) == (pytest.approx(low, abs=1e-3), pytest.approx(high, abs=1e-3))
    assert found.value == pytest.approx(compared.average("b", "ap").value - compared.average("a", "ap").value)
    alone = compared.average("b", "ap")
    assert found.high - found.low != pytest.approx(alone.high - alone.low, rel=0.01)


def test_patients_are_drawn_whole(models: tuple[dict[str, ModelOutput], np.ndarray]) -> None:
    """Every sample five times: as five samples of one patient, the interval is as wide as without the copies."""
    outputs, targets = models
    once = PairedComparison(outputs, targets, seed=1, draws=DRAWS).of_class("a", "auc", 0)
    five = {name: ModelOutput(np.repeat(one.probabilities, 5, axis=0), one.thresholds) for name, one in outputs.items()}
    names = np.repeat([f"{number:03d}" for number in range(N)], 5)
    patients = PairedComparison(five, np.repeat(targets, 5, axis=0), 1, names, DRAWS).of_class("a", "auc", 0)
    samples = PairedComparison(five, np.repeat(targets, 5, axis=0), 1, None, DRAWS).of_class("a", "auc", 0)
    assert patients.high - patients.low == pytest.approx(once.high - once.low, rel=1e-3)
    assert samples.high - samples.low < 0.7 * (once.high - once.low)


def test_the_sign_says_on_which_side_of_zero_the_interval_lies() -> None:
    intervals = ((0.5, 2), (0.2, 0.5), (-2, -0.5), (-0.5, -0.2), (-1, 2), (0.0, 1), (-1, 0.0), (-0.5, 0.5))
    assert [Estimate(1, *ends).sign for ends in intervals] == [1, 1, -1, -1, 0, 0, 0, 0]
    assert Estimate(float("nan"), float("nan"), float("nan")).sign == 0


def test_no_class_has_enough_samples(models: tuple[dict[str, ModelOutput], np.ndarray]) -> None:
    outputs, targets = models
    compared = PairedComparison({"a": ModelOutput(outputs["a"].probabilities[:12], CUTS)}, targets[:12], 0, draws=5)
    assert not compared.enough_samples.any()


def test_a_class_needs_ten_known_positives_and_ten_known_negatives() -> None:
    columns = [[1] * 10 + [0] * 10, [1] * 9 + [0] * 11, [1] * 11 + [0] * 9, [1] * 10 + [0] * 9 + [-1]]
    targets = np.array(columns, np.int8).T
    assert has_enough_samples(targets).tolist() == [True, False, False, False]
    output = ModelOutput(np.full(targets.shape, 0.5), np.full(4, 0.5))
    found = PairedComparison({"a": output}, targets, seed=0, draws=2)
    assert found.positives.tolist() == [10, 9, 11, 10]
    assert found.negatives.tolist() == [10, 11, 9, 9]
    assert found.enough_samples.tolist() == [True, False, False, False]
