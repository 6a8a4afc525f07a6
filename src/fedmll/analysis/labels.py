"""How labels come: how many a sample has, and which come together. The numbers first, then a picture of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from scipy.sparse import csr_array

from fedmll.data.dataset import PRESENT, UNKNOWN
from fedmll.files import replacing

NAMED = 60  # with more classes than this their names would not fit
ROWS_AT_ONCE = 16_384


@dataclass(frozen=True)
class Labels:
    samples: int
    sizes: NDArray[np.int64]  # (most + 1,) how many samples have 0, 1, 2, … labels
    unknown: int  # targets
    together: NDArray[np.int64]  # (C, C) samples that show both classes; on the diagonal those that show one

    @property
    def cardinality(self) -> float:
        """The mean number of labels a sample."""
        return float((self.sizes * np.arange(len(self.sizes))).sum() / max(1, self.samples))

    def pairs(self, classes: Sequence[str], most: int) -> list[tuple[str, str, int]]:
        """The classes that come together most often."""
        rows, columns = np.triu_indices(len(classes), 1)
        counts = self.together[rows, columns]
        order = np.argsort(-counts, kind="stable")[:most]
        return [(classes[rows[k]], classes[columns[k]], int(counts[k])) for k in order if counts[k]]

    def share(self) -> NDArray[np.float64]:
        """(C, C) of the samples that show the class of the row, the share that shows the one of the column."""
        alone = np.diag(self.together)[:, None]
        return np.divide(self.together, alone, out=np.full(self.together.shape, np.nan), where=alone > 0)


def count(labels: NDArray[np.int8]) -> Labels:
    classes = labels.shape[1]
    together = np.zeros((classes, classes), dtype=np.int64)
    sizes = np.zeros(classes + 1, dtype=np.int64)
    unknown = 0
    for begin in range(0, len(labels), ROWS_AT_ONCE):
        block = labels[begin : begin + ROWS_AT_ONCE]
        present = csr_array(block == PRESENT).astype(np.int64)
        together += (present.T @ present).toarray()
        sizes += np.bincount(np.diff(present.indptr), minlength=classes + 1)
        unknown += int(np.count_nonzero(block == UNKNOWN))
    used = np.flatnonzero(sizes)
    return Labels(len(labels), sizes[: 1 + (used[-1] if len(used) else 0)], unknown, together)


def sentence(found: Labels) -> str:
    several = int(found.sizes[2:].sum())
    said = (
        f"{found.cardinality:.2f} labels a sample; {found.sizes[0]:,} samples without a label, {several:,} with two or "
        "more"
    )
    return said + (f"; {found.unknown:,} targets unknown" if found.unknown else "")


def draw(path: Path, found: Labels, classes: Sequence[str]) -> None:
    """The co-occurrence matrix: darker is a larger share of the row's samples that show the column's class too."""
    shown = found.share()
    np.fill_diagonal(shown, np.nan)
    names = list(classes) if len(classes) <= NAMED else []
    side = 2.2 + 0.2 * min(len(classes), NAMED) + 0.07 * max(map(len, names), default=0)
    figure = Figure(figsize=(side + 0.8, side), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    image = axes.imshow(shown, cmap="YlGnBu", vmin=0, vmax=max(0.01, float(np.nanmax(shown, initial=0.01))))
    places = range(len(names))
    axes.set_xticks(places, names, rotation=90, fontsize=7)
    axes.set_yticks(places, names, fontsize=7)
    axes.set_title("Share of the row's samples\nthat show the column's class too", fontsize=10)
    figure.colorbar(image, shrink=0.7)
    with replacing(path) as temporary:
        figure.savefig(temporary, format=path.suffix.lstrip(".") or "png", dpi=130)
