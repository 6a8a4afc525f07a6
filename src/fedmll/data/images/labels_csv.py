"""The labels file of an image folder: a CSV with one row per image.

image,  Atelectasis, Effusion, …, split, client        one column per class: 1 present, 0 absent, blank unknown
image,  labels,                   split, client        or one column `labels`: the present classes as `A|B|C`

The image column is called image, path, file or filename; otherwise it is the first column. Paths may contain
backslashes. `split` (train, validation, test) and `client` are optional. In the `labels` form a class that is not
listed is absent, `none` (or `No Finding`) means that all classes are absent, and a blank cell means that nothing is
known. The settings `data.classes`, `data.ignore` and `data.group` name the class columns, the columns to ignore and the
patient column.
"""

from __future__ import annotations

import csv
import gzip
import os
import stat
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TextIO

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError
from fedmll.core.text import printable, suggest
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.images.problems import NAMED, Problems, abbreviate
from fedmll.data.targets import TEST, TRAIN, VALIDATION, describe_split_groups, find_split_groups

IMAGE_COLUMNS = ("image", "path", "file", "filename")
PATIENT_COLUMNS = ("patient", "patient_id", "patientid", "patient id")
CELLS = {"1": PRESENT, "0": ABSENT, "": UNKNOWN, "1.0": PRESENT, "0.0": ABSENT}  # 1.0: pandas, when a cell is blank
SPLITS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
MOST_PROPOSED = 50  # columns in a proposed setting
NOTHING = ("none", "no finding")  # in the `labels` form: known, and no class is present


@dataclass(frozen=True)
class CsvRows:
    """The header, and the rows with as many cells as the header, with their row numbers in a spreadsheet."""

    header: list[str]
    numbers: list[int]
    cells: list[list[str]]

    def column(self, place: int) -> list[str]:
        return [row[place].strip() for row in self.cells]


@dataclass(frozen=True)
class LabelTable:
    """A labels file in memory; the arrays have one row per image, in the order of the file."""

    names: list[str]  # as written in the file
    paths: list[Path]
    labels: NDArray[np.int8]
    classes: tuple[str, ...]
    split: NDArray[np.int8] | None
    clients: NDArray[np.str_] | None
    patients: NDArray[np.str_] | None  # the column of data.group
    sizes_and_times: list[tuple[int, int]]  # of each image file, in bytes and ns: they change when the image changes
    problems: Problems  # reported after the images were read
    missing: list[str] = field(default_factory=list)  # skipped rows, whose image does not exist
    is_list_form: bool = False  # the `A|B|C` form: a class that no row lists is absent everywhere, not unknown
    invalid_cells: dict[int, int] = field(default_factory=dict)  # position of a class → its cells that are not labels

    def select_rows(self, kept: Sequence[int] | NDArray[np.int64]) -> LabelTable:
        """Only these rows, in every column."""
        return replace(
            self,
            names=[self.names[row] for row in kept],
            paths=[self.paths[row] for row in kept],
            labels=self.labels[kept],
            split=None if self.split is None else self.split[kept],
            clients=None if self.clients is None else self.clients[kept],
            patients=None if self.patients is None else self.patients[kept],
            sizes_and_times=[self.sizes_and_times[row] for row in kept],
        )


