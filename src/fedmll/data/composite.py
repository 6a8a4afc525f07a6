"""Composites: multi-label images made of single-label images.

`quadrants` (the default) places source images on a canvas that is twice as wide and twice as high; the rest is zero. A
one-label sample has one image in one quadrant, a two-label sample has two images of different classes in two quadrants.
`side-by-side` does the same on a canvas that is twice as wide. `blend` keeps the size and averages the two images.

singles, pairs   the number of one-label images per class and of two-label images per pair of classes in the training
  data: proportional   (both) the proportion of multi-label CIFAR-10 (3,100 and 200 of 5,000 per class), in each split
  N, M           these numbers; if one is `proportional`, it is 3,100 : 200 to the other. Validation and test data have
                 the same ratio N : M, with as many images as possible, but at most those of the training data
  all, M         each source image is also a one-label sample, and composites (50 per pair if `proportional`) use images
                 again, as for DermaMNIST. Validation and test data get composites in proportion to their size
Except with `all`, a source image is used at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError, DataError
from fedmll.core.seeding import numpy_generator
from fedmll.data.dataset import PRESENT, Dataset, Splits
from fedmll.data.images.cache import Progress, content_key, in_memory_or_cached, no_progress, store_key

PLACES = {"quadrants": (2, 2), "side-by-side": (1, 2), "blend": (1, 1)}  # rows and columns of the canvas, in images
PAPER_SINGLES, PAPER_PAIRS, PAPER_CLASS = 3_100, 200, 5_000  # CIFAR-10: per class, per pair, source images per class
PROPORTIONAL = "proportional"
PAIRS_WITH_ALL = 50
CHUNK = 2_048  # composites made at a time
NONE = -1


@dataclass(frozen=True)
class CompositeOptions:
    """The settings data.layout, data.singles and data.pairs."""

    layout: str = "quadrants"
    singles: int | str = PROPORTIONAL
    pairs: int | str = PROPORTIONAL

    def __post_init__(self) -> None:
        if (self.singles, self.pairs) in ((0, PROPORTIONAL), (PROPORTIONAL, 0), (0, 0)):
            raise ConfigError(
                f"data.singles = {self.singles} with data.pairs = {self.pairs} makes no composites: "
                f"'{PROPORTIONAL}' is proportional to 0. Give both as numbers."
            )

    def numbers(self) -> tuple[int, int]:
        """Images per class and per pair; one that is `proportional` follows from the other."""
        if self.pairs == PROPORTIONAL:
            return int(self.singles), int(self.singles) * PAPER_PAIRS // PAPER_SINGLES
        if self.singles == PROPORTIONAL:
            return int(self.pairs) * PAPER_SINGLES // PAPER_PAIRS, int(self.pairs)
        return int(self.singles), int(self.pairs)


@dataclass(frozen=True)
class CompositeCounts:
    """The number of samples of each kind in a split; `reuse`: source images may be used again."""

    singles: NDArray[np.int64]  # (C,)
    pairs: NDArray[np.int64]  # (C, C), the upper triangle
    reuse: bool


@dataclass(frozen=True)
class CompositePlan:
    """The source images of each composite and their places on the canvas; `second` is NONE for one-label samples."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    first_place: NDArray[np.int64]
    second_place: NDArray[np.int64]
    labels: NDArray[np.int8]


def compose(
    source: Splits, options: CompositeOptions, seed: int, name: str = "the source", progress: Progress = no_progress
) -> Splits:
    """The composites of each split of a single-label source; the same seed gives the same composites."""
    parts = {"training": source.train, "validation": source.validation, "test": source.test}
    made = {
        part: _compose_split(dataset, _counts(options, source.train, dataset, name), options, seed, part, progress)
        for part, dataset in parts.items()
        if dataset is not None
    }
    for part in ("training", "test"):
        if not len(made[part]):
            raise DataError(f"'{name}' has too few {part} images per class for a composite; use more images.")
    return replace(source, train=made["training"], test=made["test"], validation=made.get("validation"))


def class_numbers(dataset: Dataset, name: str) -> NDArray[np.int64]:
    """The class of each sample of a single-label dataset."""
    positives = (dataset.labels == PRESENT).sum(axis=1)
    wrong = np.flatnonzero((positives != 1) | (dataset.labels < 0).any(axis=1))
    if len(wrong):
        raise DataError(
            f"Composites are made of images with exactly one known label; in '{name}' {len(wrong)} of {len(dataset)} "
            f"have none, several or unknown ones (the first: sample {wrong[0]}). It is multi-label already: use it "
            "without 'ml-'."
        )
    return dataset.labels.argmax(axis=1).astype(np.int64)


