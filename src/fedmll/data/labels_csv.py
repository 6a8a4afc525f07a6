"""The labels file of an image folder: a CSV with one image a row.

image,  Atelectasis, Effusion, …, split, client        a column a class: 1 present, 0 absent, blank unknown
image,  labels,                   split, client        or one column `labels`: the present classes as `A|B|C`

The image is the column called image, path, file or filename, else the first. `split` (train, validation, test) and
`client` are optional. In the `labels` form a class that is not listed is absent: only columns can say "unknown".
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.targets import TEST, TRAIN, VALIDATION, check_classes
from fedmll.errors import DataError

IMAGE_COLUMNS = ("image", "path", "file", "filename")
CELLS = {"1": PRESENT, "0": ABSENT, "": UNKNOWN, "1.0": PRESENT, "0.0": ABSENT}  # 1.0: pandas, when a cell is blank
SPLITS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
NAMED_ROWS = 5


@dataclass(frozen=True)
class LabelTable:
    """A labels file in memory; the arrays have one row an image, in the order of the file."""

    names: list[str]  # as the file has them
    paths: list[Path]
    labels: NDArray[np.int8]
    classes: tuple[str, ...]
    split: NDArray[np.int8] | None
    clients: NDArray[np.str_] | None
    sizes_and_times: list[tuple[int, int]]  # of each image file, in bytes and ns: they change when the image does
    listed: bool = False  # the `A|B|C` form: a class that no row lists is absent everywhere, not unknown


@dataclass(frozen=True)
class _Columns:
    image: int
    split: int | None
    client: int | None
    labels: int | None  # of the `A|B|C` form
    classes: list[int]


def read_labels(file: Path, images: Path) -> LabelTable:
    """Read a labels file and find its images in the folder `images`; a DataError names the row of what is wrong."""
    header, numbers, rows = _read_rows(file)
    columns = _find_columns(file, header)
    where = f"'{file}'"
    if columns.labels is None:
        classes = tuple(header[column] for column in columns.classes)
        labels = _labels_from_columns(file, header, columns.classes, numbers, rows)
    else:
        classes, labels = _labels_from_lists([row[columns.labels] for row in rows])
        if not classes:
            raise DataError(
                f"{where}: the column '{header[columns.labels]}' is blank everywhere, so there is no class to learn."
            )
    check_classes(classes, where)
    names = [row[columns.image].strip() for row in rows]
    paths = [images / name for name in names]
    return LabelTable(
        names=names,
        paths=paths,
        labels=labels,
        classes=classes,
        split=None if columns.split is None else _splits(file, columns.split, numbers, rows),
        clients=None if columns.client is None else np.array([row[columns.client].strip() for row in rows]),
        sizes_and_times=_stat_images(file, numbers, names, paths),
        listed=columns.labels is not None,
    )


def _read_rows(file: Path) -> tuple[list[str], list[int], list[list[str]]]:
    """The header, and every row that is not blank with its number as a spreadsheet shows it (the header is row 1)."""
    if not file.is_file():
        raise DataError(
            f"The labels file '{file}' does not exist. It is a CSV with one image a row: its path, then a column a "
            "class with 1 (present), 0 (absent) or blank (unknown), or one column 'labels' with 'A|B|C'."
        )
    try:
        with file.open(newline="", encoding="utf-8-sig") as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(",;\t", key=first.count)  # spreadsheets write ; where the comma is the decimal point
            table = [(number, row) for number, row in enumerate(csv.reader(stream, delimiter=delimiter), 1) if any(row)]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{file}' is not a CSV file in UTF-8 ({error}). Save it again as CSV, UTF-8.") from None
    if len(table) < 2:
        raise DataError(f"'{file}' is empty: it needs a header and at least one row. Is it the right file?")
    header = [name.strip() for name in table[0][1]]
    for number, row in table[1:]:
        if len(row) != len(header):
            raise DataError(
                f"'{file}', row {number}: {len(row)} cells where the header has {len(header)}. A comma inside a name "
                "needs quotes around the name."
            )
    return header, [number for number, _ in table[1:]], [row for _, row in table[1:]]


def _find_columns(file: Path, header: list[str]) -> _Columns:
    lower = [name.lower() for name in header]

    def only(name: str) -> int | None:
        return lower.index(name) if name in lower else None

    image = next((lower.index(name) for name in IMAGE_COLUMNS if name in lower), 0)
    split, client, labels = only("split"), only("client"), only("labels")
    classes = [column for column in range(len(header)) if column not in (image, split, client, labels)]
    if labels is not None and classes:
        raise DataError(
            f"'{file}' has a column 'labels' and also '{header[classes[0]]}'. Use either one column 'labels' with "
            "'A|B|C', or a column a class."
        )
    if labels is None and not classes:
        raise DataError(
            f"'{file}' has no class column beside '{header[image]}'. Add a column a class, with 1, 0 or blank."
        )
    check_classes(tuple(header[column] for column in classes), f"'{file}'")
    unnamed = next((column for column in classes if not header[column]), None)
    if unnamed is not None:
        raise DataError(f"'{file}': column {unnamed + 1} has no name in the header. Name it or remove it.")
    return _Columns(image, split, client, labels, classes)


def _labels_from_columns(
    file: Path, header: list[str], columns: Sequence[int], numbers: list[int], rows: list[list[str]]
) -> NDArray[np.int8]:
    labels = np.empty((len(rows), len(columns)), dtype=np.int8)
    codes = CELLS
    for place, row in enumerate(rows):
        try:
            labels[place] = [codes[row[column]] for column in columns]
        except KeyError:  # rare: cells with spaces around them, or wrong ones
            labels[place] = [_code(file, numbers[place], header[column], row[column]) for column in columns]
    return labels


def _code(file: Path, number: int, column: str, cell: str) -> int:
    code = CELLS.get(cell.strip())
    if code is None:
        raise DataError(
            f"'{file}', row {number}, column '{column}': '{cell}' is not a label. Write 1 (present), 0 (absent) or "
            "leave it blank (unknown), and remove columns that are not classes."
        )
    return code


def _labels_from_lists(cells: Iterable[str]) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    present = [[name.strip() for name in cell.split("|") if name.strip()] for cell in cells]
    classes = tuple(sorted({name for names in present for name in names}))
    place = {name: column for column, name in enumerate(classes)}
    labels = np.full((len(present), len(classes)), ABSENT, dtype=np.int8)
    samples = np.repeat(np.arange(len(present)), [len(names) for names in present])
    labels[samples, [place[name] for names in present for name in names]] = PRESENT
    return classes, labels


def _splits(file: Path, column: int, numbers: list[int], rows: list[list[str]]) -> NDArray[np.int8]:
    codes = [SPLITS.get(row[column].strip().lower()) for row in rows]
    if None in codes:
        place = codes.index(None)
        raise DataError(
            f"'{file}', row {numbers[place]}: the split '{rows[place][column]}' is none of train, validation (or val) "
            "and test."
        )
    return np.array(codes, dtype=np.int8)


def _stat_images(file: Path, numbers: list[int], names: list[str], paths: list[Path]) -> list[tuple[int, int]]:
    """Size and time of every image; it is here that a missing one, or one named twice, is found."""
    first_row: dict[str, int] = {}
    missing: list[str] = []
    found: list[tuple[int, int]] = []
    for number, name, path in zip(numbers, names, paths, strict=True):
        if first_row.setdefault(name, number) != number:
            raise DataError(
                f"'{file}', row {number}: the image '{name}' is already in row {first_row[name]}. An image has one "
                "row, or it could be in training and test at once; join the two."
            )
        try:
            status = path.stat()
            found.append((status.st_size, status.st_mtime_ns))
        except OSError:
            missing.append(f"row {number}: '{path}'")
    if missing:
        more = f"; and {len(missing) - NAMED_ROWS} more" if len(missing) > NAMED_ROWS else ""
        raise DataError(
            f"'{file}': {len(missing)} of its {len(names)} images do not exist: {'; '.join(missing[:NAMED_ROWS])}{more}"
            ". Correct the paths (they are relative to the image folder, --root), or remove the rows."
        )
    return found
