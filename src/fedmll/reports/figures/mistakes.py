"""The most confident mistakes of a run for each class, as numbers and as a contact sheet of the images."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.data.dataset import ABSENT, PRESENT
from fedmll.data.images.cache import Progress, no_progress
from fedmll.inference.load import SavedRun
from fedmll.reports.figure import ReportFigure
from fedmll.runs.predictions import Predictions

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TILE = 1.5  # inches per image of the sheet
MAX_CLASSES = 30  # on the sheet
PER_CLASS = 6  # mistakes of each class in the report


@dataclass(frozen=True)
class Mistake:
    label: int
    sample: int  # index in the predictions
    present: bool  # the truth
    probability: float


def find_mistakes(
    predictions: Predictions, top: int, thresholds: NDArray[np.floating] | None = None
) -> dict[str, list[Mistake]]:
    """By class, the `top` mistakes with the probability farthest on the wrong side of the threshold (by default 0.5).
    Unknown targets are not mistakes."""
    limits = np.full(len(predictions.classes), 0.5) if thresholds is None else thresholds
    found = {}
    for label, name in enumerate(predictions.classes):
        scores, targets = predictions.probabilities[:, label], predictions.targets[:, label]
        missed = (targets == PRESENT) & (scores <= limits[label])
        wrong = np.flatnonzero(missed | ((targets == ABSENT) & (scores > limits[label])))
        order = np.argsort(-np.abs(scores[wrong] - limits[label]), kind="stable")[:top]
        found[name] = [
            Mistake(label, int(sample), bool(missed[sample]), float(scores[sample])) for sample in wrong[order]
        ]
    return found


def load_images(run: SavedRun, progress: Progress = no_progress) -> NDArray[np.uint8]:
    """The images of the run's test data. The data must be unchanged; images are read when they are needed."""
    test = run.load_test_data(progress)
    if not test.is_images:
        raise ConfigError("The samples of this run are feature vectors, not images.")
    return cast("NDArray[np.uint8]", test.store)


def write_mistake_sheet(
    path: Path, predictions: Predictions, found: dict[str, list[Mistake]], store: NDArray[np.uint8]
) -> None:
    """Write the contact sheet as a PNG."""
    figure = draw_mistake_sheet(predictions, found, store)
    with files.atomic_replace(path) as temporary:
        figure.savefig(temporary, format="png", dpi=120)


def draw_mistake_sheet(predictions: Predictions, found: dict[str, list[Mistake]], store: NDArray[np.uint8]) -> Figure:
    """Draw the contact sheet: one row for each class with mistakes, up to MAX_CLASSES."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = dict([(name, wrong) for name, wrong in found.items() if wrong][:MAX_CLASSES])
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
                pixels = store[predictions.rows[wrong[place].sample]]
                axes.imshow(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0), cmap="gray", vmin=0, vmax=255)
                truth = "present" if wrong[place].present else "absent"
                axes.set_title(f"{truth}, p = {wrong[place].probability:.2f}", fontsize=7)
        line[0].set_ylabel(name, fontsize=8)
    FigureCanvasAgg(figure)
    return figure


def mistake_figure(run: SavedRun) -> ReportFigure:
    """The contact sheet of a run, for the report."""
    predictions = run.predictions()
    found = find_mistakes(predictions, PER_CLASS)
    return ReportFigure(
        name="mistakes",
        title="The most confident mistakes on the test data",
        caption=(
            f"Up to {PER_CLASS} images per class whose probability is farthest on the wrong side of 0.5, with the true "
            "label and the probability."
        ),
        figure=draw_mistake_sheet(predictions, found, load_images(run)),
        rows=[
            {
                "class": name,
                "truth": int(one.present),
                "probability": one.probability,
                "sample": predictions.name(one.sample),
            }
            for name, ones in found.items()
            for one in ones
        ],
    )
