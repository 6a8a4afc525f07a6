"""The most confident mistakes by hand, and the contact sheet."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pytest
from PIL import Image

from fedmll.core.errors import ConfigError
from fedmll.data.dataset import Dataset
from fedmll.data.images.decode import LazyImages
from fedmll.reports.figure import write_image
from fedmll.reports.figures.image_sheets import Mistake, draw_mistake_sheet, find_mistakes, load_images
from fedmll.runs.array_files import Predictions

if TYPE_CHECKING:
    from fedmll.inference.load_run import SavedRun

SCORES = np.array([[0.75, 0.2], [0.25, 0.7], [0.6, 0.5], [0.99, 0.4], [0.05, 0.9]], np.float32)
TARGETS = np.array([[0, 0], [1, 0], [0, 1], [-1, 1], [0, 1]], np.int8)
STORED = Predictions(classes=("a", "b"), probabilities=SCORES, targets=TARGETS, rows=np.array([4, 3, 2, 1, 0]))


def test_mistakes_by_hand() -> None:
    """Of a: 0.75 is a false alarm and 0.25 is missed; they are equally far from 0.5 (the first comes first), 0.6 is
    nearer; 0.99 is of an unknown target. Of b: 0.7 is a false alarm, 0.4 and 0.5 missed: p = 0.5 is not above 0.5."""
    found = find_mistakes(STORED, 9)
    as_said = {name: [(wrong.sample, wrong.present) for wrong in all_wrong] for name, all_wrong in found.items()}
    assert as_said == {"a": [(0, False), (1, True), (2, False)], "b": [(1, False), (3, True), (2, True)]}
    assert found["a"][0] == Mistake(0, 0, False, pytest.approx(0.75))
    assert [len(wrong) for wrong in find_mistakes(STORED, 1).values()] == [1, 1]
    moved = find_mistakes(STORED, 9, np.array([0.95, 0.3]))
    assert [wrong.sample for wrong in moved["a"]] == [1] and [wrong.sample for wrong in moved["b"]] == [1]


def test_sheet_shows_the_named_images(tmp_path: Path) -> None:
    """One mistake, of the sample in row 1 of the store, which alone is white."""
    store = np.zeros((5, 1, 6, 6), np.uint8)
    store[1] = 255
    one = Predictions(
        classes=("a",),
        probabilities=np.array([[0.1]], np.float32),
        targets=np.array([[1]], np.int8),
        rows=np.array([1]),
    )
    write_image(tmp_path / "white.png", draw_mistake_sheet(one, find_mistakes(one, 3), store))
    store[1] = 0
    write_image(tmp_path / "black.png", draw_mistake_sheet(one, find_mistakes(one, 3), store))
    with Image.open(tmp_path / "white.png") as white, Image.open(tmp_path / "black.png") as black:
        assert np.asarray(white.convert("L")).mean() > np.asarray(black.convert("L")).mean() + 50
    colours = np.zeros((5, 3, 6, 6), np.uint8)
    write_image(tmp_path / "colour.png", draw_mistake_sheet(STORED, find_mistakes(STORED, 2), colours))
    with pytest.raises(ConfigError, match="no mistakes"):
        write_image(tmp_path / "none.png", draw_mistake_sheet(one, {"a": []}, store))


def test_only_the_images_on_the_sheet_are_read(tmp_path: Path) -> None:
    """Of FLAIR all 43,960 test images would be decoded for a dozen."""
    read: list[int] = []

    def image(row: int) -> np.ndarray:
        read.append(row)
        return np.zeros((6, 6, 3), np.uint8)

    store: Any = LazyImages("key", (1000, 3, 6, 6), image)
    test = Dataset(store, np.zeros((1000, 2), np.int8), ("a", "b"))
    run = SimpleNamespace(load_test_data=lambda progress: test)
    write_image(
        tmp_path / "sheet.png", draw_mistake_sheet(STORED, find_mistakes(STORED, 1), load_images(cast("SavedRun", run)))
    )
    assert read == [4, 3]  # the rows of samples 0 and 1
