"""Test images with their predicted and true labels (FedHarmony, Fig. 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.inference.load import SavedRun
from fedmll.reports.figure import COLOURS, ReportFigure, apply_style, hide_axes, new_figure, to_image
from fedmll.reports.figures.class_features import choose_images
from fedmll.runs.predictions import sample_name

MAX_IMAGES, COLUMNS = 12, 4
MAX_LINES = 6  # of text below an image
TILE = 1.7  # inches
THRESHOLD = 0.5

BLUE, ORANGE, RED = COLOURS[0], COLOURS[1], COLOURS[3]
TRUTH = {PRESENT: "present", ABSENT: "absent", UNKNOWN: "unknown"}


def example_figure(run: SavedRun, data: Dataset) -> ReportFigure | None:
    """None without a global model or without images."""
    if run.trainer_or_none is None or not data.is_images:
        return None
    chosen = choose_images(data, MAX_IMAGES, run.summary["seed"], "examples")
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
        figure=_draw(rows, data, chosen.tolist()),
        rows=rows,
    )


def _draw(rows: list[dict[str, Any]], data: Dataset, samples: list[int]) -> Figure:
    lines = -(-len(samples) // COLUMNS)
    figure = new_figure(TILE * COLUMNS, (TILE + 0.6) * lines)
    grid: Any = figure.subplots(lines, COLUMNS, squeeze=False)
    for place, axes in enumerate(grid.ravel()):
        hide_axes(axes)
        if place >= len(samples):
            continue
        sample = samples[place]
        axes.imshow(to_image(np.asarray(data.samples(np.array([sample])))[0]), cmap="gray", vmin=0, vmax=255)
        labels = [row for row in rows if row["image"] == sample_name(data, sample)]
        for line, row in enumerate(labels[:MAX_LINES]):
            sign, colour = _mark(row)
            text = f"{sign} {row['class']} {row['probability']:.2f}"
            if line == MAX_LINES - 1 and len(labels) > MAX_LINES:
                text = f"… {len(labels) - line} more"
            where = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "annotation_clip": False}
            axes.annotate(text, (0, 0), (0, -3 - 9 * line), fontsize=7, color=colour, **where)
    return apply_style(figure)


def _mark(row: dict[str, Any]) -> tuple[str, str]:
    if row["truth"] == "unknown":
        return "?", ORANGE
    if row["truth"] == "present":
        return ("✓", BLUE) if row["predicted"] else ("−", RED)
    return "+", RED
