"""Annotation: which client annotates which classes; all other targets are unknown."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import small
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from fedmll.core.errors import ConfigError
from fedmll.data.annotation import annotate
from fedmll.data.federation import build


def test_annotation_none_knows_everything_and_needs_no_memory() -> None:
    known = annotate("none", 41_131, 1_628, 0)
    assert known.shape == (41_131, 1_628) and known.strides == (0, 0)
    assert known[0, 0]


@settings(max_examples=100, deadline=None)
@given(clients=st.integers(1, 30), classes=st.integers(1, 20), missing=st.integers(0, 19), seed=st.integers(0, 10**6))
def test_each_client_misses_m_classes_and_some_client_knows_each_class(
    clients: int, classes: int, missing: int, seed: int
) -> None:
    assume(missing < classes <= clients * (classes - missing))
    known = annotate("missing", clients, classes, seed, missing=missing)
    assert known.shape == (clients, classes)
    assert ((~known).sum(axis=1) == missing).all()
    assert known.any(axis=0).all()
    assert (known == annotate("missing", clients, classes, seed, missing=missing)).all()


def test_every_class_is_known_if_there_is_just_enough_annotation() -> None:
    """10 clients with one class each of 10: a random draw covers all of them once in 2,755 times."""
    for seed in range(20):
        known = annotate("missing", 10, 10, seed, missing=9)
        assert (known.sum(axis=0) == 1).all() and (known.sum(axis=1) == 1).all()


def test_missing_classes_are_drawn_at_random() -> None:
    known = annotate("missing", 20_000, 5, 0, missing=2)
    assert np.allclose(known.mean(axis=0), 0.6, atol=0.02)
    pairs, counts = np.unique(known, axis=0, return_counts=True)
    assert len(pairs) == 10 and np.allclose(counts / 20_000, 0.1, atol=0.01)
    assert (annotate("missing", 20, 5, 0, missing=2) != annotate("missing", 20, 5, 1, missing=2)).any()


def test_one_class_assigns_classes_in_turn() -> None:
    assert annotate("one-class", 5, 3, 0).astype(int).tolist() == [
        [1, 0, 0],
        [0, 1, 0],
        [0, 0, 1],
        [1, 0, 0],
        [0, 1, 0],
    ]
    assert annotate("one-class", 12, 12, 0).astype(int).tolist() == np.eye(12).tolist()  # just enough clients


def test_default_is_no_missing_class() -> None:
    assert annotate("missing", 3, 4, 0).all()


@pytest.mark.parametrize(
    ("kind", "clients", "missing", "hint"),
    [
        ("missing", 10, 4, "annotation.missing = 4 is not possible with 4 classes"),
        ("missing", 10, 4, "each client must annotate at least one. Use 0 to 3."),
        ("missing", 10, -1, "annotation.missing = -1 is not possible"),
        ("missing", 1, 1, "Lower annotation.missing to 0 or less"),
        ("missing", 3, 3, "Lower annotation.missing to 2 or less"),
        ("one-class", 3, 0, "class number 3 (counted from 0) of the 4 without a client that annotates it"),
        ("misssing", 3, 0, "did you mean 'missing'?"),
    ],
)
def test_class_without_annotating_client_is_rejected(kind: str, clients: int, missing: int, hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        annotate(kind, clients, 4, 0, missing=missing)
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_targets_of_other_classes_are_unknown_and_all_others_are_unchanged() -> None:
    built = build(small(partition__clients=5, annotation__kind="missing", annotation__missing=4))
    for client, rows in enumerate(built.samples):
        known = built.annotated[client]
        assert known.sum() == 6
        assert (built.train.labels[rows][:, ~known] == -1).all()
        assert np.array_equal(built.train.labels[rows][:, known], built.true_labels[rows][:, known])