def read_labels(file: Path, images: Path, reading: ReadingOptions | None = None) -> LabelTable:
    """Read a labels file and find its images in the folder `images`.

    Problems with rows, columns and images are collected in `problems`; its `report()` raises them after the images were
    read too.
    """
    reading = reading or ReadingOptions()
    problems = Problems(f"'{file}'")
    rows = _drop_ignored_columns(read_rows(file, problems), reading, problems)
    places, class_columns = _find_columns(rows.header, reading, problems)
    invalid: dict[int, int] = {}
    if "labels" in places:
        classes, labels = _labels_from_lists(rows, places["labels"], reading, problems)
    else:
        classes = tuple(rows.header[column] for column in class_columns)
        labels, invalid = _labels_from_columns(rows, class_columns, reading, problems)
    clients, patients = (
        np.array(rows.column(places[role]), dtype=np.str_) if role in places else None for role in ("client", "group")
    )
    split = _parse_splits(rows, places["split"], problems) if "split" in places else None
    if patients is not None:
        _check_patients(rows, patients, split, reading, problems)
    names = rows.column(places["image"])
    paths, found = _find_images(names, images)
    _check_repeated(rows, names, paths, found, problems)
    table = LabelTable(
        names=names,
        paths=paths,
        labels=labels,
        classes=classes,
        split=split,
        clients=clients if clients is not None and (clients != "").any() else None,
        patients=patients,
        sizes_and_times=[status or (0, 0) for status in found],
        problems=problems,
        missing=[f"row {rows.numbers[i]}: '{paths[i]}'" for i, status in enumerate(found) if status is None],
        is_list_form="labels" in places,
        invalid_cells=invalid,
    )
    if table.missing and not reading.skip_unreadable:
        problems.add(
            f"{len(table.missing)} of its {len(found)} images do not exist: {abbreviate(table.missing)}. Correct the "
            "paths (they are relative to the image folder), remove the rows, or skip them with --skip-unreadable."
        )
    elif len(table.missing) == len(found):
        problems.add(
            f"none of its {len(found)} images exists: {abbreviate(table.missing)}. Is it the right image folder?"
        )
    return table.select_rows([i for i, status in enumerate(found) if status is not None])


def _open_text(file: Path) -> TextIO:
    if file.suffix == ".gz":
        return gzip.open(file, "rt", newline="", encoding="utf-8-sig")
    return file.open(newline="", encoding="utf-8-sig")


def read_rows(file: Path, problems: Problems) -> CsvRows:
    if not file.is_file():
        raise DataError(
            f"The labels file '{file}' does not exist. It is a CSV with one row per image: its path, then one column "
            "per class with 1 (present), 0 (absent) or blank (unknown), or one column 'labels' with 'A|B|C'."
        )
    try:
        with _open_text(file) as stream:
            first = stream.readline()
            stream.seek(0)
            delimiter = max(",;\t", key=first.count)  # spreadsheets write ; if the comma is the decimal separator
            table = [(number, row) for number, row in enumerate(csv.reader(stream, delimiter=delimiter), 1) if any(row)]
    except (UnicodeDecodeError, csv.Error, EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"'{file}' is not a CSV file in UTF-8 ({error}). Save it again as CSV, UTF-8.") from None
    if len(table) < 2:
        raise DataError(f"'{file}' is empty: it needs a header and at least one row. Is it the right file?")
    header = [name.strip() for name in table[0][1]]
    whole = [(number, row) for number, row in table[1:] if len(row) == len(header)]
    wrong = [f"row {number}: {len(row)} cells" for number, row in table[1:] if len(row) != len(header)]
    if wrong:
        problems.add(
            f"{_rows_with(wrong)} more or fewer cells than the header, which has {len(header)}: {abbreviate(wrong)}. "
            "A comma inside a name needs quotes around the name."
        )
    if not whole:
        problems.report()
    return CsvRows(header, [number for number, _ in whole], [row for _, row in whole])


def _drop_ignored_columns(rows: CsvRows, reading: ReadingOptions, problems: Problems) -> CsvRows:
    _check_named_columns(reading, "ignore", reading.ignore, rows.header, problems)
    ignored = set(reading.ignore)
    # A column without a name and content comes from a comma at the end of each line.
    kept = [
        place
        for place, name in enumerate(rows.header)
        if name not in ignored and (name or any(row[place].strip() for row in rows.cells))
    ]
    if len(kept) == len(rows.header):
        return rows
    return CsvRows([rows.header[place] for place in kept], rows.numbers, [[row[p] for p in kept] for row in rows.cells])


def _check_named_columns(
    reading: ReadingOptions, setting: str, names: Sequence[str], header: list[str], problems: Problems
) -> None:
    known = set(header)
    unknown = [name for name in names if name not in known]
    for name in unknown[:NAMED]:
        hint = suggest(name, header) if len(header) <= MOST_PROPOSED * 10 else "."
        problems.add(f"{reading.setting(setting)} names '{name}', which is not a column{hint}")
    if len(unknown) > NAMED:
        problems.add(f"{reading.setting(setting)} names {len(unknown) - NAMED} more that are not columns.")


