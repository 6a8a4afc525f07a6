"""All metrics against scikit-learn, called class by class on the known entries."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from sklearn.metrics import (
    average_precision_score,
    balanced_accuracy_score,
    f1_score,
    hamming_loss,
    precision_score,
    recall_score,
    roc_auc_score,
)

from fedmll.core.errors import DataError, FedmllError
from fedmll.evaluation import metrics, ranking
from fedmll.evaluation.metrics import Confusion, accuracy, evaluate, evaluate_per_client
from fedmll.evaluation.thresholds import best_thresholds

NAN = float("nan")


def names(count: int) -> tuple[str, ...]:
    return tuple(f"class {column}" for column in range(count))


def mean(values: list[float]) -> float:
    return float(np.mean(values)) if values else NAN


def oracle(scores: NDArray, targets: NDArray, thresholds: NDArray) -> dict[str, float]:
    """Every metric the slow way: scikit-learn on each class's known entries, then on all known entries."""
    above, least, tuned = scores > 0.5, scores >= 0.5, scores > thresholds
    auc, ap, f1, f1_tuned, precision, recall, bacc = ([] for _ in range(7))
    for column in range(scores.shape[1]):
        known = targets[:, column] >= 0
        truth, score = targets[known, column], scores[known, column]
        if not truth.any():
            continue
        f1.append(f1_score(truth, above[known, column]))
        f1_tuned.append(f1_score(truth, tuned[known, column]))
        precision.append(precision_score(truth, least[known, column], zero_division=0))  # never predicted: 0
        recall.append(recall_score(truth, least[known, column]))
        ap.append(average_precision_score(truth, score))
        if not truth.all():
            auc.append(roc_auc_score(truth, score))
            bacc.append(balanced_accuracy_score(truth, above[known, column]))
    known = targets >= 0
    truth, score = targets[known], scores[known]
    both = 0 < truth.sum() < len(truth)
    c_p, c_r = mean(precision), mean(recall)
    p_all, r_all = c_p * len(precision) / scores.shape[1], c_r * len(recall) / scores.shape[1]
    expected = {
        "macro_auc": mean(auc),
        "auc": mean(auc),
        "micro_auc": roc_auc_score(truth, score) if both else NAN,
        "c_ap": mean(ap),
        "map": mean(ap),
        "o_ap": average_precision_score(truth, score) if truth.any() else NAN,
        "macro_f1": mean(f1),
        "macro_f1_tuned": mean(f1_tuned),
        "c_p": c_p,
        "c_r": c_r,
        "c_f1": 2 * c_p * c_r / (c_p + c_r) if c_p + c_r > 0 else c_p + c_r,  # 0, or NaN where there is no positive
        "c_p_all": p_all,
        "c_r_all": r_all,
        "c_f1_all": 2 * p_all * r_all / (p_all + r_all) if p_all + r_all > 0 else p_all + r_all,
        "bacc": mean(bacc),
    }
    pooled: dict[str, Callable[[], float]] = {
        "micro_f1": lambda: f1_score(truth, above[known]),
        "micro_f1_tuned": lambda: f1_score(truth, tuned[known]),
        "o_p": lambda: precision_score(truth, least[known], zero_division=0),
        "o_r": lambda: recall_score(truth, least[known]),
        "o_f1": lambda: f1_score(truth, least[known]),
    }
    expected |= {name: (call() if truth.any() else NAN) for name, call in pooled.items()}
    expected["hamming"] = hamming_loss(truth, above[known]) if len(truth) else NAN
    return {name: 100 * value for name, value in expected.items()}


