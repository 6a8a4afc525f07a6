"""Dataset: views that share one store, also with another process."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmll.core.errors import DataError
from fedmll.data.dataset import Dataset, mapped_file


def make_store() -> np.ndarray:
    return np.arange(5 * 3 * 2 * 2, dtype=np.uint8).reshape(5, 3, 2, 2)


def make_labels() -> np.ndarray:
    return np.array([[1, 0], [0, 1], [-1, 1], [0, 0], [1, -1]], dtype=np.int8)


def mapped_dataset(folder: Path) -> Dataset:
    np.save(folder / "images.npy", make_store())
    return Dataset(np.load(folder / "images.npy", mmap_mode="r"), make_labels(), ("a", "b"))


def test_a_subset_of_a_subset_is_a_view_with_the_right_samples() -> None:
    dataset = Dataset(make_store(), make_labels(), ("a", "b"), groups=np.array(list("vwxyz")))
    part = dataset.subset(np.array([4, 2, 1])).subset(np.array([1, 0]))
    assert part.store is dataset.store
    assert part.rows.tolist() == [2, 4]
    assert part.labels.tolist() == [[-1, 1], [1, -1]]
    assert part.groups is not None
    assert part.groups.tolist() == ["x", "z"]
    assert np.array_equal(part.samples(slice(None)), make_store()[[2, 4]])


def test_mapped_store_is_pickled_by_file_name(tmp_path: Path) -> None:
    dataset = mapped_dataset(tmp_path)
    assert mapped_file(dataset.store) == tmp_path / "images.npy"
    pickled = pickle.dumps(dataset)
    assert make_store().tobytes() not in pickled
    copy = pickle.loads(pickled)
    assert isinstance(copy.store, np.memmap)
    assert np.array_equal(copy.store, make_store())
    assert np.array_equal(copy.labels, make_labels())


def test_part_of_a_mapped_file_is_not_pickled_as_the_whole_file(tmp_path: Path) -> None:
    whole = mapped_dataset(tmp_path)
    part = Dataset(whole.store[1:], make_labels()[1:], ("a", "b"))
    assert mapped_file(part.store) is None
    assert np.array_equal(pickle.loads(pickle.dumps(part)).store, make_store()[1:])


def test_a_store_in_memory_is_pickled_with_its_contents() -> None:
    dataset = Dataset(make_store(), make_labels(), ("a", "b"))
    assert np.array_equal(pickle.loads(pickle.dumps(dataset)).store, make_store())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"labels": np.zeros((5, 3), np.int8)}, r"int8 of shape \(5, 2\)"),
        ({"labels": np.zeros((5, 2), np.int64)}, "int64"),
        ({"store": np.zeros((5, 3, 2, 2), np.float64)}, "uint8 images"),
        ({"groups": np.array(["x"])}, "5 samples and 1 groups"),
    ],
)
def test_arrays_of_wrong_shape_are_rejected(change: dict[str, np.ndarray], said: str) -> None:
    arrays: dict[str, Any] = {"store": make_store(), "labels": make_labels(), "classes": ("a", "b")}
    with pytest.raises(DataError, match=said):
        Dataset(**(arrays | change))
