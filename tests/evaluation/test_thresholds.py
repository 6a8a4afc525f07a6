"""Thresholds: from samples against brute force, from histograms by hand, and the guarantee of conformal recall by
simulation."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll.core.errors import ConfigError
from fedmll.evaluation import thresholds
from fedmll.evaluation.calibration import apply_calibration
from fedmll.evaluation.histograms import BINS, EDGES, score_histograms
from fedmll.evaluation.metrics import evaluate
from fedmll.evaluation.thresholds import best_thresholds


def sample(samples: int, classes: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    targets = (generator.random((samples, classes)) < np.linspace(0.05, 0.5, classes)).astype(np.int8)
    logits = generator.normal(size=targets.shape) * 1.5 + 2 * targets - 2
    targets[generator.random(targets.shape) < 0.1] = -1
    return (1 / (1 + np.exp(-logits))).astype(np.float32), targets


def bins_of(positives: dict[int, int], negatives: dict[int, int]) -> np.ndarray:
    counts = np.zeros((2, 1, BINS), np.int64)
    for side, given in enumerate((positives, negatives)):
        for place, number in given.items():
            counts[side, 0, place] = number
    return counts


def above(scores: np.ndarray, threshold: float) -> np.ndarray:
    return scores > threshold


HAND = bins_of({700: 2, 600: 1, 400: 1}, {650: 1, 500: 1, 400: 2, 10: 5})


def edge(place: int) -> float:
    """The lowest score of a bin."""
    return float(EDGES[place - 1])


class TestByHand:
    def test_best_f1(self) -> None:
        # from 700 on: 2·2/(2+4) = 0.667; from 650: 4/7; from 600: 6/8 = 0.75; from 500: 6/9; from 400: 8/12
        # the next lower score is in 500: midway between the two
        assert thresholds.best_f1_thresholds(HAND)[0] == pytest.approx((edge(600) + edge(500)) / 2, abs=5e-4)

    def test_of_equally_good_thresholds_the_highest_is_taken(self) -> None:
        # from 700 on 2·1/(1+2) = 2/3; from 500: 2·2/(4+2) = 2/3
        found = thresholds.best_f1_thresholds(bins_of({700: 1, 500: 1}, {600: 1, 500: 1}))[0]
        assert found == pytest.approx((edge(700) + edge(600)) / 2, abs=5e-4)

    def test_the_lowest_score_is_midway_to_0_and_its_neighbour_has_no_middle(self) -> None:
        assert thresholds.best_f1_thresholds(bins_of({700: 1}, {}))[0] == pytest.approx(edge(700) / 2, abs=1e-4)
        assert edge(700) > thresholds.best_f1_thresholds(bins_of({700: 1}, {699: 1}))[0] > edge(699)
        assert thresholds.best_f1_thresholds(bins_of({0: 1}, {}))[0] == -0.5

    @pytest.mark.parametrize(("recall", "place"), [(0.5, 700), (0.51, 600), (0.75, 600), (0.76, 400), (0.99, 400)])
    def test_thresholds_for_recall(self, recall: float, place: int) -> None:
        assert edge(place) > thresholds.thresholds_for_recall(HAND, recall)[0] > edge(place - 1)

    @pytest.mark.parametrize(("precision", "place"), [(0.99, 651), (0.75, 501), (0.6, 401), (0.5, 11), (0.3, 0)])
    def test_thresholds_for_precision(self, precision: float, place: int) -> None:
        # from 651 on 2/2; from 501: 3/4; from 401: 3/5; from 11: 4/8; all: 4/13 = 0.31
        found = thresholds.thresholds_for_precision(HAND, precision)[0]
        assert found == -0.5 if place == 0 else edge(place) > found > edge(place - 1)

    def test_a_precision_that_no_threshold_reaches(self) -> None:
        assert thresholds.thresholds_for_precision(bins_of({400: 1}, {500: 3}), 0.5)[0] == thresholds.NEVER_PREDICTED

    @pytest.mark.parametrize(("recall", "place"), [(0.9, 0), (0.8, 400), (0.61, 400), (0.6, 600), (0.4, 700)])
    def test_conformal_recall(self, recall: float, place: int) -> None:
        # four positives: k = ⌊(1 − recall)·5⌋ = 0, 1, 1, 2, 3
        found = thresholds.conformal_recall_thresholds(HAND, recall)[0]
        assert found == -0.5 if place == 0 else edge(place) > found > edge(place - 1)

    def test_a_class_without_positives(self) -> None:
        nothing = bins_of({}, {400: 7})
        assert thresholds.best_f1_thresholds(nothing)[0] == thresholds.DEFAULT_THRESHOLD
        assert thresholds.thresholds_for_recall(nothing, 0.9)[0] == thresholds.DEFAULT_THRESHOLD
        assert thresholds.thresholds_for_precision(nothing, 0.9)[0] == thresholds.DEFAULT_THRESHOLD
        assert thresholds.conformal_recall_thresholds(nothing, 0.9)[0] == -0.5

    def test_the_confusion_matrix_at_a_threshold(self) -> None:
        found = thresholds.confusion_at(
            HAND, np.array([edge(600) - 1e-9])
        )  # from 600 on: three of four positives, one negative
        assert found.cells[:, 0].tolist() == [8, 1, 1, 3]
        assert thresholds.confusion_at(HAND, np.array([-0.5])).cells[:, 0].tolist() == [0, 9, 0, 4]
        assert thresholds.confusion_at(HAND, np.array([thresholds.NEVER_PREDICTED])).cells[:, 0].tolist() == [
            9,
            0,
            4,
            0,
        ]
        half = bins_of({BINS // 2: 3}, {BINS // 2 - 1: 2})
        assert thresholds.confusion_at(half, np.array([thresholds.DEFAULT_THRESHOLD])).cells[:, 0].tolist() == [
            2,
            0,
            0,
            3,
        ]

    def test_a_positive_in_the_lowest_bin_counts(self) -> None:
        assert thresholds.thresholds_for_precision(bins_of({0: 1}, {}), 0.9)[0] == -0.5

    @pytest.mark.parametrize("share", [0.0, 1.0, -0.2, 90.0])
    def test_a_percentage_is_not_a_share(self, share: float) -> None:
        for function in (
            thresholds.thresholds_for_recall,
            thresholds.thresholds_for_precision,
            thresholds.conformal_recall_thresholds,
        ):
            with pytest.raises(ConfigError, match="between 0 and 1"):
                function(HAND, share)


def test_f1_is_as_high_as_with_the_exact_thresholds() -> None:
    scores, targets = sample(3000, 12, 1)
    names = [str(column) for column in range(12)]
    exact = evaluate(scores, targets, names, best_thresholds(scores, targets)).values["macro_f1_tuned"]
    summed = evaluate(scores, targets, names, thresholds.best_f1_thresholds(score_histograms(scores, targets))).values[
        "macro_f1_tuned"
    ]
    assert exact - 0.2 <= summed <= exact


def test_a_threshold_means_the_same_for_scores_and_for_bins() -> None:
    """p > threshold holds for exactly the samples of the bins above it, also where a score lies on an edge."""
    scores, targets = sample(2000, 5, 2)
    scores[:500, 0] = EDGES.astype(np.float32)[np.arange(500) + 200]
    counts = score_histograms(scores, targets)
    for threshold_of in (thresholds.best_f1_thresholds, lambda counts: thresholds.thresholds_for_recall(counts, 0.8)):
        found = threshold_of(counts)
        for column in range(5):
            kept = found[column] <= thresholds.THRESHOLDS
            positive = targets[:, column] == 1
            assert above(scores[positive, column], found[column]).sum() == counts[0, column, kept].sum()


def test_the_recall_on_new_samples_is_at_least_the_wanted_one() -> None:
    """On average over 200 random samples; it exceeds the wanted recall by at most a bin and 1/(n + 1)."""
    reached = []
    for draw in range(200):
        scores, targets = sample(400, 1, 1000 + draw)
        targets[:, 0] = np.where(targets[:, 0] < 0, 0, targets[:, 0])
        half = len(scores) // 2
        threshold = thresholds.conformal_recall_thresholds(score_histograms(scores[:half], targets[:half]), 0.8)[0]
        new = scores[half:, 0][targets[half:, 0] == 1]
        reached.append(above(new, threshold).mean() if len(new) else 1.0)
    error = np.std(reached) / np.sqrt(len(reached))
    assert 0.8 - 2 * error <= np.mean(reached) <= 0.8 + 1 / 9 + 2 * error


def test_the_guarantee_holds_for_sums_over_sites() -> None:
    """99 positives at five sites, 90 % wanted: k = ⌊0.1 · 100⌋ = 10, so a new one is found with probability 90/100, and
    a bin's width more. One column per resample."""
    generator = np.random.default_rng(5)
    scores, new = (1 / (1 + np.exp(-2 * generator.standard_normal((size, 200)) - 1)) for size in (99, 400))
    parts = np.array_split(np.arange(99), 5)
    counts = sum(score_histograms(scores[rows], np.ones((len(rows), 200), np.int8)) for rows in parts)
    reached = (new > thresholds.conformal_recall_thresholds(counts, 0.9)).mean(axis=0)  # type: ignore[arg-type]
    error = np.std(reached) / np.sqrt(200)
    assert error == pytest.approx(
        np.sqrt(0.9 * 0.1 * (1 / 101 + 1 / 400) / 200), rel=0.2
    )  # of Beta(90, 10), and of 400
    assert 0.9 - 3 * error <= reached.mean() <= 0.9 + 0.002 + 3 * error  # 0.002: the density there × 1/128


