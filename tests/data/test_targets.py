"""Targets of sources, and the split of samples and patients into training and test data."""

from __future__ import annotations

import numpy as np
import pytest

from fedmll.core.errors import DataError
from fedmll.data.dataset import Dataset
from fedmll.data.targets import (
    check_classes,
    choose_whole_groups,
    draw_split,
    find_split_groups,
    make_splits,
    one_hot,
    parse_targets,
)


def dataset(labels: np.ndarray, patients: np.ndarray | None = None) -> Dataset:
    classes = tuple(f"class {number}" for number in range(labels.shape[1]))
    return Dataset(np.zeros((len(labels), 1, 2, 2), np.uint8), labels.astype(np.int8), classes, patients=patients)


def test_one_hot_and_class_numbers_out_of_range() -> None:
    assert one_hot(np.array([2, 0]), 3, "here").tolist() == [[0, 0, 1], [1, 0, 0]]
    for wrong in (-1, 3):
        with pytest.raises(DataError, match=f"here: sample 1 has the class number {wrong}; there are 3 classes"):
            one_hot(np.array([0, wrong, wrong]), 3, "here")


def test_repeated_class_name_is_rejected() -> None:
    check_classes(("a", "b"), "here")
    with pytest.raises(DataError, match="here: the class 'b' appears twice"):
        check_classes(("a", "b", "c", "b"), "here")


def test_targets_other_than_1_0_and_minus_1_are_rejected() -> None:
    assert parse_targets(np.array([[1, -1, 0]]), ("a", "b", "c"), "here").tolist() == [[1, -1, 0]]
    assert parse_targets(np.array([[True, False]]), ("a", "b"), "here").tolist() == [[1, 0]]
    assert parse_targets(np.array([1, 0], np.uint8), ("a", "b"), "here").tolist() == [[0, 1], [1, 0]]
    for wrong in (2, -2):
        with pytest.raises(DataError, match=f"the label of sample 0 for class 'b' is {wrong}"):
            parse_targets(np.array([[1, wrong]]), ("a", "b"), "here")
    with pytest.raises(DataError, match=r"labels have the shape \(1, 2, 1\)\."):
        parse_targets(np.zeros((1, 2, 1), int), ("a", "b"), "here")


def test_a_fifth_of_every_stratum_is_test() -> None:
    """Strata are the rarest present class: 10 of class 0 only, 10 with class 1 too, 10 of none."""
    labels = np.zeros((30, 2), np.int8)
    labels[:20, 0] = 1
    labels[10:20, 1] = 1
    split = draw_split(labels)
    assert [int((split[start : start + 10] == 2).sum()) for start in (0, 10, 20)] == [2, 2, 2]
    assert set(split.tolist()) == {0, 2}


@pytest.mark.parametrize(("positives", "tested"), [(1, 0), (2, 0), (3, 1), (7, 1), (8, 2)])
def test_rare_classes_are_rounded(positives: int, tested: int) -> None:
    labels = np.zeros((100, 2), np.int8)
    labels[:, 0] = 1
    labels[:positives, 1] = 1
    assert (draw_split(labels)[:positives] == 2).sum() == tested


def test_unknown_is_not_present() -> None:
    labels = np.full((20, 2), -1, np.int8)
    labels[:10, 0] = 1
    assert [(draw_split(labels)[part] == 2).sum() for part in (slice(10), slice(10, 20))] == [2, 2]


def test_groups_are_drawn_whole_about_a_fifth_and_rare_classes_stay_in_training() -> None:
    generator = np.random.default_rng(0)
    patients = np.repeat([f"p{number}" for number in range(50)], generator.integers(1, 12, 50))
    labels = (generator.random((len(patients), 4)) < 0.3).astype(np.int8)
    labels[:, 3] = patients == "p7"
    split = draw_split(labels, patients)
    tested = set(patients[split == 2].tolist())
    assert not tested & set(patients[split == 0].tolist())
    assert 0.15 < (split == 2).mean() < 0.25
    assert "p7" not in tested, "the only patient of a class"
    assert np.array_equal(split, draw_split(labels, patients))
    alone = draw_split(labels, np.arange(len(labels)).astype(str))
    assert abs((alone == 2).mean() - 0.2) < 0.02


