"""A contact sheet: some images of a dataset with their labels, to see whether they fit."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset
from fedmll.errors import ConfigError
from fedmll.files import replacing
from fedmll.seeding import numpy_generator

COLUMNS = 6
TILE = 1.9  # inches
LETTERS, LINES = 30, 4  # of the labels below an image


def chosen(data: Dataset, count: int, seed: int) -> list[int]:
    """Positions drawn by the seed, in order."""
    return sorted(numpy_generator(seed, "contact-sheet").permutation(len(data))[:count].tolist())


def words(data: Dataset, position: int) -> str:
    """What is said of a sample: the present classes, and how many are unknown."""
    row = data.labels[position]
    names = [data.classes[column] for column in np.flatnonzero(row == PRESENT)]
    unknown = int((row == UNKNOWN).sum())
    said = ", ".join(names) or "–"
    return f"{said} ({unknown} unknown)" if unknown else said


def draw(path: Path, data: Dataset, positions: list[int]) -> None:
    if not data.is_images:
        raise ConfigError("These samples are feature vectors: there is nothing to see.")
    rows = -(-len(positions) // COLUMNS)
    figure = Figure(figsize=(TILE * COLUMNS, (TILE + 0.55) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, position in zip(grid, positions, strict=False):
        pixels = data.samples(np.array([position]))[0]
        axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
        lines = textwrap.wrap(words(data, position), LETTERS)
        text = "\n".join(lines[:LINES]) + (" …" if len(lines) > LINES else "")
        axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