class TestThresholdChoice:
    def choice(self, value: float, calibration: np.ndarray | None) -> thresholds.ThresholdChoice:
        raw = np.array([value, value])
        return thresholds.ThresholdChoice(goal="f1", raw_thresholds=raw, thresholds=raw / 2, calibration=calibration)

    def test_each_class_is_taken_from_one_of_two_choices(self) -> None:
        this, other = self.choice(0.2, np.array([[2.0, 1.0]] * 2)), self.choice(0.6, np.array([[3.0, -1.0]] * 2))
        found = this.where(np.array([True, False]), other)
        assert found.raw_thresholds.tolist() == [0.2, 0.6]
        assert found.thresholds.tolist() == [0.1, 0.3]
        assert found.calibration is not None and found.calibration.tolist() == [[2, 1], [3, -1]]

    def test_two_choices_without_calibration_give_one_without(self) -> None:
        assert self.choice(0.2, None).where(np.array([True, False]), self.choice(0.6, None)).calibration is None

    def test_a_threshold_below_0_becomes_0(self) -> None:
        found = self.choice(-0.5, None).within_0_and_1()
        assert (found.raw_thresholds.tolist(), found.thresholds.tolist()) == ([0, 0], [0, 0])
        assert self.choice(0.4, None).within_0_and_1().raw_thresholds.tolist() == [0.4, 0.4]


