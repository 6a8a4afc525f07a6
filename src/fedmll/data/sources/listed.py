"""What sources of image files share: from a table of labels and paths to splits with decoded images.

An official layout is read in two steps. Its own file makes a LabelTable (`listed`): which images there are, their
labels and split. Then the images are decoded once (`images_of`) and divided (`splits_from`). What is wrong is gathered
on the way and reported once, everything together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset, Splits
from fedmll.data.images.cache import Progress, content_key, silent
from fedmll.data.images.csv_columns import Rows, read_rows
from fedmll.data.images.decode import EncodedImages, Size, decoded_images
from fedmll.data.images.labels_csv import LabelTable, file_status
from fedmll.data.images.reading import Problems, left_out, readable, some
from fedmll.data.sources.base import Request
from fedmll.data.targets import splits_of
from fedmll.errors import nearest
from fedmll.settings import Doubtful, Reading

TARGET: dict[Doubtful, int] = {"unknown": UNKNOWN, "present": PRESENT, "absent": ABSENT}  # data.doubtful


@dataclass(frozen=True)
class LabelledImages:
    """A labels file and its images, both without what had to be left out."""

    table: LabelTable
    store: NDArray[np.uint8]
    rows: NDArray[np.int64]  # the place of each row's image in the store
    window: tuple[float, float] | None
    notes: tuple[str, ...]


# Official layouts


def pieces(problems: Problems, *needed: Path) -> bool:
    """Whether these files and folders are there; those that are not are a problem."""
    missing = [path for path in needed if not path.exists()]
    if missing:
        problems.add(f"missing: {some([repr(str(path)) for path in missing])}. Unpack the archives again, as they are.")
    return not missing


def csv_with(file: Path, columns: Sequence[str], problems: Problems) -> tuple[Rows, list[list[str]]] | None:
    """A CSV, and the cells of these columns; None, and a problem, if there is none or its header is another."""
    if not pieces(problems, file):
        return None
    own = Problems(f"'{file}'")
    rows = read_rows(file, own)
    lost = [name for name in columns if name not in rows.header]
    if lost:
        own.add(f"the header has no column '{lost[0]}'{nearest(lost[0], rows.header)}")
    problems.found += [f"'{file.name}': {text}" for text in own.found]
    return None if lost else (rows, [rows.column(rows.header.index(name)) for name in columns])


def lines_of(file: Path) -> list[str]:
    """The lines of a list of names, without blank ones."""
    return [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def by_stem(folders: Iterable[Path], endings: Sequence[str]) -> dict[str, Path]:
    """The images in these folders by their name without its ending."""
    return {
        path.stem: path for folder in folders for path in sorted(folder.iterdir()) if path.suffix.lower() in endings
    }


def listed(
    problems: Problems,
    reading: Reading,
    paths: Sequence[Path],
    labels: NDArray[np.int8],
    classes: tuple[str, ...],
    split: NDArray[np.int8] | None,
    root: Path,
    patients: Sequence[str] | None = None,
) -> LabelTable:
    """The table of what a layout lists, without images that are not there: a problem, unless they may be skipped."""
    status = [file_status(path) for path in paths]
    missing = [f"'{path}'" for path, found in zip(paths, status, strict=True) if found is None]
    if missing and (not reading.skip_unreadable or len(missing) == len(paths)):
        problems.add(
            f"{len(missing)} of the {len(paths)} images that its labels name do not exist: {some(missing)}. Unpack the "
            "archives again, or leave them out with --skip-unreadable."
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
    return replace(table.rows(kept), missing=missing)


def load_listed(table: LabelTable, where: str, request: Request, group: str | None = None) -> Splits:
    """The splits of a layout's table, or one report of all that is wrong with it."""
    return splits_from(images_of(table, request.size, request.reading, request.progress), where, request, group)


# Tables of images, official or not


def images_of(
    table: LabelTable, size: Size = None, reading: Reading | None = None, progress: Progress = silent
) -> LabelledImages:
    """The images of a table, from the cache if they are in it. Every problem of both is in one DataError."""
    reading = reading or Reading()
    if not table.paths:
        table.problems.report()
    images = decoded_images(_key(table), lambda: encoded(table), size, reading, progress)
    kept, skipped = readable(len(table.paths), encoded(table).name, images.unreadable, reading, table.problems)
    notes = (*images.notes, *left_out(table.missing, skipped))
    return LabelledImages(table.rows(kept), images.store, kept, images.window, notes)


def splits_from(found: LabelledImages, where: str, request: Request, group: str | None) -> Splits:
    table = found.table
    files: NDArray[Any] = np.full(len(found.store), "", dtype=f"<U{max(map(len, table.names))}")
    files[found.rows] = table.names
    samples = Dataset(found.store, table.labels, table.classes, found.rows, table.clients, table.patients, files=files)
    splits = splits_of(samples, table.split, where, request.require_positives, group)
    return replace(splits, window=found.window, notes=found.notes, group=group)


def _key(table: LabelTable) -> str:
    """Changes when an image does (by path, size in bytes and time), not when a label does."""
    files = zip(table.paths, table.sizes_and_times, strict=True)
    return content_key("folder", *(f"{path.absolute()}\x1f{size}\x1f{time}" for path, (size, time) in files))


def encoded(table: LabelTable) -> EncodedImages:
    return EncodedImages(len(table.paths), table.paths.__getitem__, lambda position: f"'{table.paths[position]}'")