def check(scores: NDArray, targets: NDArray) -> metrics.ClassificationReport:
    """evaluate() agrees with scikit-learn on every metric, and warns of nothing; gives the report for more checks."""
    thresholds = np.linspace(0.2, 0.8, scores.shape[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = evaluate(scores, targets, names(scores.shape[1]), thresholds)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = oracle(scores, targets, thresholds)
    assert report.values.keys() == expected.keys()
    for name, value in expected.items():
        assert report.values[name] == pytest.approx(value, rel=0, abs=1e-10, nan_ok=True), name  # 1e-12 of a fraction
        assert type(report.values[name]) is float
    return report


def matrices(
    seed: int, samples: int, count: int, *, dtype: type = np.float64, unknown: float = 0.0, steps: int | None = None
) -> tuple[NDArray, NDArray]:
    """Scores that say something about the targets; `steps` rounds them to a grid that has 0, 0.5 and 1: many ties."""
    rng = np.random.default_rng(seed)
    targets = (rng.random((samples, count)) < rng.uniform(0.05, 0.6, count)).astype(np.int8)
    scores = np.clip(0.3 * targets + rng.random((samples, count)) * 0.8, 0, 1)
    if steps:
        scores = np.round(scores * steps) / steps
    targets[rng.random((samples, count)) < unknown] = -1
    return scores.astype(dtype), targets


# ---- equal to scikit-learn ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("unknown", [0.0, 0.4])
@pytest.mark.parametrize("steps", [None, 4])
def test_equals_scikit_learn(dtype: type, unknown: float, steps: int | None) -> None:
    scores, targets = matrices(1, 300, 9, dtype=dtype, unknown=unknown, steps=steps)
    report = check(scores, targets)
    assert report.left_out == {"ap": (), "auc": (), "f1": (), "bacc": ()}


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 12),
    count=st.integers(1, 4),
    steps=st.sampled_from([None, 1, 2, 4]),
    unknown=st.sampled_from([0.0, 0.5, 0.9]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_equals_scikit_learn_on_tiny_inputs(
    seed: int, samples: int, count: int, steps: int | None, unknown: float, dtype: type
) -> None:
    """Small enough that classes without a positive, a negative or a known entry come up all the time."""
    check(*matrices(seed, samples, count, dtype=dtype, unknown=unknown, steps=steps))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.0, 0.5, 1.0])
def test_constant_scores(value: float, dtype: type) -> None:
    _, targets = matrices(2, 50, 3)
    report = check(np.full(targets.shape, value, dtype=dtype), targets)
    assert report.values["macro_auc"] == 50
    assert report.per_class["ap"] == pytest.approx(100 * targets.mean(axis=0))


def test_one_class_one_sample() -> None:
    report = check(np.array([[0.7]]), np.array([[1]], dtype=np.int8))
    assert report.values["c_ap"] == report.values["macro_f1"] == 100
    assert np.isnan(report.values["auc"]) and np.isnan(report.values["bacc"])


@pytest.mark.parametrize("target", [0, 1, -1])
def test_all_targets_equal(target: int) -> None:
    scores, _ = matrices(3, 20, 4, dtype=np.float32)
    report = check(scores, np.full(scores.shape, target, dtype=np.int8))
    assert np.isnan(report.values["macro_auc"]) and np.isnan(report.values["micro_auc"])
    assert np.isnan(report.values["hamming"]) == (target == -1)
    for name in (
        "macro_f1",
        "micro_f1",
        "c_p",
        "c_r",
        "c_f1",
        "o_p",
        "o_r",
        "o_f1",
        "macro_f1_tuned",
        "micro_f1_tuned",
    ):
        assert np.isnan(report.values[name]) == (target != 1), name


def test_no_samples_is_nan_not_zero() -> None:
    for count in (3, 0):
        empty = np.zeros((0, count))
        report = evaluate(empty, empty.astype(np.int8), names(count))
        assert len(report.values) == 19 and all(np.isnan(value) for value in report.values.values())
        assert np.array_equal(best_thresholds(empty, empty.astype(np.int8)), np.full(count, 0.5))
        clients = evaluate_per_client(empty, empty.astype(np.int8), np.zeros(0, dtype=np.int64), names(count))
        assert all(np.isnan(value) for value in clients.values.values())


def test_minus_zero_ties_with_zero() -> None:
    """The bits of −0.0 are those of a huge integer: it would rank above everything."""
    scores = np.array([[-0.0], [0.0], [0.0], [0.9]], dtype=np.float32)
    targets = np.array([[1], [0], [1], [1]], dtype=np.int8)
    report = check(scores, targets)
    assert report.values["auc"] == pytest.approx(100 * (0.5 + 0.5 + 1) / 3)