def _find_columns(header: list[str], reading: ReadingOptions, problems: Problems) -> tuple[dict[str, int], list[int]]:
    """The position of each column by its role (image, split, client, group, labels), and of the class columns."""
    lower = [name.lower() for name in header]
    places: dict[str, int] = {role: lower.index(role) for role in ("split", "client", "labels") if role in lower}
    places["image"] = next((lower.index(name) for name in IMAGE_COLUMNS if name in lower), 0)
    if reading.group is not None:
        _check_named_columns(reading, "group", [reading.group], header, problems)
        places |= {"group": header.index(reading.group)} if reading.group in header else {}
    classes = sorted(set(range(len(header))) - set(places.values()))
    if "labels" not in places and reading.classes:
        _check_named_columns(reading, "classes", reading.classes, header, problems)
        column = {name: place for place, name in reversed(list(enumerate(header)))}  # the first of each name
        classes = [column[name] for name in reading.classes if name in column]
    elif "labels" not in places and not classes:
        problems.add(
            f"there is no class column besides '{header[places['image']]}'. Add one column per class, with 1, 0 or "
            "blank."
        )
    elif "labels" in places and classes and not reading.classes:
        names = [header[column] for column in classes]
        proposal = reading.how_to_ignore(names) if len(names) <= MOST_PROPOSED else "remove them"
        problems.add(
            f"it has a column 'labels' and also {abbreviate([repr(name) for name in names])}. Use either one column "
            f"'labels' with 'A|B|C', or one column per class; if the others are not classes: {proposal}."
        )
    count = Counter(header)
    repeated = [name for name in dict.fromkeys(header[column] for column in classes) if name and count[name] > 1]
    for name in repeated[:NAMED]:
        problems.add(f"the class '{name}' appears twice. Every class needs one column and its own name.")
    if len(repeated) > NAMED:
        problems.add(f"{len(repeated) - NAMED} more classes appear twice.")
    unnamed = [str(column + 1) for column in classes if not header[column]]
    if unnamed:
        problems.add(f"these columns have no name in the header: {abbreviate(unnamed)}. Name or remove them.")
    return places, classes


def _rows_with(rows: Sequence[object]) -> str:
    return f"{len(rows)} row{'s have' if len(rows) > 1 else ' has'}"


def _labels_from_columns(
    rows: CsvRows, columns: Sequence[int], reading: ReadingOptions, problems: Problems
) -> tuple[NDArray[np.int8], dict[int, int]]:
    """The targets, and the number of cells that are not labels, by class."""
    labels = np.empty((len(rows.cells), len(columns)), dtype=np.int8)
    wrong: dict[int, list[str]] = {}  # by class
    for place, row in enumerate(rows.cells):
        try:
            labels[place] = [CELLS[row[column]] for column in columns]
        except KeyError:  # rare: cells with spaces around them, or invalid cells
            for target, column in enumerate(columns):
                code = CELLS.get(row[column].strip())
                if code is None:
                    wrong.setdefault(target, []).append(f"row {rows.numbers[place]}: '{printable(row[column], 60)}'")
                labels[place, target] = UNKNOWN if code is None else code
    if wrong:
        by_column = sorted((columns[target], cells) for target, cells in wrong.items())
        _report_cells({rows.header[column]: cells for column, cells in by_column}, reading, problems)
    return labels, {target: len(cells) for target, cells in wrong.items()}


