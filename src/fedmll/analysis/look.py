"""How the pictures of a report look: readable on white, on near-black and in print, and by colour-blind readers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from numpy.typing import NDArray

INK = "#797979"  # texts and lines: its contrast is 4.3 to 1 on white and on #111
COLOURS = ("#1F7FBF", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")  # Okabe and Ito's, the blue lighter
NAMED = 40  # with more classes than this their names would not fit
WRITTEN = 12  # up to as many classes their numbers are written into the squares
MOST = 200  # classes of one picture


def canvas(width: float, height: float) -> Figure:
    """Inches. Without pyplot: nothing is left open, and nothing depends on what was drawn before."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    return figure


def dressed(figure: Figure) -> Figure:
    """Transparent, with texts and lines that read on any page. Last, when all axes are there."""
    figure.set_facecolor("none")
    for axes in figure.axes:
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=INK)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(INK)
        for spine in axes.spines.values():
            spine.set_edgecolor(INK)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(INK)
    return figure


def signed() -> Any:
    """Blue below 0, red above; what is undefined is nearly nothing."""
    return matplotlib.colormaps["RdBu_r"].with_extremes(bad=(0.5, 0.5, 0.5, 0.15))


def colour_bar(figure: Figure, mesh: ScalarMappable, axes: Sequence[Axes], label: str, shrink: float = 0.6) -> Colorbar:
    """To the right of the axes."""
    found = figure.colorbar(mesh, ax=list(axes), shrink=shrink, pad=0.02)
    found.set_label(label, size=8)
    found.ax.tick_params(labelsize=7)
    return found


def square(axes: Axes, matrix: NDArray[np.floating], names: Sequence[str], limit: float) -> AxesImage:
    """A value for every pair of classes, between -limit and limit; the diagonal says nothing and is left out."""
    hollow = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(hollow, np.nan)
    mesh = axes.imshow(hollow, cmap=signed(), vmin=-limit, vmax=limit)
    if len(names) <= NAMED:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.tick_params(length=0)
    return mesh


def write_numbers(axes: Axes, matrix: NDArray[np.floating], limit: float) -> None:
    """Into the squares, two digits each."""
    for row, column in np.argwhere(np.isfinite(matrix) & ~np.eye(len(matrix), dtype=bool)):
        value = matrix[row, column]
        colour = "white" if abs(value) > 0.6 * limit else "0.15"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)


def pixels(sample: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(channels, height, width) as matplotlib has it."""
    return sample[0] if len(sample) == 1 else sample[:3].transpose(1, 2, 0)


def bare(axes: Axes) -> None:
    """No ticks and no frame, for an image."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def or_none(value: float) -> float | None:
    """As a picture's rows have it: what is undefined is empty."""
    return float(value) if np.isfinite(value) else None