def test_float32_neighbours_are_not_ties_and_neither_are_float64_neighbours() -> None:
    targets = np.array([[0], [1]], dtype=np.int8)
    for dtype in (np.float32, np.float64):
        low = dtype(0.7)
        scores = np.array([[low], [np.nextafter(low, dtype(1))]], dtype=dtype)
        assert evaluate(scores, targets, names(1)).values["auc"] == 100
        assert evaluate(scores[::-1], targets, names(1)).values["auc"] == 0


def test_scores_of_unknown_entries_change_nothing() -> None:
    scores, targets = matrices(4, 200, 5, unknown=0.3)
    other = np.where(targets < 0, np.random.default_rng(0).random(scores.shape), scores)
    thresholds = best_thresholds(scores, targets)
    assert np.array_equal(best_thresholds(other, targets), thresholds)
    first, second = (evaluate(matrix, targets, names(5), thresholds) for matrix in (scores, other))
    assert first.values == second.values


# ---- definitions ----------------------------------------------------------------------------------------------------


def test_c_f1_is_not_macro_f1() -> None:
    """Worked by hand. Class a: 1 of 1 predictions right, 1 of 2 found. Class b: 1 of 4 right, 1 of 1 found."""
    scores = np.array([[0.9, 0.9], [0.1, 0.9], [0.1, 0.9], [0.1, 0.9]])
    targets = np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=np.int8)
    values = evaluate(scores, targets, ("a", "b")).values
    assert values["c_p"] == pytest.approx(100 * (1 + 1 / 4) / 2)
    assert values["c_r"] == pytest.approx(100 * (1 / 2 + 1) / 2)
    assert values["c_f1"] == pytest.approx(100 * 2 * 0.625 * 0.75 / (0.625 + 0.75))  # 68.18
    assert values["macro_f1"] == pytest.approx(100 * (2 / 3 + 2 / 5) / 2)  # 53.33
    assert values["o_f1"] == values["micro_f1"] == pytest.approx(100 * 4 / 8)  # 2 found, 3 wrong, 1 missed


def test_exactly_one_half_is_a_prediction_for_c_and_o_only() -> None:
    report = evaluate(np.array([[0.5], [0.4]]), np.array([[1], [0]], dtype=np.int8), ("a",))
    expected = {"c_r": 100, "c_f1": 100, "o_f1": 100, "macro_f1": 0, "micro_f1": 0, "bacc": 50, "hamming": 50}
    assert {name: report.values[name] for name in expected} == expected


def test_left_out_classes_are_named_and_nan() -> None:
    classes = ("fine", "never", "always", "unknown", "missed")
    scores = np.array([[0.9, 0.2, 0.6, 0.1, 0.4], [0.3, 0.8, 0.8, 0.9, 0.1]])
    targets = np.array([[1, 0, 1, -1, 1], [0, 0, 1, -1, 0]], dtype=np.int8)
    report = evaluate(scores, targets, classes, np.full(5, 0.3))
    assert report.left_out == {
        "auc": ("never", "always", "unknown"),
        "bacc": ("never", "always", "unknown"),
        "ap": ("never", "unknown"),
        "f1": ("never", "unknown"),
    }
    np.testing.assert_array_equal(report.per_class["auc"], [100, NAN, NAN, NAN, 100])
    np.testing.assert_array_equal(report.per_class["bacc"], [100, NAN, NAN, NAN, 50])
    np.testing.assert_array_equal(report.per_class["ap"], [100, NAN, 100, NAN, 100])
    # "never" is predicted once and "missed" not at all: only what has a positive can be found or missed
    np.testing.assert_array_equal(report.per_class["f1"], [100, NAN, 100, NAN, 0])
    np.testing.assert_array_equal(report.per_class["precision"], [100, NAN, 100, NAN, 0])
    np.testing.assert_array_equal(report.per_class["recall"], [100, NAN, 100, NAN, 0])
    np.testing.assert_array_equal(report.per_class["positives"], [1, 0, 2, 0, 1])
    np.testing.assert_array_equal(report.per_class["known"], [2, 2, 2, 0, 2])
    assert report.values["macro_f1"] == report.values["c_p"] == report.values["c_r"] == pytest.approx(200 / 3)
    assert report.values["macro_f1_tuned"] == 100
    assert report.values["micro_f1"] == pytest.approx(100 * 6 / 8)  # pooled: the wrong prediction of "never" counts
    assert report.values["hamming"] == pytest.approx(100 * 2 / 8)


