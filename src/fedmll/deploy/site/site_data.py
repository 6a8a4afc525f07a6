"""A site's images and labels, read from its own files and prepared for a study. Nothing here uses the network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.text import letters, suggest
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.data.federation import split_holdout
from fedmll.data.images.cache import Progress, no_progress
from fedmll.data.images.decode import as_8_bit, map_images, run_all, scan_images, window_note
from fedmll.data.images.labels_csv import LabelTable, read_labels
from fedmll.data.images.open_image import open_image
from fedmll.data.images.problems import check_readable, describe_skipped
from fedmll.data.sources.labelled_images import decode_table, encoded_images
from fedmll.data.targets import TRAIN, VALIDATION
from fedmll.deploy.site.site_config import Site

CHUNK = 256  # images in memory while all images are examined


@dataclass(frozen=True, kw_only=True)
class SiteData:
    """A site's data, prepared for a study."""

    train: Dataset  # the training images
    held_out: Dataset  # the site's own test data: rows marked validation or test, or a share drawn by the seed
    annotated: NDArray[np.bool_]  # bool (C,): the site knows at least one label of the class
    # bool (len(held_out),): thresholds are chosen on these rows, and metrics are over the others
    is_validation: NDArray[np.bool_]
    window: tuple[float, float] | None = None  # the values that became 0 and 255, for images of more than 8 bits


@dataclass(frozen=True, kw_only=True)
class SiteDataSummary:
    """Counts of a site's data; the arrays have one entry per class.

    `held_out` is None if the labels file has no split: the experiment then decides the share.
    """

    images: int
    held_out: int | None
    classes: tuple[str, ...]
    present: NDArray[np.int64]
    absent: NDArray[np.int64]
    unknown: NDArray[np.int64]
    notes: tuple[str, ...] = ()


def check_site_data(site: Site, progress: Progress = no_progress) -> SiteDataSummary:
    """Read the labels and open every image.

    Raises:
        DataError: names everything that is wrong.
    """
    table = read_site_labels(site)
    if not table.paths:
        table.problems.report()
    encoded = encoded_images(table)
    scan = scan_images(encoded, progress)
    window, problem = scan.window(site.reading), scan.window_problem(site.reading, encoded)
    failures, rejected = dict(scan.unreadable), scan.rejected(site.reading)

    blank = np.zeros(len(table.paths), dtype=bool)

    def decode(position: int) -> None:
        if position not in rejected:
            with open_image(encoded.read(position)) as image:
                low, high = as_8_bit(image, "L", window).getextrema()
            blank[position] = low == high

    run_all(map_images(encoded, decode, progress, "checking images", failures))
    unreadable = dict(sorted(failures.items()))
    kept, skipped = check_readable(len(table.paths), encoded.name, unreadable, site.reading, table.problems, problem)
    notes = (*window_note(window), *describe_skipped(table.missing, skipped))
    if len(kept) and blank[kept].all():
        raise _all_blank_error(site)
    if blank[kept].any():
        notes = (*notes, f"{int(blank[kept].sum())} images are blank: every pixel has the same value")
    table = table.select_rows(kept)
    _check_any_label(site, table.labels)
    present, absent, unknown = ((table.labels == value).sum(0) for value in (PRESENT, ABSENT, UNKNOWN))
    held_out = None if table.split is None else int((table.split != TRAIN).sum())
    return SiteDataSummary(
        images=len(table.paths),
        held_out=held_out,
        classes=table.classes,
        present=present,
        absent=absent,
        unknown=unknown,
        notes=notes,
    )


def load_site_data(
    site: Site,
    classes: Sequence[str] | None,
    shape: Sequence[int],
    seed: int,
    holdout: float,
    progress: Progress = no_progress,
) -> SiteData:
    """The site's data as a study needs it.

    Args:
        site: the site.
        classes: the classes of the study; None: label sets are private, and only the site's own classes are used.
        shape: channels, height and width of the images.
        seed: the seed of the hold-out split.
        holdout: the share of images to hold out, if the labels file has no split.
        progress: called with the progress of reading images.
    """
    _check_folder(site)
    labels_file = read_labels(site.csv, site.images, site.reading)
    found = decode_table(labels_file, (shape[1], shape[2]), site.reading, progress)
    table = _rename_classes(site, found.table)
    labels = table.labels if classes is None else _align_labels(site, table, tuple(classes))
    _check_any_label(site, labels)
    annotated = (labels != UNKNOWN).any(0)
    names = table.classes if classes is None else tuple(classes)
    if classes is None:
        own = sorted(np.flatnonzero(annotated).tolist(), key=names.__getitem__)  # the order of a private client's rows
        labels, names, annotated = labels[:, own], tuple(names[column] for column in own), annotated[own]
    store = _convert_channels(site, found.store, tuple(shape))
    samples = Dataset(store, labels, names, found.rows, patients=table.patients)
    train, held_out = _split_rows(site, table, seed, holdout)
    if _all_blank(samples.subset(held_out if site.validation_only else train)):
        raise _all_blank_error(site)
    marked = np.zeros(len(held_out), bool) if table.split is None else table.split[held_out] == VALIDATION
    is_validation = marked & (not marked.all())  # if all rows are validation rows, they serve for both
    return SiteData(
        train=samples.subset(train),
        held_out=samples.subset(held_out),
        annotated=annotated,
        is_validation=is_validation,
        window=found.window,
    )


def count_images(site: Site, seed: int, holdout: float) -> tuple[int, int]:
    """The numbers of training and held-out images, from the labels file alone: before any image is read."""
    table = read_site_labels(site)
    if not table.paths:
        table.problems.report()
    train, held_out = _split_rows(site, table, seed, holdout)
    return len(train), len(held_out)


