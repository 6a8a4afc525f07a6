"""Where each class looks in an image: the attention of FedNCA-ML's LADM (Fig. 5), and of C-Tran's label tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedmll.analysis.class_features import drawn
from fedmll.analysis.look import bare, canvas, colour_bar, dressed, pixels
from fedmll.analysis.opened import learner_of, name_of
from fedmll.analysis.picture import Picture
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.running.saved import SavedRun

IMAGES = 4
CLASSES = 3  # maps of an image, at most
TILE = 1.5  # inches


@dataclass(frozen=True)
class Look:
    """Of one class into one image."""

    sample: int  # place in the data
    label: int
    weights: NDArray[np.float32]  # (rows, columns), the mean over the heads

    @property
    def share(self) -> float:
        """How much of the attention is on the image; what C-Tran's labels give to each other is not."""
        return float(self.weights.sum())


def looks(run: SavedRun, data: Dataset, images: int = IMAGES, most: int = CLASSES) -> list[Look]:
    """Of the classes that are there, in images that show two where there are enough of them. Empty where the model has
    no attention, the samples are no images, or a map would be a single square."""
    learner = learner_of(run)
    if learner is None or not data.is_images:
        return []
    seed = run.summary["seed"]
    chosen = drawn(data, images, seed, "attention", labels=2)
    if len(chosen) < images:
        chosen = drawn(data, images, seed, "attention")
    if not len(chosen):
        return []
    with torch.inference_mode():
        seen = learner.method.seen(learner.task.seen(data, chosen))
        maps = learner.model.class_maps(seen)
    if maps is None or maps[0, 0, 0].numel() == 1:
        return []
    mean = maps.mean(1).numpy()
    return [
        Look(int(sample), int(label), mean[place, label])
        for place, sample in enumerate(chosen)
        for label in np.flatnonzero(data.labels[sample] == PRESENT)[:most]
    ]


def picture(run: SavedRun, data: Dataset) -> Picture | None:
    found = looks(run, data)
    if not found:
        return None
    rows = [
        {"image": name_of(data, look.sample), "class": run.classes[look.label], "row": row, "column": column,
         "share": float(value)}
        for look in found
        for (row, column), value in np.ndenumerate(look.weights)
    ]  # fmt: skip
    least = min(look.share for look in found)
    rest = "" if least > 0.999 else " The rest of a label's attention is on the labels' own tokens (C-Tran)."
    words = (
        "Where the model looks for the classes that an image shows (FedNCA-ML, Fig. 5): the share of the class's "
        "attention on each part of the image, mean over the heads, in one scale; dotted: the mean. The seed "
        f"chose the images.{rest}"
    )
    return Picture("attention", "Where the classes look", words, _drawn(found, run, data), rows)


def _drawn(found: list[Look], run: SavedRun, data: Dataset) -> Figure:
    """A line an image: itself, then with each map."""
    samples = list(dict.fromkeys(look.sample for look in found))
    columns = 1 + max(sum(look.sample == sample for look in found) for sample in samples)
    figure = canvas(TILE * columns + 0.9, (TILE + 0.4) * len(samples))
    grid: Any = figure.subplots(len(samples), columns, squeeze=False)
    scale = ScalarMappable(Normalize(0, max(float(look.weights.max()) for look in found)), "viridis")
    for line, sample in zip(grid, samples, strict=True):
        mine = [look for look in found if look.sample == sample]
        image = pixels(np.asarray(data.samples(np.array([sample])))[0])
        height, width = image.shape[:2]
        for place, axes in enumerate(line):
            bare(axes)
            if place > len(mine):
                continue
            axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=(0, width, height, 0))
            if place:
                look = mine[place - 1]
                axes.imshow(look.weights, cmap=scale.cmap, norm=scale.norm, alpha=0.6, extent=(0, width, height, 0))
                part = "" if look.share > 0.999 else f"\n{100 * look.share:.0f} % on the image"
                axes.set_title(run.classes[look.label] + part, fontsize=8)
    bar = colour_bar(figure, scale, grid.ravel(), "share of attention", shrink=0.5)
    bar.ax.axhline(float(np.mean([look.weights for look in found])), color="white", linestyle=":")
    return dressed(figure)
