"""`ReportFigure`: a matplotlib figure with its title, its caption and the numbers it was drawn from. And the style of
all figures: readable on a light page, on a dark page and in print, and by colour-blind readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
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

TEXT_COLOUR = "#797979"  # text and lines: the contrast is 4.3 to 1 on white and on #111
COLOURS = ("#1F7FBF", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")  # by Okabe and Ito, with a lighter blue
MAX_NAMED_CLASSES = 40  # the names of more classes would not fit
MAX_WRITTEN_CLASSES = 12  # with more classes the numbers are not written into the squares
MAX_CLASSES = 200  # classes in one figure


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report. It is drawn once, shown in the page, and can be written as PNG, SVG and CSV.

    Attributes:
        name: The name of its files, for example "attention-cat".
        title: The heading.
        caption: What one sees, in a sentence or two.
        figure: The matplotlib figure.
        rows: The numbers, one dictionary per row of the CSV.
    """

    name: str
    title: str
    caption: str
    figure: Figure
    rows: list[dict[str, Any]] = field(default_factory=list)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure of this size in inches. Without pyplot no figure stays open, and no earlier figure has an
    effect."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="none")
    FigureCanvasAgg(figure)
    return figure


def apply_style(figure: Figure) -> Figure:
    """Make the background transparent, and text and lines readable on a light and a dark page. Call it last."""
    figure.set_facecolor("none")
    for axes in figure.axes:
        axes.set_facecolor("none")
        axes.tick_params(which="both", colors=TEXT_COLOUR)
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            text.set_color(TEXT_COLOUR)
        for spine in axes.spines.values():
            spine.set_edgecolor(TEXT_COLOUR)
        legend = axes.get_legend()
        for text in legend.get_texts() if legend else ():
            text.set_color(TEXT_COLOUR)
    return figure


def diverging_colours() -> Any:
    """Blue below 0 and red above; undefined values are almost transparent."""
    return matplotlib.colormaps["RdBu_r"].with_extremes(bad=(0.5, 0.5, 0.5, 0.15))


def add_colour_bar(
    figure: Figure, mesh: ScalarMappable, axes: Sequence[Axes], label: str, shrink: float = 0.6
) -> Colorbar:
    """To the right of the axes."""
    found = figure.colorbar(mesh, ax=list(axes), shrink=shrink, pad=0.02)
    found.set_label(label, size=8)
    found.ax.tick_params(labelsize=7)
    return found


def draw_class_matrix(axes: Axes, matrix: NDArray[np.floating], names: Sequence[str], limit: float) -> AxesImage:
    """Draw one value for each pair of classes, with colours from -limit to limit. The diagonal is left out."""
    hollow = np.array(matrix, dtype=np.float64)
    np.fill_diagonal(hollow, np.nan)
    mesh = axes.imshow(hollow, cmap=diverging_colours(), vmin=-limit, vmax=limit)
    if len(names) <= MAX_NAMED_CLASSES:
        axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(names)), names, fontsize=7)
    else:
        axes.set_xticks([])
        axes.set_yticks([])
    axes.tick_params(length=0)
    return mesh


def write_numbers(axes: Axes, matrix: NDArray[np.floating], limit: float) -> None:
    """Write the values into the squares, with two digits."""
    for row, column in np.argwhere(np.isfinite(matrix) & ~np.eye(len(matrix), dtype=bool)):
        value = matrix[row, column]
        colour = "white" if abs(value) > 0.6 * limit else "0.15"
        axes.text(column, row, f"{value:.2f}", ha="center", va="center", fontsize=6, color=colour)


def to_image(sample: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """A sample (channels, height, width) as matplotlib expects it: (height, width) or (height, width, 3)."""
    return sample[0] if len(sample) == 1 else sample[:3].transpose(1, 2, 0)


def hide_axes(axes: Axes) -> None:
    """Remove ticks and frame, for an image."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


def none_if_undefined(value: float) -> float | None:
    """For the rows of a figure: NaN becomes an empty cell."""
    return float(value) if np.isfinite(value) else None