def find_annotated_classes(site: Site) -> tuple[str, ...]:
    """The classes with at least one known label, in the order of a private client's rows."""
    table = read_site_labels(site)
    known = (table.labels != UNKNOWN).any(0)
    return tuple(sorted(name for name, any_known in zip(table.classes, known, strict=True) if any_known))


def find_unknown_classes(site_classes: Sequence[str], classes: Sequence[str]) -> list[tuple[str, str]]:
    """The site's classes that the study does not have, each with a suggestion (`; did you mean …?`)."""
    missing = [name for name in classes if name not in site_classes]
    by_letters = {letters(name): name for name in missing}
    found = []
    for name in site_classes:
        if name not in classes:
            same = by_letters.get(letters(name))
            hint = f"; did you mean '{same}'?" if same is not None else suggest(name, missing or classes)
            found.append((name, hint))
    return found


def check_known_classes(site: Site, site_classes: Sequence[str], classes: Sequence[str]) -> None:
    """Raise a DataError that names every class of the site that the study does not have."""
    unknown = [
        f"the class '{name}', which this federation does not have{hint}"
        for name, hint in find_unknown_classes(site_classes, classes)
    ]
    if unknown:
        raise DataError(
            f"'{site.csv}' has {' and '.join(unknown)} Rename the columns (--rename), or choose those to use with "
            "--classes."
        )


def read_site_labels(site: Site) -> LabelTable:
    """The labels file, with the study's names of the classes. No image is read."""
    _check_folder(site)
    return _rename_classes(site, read_labels(site.csv, site.images, site.reading))


def _rename_classes(site: Site, table: LabelTable) -> LabelTable:
    names = dict(site.class_renames)
    unknown = [name for name in names if name not in table.classes]
    if unknown:
        raise DataError(
            f"--rename names the class '{unknown[0]}', and '{site.csv}' has no such class"
            f"{suggest(unknown[0], table.classes)}"
        )
    classes = tuple(names.get(name, name) for name in table.classes)
    twice = next((name for name, count in Counter(classes).items() if count > 1), None)
    if twice is not None:
        raise DataError(
            f"After --rename, two columns of '{site.csv}' have the name '{twice}'. Leave one out with --ignore."
        )
    return replace(table, classes=classes)


def _check_folder(site: Site) -> None:
    if not site.images.is_dir():
        raise DataError(f"The image folder '{site.images}' does not exist; give it with --images DIR.")


def _split_rows(
    site: Site, table: LabelTable, seed: int, holdout: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Training rows and held-out rows. A site that only validates holds out all rows that are not marked train."""
    if site.validation_only:
        rows = np.arange(len(table.paths))
        marked = rows if table.split is None else np.flatnonzero(table.split != TRAIN)
        return rows[:0], marked if len(marked) else rows
    if table.split is not None:
        train, held_out = np.flatnonzero(table.split == TRAIN), np.flatnonzero(table.split != TRAIN)
    else:
        train, held_out = split_holdout(np.arange(len(table.paths)), holdout, seed, site.name, table.patients)
    if not len(train):
        raise DataError(f"'{site.csv}' has no training rows: mark some as split = train.")
    return train, held_out


def _check_any_label(site: Site, labels: NDArray[np.int8]) -> None:
    if not (labels != UNKNOWN).any():
        raise DataError(
            f"'{site.csv}' contains no label: every cell of every class is blank, which means unknown. Write 1 where a "
            "class is present and 0 where it is absent."
        )


def _all_blank(data: Dataset) -> bool:
    """Whether every image has one colour only. The search ends at the first image that has more."""
    for start in range(0, len(data), CHUNK):
        images = data.samples(slice(start, start + CHUNK)).reshape(-1, int(np.prod(data.sample_shape)))
        if (images.min(axis=1) != images.max(axis=1)).any():
            return False
    return True


def _all_blank_error(site: Site) -> DataError:
    return DataError(
        f"Every image of '{site.csv}' is blank (all pixels have the same value). Is {site.images} the right folder, "
        "and is --window right for images of more than 8 bits?"
    )


def _align_labels(site: Site, table: LabelTable, classes: tuple[str, ...]) -> NDArray[np.int8]:
    """The labels (N, len(classes)) in the study's order of classes. Classes that the file does not have are unknown.

    In the `A|B|C` form they are absent, except in rows without any label. If --classes names what the site annotates,
    this form means nothing for other classes.
    """
    check_known_classes(site, table.classes, classes)
    labels = np.full((len(table.paths), len(classes)), UNKNOWN, np.int8)
    if table.is_list_form and not site.reading.classes:
        labels[(table.labels != UNKNOWN).any(axis=1)] = ABSENT
    for column, name in enumerate(table.classes):
        labels[:, classes.index(name)] = table.labels[:, column]
    return labels


def _convert_channels(site: Site, store: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if store.shape[1:] == shape:
        return store
    if store.shape[1] == 1 and shape[0] == 3 and store.shape[2:] == shape[1:]:
        return np.broadcast_to(store, (len(store), *shape))  # grey images where the federation has colour
    if store.shape[1] == 3 and shape[0] == 1 and store.shape[2:] == shape[1:] and _is_grey(store):
        return store[:, :1]  # grey images that were saved as colour
    raise DataError(
        f"The images of {site.name} have the shape {store.shape[1:]} (channels, height, width), and the study needs "
        f"{shape}. The server sets the size with data.size, and grey or colour with study.channels."
    )


def _is_grey(store: NDArray[np.uint8]) -> bool:
    parts = (store[start : start + CHUNK] for start in range(0, len(store), CHUNK))
    return all(bool((part == part[:, :1]).all()) for part in parts)
