"""How near the classes are to each other in a model: cosines of the class vectors of its head, and with the test data
of the mean features of the classes (FedNCA-ML, Figs 4 and 7)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.analysis.class_features import ClassFeatures
from fedmll.analysis.look import NAMED, WRITTEN, canvas, colour_bar, dressed, or_none, square, write_numbers
from fedmll.analysis.opened import classes_shown, learner_of
from fedmll.analysis.picture import Picture
from fedmll.running.saved import SavedRun

Matrix = NDArray[np.float64]


def cosines(vectors: NDArray[np.floating]) -> Matrix:
    """(classes, classes); undefined (NaN) where a vector is zero or undefined."""
    exact = vectors.astype(np.float64)
    length = np.linalg.norm(exact, axis=1, keepdims=True)
    unit = exact / np.where(length > 0, length, np.nan)
    found: Matrix = unit @ unit.T
    return found


def of_the_head(run: SavedRun) -> Picture | None:
    """None where the run has no common model, or its head has nothing of its own for a class."""
    learner = learner_of(run)
    vectors = {} if learner is None else learner.model.class_vectors()
    shown = classes_shown(run)
    if not vectors or len(shown) < 2:
        return None
    matrices = {name: cosines(tensor.detach().numpy())[np.ix_(shown, shown)] for name, tensor in vectors.items()}
    ideal = -1 / (len(run.classes) - 1)
    words = (
        "Cosine between the vectors that the model's head has of every two classes. Red pairs are hard to tell apart; "
        f"classes that are as far from each other as {len(run.classes)} can be (a simplex ETF) have {ideal:.2f} "
        f"everywhere. {_means(matrices)}"
    )
    return _picture("class-vectors", "Class vectors of the head", words, matrices, [run.classes[c] for c in shown])


def of_features(run: SavedRun, features: ClassFeatures) -> Picture | None:
    """Fig. 4; a class that no image shows has no mean feature and is left out."""
    counts = features.of.sum(0)
    shown = np.intersect1d(classes_shown(run), np.flatnonzero(counts))
    if len(shown) < 2:
        return None
    means = features.of[:, shown].T.astype(np.float64) @ features.vectors / counts[shown, None]
    matrices = {"mean features": cosines(means)}
    whose = "the class's own feature" if features.class_wise else "the feature of the whole image"
    words = (
        f"Cosine between the mean features of every two classes (FedNCA-ML, Fig. 4): of each class the mean of {whose} "
        f"over the test images that show it ({features.images:,} images). Lower is better separated. {_means(matrices)}"
    )
    name, title = "class-features", "Class features on test images"
    return _picture(name, title, words, matrices, [run.classes[c] for c in shown])


def _means(matrices: Mapping[str, Matrix]) -> str:
    found = [f"{name} {np.nanmean(m[np.triu_indices(len(m), 1)]):.2f}" for name, m in matrices.items()]
    return f"Mean over the pairs: {', '.join(found)}."


def _picture(name: str, title: str, words: str, matrices: Mapping[str, Matrix], names: Sequence[str]) -> Picture:
    side = 3.6 if len(names) <= NAMED else 4.4
    figure = canvas(side * len(matrices) + 1.6, side + 0.9)
    panels: Any = figure.subplots(1, len(matrices), sharey=True, squeeze=False)
    for axes, (what, matrix) in zip(panels[0], matrices.items(), strict=True):
        mesh = square(axes, matrix, names, 1)
        axes.set_title(what, fontsize=10)
        axes.tick_params(labelleft=axes is panels[0][0])
        if len(names) <= WRITTEN:
            write_numbers(axes, matrix, 1)
    colour_bar(figure, mesh, panels[0], "cosine")
    rows = [
        {"class": names[a], "other": names[b]} | {what: or_none(m[a, b]) for what, m in matrices.items()}
        for a, b in combinations(range(len(names)), 2)
    ]
    return Picture(name, title, words, dressed(figure), rows)