def test_group_is_chosen_if_half_of_it_fits_and_the_last_never() -> None:
    sizes = np.array([4, 4, 3, 1, 1])
    chosen, room = choose_whole_groups(np.array([0, 1, 2, 3, 4]), sizes, 6.0)
    assert (chosen.tolist(), room) == ([0, 1], -2.0), "4 of 6, then 4 of the 2 that are left"
    chosen, room = choose_whole_groups(np.array([0, 2, 3, 4]), sizes, 1.9)
    assert (chosen.tolist(), room) == ([2], -1.1)
    assert choose_whole_groups(np.array([3]), sizes, 6.0)[0].tolist() == []
    assert choose_whole_groups(np.array([3, 4]), sizes, 0.0)[0].tolist() == []


def test_remaining_room_of_small_strata_is_carried_over() -> None:
    """Two patients a class: a fifth of two is none, but a fifth of all is."""
    patients = np.repeat([f"p{number:02d}" for number in range(28)], 5)
    labels = (np.arange(14) == np.repeat(np.arange(28) // 2, 5)[:, None]).astype(np.int8)
    split = draw_split(labels, patients)
    assert 0.15 < (split == 2).mean() < 0.25
    assert (labels[split == 0].sum(axis=0) > 0).all(), "every class has a patient left"


def test_patients_in_two_parts_of_a_split_are_found() -> None:
    patients = np.array(["b", "a", "b", "c", "a", "c"])
    assert find_split_groups(np.array([0, 2, 0, 0, 1, 2]), patients) == ["a", "c"]
    assert find_split_groups(np.array([0, 2, 0, 1, 2, 1]), patients) == []


def test_split_is_by_patient_only_with_a_group() -> None:
    labels = np.ones((40, 1))
    patients = np.repeat([f"p{number}" for number in range(8)], 5)
    loose = make_splits(dataset(labels, patients), None, "here")
    assert loose.test.patients is not None
    assert len(set(loose.test.patients.tolist())) > 2
    whole = make_splits(dataset(labels, patients), None, "here", group="who")
    assert whole.test.patients is not None
    assert (len(whole.test), len(set(whole.test.patients.tolist()))) == (10, 2)


def test_given_split_is_used() -> None:
    parts = make_splits(dataset(np.ones((4, 1))), np.array([0, 2, 1, 0]), "here")
    assert parts.validation is not None
    assert [part.rows.tolist() for part in (parts.train, parts.validation, parts.test)] == [[0, 3], [2], [1]]
    for wrong in (-1, 3):
        with pytest.raises(DataError, match=f"here: sample 2 has the split {wrong}"):
            make_splits(dataset(np.ones((4, 1))), np.array([0, 2, wrong, 0]), "here")
    for split, name in (([0, 0], "test"), ([2, 1], "training")):
        with pytest.raises(DataError, match=f"no {name} samples among its 2. Mark some"):
            make_splits(dataset(np.ones((2, 1))), np.array(split), "here")
    with pytest.raises(DataError, match="at least 3 per class"):
        make_splits(dataset(np.ones((2, 1))), None, "here")


def test_at_most_five_classes_without_positives_are_named() -> None:
    labels = np.zeros((2, 7))
    labels[:, 0] = 1
    split = np.array([0, 2])
    with pytest.raises(DataError, match=r"the classes 'class 1', .*'class 5' and 1 more \(not a single positive in 1"):
        make_splits(dataset(labels), split, "here")
    with pytest.raises(DataError, match=r"the classes 'class 1', .*'class 5' \(not"):
        make_splits(dataset(labels[:, :6]), split, "here")
    with pytest.raises(DataError, match=r"the class 'class 1' \("):
        make_splits(dataset(labels[:, :2]), split, "here")
    make_splits(dataset(labels), split, "here", require_positives=False)


def test_split_with_another_share_of_test_samples() -> None:
    """FedMLP divides ChestX-ray14 7:3."""
    rng = np.random.default_rng(0)
    labels = (rng.random((3000, 8)) < 0.1).astype(np.int8)
    patients = rng.integers(0, 900, 3000).astype(str)
    split = draw_split(labels, patients, 0.3)
    assert abs((split == 2).mean() - 0.3) < 0.005
    assert not set(patients[split == 0]) & set(patients[split == 2])
    assert abs((draw_split(labels, None, 0.3) == 2).mean() - 0.3) < 0.005