def test_classes_without_a_positive_change_no_average_over_classes() -> None:
    scores, targets = matrices(12, 80, 15, unknown=0.2, steps=10)
    targets[:, [2, 11, 14]] = np.minimum(targets[:, [2, 11, 14]], 0)
    with_them, kept = check(scores, targets), np.setdiff1d(np.arange(15), [2, 11, 14])
    alone = evaluate(scores[:, kept], targets[:, kept], names(12), np.linspace(0.2, 0.8, 15)[kept])
    for name in ("macro_auc", "bacc", "map", "macro_f1", "macro_f1_tuned", "c_p", "c_r", "c_f1"):
        assert with_them.values[name] == pytest.approx(alone.values[name]), name
    assert set(with_them.left_out.values()) == {("class 2", "class 11", "class 14")}


def test_the_mean_over_classes_is_the_average() -> None:
    scores, targets = matrices(5, 120, 6, unknown=0.2, steps=8)
    report = evaluate(scores, targets, names(6))
    pairs = {"ap": "c_ap", "auc": "macro_auc", "f1": "macro_f1", "precision": "c_p", "recall": "c_r", "bacc": "bacc"}
    for share, name in pairs.items():
        assert report.per_class[share].mean() == pytest.approx(report.values[name]), name
    assert "macro_f1_tuned" not in report.values


# ---- blocks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("block", [1, 70, 200])  # one column, one column, three columns of 60 samples at a time
def test_block_size_changes_nothing(monkeypatch: pytest.MonkeyPatch, block: int, dtype: type) -> None:
    scores, targets = matrices(6, 60, 7, dtype=dtype, unknown=0.2, steps=20)
    owner = np.random.default_rng(0).integers(0, 5, 60)
    whole, cuts = evaluate(scores, targets, names(7)), best_thresholds(scores, targets)
    clients = evaluate_per_client(scores, targets, owner, names(7))
    monkeypatch.setattr(ranking, "MAX_ENTRIES", block)
    widths = [part.columns.stop - part.columns.start for part in ranking.score_blocks(scores, targets, owner, 5)]
    assert widths == ([3, 3, 1] if block == 200 else [1] * 7)
    assert evaluate(scores, targets, names(7)).values == whole.values
    assert np.array_equal(best_thresholds(scores, targets), cuts)
    assert evaluate_per_client(scores, targets, owner, names(7)).values == pytest.approx(clients.values, rel=1e-14)


# ---- thresholds -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    samples=st.integers(1, 15),
    steps=st.sampled_from([None, 1, 3, 10]),
    dtype=st.sampled_from([np.float32, np.float64]),
)
def test_best_thresholds_by_brute_force(seed: int, samples: int, steps: int | None, dtype: type) -> None:
    scores, targets = matrices(seed, samples, 3, dtype=dtype, unknown=0.2, steps=steps)
    thresholds = best_thresholds(scores, targets)
    assert thresholds.shape == (3,) and thresholds.dtype == np.float64
    for column, threshold in enumerate(thresholds):
        known = targets[:, column] >= 0
        truth, score = targets[known, column], scores[known, column].astype(np.float64)
        if not truth.any():
            assert threshold == 0.5
            continue
        cuts = [-1.0, *score]
        f1 = [f1_score(truth, score > cut, zero_division=0) for cut in cuts]
        highest_cut = max(cut for cut, value in zip(cuts, f1, strict=True) if value == max(f1))
        assert np.array_equal(score > threshold, score > highest_cut)


def test_thresholds_lie_midway_and_are_used_by_evaluate() -> None:
    scores = np.array([[0.2, 0.1, 0.0], [0.1, 0.2, 0.5], [0.05, 0.3, 0.5]])
    targets = np.array([[1, 1, 1], [0, 1, 0], [0, 1, 1]], dtype=np.int8)
    thresholds = best_thresholds(scores, targets)
    assert thresholds == pytest.approx([0.15, 0.05, -0.5])
    values = evaluate(scores, targets, names(3), thresholds).values
    assert values["macro_f1"] == 0  # no score is above 0.5
    assert values["macro_f1_tuned"] == pytest.approx(100 * (1 + 1 + 0.8) / 3)
    assert values["micro_f1_tuned"] == pytest.approx(100 * 12 / 13)


