"""The features of a model for each class on test images, and their t-SNE (FedNCA-ML, Figs 3, 4, 6 and 7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.core.seeding import derive, numpy_generator
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.inference.load import SavedRun
from fedmll.methods.client_round import EVALUATION_BATCH
from fedmll.reports.figure import COLOURS, TEXT_COLOUR, ReportFigure, apply_style, new_figure

MAX_IMAGES = 1000  # for which features are computed
MAX_POINTS = 400  # of the t-SNE
MIN_POINTS = 12  # of the t-SNE
MARKERS = ("o", "^", "s")
MAX_CLASSES = len(COLOURS) * len(MARKERS)  # that can be distinguished
SEVERAL_LABELS = "several labels"


@dataclass(frozen=True, kw_only=True)
class ClassFeatures:
    """Feature vectors. If every class has its own feature (LADM, C-Tran), there is one vector for each image and each
    class that is present in it; else one per image, with all classes that are present.

    Attributes:
        vectors: (N, width).
        classes: (N, classes): the classes of each vector.
        per_class: Every class has its own feature.
        images: The number of images.
    """

    vectors: NDArray[np.float32]
    classes: NDArray[np.bool_]
    per_class: bool
    images: int


def choose_images(data: Dataset, count: int, seed: int, purpose: str, labels: int = 1) -> NDArray[np.int64]:
    """Indices of up to `count` random samples with at least this number of labels."""
    good = np.flatnonzero((data.labels == PRESENT).sum(1) >= labels)
    return np.sort(numpy_generator(seed, "picture", purpose).permutation(good)[:count])


def compute_class_features(run: SavedRun, data: Dataset) -> ClassFeatures | None:
    """None without a global model, or without an image that has a label."""
    trainer = run.trainer_or_none
    chosen = choose_images(data, MAX_IMAGES, run.summary["seed"], "features")
    if trainer is None or not len(chosen):
        return None
    vectors, classes, per_class = [], [], False
    with torch.inference_mode():
        for first in range(0, len(chosen), EVALUATION_BATCH):
            places = chosen[first : first + EVALUATION_BATCH]
            inputs = trainer.method.transform_images(trainer.task.model_inputs(data, places))
            found = trainer.model.features(inputs).numpy()
            present = data.labels[places] == PRESENT
            per_class = found.ndim == 3
            if per_class:  # only classes that are present: all of them may not fit into memory
                image, label = np.nonzero(present)
                found, present = found[image, label], np.eye(present.shape[1], dtype=bool)[label]
            vectors.append(found)
            classes.append(present)
    return ClassFeatures(
        vectors=np.concatenate(vectors), classes=np.concatenate(classes), per_class=per_class, images=len(chosen)
    )


def tsne_figure(run: SavedRun, features: ClassFeatures) -> ReportFigure | None:
    """Figs 3 and 6: the features in two dimensions. None with too few points."""
    seed = run.summary["seed"]
    frequent = np.sort(np.argsort(-features.classes.sum(0), kind="stable")[:MAX_CLASSES])
    good = np.flatnonzero(features.classes[:, frequent].any(1))
    chosen = np.sort(numpy_generator(seed, "picture", "tsne").permutation(good)[:MAX_POINTS])
    if len(chosen) < MIN_POINTS:
        return None
    places = embed(features.vectors[chosen], seed)
    several = features.classes[chosen].sum(1) > 1
    label = np.where(several, -1, features.classes[chosen].argmax(1))
    rows = [
        {"x": float(x), "y": float(y), "class": SEVERAL_LABELS if c < 0 else run.classes[c]}
        for (x, y), c in zip(places, label, strict=True)
    ]
    if features.per_class:
        what = "One point for each test image and each class that is present in it; the colour is the class."
    else:
        what = (
            "One point per test image; the colour is its class, grey if it has several. This model has one feature for "
            "all classes."
        )
    left = len(run.classes) - len(frequent)
    only = f" Only the {len(frequent)} most frequent classes are shown." if left else ""
    return ReportFigure(
        name="tsne",
        title="Features of the classes (t-SNE)",
        caption=(
            f"{what} Points that are close have similar features ({len(chosen)} points); distances between clusters "
            f"mean little.{only}"
        ),
        figure=_scatter(rows, [run.classes[c] for c in frequent]),
        rows=rows,
    )


def embed(vectors: NDArray[np.float32], seed: int) -> NDArray[np.float64]:
    """The t-SNE embedding (N, 2). One thread, so that the number of cores does not change the result."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    with threadpool_limits(1):
        flat = TSNE(perplexity=perplexity, random_state=derive(seed, "picture", "tsne") % 2**32, n_jobs=1)
        found: NDArray[np.float64] = flat.fit_transform(np.ascontiguousarray(vectors, dtype=np.float64))
    return found


def _scatter(rows: list[dict[str, Any]], classes: list[str]) -> Any:
    figure = new_figure(6.4, 4.8)
    axes = figure.subplots()
    styles = {name: (COLOURS[k % len(COLOURS)], MARKERS[k // len(COLOURS)]) for k, name in enumerate(classes)}
    for name, (colour, marker) in ({SEVERAL_LABELS: (TEXT_COLOUR, "D")} | styles).items():
        points = [row for row in rows if row["class"] == name]
        if points:
            x, y = [row["x"] for row in points], [row["y"] for row in points]
            axes.scatter(x, y, s=18, c=colour, marker=marker, linewidths=0, alpha=0.8, label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return apply_style(figure)
