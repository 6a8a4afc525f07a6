"""The most confident mistakes of a run, by class: a table, and where the data is there a sheet of the images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.analysis.opened import data_of
from fedmll.data.dataset import ABSENT, PRESENT
from fedmll.data.images.cache import Progress, silent
from fedmll.errors import ConfigError
from fedmll.running.predictions import Predictions
from fedmll.running.saved import SavedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE = 1.5  # inches a tile of the sheet
MOST = 30  # classes on it


@dataclass(frozen=True)
class Mistake:
    label: int
    sample: int  # place in the predictions
    present: bool  # the truth
    probability: float


def mistakes(kept: Predictions, top: int, thresholds: NDArray[np.floating] | None = None) -> dict[str, list[Mistake]]:
    """By class, up to `top` with the probability farthest on the wrong side of the threshold (0.5). Unknown targets are
    no mistakes."""
    cuts = np.full(len(kept.classes), 0.5) if thresholds is None else thresholds
    found = {}
    for label, name in enumerate(kept.classes):
        scores, targets = kept.probabilities[:, label], kept.targets[:, label]
        missed, invented = (targets == PRESENT) & (scores <= cuts[label]), (targets == ABSENT) & (scores > cuts[label])
        wrong = np.flatnonzero(missed | invented)
        order = np.argsort(-np.abs(scores[wrong] - cuts[label]), kind="stable")[:top]
        found[name] = [
            Mistake(label, int(sample), bool(missed[sample]), float(scores[sample])) for sample in wrong[order]
        ]
    return found


def images_of(run: SavedRun, progress: Progress = silent) -> NDArray[np.uint8]:
    """The store of the run's test data, where it is still what it was; it may read an image when it is asked for it."""
    test = data_of(run, progress)
    if not test.is_images:
        raise ConfigError("The run's samples are feature vectors: there is nothing to see.")
    return cast("NDArray[np.uint8]", test.store)


def draw(path: Path, kept: Predictions, found: dict[str, list[Mistake]], store: NDArray[np.uint8]) -> None:
    """Write the contact sheet as a PNG."""
    figure = sheet(kept, found, store)
    with files.replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def sheet(kept: Predictions, found: dict[str, list[Mistake]], store: NDArray[np.uint8]) -> Figure:
    """The contact sheet: a row a class that has mistakes, up to 30."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = dict([(name, wrong) for name, wrong in found.items() if wrong][:MOST])
    if not rows:
        raise ConfigError("There are no mistakes to draw.")
    columns = max(map(len, rows.values()))
    figure = Figure(figsize=(TILE * columns + 1, (TILE + 0.35) * len(rows)), layout="constrained")
    grid = figure.subplots(len(rows), columns, squeeze=False)
    for line, (name, wrong) in zip(grid, rows.items(), strict=True):
        for place, axes in enumerate(line):
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_frame_on(False)
            if place < len(wrong):
                pixels = store[kept.rows[wrong[place].sample]]
                axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
                truth = "present" if wrong[place].present else "absent"
                axes.set_title(f"{truth}, p = {wrong[place].probability:.2f}", fontsize=7)
        line[0].set_ylabel(name, fontsize=8)
    FigureCanvasAgg(figure)
    return figure
