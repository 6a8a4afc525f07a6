"""A contact sheet: random images of a dataset with their labels, to check that images and labels match."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from fedmll.core.errors import ConfigError
from fedmll.core.files import atomic_replace
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import PRESENT, UNKNOWN, Dataset

COLUMNS = 6
TILE = 1.9  # inches
LINE_LENGTH, MAX_LINES = 30, 4  # of the labels below an image


def choose_positions(data: Dataset, count: int, seed: int) -> list[int]:
    """Random positions, in ascending order."""
    return sorted(numpy_generator(seed, "contact-sheet").permutation(len(data))[:count].tolist())


def describe_labels(data: Dataset, position: int) -> str:
    """The present classes of a sample, and how many classes are unknown."""
    row = data.labels[position]
    names = [data.classes[column] for column in np.flatnonzero(row == PRESENT)]
    unknown = int((row == UNKNOWN).sum())
    text = ", ".join(names) or "–"
    return f"{text} ({unknown} unknown)" if unknown else text


def draw_contact_sheet(path: Path, data: Dataset, positions: list[int]) -> None:
    """Write the images at these positions, with their labels, as a PNG."""
    if not data.is_images:
        raise ConfigError("These samples are feature vectors, not images.")
    rows = -(-len(positions) // COLUMNS)
    figure = Figure(figsize=(TILE * COLUMNS, (TILE + 0.55) * rows), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(rows, COLUMNS, squeeze=False).ravel()
    for axes in grid:
        axes.set_axis_off()
    for axes, position in zip(grid, positions, strict=False):
        pixels = data.samples(np.array([position]))[0]
        axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
        lines = textwrap.wrap(describe_labels(data, position), LINE_LENGTH)
        text = "\n".join(lines[:MAX_LINES]) + (" …" if len(lines) > MAX_LINES else "")
        axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)
