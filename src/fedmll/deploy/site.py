"""A site of a real federation: its own images and labels, as its own files have them. Nothing here knows a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.federation import split_off
from fedmll.data.images.cache import Progress, silent
from fedmll.data.images.decode import Size, as_8_bit, finish, look_at, open_image, window_note, work_through
from fedmll.data.images.labels_csv import LabelTable, read_labels
from fedmll.data.images.reading import left_out, readable
from fedmll.data.sources import folder
from fedmll.data.targets import TEST, TRAIN
from fedmll.errors import DataError, nearest
from fedmll.settings import Reading


@dataclass(frozen=True)
class Site:
    """Where a site's things lie."""

    name: str
    csv: Path
    images: Path
    memory: Path  # what its methods remember between rounds
    classes: tuple[str, ...] = ()  # the only columns to use; empty: all
    device: str = "auto"
    ignore: tuple[str, ...] = ()  # the rest is as in an experiment's [data]
    group: str | None = None
    window: tuple[float, float] | None = None
    skip_unreadable: bool = False

    @property
    def reading(self) -> Reading:
        return Reading(self.classes, self.ignore, self.group, self.window, self.skip_unreadable, by_options=True)


@dataclass(frozen=True)
class SiteData:
    train: Dataset
    held_out: Dataset  # its own test data: rows marked validation or test, or a share drawn by the seed
    annotated: NDArray[np.bool_]  # (C,): it knows at least one label


@dataclass(frozen=True)
class Summary:
    """What the check of a site's data finds; one entry a class."""

    images: int
    held_out: int | None  # None: the experiment's share
    classes: tuple[str, ...]
    present: NDArray[np.int64]
    absent: NDArray[np.int64]
    unknown: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def check(site: Site, progress: Progress = silent) -> Summary:
    """Read the labels and open every image; a DataError names everything that is wrong."""
    table = _table(site)
    if not table.paths:
        table.problems.report()
    encoded = folder.encoded(table)
    look = look_at(encoded, progress)
    window, failures = look.window(site.reading), look.refused(site.reading)

    def decode(position: int) -> None:
        if position not in failures:
            with open_image(encoded.read(position)) as image:
                as_8_bit(image, "L", window)

    finish(work_through(encoded, decode, progress, "checking images", failures))
    unreadable = dict(sorted(failures.items()))
    kept, skipped = readable(len(table.paths), encoded.name, unreadable, site.reading, table.problems)
    notes = (*window_note(window), *left_out(table.missing, skipped))
    table = table.rows(kept)
    present, absent, unknown = ((table.labels == value).sum(0) for value in (PRESENT, ABSENT, UNKNOWN))
    held_out = None if table.split is None else int((table.split != TRAIN).sum())
    return Summary(len(table.paths), held_out, table.classes, present, absent, unknown, notes)


def load(
    site: Site,
    classes: Sequence[str] | None,
    shape: Sequence[int],
    seed: int,
    holdout: float,
    progress: Progress = silent,
) -> SiteData:
    """The site's data as an experiment needs it. `classes` None: its label set is private, only its own count."""
    _check_folder(site)
    found = folder.read(site.csv, site.images, (shape[1], shape[2]), site.reading, progress)
    table = found.table
    labels = table.labels if classes is None else _aligned(site, table, tuple(classes))
    annotated = (labels != UNKNOWN).any(0)
    names = table.classes if classes is None else tuple(classes)
    if classes is None:
        own = sorted(np.flatnonzero(annotated).tolist(), key=names.__getitem__)  # the order of a private client's rows
        labels, names, annotated = labels[:, own], tuple(names[column] for column in own), annotated[own]
    samples = Dataset(_as_shape(site, found.store, tuple(shape)), labels, names, found.rows)
    if table.split is not None:
        train, held_out = np.flatnonzero(table.split == TRAIN), np.flatnonzero(table.split != TRAIN)
    else:
        train, held_out = split_off(np.arange(len(samples)), holdout, seed, site.name, table.patients)
    if not len(train):
        raise DataError(f"'{site.csv}' has no training rows: mark some as split = train.")
    return SiteData(samples.subset(train), samples.subset(held_out), annotated)


def load_test(
    file: Path, images: Path | None, size: Size, reading: Reading | None = None, progress: Progress = silent
) -> tuple[Dataset, Dataset, folder.LabelledImages]:
    """The server's own folder: test data (all rows, or those with split = test), the rows marked train, and both."""
    found = folder.read(file, images or file.parent, size, reading, progress)
    samples = Dataset(found.store, found.table.labels, found.table.classes, found.rows)
    split = np.full(len(samples), TEST) if found.table.split is None else found.table.split
    return samples.subset(np.flatnonzero(split == TEST)), samples.subset(np.flatnonzero(split == TRAIN)), found


def _table(site: Site) -> LabelTable:
    _check_folder(site)
    return read_labels(site.csv, site.images, site.reading)


def _check_folder(site: Site) -> None:
    if not site.images.is_dir():
        raise DataError(f"The image folder '{site.images}' does not exist; give it with --images DIR.")


def _columns(table: LabelTable, classes: Sequence[str]) -> NDArray[np.int8]:
    """The labels of these classes. One that the file does not have is unknown; in the `A|B|C` form it is absent, but
    where the row says nothing at all."""
    place = {name: column for column, name in enumerate(table.classes)}
    labels = np.full((len(table.paths), len(classes)), UNKNOWN, np.int8)
    if table.listed:
        labels[(table.labels != UNKNOWN).any(axis=1)] = ABSENT
    for column, name in enumerate(classes):
        if name in place:
            labels[:, column] = table.labels[:, place[name]]
    return labels


def _aligned(site: Site, table: LabelTable, classes: tuple[str, ...]) -> NDArray[np.int8]:
    """The labels in the federation's order of classes. What the site does not annotate is unknown."""
    strange = next((name for name in table.classes if name not in classes), None)
    if strange is not None:
        raise DataError(
            f"'{site.csv}' has the class '{strange}', which this federation does not have{nearest(strange, classes)} "
            "Rename the column, or choose the columns to use with --classes."
        )
    # --classes says what the site annotates: the `A|B|C` form speaks of no other class
    return _columns(replace(table, listed=table.listed and not site.classes), classes)


def _as_shape(site: Site, store: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if store.shape[1:] == shape:
        return store
    if store.shape[1] == 1 and shape[0] == 3 and store.shape[2:] == shape[1:]:
        return np.broadcast_to(store, (len(store), *shape))  # grey images where the federation has colour
    raise DataError(
        f"The images of {site.name} are {store.shape[1:]} (channels, height, width), and the federation works with "
        f"{shape}. The server sets their size by data.size, and grey or colour by sites.channels."
    )