def _counts(options: CompositeOptions, train: Dataset, part: Dataset, name: str) -> CompositeCounts:
    """The numbers for one split; those of validation and test data follow from the training data."""
    classes = len(train.classes)
    in_train = np.bincount(class_numbers(train, name), minlength=classes)
    in_part = np.bincount(class_numbers(part, name), minlength=classes)
    smaller = np.triu(np.minimum.outer(in_part, in_part), 1)
    if options.singles == "all":
        pairs = PAIRS_WITH_ALL if options.pairs == PROPORTIONAL else int(options.pairs)
        per_pair = pairs if part is train else round(pairs * len(part) / len(train))
        return CompositeCounts(in_part, np.where(smaller > 0, per_pair, 0), reuse=True)
    if options.singles == options.pairs == PROPORTIONAL:
        # 62 % and 9 × 4 % of a class; with more than 10 classes more pairs share the 36 %
        partners = max(classes - 1, 9)
        return CompositeCounts(
            in_part * PAPER_SINGLES // PAPER_CLASS, smaller * PAPER_PAIRS * 9 // (PAPER_CLASS * partners), reuse=False
        )
    singles, pairs = options.numbers()
    scarce = int(in_train.argmin())
    needed = singles + pairs * (classes - 1)
    if needed > in_train[scarce]:
        raise ConfigError(
            f"data.singles = {singles} and data.pairs = {pairs} need {needed} training images per class (pairs with "
            f"each of the {classes - 1} other classes); '{name}' has {in_train[scarce]} of '{train.classes[scarce]}'. "
            'Lower them, or set data.singles = "all", which uses images more than once.'
        )
    if part is not train and needed > in_part.min():
        singles, pairs = _same_ratio(singles, pairs, classes, int(in_part.min()))
    return CompositeCounts(np.full(classes, singles), np.triu(np.full((classes, classes), pairs), 1), reuse=False)


def _same_ratio(singles: int, pairs: int, classes: int, available: int) -> tuple[int, int]:
    """The largest numbers in the ratio singles : pairs for which `available` images per class are enough."""
    needed = singles + pairs * (classes - 1)
    fewer = pairs * available // needed
    if fewer == 0:  # so few images that only one-label samples fit
        return singles * available // needed, 0
    return fewer * singles // pairs, fewer


def _compose_split(
    source: Dataset, counts: CompositeCounts, options: CompositeOptions, seed: int, part: str, progress: Progress
) -> Dataset:
    plan = _draw(source, counts, PLACES[options.layout], numpy_generator(seed, "composite", part))
    down, across = PLACES[options.layout]
    channels, height, width = source.sample_shape
    shape = (len(plan.labels), channels, down * height, across * width)
    what = f"composing {part} images"

    def key() -> str:
        drawn = (plan.first, plan.second, plan.first_place, plan.second_place)
        return content_key("composite", store_key(source.store), options.layout, *drawn)  # type: ignore[arg-type]

    def fill(canvas: NDArray[np.uint8]) -> None:
        for start in range(0, len(canvas), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(canvas)))
            _paint(canvas[chunk], source.store, plan, chunk, options.layout)  # type: ignore[arg-type]
            progress(chunk.stop, len(canvas), what)

    return Dataset(in_memory_or_cached(key, shape, fill, progress, what), plan.labels, source.classes)


def _draw(
    source: Dataset, counts: CompositeCounts, places: tuple[int, int], generator: np.random.Generator
) -> CompositePlan:
    """Draw all random choices of a split: source images, places and the order of samples."""
    numbers = source.labels.argmax(axis=1)
    classes = len(source.classes)
    piles = [generator.permutation(np.flatnonzero(numbers == label)) for label in range(classes)]
    first = [piles[label][: counts.singles[label]] for label in range(classes)]
    second = [np.full(len(images), NONE) for images in first]
    used = np.zeros(classes, dtype=np.int64) if counts.reuse else counts.singles.copy()
    for one, other in zip(*np.nonzero(counts.pairs), strict=True):
        wanted = counts.pairs[one, other]
        for label, images in ((one, first), (other, second)):
            if counts.reuse:  # no image is used again before all images of the class were used
                images.append(piles[label][np.arange(used[label], used[label] + wanted) % len(piles[label])])
            else:
                images.append(piles[label][used[label] : used[label] + wanted])
            used[label] += wanted
    order = generator.permutation(sum(map(len, first)))
    firsts, seconds = np.concatenate(first)[order], np.concatenate(second)[order]
    labels = source.labels[firsts].copy()
    labels[seconds != NONE] |= source.labels[seconds[seconds != NONE]]
    cells = places[0] * places[1]
    first_place = generator.integers(cells, size=len(order))
    second_place = (first_place + generator.integers(1, max(cells, 2), size=len(order))) % cells
    rows = np.append(source.rows, NONE)  # NONE stays NONE
    return CompositePlan(rows[firsts], rows[seconds], first_place, second_place, labels)


def _paint(canvas: NDArray[np.uint8], store: NDArray[np.uint8], plan: CompositePlan, chunk: slice, layout: str) -> None:
    """Draw the composites of `chunk` on a canvas of zeros."""
    first, second = plan.first[chunk], plan.second[chunk]
    paired = np.flatnonzero(second != NONE)
    if layout == "blend":
        canvas[:] = store[first]
        total = canvas[paired].astype(np.uint16) + store[second[paired]]
        canvas[paired] = (total + 1) // 2
        return
    down, across = PLACES[layout]
    count, channels, height, width = canvas.shape
    cells = canvas.reshape(count, channels, down, height // down, across, width // across)
    all_samples = np.arange(count)
    for samples, images, places in (
        (all_samples, first, plan.first_place[chunk]),
        (paired, second[paired], plan.second_place[chunk][paired]),
    ):
        for place in range(down * across):
            here = places == place
            cells[samples[here], :, place // across, :, place % across, :] = store[images[here]]
