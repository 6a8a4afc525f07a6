"""Pad-stack composites: multi-label images made of single-label ones.

`quadrants` (the default) puts each source image on a canvas twice as wide and twice as high, the rest zero: a one-label
sample has one image in one quadrant, a two-label sample two images of different classes in two different quadrants.
`side-by-side` does the same on a canvas twice as wide. `blend` keeps the size and takes the mean of the two images.

singles, pairs   how many one-label images a class and two-label images a pair of classes the training data gets:
  proportional   (both) the proportion of multi-label CIFAR-10 (3,100 and 200 of 5,000 a class), in every split
  N, M           these numbers; one of them `proportional`: 3,100 : 200 to the other. Validation and test have the same
                 ratio N : M, with as many images as they allow and at most those of training
  all, M         every source image is kept as a one-label sample, and the composites (50 a pair if `proportional`) use
                 images again, as for DermaMNIST. Validation and test get composites in proportion to their size
Unless all are kept, a source image is used at most once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import PRESENT, Dataset, Splits
from fedmll.data.images.cache import Progress, content_key, in_ram_or_cached, silent, store_key
from fedmll.errors import ConfigError, DataError
from fedmll.seeding import numpy_generator

PLACES = {"quadrants": (2, 2), "side-by-side": (1, 2), "blend": (1, 1)}  # rows and columns of the canvas, in images
PAPER_SINGLES, PAPER_PAIRS, PAPER_CLASS = (
    3_100,
    200,
    5_000,
)  # multi-label CIFAR-10: a class, a pair, source images a class
PROPORTIONAL = "proportional"
PAIRS_BESIDE_ALL = 50
CHUNK = 2_048  # composites made at a time
NONE = -1


@dataclass(frozen=True)
class CompositeOptions:
    """As in settings.Data, which checks each of them."""

    layout: str = "quadrants"
    singles: int | str = PROPORTIONAL
    pairs: int | str = PROPORTIONAL

    def __post_init__(self) -> None:
        if (self.singles, self.pairs) in ((0, PROPORTIONAL), (PROPORTIONAL, 0), (0, 0)):
            raise ConfigError(
                f"data.singles = {self.singles} with data.pairs = {self.pairs} makes no composites: "
                f"'{PROPORTIONAL}' is in proportion to 0. Give both as numbers."
            )


@dataclass(frozen=True)
class Counts:
    """How many samples of each kind a split gets. Images may be used again if all of them are kept as singles."""

    singles: NDArray[np.int64]  # (C,)
    pairs: NDArray[np.int64]  # (C, C), the upper triangle
    reuse: bool


@dataclass(frozen=True)
class Recipe:
    """Which source images make each composite, and where on the canvas they go; `second` is NONE for a single."""

    first: NDArray[np.int64]
    second: NDArray[np.int64]
    first_place: NDArray[np.int64]
    second_place: NDArray[np.int64]
    labels: NDArray[np.int8]


def compose(
    source: Splits, options: CompositeOptions, seed: int, name: str = "the source", progress: Progress = silent
) -> Splits:
    """The composites of every split of a single-label source, the same for the same seed."""
    parts = {"training": source.train, "validation": source.validation, "test": source.test}
    made = {
        part: _compose_split(dataset, _counts(options, source.train, dataset, name), options, seed, part, progress)
        for part, dataset in parts.items()
        if dataset is not None
    }
    for part in ("training", "test"):
        if not len(made[part]):
            raise DataError(f"'{name}' has too few {part} images a class for a single composite; use more of them.")
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


def _counts(options: CompositeOptions, train: Dataset, part: Dataset, name: str) -> Counts:
    """Numbers for one split; those of validation and test follow from the training's."""
    classes = len(train.classes)
    in_train = np.bincount(class_numbers(train, name), minlength=classes)
    in_part = np.bincount(class_numbers(part, name), minlength=classes)
    smaller = np.triu(np.minimum.outer(in_part, in_part), 1)
    if options.singles == "all":
        pairs = PAIRS_BESIDE_ALL if options.pairs == PROPORTIONAL else int(options.pairs)
        a_pair = pairs if part is train else round(pairs * len(part) / len(train))
        return Counts(in_part, np.where(smaller > 0, a_pair, 0), reuse=True)
    if options.singles == options.pairs == PROPORTIONAL:
        # 62 % and 9 × 4 % of a class; with more than 10 classes the 36 % are shared by more partners
        partners = max(classes - 1, 9)
        return Counts(
            in_part * PAPER_SINGLES // PAPER_CLASS, smaller * PAPER_PAIRS * 9 // (PAPER_CLASS * partners), reuse=False
        )
    singles, pairs = _explicit(options)
    scarce = int(in_train.argmin())
    needed = singles + pairs * (classes - 1)
    if needed > in_train[scarce]:
        raise ConfigError(
            f"data.singles = {singles} and data.pairs = {pairs} need {needed} training images a class (pairs with each "
            f"of the {classes - 1} other classes); '{name}' has {in_train[scarce]} of '{train.classes[scarce]}'. Lower "
            'them, or set data.singles = "all", which uses images more than once.'
        )
    if part is not train and needed > in_part.min():
        singles, pairs = _same_ratio(singles, pairs, classes, int(in_part.min()))
    return Counts(np.full(classes, singles), np.triu(np.full((classes, classes), pairs), 1), reuse=False)


