"""The labels file of an image folder: a CSV with one image a row.

image,  Atelectasis, Effusion, …, split, client        a column a class: 1 present, 0 absent, blank unknown
image,  labels,                   split, client        or one column `labels`: the present classes as `A|B|C`

The image is the column called image, path, file or filename, else the first; its path may have backslashes. `split`
(train, validation, test) and `client` are optional. In the `labels` form a class that is not listed is absent, `none`
(or `No Finding`) says that all are, and a blank cell that nothing is known. `data.classes`, `data.ignore` and
`data.group` say which columns are classes, none, and whose image it is (see fedmll.data.images.reading).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.images.csv_columns import Rows, find_columns, read_rows, rows_with, without_ignored
from fedmll.data.images.reading import NAMED, Problems, some
from fedmll.data.targets import TEST, TRAIN, VALIDATION, both_sides, straddling
from fedmll.settings import Reading

PATIENT_COLUMNS = ("patient", "patient_id", "patientid", "patient id")
CELLS = {"1": PRESENT, "0": ABSENT, "": UNKNOWN, "1.0": PRESENT, "0.0": ABSENT}  # 1.0: pandas, when a cell is blank
SPLITS = {"train": TRAIN, "val": VALIDATION, "validation": VALIDATION, "test": TEST}
NOTHING = ("none", "no finding")  # in the `labels` form: known, and no class is present


@dataclass(frozen=True)
class LabelTable:
    """A labels file in memory; the arrays have one row an image, in the order of the file."""

    names: list[str]  # as the file has them
    paths: list[Path]
    labels: NDArray[np.int8]
    classes: tuple[str, ...]
    split: NDArray[np.int8] | None
    clients: NDArray[np.str_] | None
    patients: NDArray[np.str_] | None  # the column that data.group names
    sizes_and_times: list[tuple[int, int]]  # of each image file, in bytes and ns: they change when the image does
    problems: Problems  # to be completed by who looks at the images, and then reported
    missing: list[str] = field(default_factory=list)  # rows that were left out because their image does not exist
    listed: bool = False  # the `A|B|C` form: a class that no row lists is absent everywhere, not unknown

    def rows(self, kept: Sequence[int] | NDArray[np.int64]) -> LabelTable:
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


def read_labels(file: Path, images: Path, reading: Reading | None = None) -> LabelTable:
    """Read a labels file and find its images in the folder `images`.

    What is wrong with rows, columns and images is in `problems`: report() raises it, when the images are read too.
    """
    reading = reading or Reading()
    problems = Problems(f"'{file}'")
    rows = without_ignored(read_rows(file, problems), reading, problems)
    columns = find_columns(rows, reading, problems)
    if columns.labels is None:
        classes = tuple(rows.header[column] for column in columns.classes)
        labels = _labels_from_columns(rows, columns.classes, reading, problems)
    else:
        classes, labels = _labels_from_lists(rows, columns.labels, reading, problems)
    names = rows.column(columns.image)
    split = None if columns.split is None else _splits(rows, columns.split, problems)
    patients = None if columns.group is None else np.array(rows.column(columns.group), dtype=np.str_)
    if patients is not None:
        _check_patients(rows, patients, split, reading, problems)
    clients = None if columns.client is None else np.array(rows.column(columns.client), dtype=np.str_)
    paths, found = _find_images(rows, names, images)
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
        listed=columns.labels is not None,
    )
    _check_repeated(rows, names, paths, problems)
    return _existing(table, rows, found, reading)


def _labels_from_columns(rows: Rows, columns: Sequence[int], reading: Reading, problems: Problems) -> NDArray[np.int8]:
    labels = np.empty((len(rows.cells), len(columns)), dtype=np.int8)
    wrong: dict[int, list[str]] = {}  # by column
    for place, row in enumerate(rows.cells):
        try:
            labels[place] = [CELLS[row[column]] for column in columns]
        except KeyError:  # rare: cells with spaces around them, or wrong ones
            for target, column in enumerate(columns):
                code = CELLS.get(row[column].strip())
                if code is None:
                    wrong.setdefault(column, []).append(f"row {rows.numbers[place]}: '{row[column]}'")
                labels[place, target] = UNKNOWN if code is None else code
    if wrong:
        _report_cells({rows.header[column]: cells for column, cells in sorted(wrong.items())}, reading, problems)
    return labels


def _report_cells(wrong: dict[str, list[str]], reading: Reading, problems: Problems) -> None:
    a_column = max(1, NAMED // len(wrong))
    cells = some([f"{len(cells)} in column '{name}' ({some(cells, a_column)})" for name, cells in wrong.items()])
    advice = f"Columns that are no classes are left out with {reading.how_to_ignore(list(wrong))}"
    if reading.classes:
        advice = f"Leave columns that are no classes out of {reading.setting('classes')}"
    patient = next((name for name in wrong if name.lower() in PATIENT_COLUMNS), None)
    if patient is not None and reading.group is None:
        others = [name for name in wrong if name != patient]
        more = f" {reading.how_to_ignore(others)}" if others else ""
        advice += f", or keep each patient on one side of every split: {reading.how_to_set('group', patient)}{more}"
    problems.add(f"cells that are no label: {cells}. A label is 1 (present), 0 (absent) or blank (unknown). {advice}.")


def _labels_from_lists(
    rows: Rows, column: int, reading: Reading, problems: Problems
) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    cells = rows.column(column)
    listed = [[name.strip() for name in cell.split("|") if name.strip()] for cell in cells]
    present = [[name for name in names if name.lower() not in NOTHING] for names in listed]
    both = [
        f"row {rows.numbers[row]}: '{cells[row]}'"
        for row, shown in enumerate(present)
        if 0 < len(shown) < len(listed[row])
    ]
    if both:
        problems.add(f"{rows_with(len(both))} both 'none' and a class ({some(both)}). Write one or the other.")
    classes = reading.classes or tuple(sorted({name for names in present for name in names}))
    if not classes:
        problems.add(f"the column '{rows.header[column]}' names no class anywhere, so there is nothing to learn.")
    place_of = {name: place for place, name in enumerate(classes)}
    labels = np.full((len(cells), len(classes)), ABSENT, dtype=np.int8)
    for row, shown in enumerate(present):
        if not listed[row]:
            labels[row] = UNKNOWN
        labels[row, [place_of[name] for name in shown if name in place_of]] = PRESENT
    return classes, labels


def _splits(rows: Rows, column: int, problems: Problems) -> NDArray[np.int8]:
    words = rows.column(column)
    wrong = [f"row {rows.numbers[row]}: '{word}'" for row, word in enumerate(words) if word.lower() not in SPLITS]
    if wrong:
        problems.add(
            f"{rows_with(len(wrong))} a split that is none of train, validation (or val) and test ({some(wrong)})."
        )
    return np.array([SPLITS.get(word.lower(), TRAIN) for word in words], dtype=np.int8)


def _check_patients(
    rows: Rows, patients: NDArray[np.str_], split: NDArray[np.int8] | None, reading: Reading, problems: Problems
) -> None:
    blank = [f"row {rows.numbers[place]}" for place in np.flatnonzero(patients == "")]
    if blank:
        problems.add(
            f"{rows_with(len(blank))} no '{reading.group}' ({some(blank)}), which {reading.setting('group')} needs."
        )
    both = [] if split is None else straddling(split, patients)
    if both:
        problems.add(both_sides(both, str(reading.group)))


def _find_images(rows: Rows, names: list[str], images: Path) -> tuple[list[Path], list[tuple[int, int] | None]]:
    """The path, size and time of every image; None for one that is not there or may not be read."""
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
    """The size in bytes and the time of a file; None if it is not there or may not be read."""
    try:
        status = path.stat()
    except (OSError, ValueError):  # ValueError: a name with a zero byte
        return None
    usable = stat.S_ISREG(status.st_mode) and os.access(path, os.R_OK)
    return (status.st_size, status.st_mtime_ns) if usable else None


def _check_repeated(rows: Rows, names: list[str], paths: list[Path], problems: Problems) -> None:
    first: dict[str, int] = {}
    again = [
        f"row {rows.numbers[row]}: '{names[row]}' is already in row {first[str(path)]}"
        for row, path in enumerate(paths)
        if first.setdefault(str(path), rows.numbers[row]) != rows.numbers[row]
    ]
    if again:
        problems.add(
            f"{rows_with(len(again))} an image that another row has ({some(again)}). An image has one row, or it could "
            "be in training and test at once; join them."
        )


def _existing(table: LabelTable, rows: Rows, found: list[tuple[int, int] | None], reading: Reading) -> LabelTable:
    """The rows whose image is there; the others are a problem, or left out."""
    lost = [place for place, status in enumerate(found) if status is None]
    missing = [f"row {rows.numbers[place]}: '{table.paths[place]}'" for place in lost]
    if missing and not reading.skip_unreadable:
        table.problems.add(
            f"{len(missing)} of its {len(found)} images do not exist: {some(missing)}. Correct the paths (they are "
            "relative to the image folder), remove the rows, or leave them out with --skip-unreadable."
        )
    elif missing and len(missing) == len(found):
        table.problems.add(f"not one of its {len(found)} images exists: {some(missing)}. Is it the right image folder?")
    kept = [place for place, status in enumerate(found) if status is not None]
    return replace(table.rows(kept), missing=missing)