def test_a_class_without_a_validation_positive_keeps_one_half() -> None:
    """Also where all of its validation samples are unknown; on the test data its F1 is that of p > 0.5."""
    validation = np.array([[0.3, 0.9, 0.9], [0.1, 0.8, 0.1]], dtype=np.float32)
    thresholds = best_thresholds(validation, np.array([[1, 0, -1], [0, 0, -1]], dtype=np.int8))
    assert thresholds == pytest.approx([0.2, 0.5, 0.5])
    scores, targets = np.array([[0.3, 0.5, 0.6], [0.1, 0.6, 0.4]]), np.array([[1, 0, 1], [0, 1, 1]], dtype=np.int8)
    report = evaluate(scores, targets, names(3), thresholds)
    assert report.values["macro_f1_tuned"] == pytest.approx((100 + 100 + report.per_class["f1"][2]) / 3)
    assert report.left_out["f1"] == ()  # left out is decided by the test data


def test_a_threshold_between_neighbouring_floats_still_divides_them() -> None:
    for start in (0.1, 0.3, 0.7):  # (a + b) / 2 rounds to a for some and to b for others
        low = np.nextafter(start, 1)
        for value in (start, low):
            scores = np.array([[value], [np.nextafter(value, 1)]])
            threshold = best_thresholds(scores, np.array([[0], [1]], dtype=np.int8))
            assert (scores > threshold).tolist() == [[False], [True]]


# ---- single label ---------------------------------------------------------------------------------------------------


def test_accuracy_counts_samples_with_exactly_one_positive() -> None:
    scores = np.array([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1], [0.1, 0.8, 0.1], [0.9, 0.1, 0], [0.9, 0.1, 0], [0.9, 0.1, 0]])
    targets = np.array(
        [[1, 0, 0], [0, 1, 0], [0, 1, 0], [1, 1, 0], [0, 0, 0], [1, -1, 0]],  # two, none, one and perhaps another
        dtype=np.int8,
    )
    top, by_class = accuracy(scores, targets)
    assert top == pytest.approx(200 / 3)
    np.testing.assert_array_equal(by_class, [100, 50, NAN])
    top, by_class = accuracy(scores[3:], targets[3:])
    assert np.isnan(top) and np.isnan(by_class).all() and by_class.shape == (3,)


# ---- clients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_per_client_is_evaluate_on_each_client(dtype: type) -> None:
    scores, targets = matrices(7, 150, 4, dtype=dtype, unknown=0.2, steps=10)
    owner = np.random.default_rng(1).choice([3, 5, 8, 40], p=[0.6, 0.3, 0.08, 0.02], size=150)
    report = evaluate_per_client(scores, targets, owner, names(4))
    assert report.table["client"].tolist() == [3, 5, 8, 40]
    rows: dict[str, list[float]] = {"auc": [], "map": [], "macro_f1": []}
    for position, client in enumerate([3, 5, 8, 40]):
        mine = owner == client
        own = evaluate(scores[mine], targets[mine], names(4))
        for name in rows:
            rows[name].append(own.values[name])
            assert report.table[name][position] == pytest.approx(own.values[name], nan_ok=True), (client, name)
        assert report.table["samples"][position] == mine.sum()
    for name, values in rows.items():
        assert report.values[f"client_mean_{name}"] == pytest.approx(np.nanmean(values))
        assert report.values[f"client_worst_{name}"] == pytest.approx(np.nanmin(values))


def test_clients_without_a_defined_metric_are_ignored() -> None:
    scores = np.array([[0.9], [0.1], [0.4], [0.6]], dtype=np.float32)
    targets = np.array([[1], [0], [0], [-1]], dtype=np.int8)
    report = evaluate_per_client(scores, targets, np.array([0, 0, 1, 2]), ("a",))
    np.testing.assert_array_equal(report.table["auc"], [100, NAN, NAN])
    assert report.values["client_worst_auc"] == report.values["client_mean_map"] == 100


