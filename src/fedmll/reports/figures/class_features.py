"""How a model separates the classes (FedNCA-ML, Figs 3, 4, 6 and 7): the t-SNE of its features on test images, and
cosines between the mean features of the classes and between the class vectors of its head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.core.seeding import derive, numpy_generator
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.inference.load_run import SavedRun
from fedmll.methods.framework.client_round import EVALUATION_BATCH
from fedmll.reports.figure import (
    COLOURS,
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    TEXT_COLOUR,
    ReportFigure,
    add_colour_bar,
    apply_style,
    draw_class_matrix,
    new_figure,
    write_numbers,
)

MAX_IMAGES = 1000  # for which features are computed
MAX_POINTS = 400  # of the t-SNE
MIN_POINTS = 12  # of the t-SNE
MARKERS = ("o", "^", "s")
MAX_MARKED_CLASSES = len(COLOURS) * len(MARKERS)  # that can be distinguished
SEVERAL_LABELS = "several labels"


@dataclass(frozen=True, kw_only=True)
class ClassFeatures:
    """Feature vectors. If every class has its own feature (LADM, C-Tran), there is one vector for each image and each
    class that is present in it; else one per image, with all classes that are present."""

    vectors: NDArray[np.float32]  # (N, width)
    classes: NDArray[np.bool_]  # (N, classes): the classes of each vector
    per_class: bool  # every class has its own feature
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
    frequent = np.sort(np.argsort(-features.classes.sum(0), kind="stable")[:MAX_MARKED_CLASSES])
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


# ---- Similarity of classes

Matrix = NDArray[np.float64]
MAX_WRITTEN_CLASSES = 12  # with more classes the numbers are not written into the squares


def cosines(vectors: NDArray[np.floating]) -> Matrix:
    """(classes, classes); undefined (NaN) where a vector is zero or undefined."""
    exact = vectors.astype(np.float64)
    length = np.linalg.norm(exact, axis=1, keepdims=True)
    unit = exact / np.where(length > 0, length, np.nan)
    found: Matrix = unit @ unit.T
    return found


def class_vector_figure(run: SavedRun) -> ReportFigure | None:
    """None if the run has no global model, or its head has no vectors of classes."""
    trainer = run.trainer_or_none
    vectors = {} if trainer is None else trainer.model.class_vectors()
    shown = run.most_frequent_classes(MAX_CLASSES)
    if not vectors or len(shown) < 2:
        return None
    matrices = {name: cosines(tensor.detach().numpy())[np.ix_(shown, shown)] for name, tensor in vectors.items()}
    ideal = -1 / (len(run.classes) - 1)
    caption = (
        "Cosine between the class vectors in the model's head. Red pairs are hard to distinguish. If all "
        f"{len(run.classes)} classes were as far apart as possible (a simplex ETF), every cosine would be {ideal:.2f}. "
        f"{_means(matrices)}"
    )
    names = [run.classes[c] for c in shown]
    return _matrix_figure("class-vectors", "Similarity of class vectors", caption, matrices, names)


def class_feature_figure(run: SavedRun, features: ClassFeatures) -> ReportFigure | None:
    """Fig. 4. A class without an image has no mean feature and is left out."""
    counts = features.classes.sum(0)
    shown = np.intersect1d(run.most_frequent_classes(MAX_CLASSES), np.flatnonzero(counts))
    if len(shown) < 2:
        return None
    means = features.classes[:, shown].T.astype(np.float64) @ features.vectors / counts[shown, None]
    matrices = {"mean features": cosines(means)}
    feature = "the feature of the class" if features.per_class else "the feature of the whole image"
    caption = (
        f"Cosine between the mean features of the classes (FedNCA-ML, Fig. 4), from {features.images:,} test images. "
        f"The mean feature of a class is the mean of {feature} over the images with the class. Lower cosines mean that "
        f"classes are better separated. {_means(matrices)}"
    )
    name, title = "class-features", "Similarity of class features on test images"
    return _matrix_figure(name, title, caption, matrices, [run.classes[c] for c in shown])


def _means(matrices: Mapping[str, Matrix]) -> str:
    found = [f"{name} {np.nanmean(m[np.triu_indices(len(m), 1)]):.2f}" for name, m in matrices.items()]
    return f"Mean over all pairs: {', '.join(found)}."


def _matrix_figure(
    name: str, title: str, caption: str, matrices: Mapping[str, Matrix], names: Sequence[str]
) -> ReportFigure:
    side = 3.6 if len(names) <= MAX_NAMED_CLASSES else 4.4
    figure = new_figure(side * len(matrices) + 1.6, side + 0.9)
    panels: Any = figure.subplots(1, len(matrices), sharey=True, squeeze=False)
    for axes, (what, matrix) in zip(panels[0], matrices.items(), strict=True):
        mesh = draw_class_matrix(axes, matrix, names, 1)
        axes.set_title(what, fontsize=10)
        axes.tick_params(labelleft=axes is panels[0][0])
        if len(names) <= MAX_WRITTEN_CLASSES:
            write_numbers(axes, matrix, 1)
    add_colour_bar(figure, mesh, panels[0], "cosine")
    rows = [
        {"class": names[a], "other": names[b]} | {what: float(m[a, b]) for what, m in matrices.items()}
        for a, b in combinations(range(len(names)), 2)
    ]
    return ReportFigure(name=name, title=title, caption=caption, figure=apply_style(figure), rows=rows)
