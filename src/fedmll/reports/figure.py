"""`ReportFigure`: a matplotlib figure with its title, its caption and the numbers it was drawn from. Also the style of
all figures (readable on a light page, on a dark page and in print, and by colour-blind readers), and their files."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colorbar import Colorbar
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.text import Text
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.runs.formatting import dicts_to_csv

TEXT_COLOUR = "#797979"  # text and lines: the contrast is 4.3 to 1 on white and on #111
COLOURS = ("#1F7FBF", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9")  # by Okabe and Ito, with a lighter blue
MAX_NAMED_CLASSES = 40  # the names of more classes would not fit
MAX_CLASSES = 200  # classes in one figure
IMAGE_TYPES = ("png", "svg", "pdf", "jpg")
RESOLUTION = 200  # dots per inch of files
SVG_SETTINGS: Any = {"svg.hashsalt": "fedmll", "svg.fonttype": "none"}  # same figure, same bytes; text stays text


@dataclass(frozen=True, kw_only=True)
class ReportFigure:
    """One figure of a report. It is drawn once, shown in the page, and can be written as PNG, SVG and CSV."""

    name: str  # of its files, for example "attention-cat"
    title: str
    caption: str  # what one sees, in a sentence or two
    figure: Figure
    rows: list[dict[str, Any]] = field(default_factory=list)  # the numbers, one dictionary per row of the CSV


def new_figure(width: float, height: float, background: str = "none", layout: Any = "constrained") -> Figure:
    """An empty figure of this size in inches, transparent by default. Without pyplot no figure stays open, and no
    earlier figure has an effect."""
    figure = Figure(figsize=(width, height), layout=layout, facecolor=background)
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


def show_image(axes: Axes, sample: NDArray[np.uint8], **options: Any) -> None:
    """Draw a sample (channels, height, width)."""
    pixels = sample[0] if len(sample) == 1 else sample[:3].transpose(1, 2, 0)
    axes.imshow(pixels, cmap="gray", vmin=0, vmax=255, **options)


def hide_axes(axes: Axes) -> None:
    """Remove ticks and frame, for an image."""
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_frame_on(False)


# ---- Files


def write_figures(folder: Path, figures: Iterable[ReportFigure]) -> int:
    """Write NAME.png, NAME.svg and NAME.csv for each figure. Returns the number of figures."""
    names: set[str] = set()
    for figure in figures:
        name = file_name(figure.name)
        while name in names:
            name += "-2"
        names.add(name)
        for kind in ("png", "svg"):
            files.write_atomic(folder / f"{name}.{kind}", render(figure.figure, kind))
        if figure.rows:
            files.write_atomic(folder / f"{name}.csv", dicts_to_csv(figure.rows))
    return len(names)


def write_image(path: Path, figure: Figure, resolution: int = 150) -> None:
    """Write a figure with a white background."""
    kind = path.suffix.lstrip(".").lower()
    if kind not in IMAGE_TYPES:
        raise ConfigError(f"'{path}' is not the name of an image: it must end in .{', .'.join(IMAGE_TYPES)}.")
    files.write_atomic(path, render(figure, kind, resolution, facecolor="white"))


def render(figure: Figure, kind: str, resolution: int = RESOLUTION, **options: Any) -> bytes:
    """The bytes of an image file, without a date: the same figure has the same bytes."""
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # a class name may have dollar signs
    content = io.BytesIO()
    with rc_context(SVG_SETTINGS):
        figure.savefig(
            content, format=kind, dpi=resolution, metadata={"Date": None} if kind == "svg" else None, **options
        )
    return content.getvalue()


def file_name(text: str) -> str:
    """Text as a file name that every operating system accepts."""
    return re.sub(r"[^\w.=+-]+", "-", text, flags=re.ASCII).strip("-.")[:100] or "figure"
