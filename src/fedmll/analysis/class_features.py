"""What a model makes of test images, by class: the features behind FedNCA-ML's Figs 3, 4, 6 and 7, and their t-SNE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedmll.analysis.look import COLOURS, INK, canvas, dressed
from fedmll.analysis.opened import learner_of
from fedmll.analysis.picture import Picture
from fedmll.client import EVALUATION_BATCH
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.running.saved import SavedRun
from fedmll.seeding import derive, numpy_generator

IMAGES = 1000  # at most, of which features are computed
POINTS = 400  # of the t-SNE, at most
FEWEST = 12  # points that a t-SNE needs to show anything
MARKERS = ("o", "^", "s")
MOST_CLASSES = len(COLOURS) * len(MARKERS)  # that can be told apart
SEVERAL = "several labels"


@dataclass(frozen=True)
class ClassFeatures:
    """Where every class reads a feature of its own (the LADM, C-Tran) a vector is of an image and a class that it
    shows; else of an image, with all classes that it shows."""

    vectors: NDArray[np.float32]  # (N, width)
    of: NDArray[np.bool_]  # (N, classes)
    class_wise: bool
    images: int


def drawn(data: Dataset, count: int, seed: int, purpose: str, labels: int = 1) -> NDArray[np.int64]:
    """Places of up to `count` samples that show at least so many `labels`; the run's seed chooses them."""
    good = np.flatnonzero((data.labels == PRESENT).sum(1) >= labels)
    return np.sort(numpy_generator(seed, "picture", purpose).permutation(good)[:count])


def class_features(run: SavedRun, data: Dataset) -> ClassFeatures | None:
    """None without a common model, or an image that shows a class."""
    learner = learner_of(run)
    chosen = drawn(data, IMAGES, run.summary["seed"], "features")
    if learner is None or not len(chosen):
        return None
    vectors, of, class_wise = [], [], False
    with torch.inference_mode():
        for first in range(0, len(chosen), EVALUATION_BATCH):
            places = chosen[first : first + EVALUATION_BATCH]
            found = learner.model.features(learner.method.seen(learner.task.seen(data, places))).numpy()
            shown = data.labels[places] == PRESENT
            class_wise = found.ndim == 3
            if class_wise:  # only the pairs that are there: all of them may not fit the memory
                image, label = np.nonzero(shown)
                found, shown = found[image, label], np.eye(shown.shape[1], dtype=bool)[label]
            vectors.append(found)
            of.append(shown)
    return ClassFeatures(np.concatenate(vectors), np.concatenate(of), class_wise, len(chosen))


def tsne(run: SavedRun, features: ClassFeatures) -> Picture | None:
    """Fig. 3 and 6: two dimensions, near is alike. None with too few points."""
    seed = run.summary["seed"]
    frequent = np.sort(np.argsort(-features.of.sum(0), kind="stable")[:MOST_CLASSES])
    good = np.flatnonzero(features.of[:, frequent].any(1))
    chosen = np.sort(numpy_generator(seed, "picture", "tsne").permutation(good)[:POINTS])
    if len(chosen) < FEWEST:
        return None
    places = embedded(features.vectors[chosen], seed)
    several = features.of[chosen].sum(1) > 1
    label = np.where(several, -1, features.of[chosen].argmax(1))
    rows = [
        {"x": float(x), "y": float(y), "class": SEVERAL if c < 0 else run.classes[c]}
        for (x, y), c in zip(places, label, strict=True)
    ]
    if features.class_wise:
        what = "A point is what the model reads for one class in one test image that shows it; its colour is the class."
    else:
        what = (
            "A point is the feature of a test image; its colour is its class, grey where it has several: this model "
            "has one feature for all classes."
        )
    left = len(run.classes) - len(frequent)
    only = f" Only the {len(frequent)} most frequent classes are shown." if left else ""
    words = f"{what} Near points are alike (t-SNE, {len(chosen)} points); distances between clusters mean little.{only}"
    return Picture("tsne", "Features of the classes", words, _scatter(rows, [run.classes[c] for c in frequent]), rows)


def embedded(vectors: NDArray[np.float32], seed: int) -> NDArray[np.float64]:
    """(N, 2). One thread: the same on every machine's number of cores."""
    from sklearn.manifold import TSNE
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    perplexity = min(30.0, (len(vectors) - 1) / 3)
    with threadpool_limits(1):
        flat = TSNE(perplexity=perplexity, random_state=derive(seed, "picture", "tsne") % 2**32, n_jobs=1)
        found: NDArray[np.float64] = flat.fit_transform(np.ascontiguousarray(vectors, dtype=np.float64))
    return found


def _scatter(rows: list[dict[str, Any]], classes: list[str]) -> Any:
    figure = canvas(6.4, 4.8)
    axes = figure.subplots()
    looks = {name: (COLOURS[k % len(COLOURS)], MARKERS[k // len(COLOURS)]) for k, name in enumerate(classes)}
    for name, (colour, marker) in ({SEVERAL: (INK, "D")} | looks).items():
        mine = [row for row in rows if row["class"] == name]
        if mine:
            x, y = [row["x"] for row in mine], [row["y"] for row in mine]
            axes.scatter(x, y, s=18, c=colour, marker=marker, linewidths=0, alpha=0.8, label=name)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.set_aspect("equal", adjustable="datalim")
    axes.legend(loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=8)
    return dressed(figure)
