"""Label statistics of a dataset: labels per sample and co-occurrence of classes, as numbers and as an image."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedmll.core.files import atomic_replace
from fedmll.data.dataset import PRESENT, UNKNOWN

MAX_NAMED_CLASSES = 60  # the names of more classes would not fit
ROWS_AT_ONCE = 16_384


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


def write_co_occurrence(path: Path, found: LabelStatistics, classes: Sequence[str]) -> None:
    """Write the co-occurrence matrix as an image: darker cells mean that more samples of the row have the column's
    class."""
    shown = found.conditional_frequency()
    np.fill_diagonal(shown, np.nan)
    names = list(classes) if len(classes) <= MAX_NAMED_CLASSES else []
    side = 2.2 + 0.2 * min(len(classes), MAX_NAMED_CLASSES) + 0.07 * max(map(len, names), default=0)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shown, cmap="YlGnBu", vmin=0, vmax=max(0.01, float(np.nanmax(shown, initial=0.01))))
    places = range(len(names))
    axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_yticks(places, names, fontsize=7)
    axes.set_title("Share of the samples with the row's class\nthat also have the column's class", fontsize=10)
    figure.colorbar(image, shrink=0.7)
    with atomic_replace(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=130)
