"""Attention maps of classes: of the LADM in FedNCA-ML (Fig. 5) and of the label tokens in C-Tran."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from numpy.typing import NDArray

from fedmll.data.dataset import PRESENT, Dataset
from fedmll.inference.load_run import SavedRun
from fedmll.reports.figure import ReportFigure, add_colour_bar, apply_style, hide_axes, new_figure, show_image
from fedmll.reports.figures.class_features import choose_images
from fedmll.runs.array_files import sample_name

MAX_IMAGES = 4
MAX_CLASSES = 3  # maps per image
TILE = 1.5  # inches


@dataclass(frozen=True)
class AttentionMap:
    """The attention of one class on one image."""

    sample: int  # index in the data
    label: int
    weights: NDArray[np.float32]  # (rows, columns), the mean over the heads

    @property
    def share(self) -> float:
        """The share of the attention that is on the image; the rest is on the label tokens (C-Tran)."""
        return float(self.weights.sum())


def attention_maps(
    run: SavedRun, data: Dataset, images: int = MAX_IMAGES, max_classes: int = MAX_CLASSES
) -> list[AttentionMap]:
    """The maps of the classes that are present, if possible in images with two classes. Empty if the model has no
    attention, the samples are not images, or a map would be a single square."""
    trainer = run.trainer_or_none
    if trainer is None or not data.is_images:
        return []
    seed = run.summary["seed"]
    chosen = choose_images(data, images, seed, "attention", labels=2)
    if len(chosen) < images:
        chosen = choose_images(data, images, seed, "attention")
    if not len(chosen):
        return []
    with torch.inference_mode():
        inputs = trainer.method.transform_images(trainer.task.model_inputs(data, chosen))
        maps = trainer.model.class_maps(inputs)
    if maps is None or maps[0, 0, 0].numel() == 1:
        return []
    mean = maps.mean(1).numpy()
    return [
        AttentionMap(int(sample), int(label), mean[place, label])
        for place, sample in enumerate(chosen)
        for label in np.flatnonzero(data.labels[sample] == PRESENT)[:max_classes]
    ]


def attention_figure(run: SavedRun, data: Dataset) -> ReportFigure | None:
    maps = attention_maps(run, data)
    if not maps:
        return None
    rows = [
        {"image": sample_name(data, one.sample), "class": run.classes[one.label], "row": row, "column": column,
         "share": float(value)}
        for one in maps
        for (row, column), value in np.ndenumerate(one.weights)
    ]  # fmt: skip
    least = min(one.share for one in maps)
    rest = "" if least > 0.999 else " The rest of the attention is on the label tokens (C-Tran)."
    return ReportFigure(
        name="attention",
        title="Attention maps of the classes",
        caption=(
            "The parts of an image that the model attends to for each class that is present (FedNCA-ML, Fig. 5): the "
            "share of the attention of the class on each part, averaged over the attention heads. All maps have the "
            f"same scale; the dotted line is the mean. The images were chosen at random.{rest}"
        ),
        figure=_draw(maps, run, data),
        rows=rows,
    )


def _draw(maps: list[AttentionMap], run: SavedRun, data: Dataset) -> Figure:
    """One line per image: the image, then the image with each map."""
    samples = list(dict.fromkeys(one.sample for one in maps))
    columns = 1 + max(sum(one.sample == sample for one in maps) for sample in samples)
    figure = new_figure(TILE * columns + 0.9, (TILE + 0.4) * len(samples))
    grid: Any = figure.subplots(len(samples), columns, squeeze=False)
    scale = ScalarMappable(Normalize(0, max(float(one.weights.max()) for one in maps)), "viridis")
    for line, sample in zip(grid, samples, strict=True):
        of_image = [one for one in maps if one.sample == sample]
        image = data.samples(np.array([sample]))[0]
        *_, height, width = image.shape
        for place, axes in enumerate(line):
            hide_axes(axes)
            if place > len(of_image):
                continue
            show_image(axes, image, extent=(0, width, height, 0))
            if place:
                one = of_image[place - 1]
                axes.imshow(one.weights, cmap=scale.cmap, norm=scale.norm, alpha=0.6, extent=(0, width, height, 0))
                part = "" if one.share > 0.999 else f"\n{100 * one.share:.0f} % on the image"
                axes.set_title(run.classes[one.label] + part, fontsize=8)
    bar = add_colour_bar(figure, scale, grid.ravel(), "share of attention", shrink=0.5)
    bar.ax.axhline(float(np.mean([one.weights for one in maps])), color="white", linestyle=":")
    return apply_style(figure)
