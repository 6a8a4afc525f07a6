"""Shared by sources of image files: from a table of labels and paths to splits with decoded images.

A dataset in its official layout is read in two steps. Its source builds a `LabelTable` (`build_label_table`) of images,
labels and split. Then `load_label_table` decodes the images and divides them. Problems are collected on the way and
reported together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import ReadingOptions, UncertainLabels
from fedmll.core.text import suggest
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset, Splits
from fedmll.data.images.cache import Progress, content_key, no_progress
from fedmll.data.images.decode import EncodedImages, Size, decoded_images
from fedmll.data.images.labels_csv import CsvRows, LabelTable, file_status, read_rows
from fedmll.data.images.problems import Problems, abbreviate, check_readable, describe_skipped
from fedmll.data.sources.base import SourceRequest
from fedmll.data.targets import make_splits

UNCERTAIN_TARGETS: dict[UncertainLabels, int] = {
    "unknown": UNKNOWN,
    "present": PRESENT,
    "absent": ABSENT,
}  # data.uncertain_labels


@dataclass(frozen=True)
class LabelledImages:
    """A labels file and its images, both without skipped rows."""

    table: LabelTable
    store: NDArray[np.uint8]
    rows: NDArray[np.int64]  # the position of each row's image in the store
    window: tuple[float, float] | None
    notes: tuple[str, ...]


# Official layouts


def check_exist(problems: Problems, *needed: Path) -> bool:
    """Whether these files and folders exist; missing ones are added to the problems."""
    missing = [path for path in needed if not path.exists()]
    if missing:
        problems.add(
            f"missing: {abbreviate([repr(str(path)) for path in missing])}. Unpack the archives again without changes."
        )
    return not missing


def read_csv_columns(file: Path, columns: Sequence[str], problems: Problems) -> tuple[CsvRows, list[list[str]]] | None:
    """A CSV and the cells of these columns; None, and a problem, if the file or a column is missing."""
    if not check_exist(problems, file):
        return None
    own = Problems(f"'{file}'")
    rows = read_rows(file, own)
    lost = [name for name in columns if name not in rows.header]
    if lost:
        own.add(f"the header has no column '{lost[0]}'{suggest(lost[0], rows.header)}")
    problems.found += [f"'{file.name}': {text}" for text in own.found]
    return None if lost else (rows, [rows.column(rows.header.index(name)) for name in columns])


def read_lines(file: Path) -> list[str]:
    """The lines of a text file, without blank lines."""
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def find_images_by_stem(folders: Iterable[Path], endings: Sequence[str]) -> dict[str, Path]:
    """The images in these folders by file name without extension."""
    return {
        path.stem: path for folder in folders for path in sorted(folder.iterdir()) if path.suffix.lower() in endings
    }


def build_label_table(
    problems: Problems,
    reading: ReadingOptions,
    paths: Sequence[Path],
    labels: NDArray[np.int8],
    classes: tuple[str, ...],
    split: NDArray[np.int8] | None,
    root: Path,
    patients: Sequence[str] | None = None,
) -> LabelTable:
    """Build the table of a dataset. Missing images are skipped if allowed, otherwise they are a problem."""
    status = [file_status(path) for path in paths]
    missing = [f"'{path}'" for path, found in zip(paths, status, strict=True) if found is None]
    if missing and (not reading.skip_unreadable or len(missing) == len(paths)):
        problems.add(
            f"{len(missing)} of the {len(paths)} images that its labels name do not exist: {abbreviate(missing)}. "
            "Unpack the "
            "archives again, or skip them with --skip-unreadable."
        )
    names = [path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path) for path in paths]
    table = LabelTable(
        names=names,
        paths=list(paths),
        labels=labels,
        classes=classes,
        split=split,
        clients=None,
        patients=None if patients is None else np.array(patients, dtype=np.str_),
        sizes_and_times=[found or (0, 0) for found in status],
        problems=problems,
    )
    kept = [place for place, found in enumerate(status) if found is not None]
    return replace(table.select_rows(kept), missing=missing)


def load_label_table(table: LabelTable, where: str, request: SourceRequest, group: str | None = None) -> Splits:
    """Decode the images of a table and divide them into splits; raises one error with all problems."""
    return splits_from(decode_table(table, request.size, request.reading, request.progress), where, request, group)


# Tables of images, official or not


def decode_table(
    table: LabelTable, size: Size = None, reading: ReadingOptions | None = None, progress: Progress = no_progress
) -> LabelledImages:
    """Decode the images of a table, or read them from the cache. One DataError contains all problems."""
    reading = reading or ReadingOptions()
    if not table.paths:
        table.problems.report()
    images = decoded_images(_key(table), lambda: encoded_images(table), size, reading, progress)
    kept, skipped = check_readable(
        len(table.paths), encoded_images(table).name, images.unreadable, reading, table.problems
    )
    notes = (*images.notes, *describe_skipped(table.missing, skipped))
    return LabelledImages(table.select_rows(kept), images.store, kept, images.window, notes)


def splits_from(found: LabelledImages, where: str, request: SourceRequest, group: str | None) -> Splits:
    table = found.table
    files: NDArray[Any] = np.full(len(found.store), "", dtype=f"<U{max(map(len, table.names))}")
    files[found.rows] = table.names
    samples = Dataset(found.store, table.labels, table.classes, found.rows, table.clients, table.patients, files=files)
    splits = make_splits(samples, table.split, where, request.require_positives, group)
    return replace(splits, window=found.window, notes=found.notes, group=group)


def _key(table: LabelTable) -> str:
    """The cache key: changes when an image changes (by path, size and time), not when a label changes."""
    files = zip(table.paths, table.sizes_and_times, strict=True)
    return content_key("folder", *(f"{path.absolute()}\x1f{size}\x1f{time}" for path, (size, time) in files))


def encoded_images(table: LabelTable) -> EncodedImages:
    return EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")