def _explicit(options: CompositeOptions) -> tuple[int, int]:
    if options.pairs == PROPORTIONAL:
        return int(options.singles), int(options.singles) * PAPER_PAIRS // PAPER_SINGLES
    if options.singles == PROPORTIONAL:
        return int(options.pairs) * PAPER_SINGLES // PAPER_PAIRS, int(options.pairs)
    return int(options.singles), int(options.pairs)


def _same_ratio(singles: int, pairs: int, classes: int, available: int) -> tuple[int, int]:
    """The largest numbers in the ratio singles : pairs for which `available` images a class are enough."""
    needed = singles + pairs * (classes - 1)
    fewer = pairs * available // needed
    if fewer == 0:  # so few images that only singles fit
        return singles * available // needed, 0
    return fewer * singles // pairs, fewer


def _compose_split(
    source: Dataset, counts: Counts, options: CompositeOptions, seed: int, part: str, progress: Progress
) -> Dataset:
    recipe = _draw(source, counts, PLACES[options.layout], numpy_generator(seed, "composite", part))
    down, across = PLACES[options.layout]
    channels, height, width = source.sample_shape
    shape = (len(recipe.labels), channels, down * height, across * width)
    what = f"composing {part} images"

    def key() -> str:
        drawn = (recipe.first, recipe.second, recipe.first_place, recipe.second_place)
        return content_key("composite", store_key(source.store), options.layout, *drawn)  # type: ignore[arg-type]

    def fill(canvas: NDArray[np.uint8]) -> None:
        for start in range(0, len(canvas), CHUNK):
            chunk = slice(start, min(start + CHUNK, len(canvas)))
            _paint(canvas[chunk], source.store, recipe, chunk, options.layout)  # type: ignore[arg-type]
            progress(chunk.stop, len(canvas), what)

    return Dataset(in_ram_or_cached(key, shape, fill, progress, what), recipe.labels, source.classes)


def _draw(source: Dataset, counts: Counts, places: tuple[int, int], generator: np.random.Generator) -> Recipe:
    """All random choices of a split, before any pixel is touched: source images, places and the order of samples."""
    numbers = source.labels.argmax(axis=1)
    classes = len(source.classes)
    piles = [generator.permutation(np.flatnonzero(numbers == label)) for label in range(classes)]
    first = [piles[label][: counts.singles[label]] for label in range(classes)]
    second = [np.full(len(images), NONE) for images in first]
    used = np.zeros(classes, dtype=np.int64) if counts.reuse else counts.singles.copy()
    for one, other in zip(*np.nonzero(counts.pairs), strict=True):
        wanted = counts.pairs[one, other]
        for label, images in ((one, first), (other, second)):
            if counts.reuse:  # round and round the shuffled pile: no image comes again before all have been used
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
    rows = np.append(source.rows, NONE)  # so that NONE stays NONE
    return Recipe(rows[firsts], rows[seconds], first_place, second_place, labels)


def _paint(canvas: NDArray[np.uint8], store: NDArray[np.uint8], recipe: Recipe, chunk: slice, layout: str) -> None:
    """Fill a zeroed canvas with the composites of `chunk`."""
    first, second = recipe.first[chunk], recipe.second[chunk]
    paired = np.flatnonzero(second != NONE)
    if layout == "blend":
        canvas[:] = store[first]
        total = canvas[paired].astype(np.uint16) + store[second[paired]]
        canvas[paired] = (total + 1) // 2
        return
    down, across = PLACES[layout]
    count, channels, height, width = canvas.shape
    cells = canvas.reshape(count, channels, down, height // down, across, width // across)
    everyone = np.arange(count)
    for samples, images, places in (
        (everyone, first, recipe.first_place[chunk]),
        (paired, second[paired], recipe.second_place[chunk][paired]),
    ):
        for place in range(down * across):
            here = places == place
            cells[samples[here], :, place // across, :, place % across, :] = store[images[here]]
