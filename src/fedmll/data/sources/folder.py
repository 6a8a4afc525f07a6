"""`folder:labels.csv`: image files in the folder `--root` and their labels in a CSV (its columns: see data.labels_csv).

Without `--root` the images are looked for beside the CSV. Without a `split` column a fifth is test, the same fifth for
every seed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.cache import Progress, content_key, silent
from fedmll.data.images.decode import EncodedImages, Size, decoded_images
from fedmll.data.images.labels_csv import LabelTable, read_labels
from fedmll.data.images.reading import left_out, readable
from fedmll.data.sources.base import Request, Source
from fedmll.data.targets import splits_of
from fedmll.errors import DataError
from fedmll.registry import register
from fedmll.settings import Reading


@dataclass(frozen=True)
class LabelledImages:
    """A labels file and its images, both without what had to be left out."""

    table: LabelTable
    store: NDArray[np.uint8]
    rows: NDArray[np.int64]  # the place of each row's image in the store
    window: tuple[float, float] | None
    notes: tuple[str, ...]


def load(request: Request) -> Splits:
    file = request.file()
    root = request.root or file.parent
    if not root.is_dir():
        raise DataError(
            f"The image folder '{root}' does not exist. Give the folder that the paths in '{file}' start from with "
            "--root."
        )
    found = read(file, root, request.size, request.reading, request.progress)
    table = found.table
    files = np.full(len(found.store), "", dtype=f"<U{max(map(len, table.names))}")
    files[found.rows] = table.names
    samples = Dataset(found.store, table.labels, table.classes, found.rows, table.clients, table.patients, files=files)
    splits = splits_of(samples, table.split, f"'{file}'", request.require_positives, request.reading.group)
    return replace(splits, window=found.window, notes=found.notes)


def read(
    file: Path, root: Path, size: Size = None, reading: Reading | None = None, progress: Progress = silent
) -> LabelledImages:
    """The labels, and the images from the cache if they are in it. Every problem of both is in one DataError."""
    reading = reading or Reading()
    table = read_labels(file, root, reading)
    if not table.paths:
        table.problems.report()
    images = decoded_images(_key(table), lambda: encoded(table), size, reading, progress)
    kept, skipped = readable(len(table.paths), encoded(table).name, images.unreadable, reading, table.problems)
    notes = (*images.notes, *left_out(table.missing, skipped))
    return LabelledImages(table.rows(kept), images.store, kept, images.window, notes)


def _key(table: LabelTable) -> str:
    """Changes when an image does (by path, size in bytes and time), not when a label does."""
    files = zip(table.paths, table.sizes_and_times, strict=True)
    return content_key("folder", *(f"{path.absolute()}\x1f{size}\x1f{time}" for path, (size, time) in files))


def encoded(table: LabelTable) -> EncodedImages:
    return EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")


register("source", "folder")(
    Source(
        description="your image files in the folder --root DIR, with their labels in a CSV",
        load=load,
        available=lambda root: True,
        file="labels.csv",
        says_clients=True,
    )
)
