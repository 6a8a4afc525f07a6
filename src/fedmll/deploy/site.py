"""A site of a real federation: its own images and labels, as its own files have them. Nothing here knows a network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
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
from fedmll.data.targets import TEST, TRAIN, VALIDATION
from fedmll.deploy.approval import Limits
from fedmll.errors import DataError, nearest
from fedmll.settings import Reading

AT_ONCE = 256  # images in memory while all are looked at


@dataclass(frozen=True)
class Site:
    """Where a site's things lie, and what it agrees to."""

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
    files: tuple[Path, ...] = ()  # its copies of files that an experiment names by their digest
    limits: Limits = field(default_factory=Limits)
    asks: bool = False  # a person approves every experiment at the terminal; off: approved beforehand
    keep_cache: bool = False  # prepared images stay in the memory folder when the run is over
    rename: tuple[tuple[str, str], ...] = ()  # its own names of classes, and the study's
    out: Path | None = None  # where the common model and its report go; None: the memory folder
    validates: bool = False  # it only tests the common model, and never trains

    @property
    def reading(self) -> Reading:
        return Reading(self.classes, self.ignore, self.group, self.window, self.skip_unreadable, by_options=True)


@dataclass(frozen=True)
class SiteData:
    train: Dataset
    held_out: Dataset  # its own test data: rows marked validation or test, or a share drawn by the seed
    annotated: NDArray[np.bool_]  # (C,): it knows at least one label
    validation: NDArray[np.bool_]  # of held_out: thresholds are chosen on these rows, and metrics are of the others
    window: tuple[float, float] | None = None  # the values that became 0 and 255, of images of more than 8 bits


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
    table = labels_of(site)
    if not table.paths:
        table.problems.report()
    encoded = folder.encoded(table)
    look = look_at(encoded, progress)
    window, failures = look.window(site.reading), look.refused(site.reading)

    blank = np.zeros(len(table.paths), dtype=bool)

    def decode(position: int) -> None:
        if position not in failures:
            with open_image(encoded.read(position)) as image:
                low, high = as_8_bit(image, "L", window).getextrema()
            blank[position] = low == high

    finish(work_through(encoded, decode, progress, "checking images", failures))
    unreadable = dict(sorted(failures.items()))
    kept, skipped = readable(len(table.paths), encoded.name, unreadable, site.reading, table.problems)
    notes = (*window_note(window), *left_out(table.missing, skipped))
    if len(kept) and blank[kept].all():
        raise _nothing_to_see(site)
    if blank[kept].any():
        notes = (*notes, f"{int(blank[kept].sum())} images are blank: every pixel has the same value")
    table = table.rows(kept)
    _refuse_blank(site, table.labels)
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
    table = _renamed(site, found.table)
    labels = table.labels if classes is None else _aligned(site, table, tuple(classes))
    _refuse_blank(site, labels)
    annotated = (labels != UNKNOWN).any(0)
    names = table.classes if classes is None else tuple(classes)
    if classes is None:
        own = sorted(np.flatnonzero(annotated).tolist(), key=names.__getitem__)  # the order of a private client's rows
        labels, names, annotated = labels[:, own], tuple(names[column] for column in own), annotated[own]
    store = _as_shape(site, found.store, tuple(shape))
    samples = Dataset(store, labels, names, found.rows, patients=table.patients)
    train, held_out = _divided(site, table, seed, holdout)
    if _all_blank(samples.subset(held_out if site.validates else train)):
        raise _nothing_to_see(site)
    marked = np.zeros(len(held_out), bool) if table.split is None else table.split[held_out] == VALIDATION
    apart = marked & (not marked.all())  # rows of one kind serve for both
    return SiteData(samples.subset(train), samples.subset(held_out), annotated, apart, found.window)


def sizes(site: Site, seed: int, holdout: float) -> tuple[int, int]:
    """Images to train on and held out, by the labels file alone: before any image is read."""
    table = labels_of(site)
    if not table.paths:
        table.problems.report()
    train, held_out = _divided(site, table, seed, holdout)
    return len(train), len(held_out)


def own_classes(site: Site) -> tuple[str, ...]:
    """That it annotates, in the order of a private client's rows."""
    table = labels_of(site)
    known = (table.labels != UNKNOWN).any(0)
    return tuple(sorted(name for name, any_known in zip(table.classes, known, strict=True) if any_known))


def strangers(own: Sequence[str], classes: Sequence[str]) -> list[tuple[str, str]]:
    """Classes of a site that a study does not have, each with the likely spelling."""
    lacking = [name for name in classes if name not in own]
    alike = {_letters(name): name for name in lacking}
    found = []
    for name in own:
        if name not in classes:
            same = alike.get(_letters(name))
            meant = f"; did you mean '{same}'?" if same is not None else nearest(name, lacking or classes)
            found.append((name, meant))
    return found