def _report_cells(wrong: dict[str, list[str]], reading: ReadingOptions, problems: Problems) -> None:
    per_column = max(1, NAMED // len(wrong))
    columns = [f"{len(cells)} in column '{name}' ({abbreviate(cells, per_column)})" for name, cells in wrong.items()]
    advice = f"Ignore columns that are not classes with {reading.how_to_ignore(list(wrong))}"
    if len(wrong) > MOST_PROPOSED:
        advice = f"Name the columns that are classes with {reading.setting('classes')}"
    if reading.classes:
        advice = f"Leave columns that are not classes out of {reading.setting('classes')}"
    patient = next((name for name in wrong if name.lower() in PATIENT_COLUMNS), None)
    if patient is not None and reading.group is None and len(wrong) <= MOST_PROPOSED:
        others = [name for name in wrong if name != patient]
        more = f" {reading.how_to_ignore(others)}" if others else ""
        advice += f", or keep each patient on one side of every split: {reading.how_to_set('group', patient)}{more}"
    problems.add(
        f"cells that are not labels: {abbreviate(columns)}. A label is 1 (present), 0 (absent) or blank (unknown). "
        f"{advice}."
    )


def _labels_from_lists(
    rows: CsvRows, column: int, reading: ReadingOptions, problems: Problems
) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    cells = rows.column(column)
    listed = [[name.strip() for name in cell.split("|") if name.strip()] for cell in cells]
    present = [[name for name in names if name.lower() not in NOTHING] for names in listed]
    both = [
        f"row {rows.numbers[row]}: '{printable(cells[row], 60)}'"
        for row, shown in enumerate(present)
        if 0 < len(shown) < len(listed[row])
    ]
    if both:
        problems.add(f"{_rows_with(both)} both 'none' and a class ({abbreviate(both)}). Write one or the other.")
    classes = reading.classes or tuple(sorted({name for names in present for name in names}))
    if not classes:
        problems.add(f"the column '{rows.header[column]}' names no class in any row.")
    place_of = {name: place for place, name in enumerate(classes)}
    labels = np.full((len(cells), len(classes)), ABSENT, dtype=np.int8)
    for row, shown in enumerate(present):
        if not listed[row]:
            labels[row] = UNKNOWN
        labels[row, [place_of[name] for name in shown if name in place_of]] = PRESENT
    return classes, labels


def _parse_splits(rows: CsvRows, column: int, problems: Problems) -> NDArray[np.int8]:
    words = rows.column(column)
    wrong = [f"row {rows.numbers[row]}: '{word}'" for row, word in enumerate(words) if word.lower() not in SPLITS]
    if wrong:
        problems.add(
            f"{_rows_with(wrong)} a split other than train, validation (or val) and test ({abbreviate(wrong)})."
        )
    return np.array([SPLITS.get(word.lower(), TRAIN) for word in words], dtype=np.int8)


def _check_patients(
    rows: CsvRows,
    patients: NDArray[np.str_],
    split: NDArray[np.int8] | None,
    reading: ReadingOptions,
    problems: Problems,
) -> None:
    blank = [f"row {rows.numbers[place]}" for place in np.flatnonzero(patients == "")]
    if blank:
        setting = reading.setting("group")
        problems.add(f"{_rows_with(blank)} no '{reading.group}' ({abbreviate(blank)}), which {setting} needs.")
    both = [] if split is None else find_split_groups(split, patients)
    if both:
        problems.add(describe_split_groups(both, str(reading.group)))


def _find_images(names: list[str], images: Path) -> tuple[list[Path], list[tuple[int, int] | None]]:
    """The path, size and time of each image; None if it does not exist or cannot be read."""
    paths, found = [], []
    for name in names:
        path = images / name
        status = file_status(path)
        if status is None and "\\" in name:  # written on Windows
            path = images / name.replace("\\", "/")
            status = file_status(path)
        paths.append(path)
        found.append(status)
    return paths, found


def file_status(path: Path) -> tuple[int, int] | None:
    """The size in bytes and the time of a file; None if it does not exist or cannot be read."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None
    usable = stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK)
    return (status.st_size, status.st_mtime_ns) if usable else None


def _check_repeated(
    rows: CsvRows, names: list[str], paths: list[Path], found: list[tuple[int, int] | None], problems: Problems
) -> None:
    """Different names may be the same file: `1.png`, `../images/1.png`, or a link."""
    folder_path = cache(os.path.realpath)  # most images have few folders
    first: dict[str, int] = {}
    again = []
    for row, (path, status) in enumerate(zip(paths, found, strict=True)):
        number, file = rows.numbers[row], str(path)
        if status is not None:
            folder, name = os.path.split(file)
            file = os.path.realpath(file) if path.is_symlink() else f"{folder_path(folder)}/{name}"
        if first.setdefault(file, number) != number:
            again.append(f"row {number}: '{names[row]}' is already in row {first[file]}")
    if again:
        problems.add(
            f"{_rows_with(again)} an image that another row has ({abbreviate(again)}). Each image needs one row, "
            "otherwise it could be in training and test data; join the rows."
        )
