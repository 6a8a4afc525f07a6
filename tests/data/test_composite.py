"""Composites compared with their definition: which source image is where, and how many there are."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from fedmll.core.errors import ConfigError, DataError
from fedmll.data.composite import CompositeOptions, compose
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images import cache


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def numbered_images(counts: list[int], first: int = 1, side: int = 4) -> Dataset:
    """Every image is recognisable: its pixels are its number in base 250 (two channels), never zero; classes mixed."""
    total = sum(counts)
    numbers = np.arange(first, first + total)
    store = np.empty((total, 2, side, side), dtype=np.uint8)
    store[:, 0] = (numbers // 250 + 1)[:, None, None]
    store[:, 1] = (numbers % 250 + 1)[:, None, None]
    labels = np.zeros((total, len(counts)), dtype=np.int8)
    classes = np.random.default_rng(3).permutation(np.repeat(np.arange(len(counts)), counts))
    labels[np.arange(total), classes] = 1
    return Dataset(store, labels, tuple(f"class {number}" for number in range(len(counts))))


def source(train: int | list[int] = 100, test: int | list[int] = 50, classes: int = 10) -> Splits:
    return Splits(
        numbered_images([train] * classes if isinstance(train, int) else train),
        numbered_images([test] * classes if isinstance(test, int) else test),
    )


def cells_of(canvas: np.ndarray, down: int, across: int) -> list[np.ndarray]:
    return [cell for row in np.split(canvas, down, axis=1) for cell in np.split(row, across, axis=2)]


def identify(cell: np.ndarray, dataset: Dataset) -> int:
    """The row of `dataset` whose image this is, pixel for pixel."""
    row = (int(cell[0, 0, 0]) - 1) * 250 + int(cell[1, 0, 0]) - 1 - 1
    assert np.array_equal(cell, dataset.store[row])
    return row


def pair_counts(labels: np.ndarray) -> np.ndarray:
    paired = labels[labels.sum(axis=1) == 2].astype(np.int64)
    return paired.T @ paired


def used_rows(made: Dataset, dataset: Dataset, down: int = 2, across: int = 2) -> list[int]:
    """Check every canvas against its label; returns the source images in it."""
    used = []
    for position in range(len(made)):
        cells = [cell for cell in cells_of(made.store[position], down, across) if cell.any()]
        rows = [identify(cell, dataset) for cell in cells]
        expected = dataset.labels[rows].sum(axis=0)
        assert np.array_equal(made.labels[position], expected), "the label is that of the images on the canvas"
        used += rows
    return used


def test_quadrants_hold_whole_source_images_of_the_labels_and_zeros() -> None:
    given = source()
    made = compose(given, CompositeOptions(), seed=1)
    assert made.train.sample_shape == (2, 8, 8)
    assert made.train.labels.dtype == np.int8
    used = used_rows(made.train, given.train)
    assert len(used) == len(set(used)), "a source image is used at most once"
    assert len(used) == 62 * 10 + 45 * 4 * 2


def test_proportional_gives_the_papers_numbers() -> None:
    made = compose(
        Splits(numbered_images([5000] * 10, side=1), numbered_images([1000] * 10, side=1)), CompositeOptions(), 0
    )
    for part, singles, pairs in ((made.train, 3100, 200), (made.test, 620, 40)):
        assert len(part) == singles * 10 + 45 * pairs
        single = part.labels[part.labels.sum(axis=1) == 1]
        assert single.sum(axis=0).tolist() == [singles] * 10
        found = pair_counts(part.labels)
        assert [found[pair] for pair in combinations(range(10), 2)] == [pairs] * 45
    assert len(made.train) == 40_000


def test_all_quadrants_and_all_pairs_of_quadrants_are_used() -> None:
    given = source()
    made = compose(given, CompositeOptions(), seed=1).train
    places = {
        tuple(place for place, cell in enumerate(cells_of(canvas, 2, 2)) if cell.any())
        for canvas in np.asarray(made.store)
    }
    assert places == {(0,), (1,), (2,), (3,), *combinations(range(4), 2)}


def test_quadrants_are_drawn_evenly_for_both_images() -> None:
    given = Splits(numbered_images([4000, 4000], side=1), numbered_images([10, 10], side=1))
    made = compose(given, CompositeOptions(singles=0, pairs=4000), seed=5).train
    filled = np.asarray(made.store)[:, 1].astype(bool).reshape(len(made), 4)
    assert (filled.sum(axis=1) == 2).all()
    # 4,000 draws of 2 of 4: each expected 2,000 times with a standard deviation of 32
    assert np.abs(filled.sum(axis=0) - 2000).max() < 150


def test_side_by_side_places_two_images_next_to_each_other() -> None:
    given = source()
    made = compose(given, CompositeOptions(layout="side-by-side"), seed=1).train
    assert made.sample_shape == (2, 4, 8)
    used = used_rows(made, given.train, down=1, across=2)
    assert len(set(used)) == len(used) == 980


def test_blend_is_the_rounded_mean_and_singles_are_unchanged() -> None:
    train = Dataset(
        np.array([10, 10, 21, 21, 21], np.uint8).reshape(5, 1, 1, 1) * np.ones((1, 1, 2, 2), np.uint8),
        np.array([[1, 0], [1, 0], [0, 1], [0, 1], [0, 1]], np.int8),
        ("low", "high"),
    )
    made = compose(Splits(train, train), CompositeOptions("blend", singles=1, pairs=1), seed=0).train
    assert made.sample_shape == (1, 2, 2)
    values = {tuple(label): int(image.max()) for label, image in zip(made.labels.tolist(), made.store, strict=True)}
    assert values == {(1, 0): 10, (0, 1): 21, (1, 1): 16}


def test_explicit_numbers_give_a_test_set_in_the_same_ratio() -> None:
    made = compose(source(train=600, test=300), CompositeOptions(singles=300, pairs=30), seed=0)
    assert len(made.train) == 300 * 10 + 45 * 30
    # 300 + 9 × 30 = 570 images a class; of 300 the largest part in the ratio 10 : 1 is 150 + 9 × 15 = 285
    assert len(made.test) == 150 * 10 + 45 * 15


def test_papers_numbers_as_explicit_numbers_give_its_test_set() -> None:
    given = Splits(numbered_images([5000] * 10, side=1), numbered_images([1000] * 10, side=1))
    made = compose(given, CompositeOptions(singles=3100, pairs=200), seed=0)
    assert (len(made.train), len(made.test)) == (40_000, 620 * 10 + 45 * 40)


def test_one_explicit_number_determines_the_other() -> None:
    by_singles = compose(source(train=600, test=600), CompositeOptions(singles=310), seed=0)
    by_pairs = compose(source(train=600, test=600), CompositeOptions(pairs=20), seed=0)
    for made in (by_singles, by_pairs):
        assert len(made.train) == len(made.test) == 310 * 10 + 45 * 20


def test_all_singles_are_kept_and_every_pair_gets_the_same_number() -> None:
    given = source(train=[3, 40, 90], test=[2, 20, 45], classes=3)
    made = compose(given, CompositeOptions(singles="all"), seed=0)
    single = made.train.labels.sum(axis=1) == 1
    assert made.train.labels[single].sum(axis=0).tolist() == [3, 40, 90]
    found = pair_counts(made.train.labels)
    assert found[0, 1] == found[0, 2] == found[1, 2] == 50
    kept = used_rows(made.train, given.train)
    assert set(kept) == set(range(133)), "no source image is left out"
    assert pair_counts(made.test.labels)[0, 1] == round(50 * 67 / 133)


def test_pairs_of_uneven_classes_follow_the_smaller_class() -> None:
    made = compose(source(train=[100, 200, 1000], test=[100, 200, 1000], classes=3), CompositeOptions(), seed=0).train
    found = pair_counts(made.labels)
    assert (found[0, 1], found[0, 2], found[1, 2]) == (4, 4, 8)
    assert made.labels[made.labels.sum(axis=1) == 1].sum(axis=0).tolist() == [62, 124, 620]


def test_more_than_ten_classes_still_use_each_image_once() -> None:
    given = source(train=200, test=200, classes=20)
    used = used_rows(compose(given, CompositeOptions(), seed=0).train, given.train)
    assert len(used) == len(set(used))
    assert len(used) == 20 * (124 + 19 * 3)  # 62 % of 200, and 36 % of 200 shared by 19 partners: 3 each


def test_validation_is_composed_like_test() -> None:
    given = Splits(numbered_images([100] * 10), numbered_images([50] * 10), numbered_images([25] * 10))
    made = compose(given, CompositeOptions(), seed=0)
    assert made.validation is not None
    assert len(made.validation) == 15 * 10 + 45 * 1


def test_rows_of_a_shared_store_are_respected() -> None:
    whole = numbered_images([60] * 10)
    train = np.arange(0, 600, 2)
    given = Splits(whole.subset(train), whole.subset(train + 1))
    made = compose(given, CompositeOptions(), seed=0)
    full = Dataset(whole.store, whole.labels, whole.classes)
    assert {row % 2 for row in used_rows(made.train, full)} == {0}
    assert {row % 2 for row in used_rows(made.test, full)} == {1}


def test_composites_depend_on_the_seed(cache_folder: Path) -> None:
    given = source()
    one, same, other = (compose(given, CompositeOptions(), seed).train for seed in (1, 1, 2))
    assert np.array_equal(one.store, same.store)
    assert np.array_equal(one.labels, same.labels)
    assert not np.array_equal(one.labels, other.labels)
    assert not cache_folder.exists(), "small composites stay in memory"


def test_large_composites_are_mapped_once_for_each_seed(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = source()
    in_memory = compose(given, CompositeOptions(), seed=1)
    monkeypatch.setattr(cache, "MEMORY_LIMIT", 1000)
    mapped = compose(given, CompositeOptions(), seed=1)
    assert isinstance(mapped.train.store, np.memmap)
    assert np.array_equal(mapped.train.store, in_memory.train.store)
    calls: list[tuple[int, int, str]] = []
    compose(given, CompositeOptions(), 1, progress=lambda *call: calls.append(call))
    assert not calls, "made once"
    assert len(list(cache_folder.glob("*.npy"))) == 2
    compose(given, CompositeOptions(), seed=2)
    compose(given, CompositeOptions(layout="side-by-side"), seed=1)
    assert len(list(cache_folder.glob("*.npy"))) == 6


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"pairs": 0}, "Give both as numbers"),
        ({"singles": 0}, "Give both as numbers"),
        ({"singles": 0, "pairs": 0}, "Give both as numbers"),
    ],
)
def test_options_without_any_composite_are_rejected(options: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        CompositeOptions(**options)


@pytest.mark.parametrize(
    "options", [{"singles": 1}, {"pairs": 1}, {"singles": 0, "pairs": 1}, {"singles": 1, "pairs": 0}]
)
def test_valid_options_are_accepted(options: dict[str, object]) -> None:
    CompositeOptions(**options)


def test_given_numbers_use_an_image_at_most_once() -> None:
    given = source()
    used = used_rows(compose(given, CompositeOptions(singles=10, pairs=10), seed=0).train, given.train)
    assert len(used) == len(set(used)) == 10 * 10 + 45 * 10 * 2


def test_a_class_of_one_image_is_in_as_many_pairs_as_the_others_if_images_are_used_again() -> None:
    made = compose(source(train=[3, 40, 90], test=[1, 20, 45], classes=3), CompositeOptions(singles="all"), seed=0)
    assert pair_counts(made.test.labels)[0, 1] == pair_counts(made.test.labels)[1, 2] == round(50 * 66 / 133)


def test_too_few_source_images_name_the_class_and_the_numbers() -> None:
    given = source(train=[100, 30, 100], test=[9, 9, 9], classes=3)
    with pytest.raises(ConfigError, match=r"need 40 training images per class.*has 30 of 'class 1'"):
        compose(given, CompositeOptions(singles=20, pairs=10), seed=0, name="ml-x")


def test_a_test_set_too_small_for_any_composite_is_refused() -> None:
    with pytest.raises(DataError, match="too few test images"):
        compose(source(train=100, test=1), CompositeOptions(), seed=0)


@pytest.mark.parametrize("labels", [[1, 1], [0, 0], [1, -1]])
def test_only_single_label_sources_are_composed(labels: list[int]) -> None:
    train = numbered_images([20, 20])
    changed = train.labels.copy()
    changed[5] = labels
    given = Splits(train.with_labels(changed), train)
    with pytest.raises(DataError, match=r"exactly one known label.*sample 5.*without 'ml-'"):
        compose(given, CompositeOptions(), seed=0)