def refuse_strangers(site: Site, own: Sequence[str], classes: Sequence[str]) -> None:
    """A DataError names every class that the study does not have."""
    strange = [
        f"the class '{name}', which this federation does not have{meant}" for name, meant in strangers(own, classes)
    ]
    if strange:
        raise DataError(
            f"'{site.csv}' has {' and '.join(strange)} Rename the columns (--rename), or choose those to use with "
            "--classes."
        )


def _letters(name: str) -> str:
    """Without what spellings differ in."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


def load_test(
    file: Path, images: Path | None, size: Size, reading: Reading | None = None, progress: Progress = silent
) -> tuple[Dataset, Dataset, folder.LabelledImages]:
    """The server's own folder: test data (all rows, or those with split = test), the rows marked train, and both."""
    found = folder.read(file, images or file.parent, size, reading, progress)
    samples = Dataset(found.store, found.table.labels, found.table.classes, found.rows)
    split = np.full(len(samples), TEST) if found.table.split is None else found.table.split
    return samples.subset(np.flatnonzero(split == TEST)), samples.subset(np.flatnonzero(split == TRAIN)), found


def labels_of(site: Site) -> LabelTable:
    """By the labels file alone, under the study's names."""
    _check_folder(site)
    return _renamed(site, read_labels(site.csv, site.images, site.reading))


def _renamed(site: Site, table: LabelTable) -> LabelTable:
    names = dict(site.rename)
    strange = [name for name in names if name not in table.classes]
    if strange:
        raise DataError(
            f"--rename names the class '{strange[0]}', and '{site.csv}' has none of that name"
            f"{nearest(strange[0], table.classes)}"
        )
    classes = tuple(names.get(name, name) for name in table.classes)
    twice = next((name for name in classes if classes.count(name) > 1), None)
    if twice is not None:
        raise DataError(f"With --rename two columns of '{site.csv}' are called '{twice}'. Leave one out with --ignore.")
    return replace(table, classes=classes)


def _check_folder(site: Site) -> None:
    if not site.images.is_dir():
        raise DataError(f"The image folder '{site.images}' does not exist; give it with --images DIR.")


def _divided(site: Site, table: LabelTable, seed: int, holdout: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Rows to train on, and held out: where nobody trains, all but those that are marked for it."""
    if site.validates:
        rows = np.arange(len(table.paths))
        marked = rows if table.split is None else np.flatnonzero(table.split != TRAIN)
        return rows[:0], marked if len(marked) else rows
    if table.split is not None:
        train, held_out = np.flatnonzero(table.split == TRAIN), np.flatnonzero(table.split != TRAIN)
    else:
        train, held_out = split_off(np.arange(len(table.paths)), holdout, seed, site.name, table.patients)
    if not len(train):
        raise DataError(f"'{site.csv}' has no training rows: mark some as split = train.")
    return train, held_out


def _refuse_blank(site: Site, labels: NDArray[np.int8]) -> None:
    if not (labels != UNKNOWN).any():
        raise DataError(
            f"'{site.csv}' says nothing: every cell of every class is blank, which means that it is not known. Write 1 "
            "where a finding is present and 0 where it is absent."
        )


def _all_blank(data: Dataset) -> bool:
    """Whether no image shows anything; the first that does is enough."""
    for start in range(0, len(data), AT_ONCE):
        images = data.samples(slice(start, start + AT_ONCE)).reshape(-1, int(np.prod(data.sample_shape)))
        if (images.min(axis=1) != images.max(axis=1)).any():
            return False
    return True


def _nothing_to_see(site: Site) -> DataError:
    return DataError(
        f"Every image of '{site.csv}' is blank (all its pixels have one value). Is {site.images} the right folder, and "
        "--window right for images of more than 8 bits?"
    )


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
    refuse_strangers(site, table.classes, classes)
    # --classes says what the site annotates: the `A|B|C` form speaks of no other class
    return _columns(replace(table, listed=table.listed and not site.classes), classes)


def _as_shape(site: Site, store: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if store.shape[1:] == shape:
        return store
    if store.shape[1] == 1 and shape[0] == 3 and store.shape[2:] == shape[1:]:
        return np.broadcast_to(store, (len(store), *shape))  # grey images where the federation has colour
    if store.shape[1] == 3 and shape[0] == 1 and store.shape[2:] == shape[1:] and _is_grey(store):
        return store[:, :1]  # grey images that were saved as colour
    raise DataError(
        f"The images of {site.name} are {store.shape[1:]} (channels, height, width), and the federation works with "
        f"{shape}. The server sets their size by data.size, and grey or colour by sites.channels."
    )


def _is_grey(store: NDArray[np.uint8]) -> bool:
    parts = (store[start : start + AT_ONCE] for start in range(0, len(store), AT_ONCE))
    return all(bool((part == part[:, :1]).all()) for part in parts)
