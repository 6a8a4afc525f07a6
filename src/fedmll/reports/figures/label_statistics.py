"""Label statistics: labels per sample, co-occurrence of classes, and the label map, which is the number of positives of
each class at each client. As numbers, as tables and as images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, ListedColormap, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path as Outline
from matplotlib.ticker import StrMethodFormatter
from numpy.typing import NDArray
from rich.markup import escape
from rich.table import Table
from scipy.sparse import csr_array

from fedmll.data.dataset import PRESENT, UNKNOWN
from fedmll.reports.figure import new_figure, write_image

MAX_NAMED_CLASSES = 60  # the names of more classes would not fit
ROWS_AT_ONCE = 16_384
TABLE_LIMIT = 30  # clients, and classes, in a table in the terminal
IMAGE_LIMIT = 200  # clients, and classes, in an image that can still be read
MAX_WRITTEN = 16  # with more clients or classes the numbers do not fit into the cells
NOT_ANNOTATED = "–"
POINTS_PER_INCH = 72


@dataclass(frozen=True, kw_only=True)
class LabelStatistics:
    samples: int
    sizes: NDArray[np.int64]  # how many samples have 0, 1, 2, … labels
    unknown: int  # unknown targets
    co_occurrence: NDArray[np.int64]  # (C, C) samples with both classes; on the diagonal, samples with the class

    @property
    def cardinality(self) -> float:
        """The mean number of labels per sample."""
        return float((self.sizes * np.arange(len(self.sizes))).sum() / max(1, self.samples))

    def frequent_pairs(self, classes: Sequence[str], count: int) -> list[tuple[str, str, int]]:
        """The pairs of classes that occur together most often, with the number of samples."""
        rows, columns = np.triu_indices(len(classes), 1)
        counts = self.co_occurrence[rows, columns]
        order = np.argsort(-counts, kind="stable")[:count]
        return [(classes[rows[k]], classes[columns[k]], int(counts[k])) for k in order if counts[k]]

    def conditional_frequency(self) -> NDArray[np.float64]:
        """(C, C): the share of the samples with the class of the row that also have the class of the column."""
        samples = np.diag(self.co_occurrence)[:, None]
        return np.divide(self.co_occurrence, samples, out=np.full(self.co_occurrence.shape, np.nan), where=samples > 0)


def label_statistics(labels: NDArray[np.int8]) -> LabelStatistics:
    classes = labels.shape[1]
    co_occurrence = np.zeros((classes, classes), dtype=np.int64)
    sizes = np.zeros(classes + 1, dtype=np.int64)
    unknown = 0
    for begin in range(0, len(labels), ROWS_AT_ONCE):
        block = labels[begin : begin + ROWS_AT_ONCE]
        present = csr_array(block == PRESENT).astype(np.int64)
        co_occurrence += (present.T @ present).toarray()
        sizes += np.bincount(np.diff(present.indptr), minlength=classes + 1)
        unknown += int(np.count_nonzero(block == UNKNOWN))
    used = np.flatnonzero(sizes)
    return LabelStatistics(
        samples=len(labels),
        sizes=sizes[: 1 + (used[-1] if len(used) else 0)],
        unknown=unknown,
        co_occurrence=co_occurrence,
    )


def describe_labels(found: LabelStatistics) -> str:
    several = int(found.sizes[2:].sum())
    text = f"{found.cardinality:.2f} labels per sample; {found.sizes[0]:,} samples without a label, "
    text += f"{several:,} with two or more"
    return text + (f"; {found.unknown:,} targets unknown" if found.unknown else "")


def write_co_occurrence(
    path: Path,
    found: LabelStatistics,
    classes: Sequence[str],
    of_clients: Mapping[str, LabelStatistics] | None = None,
) -> None:
    """Write the co-occurrence matrix as an image: darker cells mean that more samples of the row have the column's
    class. With `of_clients`, their matrices are beside it, in the same colours (FedHarmony, Figure 1)."""
    panels = {"": found} if not of_clients else {"all clients": found, **of_clients}
    shown = {title: statistics.conditional_frequency() for title, statistics in panels.items()}
    for matrix in shown.values():
        np.fill_diagonal(matrix, np.nan)
    largest = max(float(np.nanmax(matrix, initial=0.01)) for matrix in shown.values())
    names = list(classes) if len(classes) <= MAX_NAMED_CLASSES else []
    side = 2.2 + 0.2 * min(len(classes), MAX_NAMED_CLASSES) + 0.07 * max(map(len, names), default=0)
    figure = new_figure(side * len(shown) + 0.8, side)
    all_axes = figure.subplots(1, len(shown), squeeze=False)[0]
    places = range(len(names))
    for axes, (title, matrix) in zip(all_axes, shown.items(), strict=True):
        image = axes.imshow(matrix, cmap="YlGnBu", vmin=0, vmax=largest)
        axes.set_xticks(places, names, rotation=90, fontsize=7)
        axes.set_yticks(places, names, fontsize=7)
        text = "Share of the samples with the row's class\nthat also have the column's class"
        axes.set_title(f"{title}\n{text}" if title else text, fontsize=10)
    figure.colorbar(image, ax=list(all_axes), shrink=0.7)
    write_image(path, figure)


# ---- The label map


class LabelMap(NamedTuple):
    """Counts for K clients. Counts per class are only kept for the first S clients: for all users of FLAIR they would
    take a gigabyte."""

    positives: NDArray[np.int64]  # (S, C)
    unknown: NDArray[np.int64]  # (S, C)
    sizes: NDArray[np.int64]  # (K,) samples
    totals: NDArray[np.int64]  # (C,) positives of all clients

    @property
    def known(self) -> NDArray[np.bool_]:
        """(S, C): False where a client has no annotation of the class for any of its samples."""
        return self.unknown < self.sizes[: len(self.unknown), None]


def count_labels(
    labels: NDArray[np.int8], clients: Sequence[NDArray[np.integer]], known: NDArray[np.bool_] | None = None
) -> LabelMap:
    """Count the positive and the unknown targets of each client and class.

    Args:
        labels: (N, C) targets of all samples.
        clients: The sample positions of each client.
        known: (K, C) False where a client does not annotate a class; its targets count as unknown.
    """
    shape = (min(len(clients), IMAGE_LIMIT), labels.shape[1])
    positives, unknown = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64)
    totals = np.zeros(labels.shape[1], dtype=np.int64)
    for client, positions in enumerate(clients):
        own = labels[positions]
        if known is not None:
            own = np.where(known[client], own, UNKNOWN)
        present = np.count_nonzero(own == PRESENT, axis=0)
        totals += present
        if client < IMAGE_LIMIT:
            positives[client], unknown[client] = present, np.count_nonzero(own == UNKNOWN, axis=0)
    sizes = np.array([len(positions) for positions in clients], dtype=np.int64)
    return LabelMap(positives, unknown, sizes, totals)


def label_table(counts: LabelMap, names: Sequence[str], classes: Sequence[str], limit: int = TABLE_LIMIT) -> Table:
    """The positives as a table for the terminal; a dash where the client does not annotate the class."""
    rows, columns = min(limit, len(names)), min(limit, len(classes))
    result = Table(title="positives of each class at each client", caption=_note(names, classes, limit) or None)
    result.add_column("client", no_wrap=True)
    for heading in ("samples", *classes[:columns]):
        result.add_column(escape(heading), justify="right")
    for client in range(rows):
        cells = zip(counts.positives[client, :columns], counts.known[client, :columns], strict=True)
        written = [f"{count:,}" if known else NOT_ANNOTATED for count, known in cells]
        result.add_row(escape(names[client]), f"{counts.sizes[client]:,}", *written)
    result.add_section()
    result.add_row("all", f"{counts.sizes.sum():,}", *(f"{count:,}" for count in counts.totals[:columns]), style="bold")
    return result


def draw_label_map(
    counts: NDArray[np.integer], names: Sequence[str], classes: Sequence[str], known: NDArray[np.bool_] | None = None
) -> Figure:
    """Draw the map: darker cells have more positives, hatched ones are not annotated."""
    shown = np.asarray(counts)[:IMAGE_LIMIT, :IMAGE_LIMIT]
    not_annotated = np.zeros(shown.shape, dtype=bool) if known is None else ~known[:IMAGE_LIMIT, :IMAGE_LIMIT]
    rows, columns = shown.shape
    small = max(rows, columns) <= MAX_WRITTEN
    cell = 0.42 if small else max(0.11, min(0.3, 8 / max(rows, columns)))
    font = min(9.0, cell * POINTS_PER_INCH * 0.72)  # a line of text is as high as a cell
    figure, axes, bar_axes = _lay_out(rows * cell, columns * cell, names[:rows], classes[:columns], font)
    norm = LogNorm(1, max(2, int(shown.max(initial=0))))
    mesh = axes.pcolormesh(
        np.ma.masked_less(shown, 1), cmap=_colours(), norm=norm, edgecolors="white", linewidth=0.5 if small else 0.3
    )
    if not_annotated.any():
        _hatch(axes, not_annotated)
    if small:
        _write_numbers(axes, shown, not_annotated, norm)
    bar = figure.colorbar(mesh, cax=bar_axes, ticks=_ticks(int(shown.max(initial=2))))
    bar.outline.set_linewidth(0)
    bar_axes.tick_params(length=2, labelsize=8)
    bar_axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    bar_axes.minorticks_off()
    bar_axes.set_ylabel("positives", fontsize=9)
    note = _note(names, classes, IMAGE_LIMIT)
    axes.annotate(note, (0, 0), (4, 4), "figure fraction", textcoords="offset points", fontsize=8, color="0.35")
    return figure


def _lay_out(
    height: float, width: float, names: Sequence[str], classes: Sequence[str], font: float
) -> tuple[Figure, Axes, Axes]:
    """A figure with the map, `width` × `height` inches, and its colour bar; the margins fit the names."""
    letter = font * 0.62 / POINTS_PER_INCH  # inches; the widest usual letters of the default font
    left = 0.35 + letter * max(map(len, names))
    bottom = 0.35 + letter * max(map(len, classes))
    top, bar_gap, bar_width, right = 0.75, 0.2, 0.16, 0.75
    total_width = max(left + width + bar_gap + bar_width + right, 4.2)  # the title and the legend need as much
    total_height = max(bottom + height + top, 2.6)
    figure = new_figure(total_width, total_height, background="white", layout=None)

    def place(x: float, from_top: float, w: float, h: float) -> Axes:
        return figure.add_axes((x / total_width, 1 - (from_top + h) / total_height, w / total_width, h / total_height))

    axes = place(left, top, width, height)
    bar_axes = place(left + width + bar_gap, top, bar_width, min(max(height, 1.2), 3.0))
    figure.text(0.12 / total_width, 1 - 0.3 / total_height, "Positives of each class at each client", fontsize=12)
    axes.set_xticks(np.arange(len(classes)) + 0.5, classes, rotation=90, fontsize=font)
    axes.set_yticks(np.arange(len(names)) + 0.5, names, fontsize=font)
    axes.set_xlim(0, len(classes))
    axes.set_ylim(len(names), 0)  # the first client on top
    axes.tick_params(length=0, pad=3)
    axes.spines[:].set_visible(False)
    return figure, axes, bar_axes


def _colours() -> Colormap:
    """Yellow to blue without the palest tenth: one positive must look different from none."""
    shades = matplotlib.colormaps["YlGnBu"](np.linspace(0.12, 1, 256))
    return ListedColormap(shades).with_extremes(bad="0.965")


def _hatch(axes: Axes, not_annotated: NDArray[np.bool_]) -> None:
    row, column = np.nonzero(not_annotated)
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1), (0, 0)])
    boxes = np.stack([column, row], axis=1)[:, None] + corners
    style: dict[str, Any] = {"facecolor": "white", "edgecolor": "0.62", "hatch": "////", "linewidth": 0}
    # One path for all cells: one patch per cell would take seconds.
    axes.add_patch(PathPatch(Outline.make_compound_path_from_polys(boxes), **style))
    handle = Patch(**style, label="the client does not annotate the class")
    above: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderpad": 0.3, "borderaxespad": 0.0}
    axes.legend(handles=[handle], frameon=False, fontsize=8, **above)


def _write_numbers(axes: Axes, shown: NDArray[np.integer], not_annotated: NDArray[np.bool_], norm: LogNorm) -> None:
    for row, column in zip(*np.nonzero((shown > 0) & ~not_annotated), strict=True):
        count = int(shown[row, column])
        text = f"{count}" if count < 10_000 else f"{count / 1000:.0f}k"
        colour = "white" if norm(count) > 0.55 else "0.15"
        axes.text(column + 0.5, row + 0.5, text, ha="center", va="center", fontsize=7, color=colour)


def _ticks(largest: int) -> list[int]:
    """1, 2, 5, 10, … up to the largest count, powers of ten alone where that would be too many."""
    steps = (1, 2, 5) if largest < 1000 else (1,)
    return [step * 10**power for power in range(10) for step in steps if step * 10**power <= largest]


def _note(names: Sequence[str], classes: Sequence[str], limit: int) -> str:
    """A note on what was left out, if anything."""
    parts = [
        f"the first {limit} of {len(items):,} {what}"
        for items, what in ((names, "clients"), (classes, "classes"))
        if len(items) > limit
    ]
    return "only " + " and ".join(parts) if parts else ""
