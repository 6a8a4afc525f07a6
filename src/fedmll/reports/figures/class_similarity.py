"""How similar the classes are in a model: cosines between the class vectors of its head and, with the test data,
between the mean features of the classes (FedNCA-ML, Figs 4 and 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.inference.load import SavedRun
from fedmll.reports.figure import (
    MAX_CLASSES,
    MAX_NAMED_CLASSES,
    MAX_WRITTEN_CLASSES,
    ReportFigure,
    add_colour_bar,
    apply_style,
    draw_class_matrix,
    new_figure,
    none_if_undefined,
    write_numbers,
)
from fedmll.reports.figures.class_features import ClassFeatures

Matrix = NDArray[np.float64]


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
        f"Cosine between the mean features of the classes (FedNCA-ML, Fig. 4): the mean of {feature} over the test "
        f"images with the class ({features.images:,} images). Lower means better separated. {_means(matrices)}"
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
        {"class": names[a], "other": names[b]} | {what: none_if_undefined(m[a, b]) for what, m in matrices.items()}
        for a, b in combinations(range(len(names)), 2)
    ]
    return ReportFigure(name=name, title=title, caption=caption, figure=apply_style(figure), rows=rows)
