"""The label map: the numbers, the table and the image."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
from matplotlib import _pylab_helpers
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from fedmll.reports.figure import write_image
from fedmll.reports.figures.label_statistics import IMAGE_LIMIT, count_labels, draw_label_map, label_table

LABELS = np.array([[1, 0, -1], [1, 1, -1], [0, 1, 0], [1, -1, 1]], dtype=np.int8)
CLIENTS = (np.array([0, 1]), np.array([2, 3]))


def printed(labels: NDArray[np.int8], clients: list[NDArray[np.int64]]) -> list[str]:
    names = [f"c{client:03d}" for client in range(len(clients))]
    classes = [f"k{number}" for number in range(labels.shape[1])]
    stream = io.StringIO()
    Console(width=2000, file=stream).print(label_table(count_labels(labels, clients), names, classes))
    return stream.getvalue().splitlines()


def pixels(path: Path) -> NDArray[np.int64]:
    return np.asarray(Image.open(path).convert("RGB"), dtype=np.int64)


def test_count_labels() -> None:
    result = count_labels(LABELS, CLIENTS)
    assert result.positives.tolist() == [[2, 1, 0], [1, 1, 1]]
    assert result.unknown.tolist() == [[0, 0, 2], [0, 1, 0]]
    assert result.sizes.tolist() == [2, 2]
    assert result.known.tolist() == [[True, True, False], [True, True, True]]


def test_classes_that_are_not_annotated_are_unknown() -> None:
    result = count_labels(LABELS, CLIENTS, known=np.array([[False, True, True], [True, True, False]]))
    assert result.positives.tolist() == [[0, 1, 0], [1, 1, 0]]
    assert result.unknown.tolist() == [[2, 0, 2], [0, 1, 2]]


def test_counts_are_not_limited_by_the_type_of_the_targets() -> None:
    assert count_labels(np.ones((300, 1), dtype=np.int8), [np.arange(300)]).positives.tolist() == [[300]]


def test_totals_include_clients_that_are_not_shown(tmp_path: Path) -> None:
    """A row a client of 51,414 clients and 1,628 classes would be a gigabyte."""
    labels = np.ones((250, 2), dtype=np.int8)
    labels[240, 0] = -1
    result = count_labels(labels, np.array_split(np.arange(250), 250))
    assert result.positives.shape == result.unknown.shape == result.known.shape == (IMAGE_LIMIT, 2)
    assert len(result.sizes) == 250 and result.totals.tolist() == [249, 250]
    names = [f"c{client:03d}" for client in range(250)]
    write_image(tmp_path / "map.png", draw_label_map(result.positives, names, ["a", "b"], result.known))
    stream = io.StringIO()
    Console(width=200, file=stream).print(label_table(result, names, ["a", "b"]))
    assert "the first 30 of 250 clients" in stream.getvalue()


def test_label_table() -> None:
    lines = printed(LABELS, list(CLIENTS))
    cells = [line.replace("│", " ").split() for line in lines if "│" in line]
    assert cells == [["c000", "2", "2", "1", "–"], ["c001", "2", "1", "1", "1"], ["all", "4", "3", "2", "1"]]
    assert not any("only the first" in line for line in lines)


def test_large_table_is_cut_with_a_note() -> None:
    labels = np.ones((40, 35), dtype=np.int8)
    lines = printed(labels, np.array_split(np.arange(40), 40))
    assert sum("c0" in line for line in lines) == 30
    assert "c029" in "".join(lines) and "c030" not in "".join(lines)
    assert any("k29" in line for line in lines) and not any("k30" in line for line in lines)
    assert "only the first 30 of 40 clients and the first 30 of 35 classes" in lines[-1]
    total = next(line for line in lines if " all " in line).replace("│", " ").split()
    assert total == ["all"] + ["40"] * 31  # totals are over all clients, not over those shown


def test_label_map_shows_counts_and_classes_without_annotation(tmp_path: Path) -> None:
    names, classes = ["c000", "c001"], ["cat", "dog", "cow"]
    few, many, cut = (tmp_path / f"{name}.png" for name in ("few", "many", "cut"))
    write_image(few, draw_label_map(np.array([[1, 0, 50], [0, 2, 0]]), names, classes))
    write_image(many, draw_label_map(np.array([[50, 0, 50], [0, 2, 0]]), names, classes))
    known = np.array([[True, True, True], [True, True, False]])
    write_image(cut, draw_label_map(np.array([[1, 0, 50], [0, 2, 0]]), names, classes, known))
    pictures = [pixels(path) for path in (few, many, cut)]
    assert pictures[0].shape == pictures[1].shape == pictures[2].shape
    first_cell = np.argwhere((pictures[0] != pictures[1]).any(axis=2))
    assert (pictures[1][tuple(first_cell.T)].mean()) < pictures[0][tuple(first_cell.T)].mean() - 80  # more is darker
    hatched = np.argwhere((pictures[0] != pictures[2]).any(axis=2))
    below = hatched[hatched[:, 0] > first_cell[:, 0].max()]
    assert len(below) > 200 and below[:, 1].min() > first_cell[:, 1].max()  # the last cell of the second row


@pytest.mark.parametrize(("clients", "classes"), [(1, 1), (10, 10), (100, 80), (400, 300)])
def test_label_maps_of_any_size_fit_into_the_image(tmp_path: Path, clients: int, classes: int) -> None:
    counts = np.random.default_rng(0).poisson(3, (clients, classes))
    path = tmp_path / "deep" / "map.png"
    names, class_names = [f"hospital {n}" for n in range(clients)], [f"a long class name {n}" for n in range(classes)]
    write_image(path, draw_label_map(counts, names, class_names))
    picture = pixels(path)
    ink = np.argwhere((picture < 200).any(axis=2))
    height, width = picture.shape[:2]
    assert ink.min() > 2 and ink[:, 0].max() < height - 2 and ink[:, 1].max() < width - 2  # nothing is cut off
    assert max(height, width) < 5_000
    assert [file.name for file in path.parent.iterdir()] == ["map.png"]


def test_drawing_leaves_no_global_state(tmp_path: Path) -> None:
    counts, known = np.zeros((2, 2), dtype=np.int64), np.zeros((2, 2), dtype=bool)
    write_image(tmp_path / "map.svg", draw_label_map(counts, ["a", "b"], ["x", "y"], known))
    assert (tmp_path / "map.svg").read_text().startswith("<?xml")
    assert not _pylab_helpers.Gcf.figs
