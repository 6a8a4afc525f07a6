"""The rows and columns of a labels file: which column is what (see fedmll.data.images.labels_csv for the format)."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from fedmll.data.images.reading import Problems, some
from fedmll.errors import DataError, nearest
from fedmll.settings import Reading

IMAGE_COLUMNS = ("image", "path", "file", "filename")


@dataclass(frozen=True)
class Rows:
    """The header, and the rows that have as many cells, with their numbers as a spreadsheet shows them."""

    header: list[str]
    numbers: list[int]
    cells: list[list[str]]

    def column(self, place: int) -> list[str]:
        return [row[place].strip() for row in self.cells]


@dataclass(frozen=True)
class Columns:
    image: int
    split: int | None
    client: int | None
    group: int | None
    labels: int | None  # of the `A|B|C` form
    classes: list[int]


def read_rows(file: Path, problems: Problems) -> Rows:
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
    whole = [(number, row) for number, row in table[1:] if len(row) == len(header)]
    wrong = [f"row {number}: {len(row)} cells" for number, row in table[1:] if len(row) != len(header)]
    if wrong:
        problems.add(
            f"{rows_with(len(wrong))} another number of cells than the header, which has {len(header)}: {some(wrong)}. "
            "A comma inside a name needs quotes around the name."
        )
    if not whole:
        problems.report()
    return Rows(header, [number for number, _ in whole], [row for _, row in whole])


def without_ignored(rows: Rows, reading: Reading, problems: Problems) -> Rows:
    for name in reading.ignore:
        if name not in rows.header:
            problems.add(f"{reading.setting('ignore')} names '{name}', which is no column{nearest(name, rows.header)}")
    # A column without name and content comes from a comma at the end of every line.
    kept = [
        place
        for place, name in enumerate(rows.header)
        if name not in reading.ignore and (name or any(row[place].strip() for row in rows.cells))
    ]
    if len(kept) == len(rows.header):
        return rows
    return Rows([rows.header[place] for place in kept], rows.numbers, [[row[p] for p in kept] for row in rows.cells])


def find_columns(rows: Rows, reading: Reading, problems: Problems) -> Columns:
    header = rows.header
    lower = [name.lower() for name in header]

    def only(name: str) -> int | None:
        return lower.index(name) if name in lower else None

    image = next((lower.index(name) for name in IMAGE_COLUMNS if name in lower), 0)
    split, client, labels = only("split"), only("client"), only("labels")
    group = header.index(reading.group) if reading.group in header else None
    if reading.group is not None and group is None:
        problems.add(
            f"{reading.setting('group')} names '{reading.group}', which is no column{nearest(reading.group, header)}"
        )
    classes = [column for column in range(len(header)) if column not in (image, split, client, group, labels)]
    if labels is None and reading.classes:
        for name in reading.classes:
            if name not in header:
                problems.add(f"{reading.setting('classes')} names '{name}', which is no column{nearest(name, header)}")
        classes = [header.index(name) for name in reading.classes if name in header]
    elif labels is None and not classes:
        problems.add(f"there is no class column beside '{header[image]}'. Add a column a class, with 1, 0 or blank.")
    elif labels is not None and classes and not reading.classes:
        names = [header[column] for column in classes]
        problems.add(
            f"it has a column 'labels' and also {some([repr(name) for name in names])}. Use either one column 'labels' "
            f"with 'A|B|C', or a column a class; if the others are no classes: {reading.how_to_ignore(names)}."
        )
    _check_header(header, classes, problems)
    return Columns(image, split, client, group, labels, classes)


def _check_header(header: list[str], classes: list[int], problems: Problems) -> None:
    names = [header[column] for column in classes]
    for name in dict.fromkeys(name for name in names if name and header.count(name) > 1):
        problems.add(f"the class '{name}' appears twice. Every class needs one column and its own name.")
    unnamed = [str(column + 1) for column in classes if not header[column]]
    if unnamed:
        problems.add(f"column {', '.join(unnamed)} has no name in the header. Name it or remove it.")


def rows_with(count: int) -> str:
    return f"{count} row{'s have' if count > 1 else ' has'}"
