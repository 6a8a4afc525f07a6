"""Shared by sources of image files: from a table of labels and paths to splits with decoded images.

The source of a published dataset reads the labels in their official layout and calls `load_official`. Problems are
collected on the way and reported together.
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
from fedmll.data.images.labels_csv import LabelTable, file_status, read_rows
from fedmll.data.images.problems import Problems, abbreviate, check_readable, describe_skipped
from fedmll.data.sources.base import SourceRequest
from fedmll.data.targets import make_splits

UNCERTAIN_TARGETS: dict[UncertainLabels | None, int] = {  # data.uncertain_labels
    None: UNKNOWN,
    "unknown": UNKNOWN,
    "present": PRESENT,
    "absent": ABSENT,
}


@dataclass(frozen=True)
class LabelledImages:
    """A labels file and its images, both without skipped rows."""

    table: LabelTable
    store: NDArray[np.uint8]
    rows: NDArray[np.int64]  # the position of each row's image in the store
    window: tuple[float, float] | None
    notes: tuple[str, ...]

    def splits(self, where: str, request: SourceRequest, group: str | None) -> Splits:
        table = self.table
        files: NDArray[Any] = np.full(len(self.store), "", dtype=f"<U{max(map(len, table.names))}")
        files[self.rows] = table.names
        samples = Dataset(
            self.store, table.labels, table.classes, self.rows, table.clients, table.patients, files=files
        )
        splits = make_splits(samples, table.split, where, request.require_positives, group)
        return replace(splits, window=self.window, notes=self.notes, group=group)


def decode_table(
    table: LabelTable, size: Size = None, reading: ReadingOptions | None = None, progress: Progress = no_progress
) -> LabelledImages:
    """Decode the images of a table, or read them from the cache. One DataError contains all problems."""
    reading = reading or ReadingOptions()
    if not table.paths:
        table.problems.report()
    # The cache key changes when an image changes (by path, size and time), not when a label changes.
    files = zip(table.paths, table.sizes_and_times, strict=True)
    key = content_key("folder", *(f"{path.absolute()}\x1f{bytes_}\x1f{time}" for path, (bytes_, time) in files))
    encoded = encoded_images(table)
    images = decoded_images(key, lambda: encoded, size, reading, progress)
    kept, skipped = check_readable(
        encoded.count, encoded.name, images.unreadable, reading, table.problems, images.window_problem
    )
    notes = (*images.notes, *describe_skipped(table.missing, skipped))
    return LabelledImages(table.select_rows(kept), images.store, kept, images.window, notes)


def encoded_images(table: LabelTable) -> EncodedImages:
    return EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")


# Published datasets in their official layout


def check_exist(problems: Problems, *needed: Path) -> bool:
    """Whether these files and folders exist; missing ones are added to the problems."""
    missing = [repr(str(path)) for path in needed if not (path.is_file() or path.is_dir())]  # a pipe is neither
    if missing:
        problems.add(f"missing: {abbreviate(missing)}. Unpack the archives again without changes.")
    return not missing


def read_csv_columns(file: Path, columns: Sequence[str], problems: Problems) -> list[list[str]]:
    """The cells of these columns of a CSV; empty lists, and a problem, if the file or a column is missing."""
    if not check_exist(problems, file):
        return [[] for _ in columns]
    own = Problems(f"'{file}'")
    rows = read_rows(file, own)
    lost = [name for name in columns if name not in rows.header]
    if lost:
        own.add(f"the header has no column '{lost[0]}'{suggest(lost[0], rows.header)}")
    problems.found += [f"'{file.name}': {text}" for text in own.found]
    return [[] if lost else rows.column(rows.header.index(name)) for name in columns]


def read_lines(file: Path) -> list[str]:
    """The lines of a text file, without blank lines."""
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def find_images_by_stem(folders: Iterable[Path], endings: Sequence[str]) -> dict[str, Path]:
    """The images in these folders by file name without extension."""
    return {
        path.stem: path for folder in folders for path in sorted(folder.iterdir()) if path.suffix.lower() in endings
    }


def load_official(
    problems: Problems,
    request: SourceRequest,
    root: Path,
    paths: Sequence[Path],
    labels: NDArray[np.int8],
    classes: tuple[str, ...],
    split: NDArray[np.int8] | None,
    patients: Sequence[str] | None = None,
    group: str | None = None,
) -> Splits:
    """Decode the images of a published dataset and divide them into splits.

    Missing images are skipped if the user allows it, otherwise they are a problem. `group` is the publisher's name of
    `patients`.
    """
    reading, status = request.reading, [file_status(path) for path in paths]
    missing = [f"'{path}'" for path, found in zip(paths, status, strict=True) if found is None]
    if missing and (not reading.skip_unreadable or len(missing) == len(paths)):
        problems.add(
            f"{len(missing)} of the {len(paths)} images that its labels name do not exist: {abbreviate(missing)}. "
            "Unpack the archives again, or skip them with --skip-unreadable."
        )
    table = LabelTable(
        names=[path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path) for path in paths],
        paths=list(paths),
        labels=labels,
        classes=classes,
        split=split,
        clients=None,
        patients=None if patients is None else np.array(patients, dtype=np.str_),
        sizes_and_times=[found or (0, 0) for found in status],
        problems=problems,
    )
    table = replace(table.select_rows([i for i, found in enumerate(status) if found is not None]), missing=missing)
    if request.labels_only:
        return _without_images(table, request.root or root).splits(problems.where, request, group)
    return decode_table(table, request.size, reading, request.progress).splits(problems.where, request, group)


def _without_images(table: LabelTable, root: Path) -> LabelledImages:
    """The labels and the files of a table, relative to the user's folder; its images are not opened."""
    table.problems.report()
    names = [path.relative_to(root).as_posix() for path in table.paths]
    store = np.broadcast_to(np.uint8(0), (len(names), 1, 1, 1))
    return LabelledImages(replace(table, names=names), store, np.arange(len(names)), None, ())
