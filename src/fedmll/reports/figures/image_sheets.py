"""Sheets of images: of a dataset with its labels (`fedmll data show`), of test images with predicted and true labels
(FedHarmony, Fig. 3), and of the most confident mistakes (`fedmll errors`)."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.images.cache import Progress, no_progress
from fedmll.inference.load_run import SavedRun
from fedmll.reports.figure import COLOURS, ReportFigure, apply_style, hide_axes, new_figure, show_image, write_image
from fedmll.reports.figures.class_features import choose_images
from fedmll.runs.array_files import Predictions, sample_name

TILE = 1.9  # inches per image
COLUMNS, LINE_LENGTH, MAX_LINES = 6, 30, 4  # of a contact sheet, and of the labels below an image
MAX_EXAMPLES, EXAMPLE_COLUMNS, MAX_EXAMPLE_LINES = 12, 4, 6
MAX_CLASSES, PER_CLASS = 30, 6  # classes on the sheet of mistakes; mistakes of each class in the report
THRESHOLD = 0.5
TRUTH = {PRESENT: "present", ABSENT: "absent", UNKNOWN: "unknown"}


def choose_positions(data: Dataset, count: int, seed: int) -> list[int]:
    """Random positions, in ascending order."""
    return sorted(numpy_generator(seed, "contact-sheet").permutation(len(data))[:count].tolist())


def describe_sample(data: Dataset, position: int) -> str:
    """The present classes of a sample, and how many classes are unknown."""
    row = data.labels[position]
    text = ", ".join(data.classes[column] for column in np.flatnonzero(row == PRESENT)) or "–"
    unknown = int((row == UNKNOWN).sum())
    return f"{text} ({unknown} unknown)" if unknown else text


def write_contact_sheet(path: Path, data: Dataset, positions: list[int]) -> None:
    """Write the images at these positions, with their labels."""
    if not data.is_images:
        raise ConfigError("These samples are feature vectors, not images.")
    figure, grid = _new_grid(-(-len(positions) // COLUMNS), COLUMNS, text_height=0.55)
    for axes, position in zip(grid.ravel(), positions, strict=False):
        show_image(axes, data.samples(np.array([position]))[0])
        lines = textwrap.wrap(describe_sample(data, position), LINE_LENGTH)
        text = "\n".join(lines[:MAX_LINES]) + (" …" if len(lines) > MAX_LINES else "")
        axes.text(0.5, -0.03, text, transform=axes.transAxes, ha="center", va="top", fontsize=6.5)
    write_image(path, figure)


def _new_grid(rows: int, columns: int, text_height: float) -> tuple[Figure, Any]:
    """A figure with places for images, and space for text below each."""
    figure = new_figure(TILE * columns, (TILE + text_height) * rows)
    grid: Any = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.ravel():
        hide_axes(axes)
    return figure, grid


# ---- Examples


def example_figure(run: SavedRun, data: Dataset) -> ReportFigure | None:
    """None without a global model or without images."""
    if run.trainer_or_none is None or not data.is_images:
        return None
    chosen = choose_images(data, MAX_EXAMPLES, run.summary["seed"], "examples")
    if not len(chosen):
        return None
    scores = run.predict(data.subset(chosen))
    rows = [
        {"image": sample_name(data, sample), "class": run.classes[label],
         "truth": TRUTH[int(data.labels[sample, label])], "predicted": bool(p[label] > THRESHOLD),
         "probability": float(p[label])}
        for sample, p in zip(chosen, scores, strict=True)
        for label in np.argsort(-((data.labels[sample] == PRESENT) + p), kind="stable")  # the true ones first
        if data.labels[sample, label] == PRESENT or p[label] > THRESHOLD
    ]  # fmt: skip
    return ReportFigure(
        name="examples",
        title="Predicted and true labels",
        caption=(
            "Test images with their true and their predicted labels (probability above 0.5): ✓ correct, − missed, "
            "+ wrong, ? predicted where the truth is unknown. The images are a random choice of those with a label."
        ),
        figure=_draw_examples(rows, data, chosen.tolist()),
        rows=rows,
    )


def _draw_examples(rows: list[dict[str, Any]], data: Dataset, samples: list[int]) -> Figure:
    figure, grid = _new_grid(-(-len(samples) // EXAMPLE_COLUMNS), EXAMPLE_COLUMNS, text_height=0.6)
    for axes, sample in zip(grid.ravel(), samples, strict=False):
        show_image(axes, data.samples(np.array([sample]))[0])
        labels = [row for row in rows if row["image"] == sample_name(data, sample)]
        for line, row in enumerate(labels[:MAX_EXAMPLE_LINES]):
            sign, colour = _mark(row)
            text = f"{sign} {row['class']} {row['probability']:.2f}"
            if line == MAX_EXAMPLE_LINES - 1 and len(labels) > MAX_EXAMPLE_LINES:
                text = f"… {len(labels) - line} more"
            where = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "annotation_clip": False}
            axes.annotate(text, (0, 0), (0, -3 - 9 * line), fontsize=7, color=colour, **where)
    return apply_style(figure)


def _mark(row: dict[str, Any]) -> tuple[str, str]:
    blue, orange, red = COLOURS[0], COLOURS[1], COLOURS[3]
    if row["truth"] == "unknown":
        return "?", orange
    if row["truth"] == "present":
        return ("✓", blue) if row["predicted"] else ("−", red)
    return "+", red


# ---- Mistakes


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


def draw_mistake_sheet(predictions: Predictions, found: dict[str, list[Mistake]], store: NDArray[np.uint8]) -> Figure:
    """One row of images for each class with mistakes, up to MAX_CLASSES."""
    rows = dict([(name, wrong) for name, wrong in found.items() if wrong][:MAX_CLASSES])
    if not rows:
        raise ConfigError("There are no mistakes to draw.")
    figure, grid = _new_grid(len(rows), max(map(len, rows.values())), text_height=0.35)
    for line, (name, wrong) in zip(grid, rows.items(), strict=True):
        for axes, mistake in zip(line, wrong, strict=False):
            show_image(axes, store[predictions.rows[mistake.sample]])
            truth = "present" if mistake.present else "absent"
            axes.set_title(f"{truth}, p = {mistake.probability:.2f}", fontsize=7)
        line[0].set_ylabel(name, fontsize=8)
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
        figure=apply_style(draw_mistake_sheet(predictions, found, load_images(run))),
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