def test_a_calibrated_threshold_makes_the_same_predictions() -> None:
    scores, targets = sample(2000, 4, 3)
    found = thresholds.choose_thresholds(score_histograms(scores, targets), "f1", "platt")
    assert found.calibration is not None and not np.array_equal(found.thresholds, found.raw_thresholds)
    calibrated = apply_calibration(scores, found.calibration)
    assert ((calibrated > found.thresholds) == (scores > found.raw_thresholds)).all()


def test_calibration_does_not_reverse_a_class_and_does_not_move_always_and_never() -> None:
    # the class has its positives at the low scores; a logistic regression would have a negative slope
    reversed_class = bins_of({300: 50, 900: 1}, {700: 50, 200: 1})
    found = thresholds.choose_thresholds(reversed_class, "conformal_recall=0.99", "platt")
    assert found.calibration is not None and found.calibration.tolist() == [[1, 0]]
    assert found.thresholds.tolist() == [-0.5]  # ⌊0.01 · 52⌋ = 0: too few positives
    never = thresholds.choose_thresholds(bins_of({400: 1}, {500: 3, 300: 9}), "precision=0.9", "platt")
    assert never.thresholds.tolist() == never.raw_thresholds.tolist() == [1.0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.34214, "0.3421"), (0.00001234, "0.00001234"), (0.9999987654, "0.999998765"), (-0.5, "-0.5"), (1.0, "1")],
)
def test_a_threshold_is_shown_with_four_significant_digits(value: float, text: str) -> None:
    assert thresholds.format_threshold(value) == text
