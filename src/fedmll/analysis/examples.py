"""Test images with what the model says of them beside the truth (FedHarmony, Fig. 3)."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedmll.analysis.class_features import drawn
from fedmll.analysis.look import COLOURS, bare, canvas, dressed, pixels
from fedmll.analysis.opened import learner_of, name_of
from fedmll.analysis.picture import Picture
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.running.saved import SavedRun

IMAGES, COLUMNS = 12, 4
LINES = 6  # of text below an image
TILE = 1.7  # inches
THRESHOLD = 0.5

BLUE, ORANGE, RED = COLOURS[0], COLOURS[1], COLOURS[3]
TRUTH = {PRESENT: "present", ABSENT: "absent", UNKNOWN: "unknown"}


def picture(run: SavedRun, data: Dataset) -> Picture | None:
    """None without a common model or without images."""
    if learner_of(run) is None or not data.is_images:
        return None
    chosen = drawn(data, IMAGES, run.summary["seed"], "examples")
    if not len(chosen):
        return None
    scores = run.predict(data.subset(chosen))
    rows = [
        {"image": name_of(data, sample), "class": run.classes[label], "truth": TRUTH[int(data.labels[sample, label])],
         "predicted": bool(p[label] > THRESHOLD), "probability": float(p[label])}
        for sample, p in zip(chosen, scores, strict=True)
        for label in np.argsort(-((data.labels[sample] == PRESENT) + p), kind="stable")  # the true ones first
        if data.labels[sample, label] == PRESENT or p[label] > THRESHOLD
    ]  # fmt: skip
    words = (
        "Test images with the true labels and those that the model gives (probability above 0.5): ✓ found, − missed, "
        "+ wrongly given, ? given where the truth is unknown. The seed chose the images among those with a label."
    )
    return Picture("examples", "Predicted and true labels", words, _drawn(rows, data, chosen.tolist()), rows)


def _drawn(rows: list[dict[str, Any]], data: Dataset, samples: list[int]) -> Figure:
    lines = -(-len(samples) // COLUMNS)
    figure = canvas(TILE * COLUMNS, (TILE + 0.6) * lines)
    grid: Any = figure.subplots(lines, COLUMNS, squeeze=False)
    for place, axes in enumerate(grid.ravel()):
        bare(axes)
        if place >= len(samples):
            continue
        sample = samples[place]
        axes.imshow(pixels(np.asarray(data.samples(np.array([sample])))[0]), cmap="gray", vmin=0, vmax=255)
        mine = [row for row in rows if row["image"] == name_of(data, sample)]
        for line, row in enumerate(mine[:LINES]):
            sign, colour = _mark(row)
            text = f"{sign} {row['class']} {row['probability']:.2f}"
            if line == LINES - 1 and len(mine) > LINES:
                text = f"… {len(mine) - line} more"
            where = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top", "annotation_clip": False}
            axes.annotate(text, (0, 0), (0, -3 - 9 * line), fontsize=7, color=colour, **where)
    return dressed(figure)


def _mark(row: dict[str, Any]) -> tuple[str, str]:
    if row["truth"] == "unknown":
        return "?", ORANGE
    if row["truth"] == "present":
        return ("✓", BLUE) if row["predicted"] else ("−", RED)
    return "+", RED