# ---- errors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, -0.1, 3.0])
def test_scores_that_are_not_probabilities_are_rejected(bad: float) -> None:
    scores, targets = matrices(8, 10, 2)
    scores[4, 1] = bad
    targets[4, 1] = -1  # even where the target is unknown: the model is broken all the same
    for call in (lambda: evaluate(scores, targets, names(2)), lambda: best_thresholds(scores, targets)):
        with pytest.raises(FedmllError, match="NaN, infinite or outside"):
            call()


def test_the_error_message_names_the_lowest_and_the_highest_score() -> None:
    scores, targets = np.array([[0.5], [3.0]]), np.array([[True], [False]])
    with pytest.raises(DataError, match=r"the lowest is 0\.5 and the highest 3\.0"):
        evaluate(scores, targets, ("a",))
    assert evaluate(scores / 3, targets, ("a",)).values["auc"] == 0  # true and false are targets too
    assert evaluate(np.array([[0.2], [1 + 5e-7]]), targets, ("a",)).values["auc"] == 0  # rounded to just over 1
    with pytest.raises(DataError, match="they go from -2 to 1"):
        evaluate(scores / 3, np.array([[1], [-2]]), ("a",))


def test_other_bad_input_is_rejected() -> None:
    scores, targets = matrices(9, 10, 2)
    owner = np.zeros(10, dtype=np.int64)
    with pytest.raises(DataError, match="C = 3 classes"):
        evaluate(scores, targets, names(3))
    with pytest.raises(DataError, match=r"\(10, 2\) and \(9, 2\)"):
        accuracy(scores, targets[:9])
    with pytest.raises(DataError, match="float16"):
        evaluate(scores.astype(np.float16), targets, names(2))
    with pytest.raises(DataError, match="they go from 0 to 2"):
        evaluate(scores, targets * np.int8(2), names(2))
    for thresholds in (np.zeros(3), np.array([0.5, NAN])):
        with pytest.raises(DataError, match="thresholds"):
            evaluate(scores, targets, names(2), thresholds)
    for wrong in (owner[:9], owner.astype(np.float64)):
        with pytest.raises(DataError, match="owner"):
            evaluate_per_client(scores, targets, wrong, names(2))


# ---- speed ----------------------------------------------------------------------------------------------------------


def fastest(call: Callable[[], object], times: int = 3) -> float:
    taken = []
    for _ in range(times):
        begin = time.process_time()  # of this process only: the machine may be busy with other work
        call()
        taken.append(time.process_time() - begin)
    return min(taken)


def test_all_metrics_take_less_time_than_two_of_scikit_learn() -> None:
    scores, targets = matrices(10, 3000, 80, dtype=np.float32)
    ours = fastest(lambda: evaluate(scores, targets, names(80)))
    theirs = fastest(lambda: (roc_auc_score(targets, scores), average_precision_score(targets, scores)))
    assert theirs > 1.5 * ours  # some 5 times when nothing else runs


def test_two_thousand_clients_are_quick() -> None:
    scores, targets = matrices(11, 20_000, 20, dtype=np.float32)
    owner = np.random.default_rng(2).integers(0, 2000, 20_000)
    pooled = fastest(lambda: evaluate(scores, targets, names(20)))
    assert (
        fastest(lambda: evaluate_per_client(scores, targets, owner, names(20))) < 5 * pooled
    )  # about 1; a loop over clients: 20


def test_the_confusion_matrix_at_thresholds_by_hand() -> None:
    """Two classes with the thresholds 0.5 and 0.2; a score that equals the threshold is no prediction."""
    scores = np.array([[0.9, 0.3], [0.5, 0.2], [0.6, 0.1], [0.1, 0.9], [0.7, 0.4]])
    targets = np.array([[1, 0], [1, 1], [0, -1], [0, 1], [-1, 0]], np.int8)
    found = Confusion.at_thresholds(scores, targets, np.array([0.5, 0.2]))
    assert found.cells.T.tolist() == [[1, 1, 1, 1], [0, 2, 1, 1]]  # tn, fp, fn, tp of each class
    assert found.known.tolist() == [4, 4]
