"""`table:FILE.csv` or `.parquet`: one row per sample, with columns of features and of labels.

age,smoker,client,label:cough,label:fever      columns `label:NAME` are labels: 1, 0, blank for unknown
63,yes,north,1,0                               (or the columns in data.classes)
41,,south,,1

`client` names the client of a sample, `split` is train, validation or test, and data.group is the column of the
patient. Every other column is a feature. A column of numbers is standardised with the mean and standard deviation of
the training rows, and a missing value becomes the mean. A column of text becomes one feature per value; a missing or
new value is 0 in all of them. This encoding is stored in the experiment (data.encoding), so that predictions use the
same.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import TableEncoding
from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.core.text import suggest
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.images.problems import Problems, abbreviate
from fedmll.data.objects import CLIENT, LABEL_PREFIX, SPLIT, SPLIT_NAMES
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.targets import TRAIN, check_classes, draw_split, make_splits

MOST_CATEGORIES = 100  # of a column of text
LABELS = {"1": 1, "1.0": 1, "true": 1, "yes": 1, "0": 0, "0.0": 0, "false": 0, "no": 0, "-1": -1, "-1.0": -1}
MISSING = {"", "na", "n/a", "nan", "null", "none", "?"}

Column = list[str | None]


def load(request: SourceRequest) -> Splits:
    file, reading = request.file(), request.reading
    where = f"'{file}'"
    problems = Problems(where)
    columns = read_table(file)
    labels = list(reading.classes) or [name for name in columns if name.startswith(LABEL_PREFIX)]
    group = () if reading.group is None else (reading.group,)
    for name in (name for name in (*labels, *reading.ignore, *group) if name not in columns):
        problems.add(f"there is no column '{name}'{suggest(name, columns)}")
    if not labels:
        problems.add(
            f"no column is a label. Begin the names of label columns with '{LABEL_PREFIX}', or list them in "
            f"{reading.setting('classes')}."
        )
    problems.report()
    features = [name for name in columns if name not in {*labels, *reading.ignore, *group, CLIENT, SPLIT}]
    if not features:
        problems.add("every column is a label or has another meaning; a column of features is needed.")
    targets = np.stack([_labels(columns[name], name, problems) for name in labels], 1)
    split = _split(columns[SPLIT], problems) if SPLIT in columns else None
    problems.report()
    classes = tuple(name.removeprefix(LABEL_PREFIX) for name in labels)
    check_classes(classes, where)
    clients, patients = (
        None if name not in columns else np.array(["" if value is None else value for value in columns[name]])
        for name in (CLIENT, reading.group or "")
    )
    if split is None:
        split = draw_split(targets, patients)
    encoding = request.reading.encoding or fit_encoding(columns, features, split == TRAIN, problems)
    problems.report()
    vectors = encode(columns, encoding, where)
    samples = Dataset(vectors, targets, classes, groups=clients, patients=patients)
    splits = make_splits(samples, split, where, request.require_positives, reading.group)
    return Splits(
        splits.train, splits.test, splits.validation,
        notes=_notes(columns, encoding), group=reading.group, encoding=encoding,
    )  # fmt: skip


def read_table(file: Path) -> dict[str, Column]:
    """The columns of a table as text; a missing value is None."""
    if not file.is_file():
        raise DataError(f"The table '{file}' does not exist; a .csv or .parquet file is expected there.")
    if file.suffix == ".parquet":
        return _read_parquet(file)
    if file.suffix != ".csv":
        raise DataError(f"'{file}' is no table that can be read: its name must end in .csv or .parquet.")
    try:
        with file.open(newline="", encoding="utf-8-sig") as opened:
            rows = csv.reader(opened)
            header = next(rows, [])
            table = [row for row in rows if row]
    except (UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"'{file}' is not a CSV file in UTF-8 ({error}). Save it as such.") from None
    repeated = [name for name, count in Counter(header).items() if count > 1]
    if repeated:
        raise DataError(f"'{file}': the column '{repeated[0]}' appears twice. Each column needs its own name.")
    short = next((number for number, row in enumerate(table, 2) if len(row) != len(header)), None)
    if short is not None or not table:
        problem = "has no rows" if not table else f"line {short} has not {len(header)} fields, as the header has"
        raise DataError(f"'{file}': {problem}. Correct the file.")
    values = [[None if cell.strip().lower() in MISSING else cell.strip() for cell in row] for row in table]
    return {name.strip(): list(column) for name, column in zip(header, zip(*values, strict=True), strict=True)}


def _read_parquet(file: Path) -> dict[str, Column]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError("Parquet files are read with pyarrow: pip install 'fedmll[tables]'.") from None
    try:
        table = parquet.read_table(file).to_pydict()
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"'{file}' is not a readable Parquet file ({str(error)[:120]}). Copy it again.") from None
    return {str(name): [_text(value) for value in values] for name, values in table.items()}


def _text(value: Any) -> str | None:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return None
    return str(int(value)) if isinstance(value, bool) else str(value)


def fit_encoding(
    columns: Mapping[str, Column], features: Sequence[str], train: NDArray[np.bool_], problems: Problems
) -> TableEncoding:
    """How each feature column becomes numbers: mean and standard deviation, or the values of a column of text."""
    found: list[tuple[str, tuple[float, float] | tuple[str, ...]]] = []
    for name in features:
        values = [value for value, used in zip(columns[name], train, strict=True) if used and value is not None]
        try:
            numbers = np.array(values, float)
            if not len(numbers):
                problems.add(f"the column '{name}' has no value in the training rows. Ignore it (data.ignore).")
            elif not np.isfinite(numbers).all():
                problems.add(f"the column '{name}' has infinite numbers. Replace them.")
            else:
                found.append((name, (float(numbers.mean()), float(numbers.std()) or 1.0)))
        except ValueError:
            categories = sorted(set(values))
            if len(categories) > MOST_CATEGORIES:
                problems.add(
                    f"the column '{name}' has {len(categories)} different values, such as "
                    f"{abbreviate(categories[:3])}; a column of text may have {MOST_CATEGORIES}. Ignore it "
                    "(data.ignore)."
                )
            found.append((name, tuple(categories)))
    return tuple(found)


def encode(columns: Mapping[str, Column], encoding: TableEncoding, where: str) -> NDArray[np.float32]:
    """One row of numbers per sample."""
    parts: list[NDArray[np.float32]] = []
    for name, rule in encoding:
        if name not in columns:
            raise DataError(f"{where} has no column '{name}', which the model uses. Add it; blank cells are allowed.")
        values = columns[name]
        if is_categorical(rule):
            place = {category: number for number, category in enumerate(rule)}
            part = np.zeros((len(values), len(rule)), np.float32)
            for row, value in enumerate(values):
                if value in place:
                    part[row, place[value]] = 1
        else:
            mean, std = (float(number) for number in rule)
            try:
                numbers = np.array([mean if value is None else value for value in values], float)
                part = ((numbers - mean) / std).astype(np.float32)[:, None]
            except ValueError:
                wrong = next(value for value in values if value is not None and not _is_number(value))
                raise DataError(f"{where}: '{wrong}' in the column '{name}' is not a number. Correct it.") from None
            if not np.isfinite(part).all():
                raise DataError(f"{where}: the column '{name}' has infinite numbers. Replace them.")
        parts.append(part)
    return np.concatenate(parts, 1)


def is_categorical(rule: tuple[float, float] | tuple[str, ...]) -> bool:
    return not rule or isinstance(rule[0], str)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _labels(column: Column, name: str, problems: Problems) -> NDArray[np.int8]:
    wrong = [value for value in column if value is not None and value.lower() not in LABELS]
    if wrong:
        problems.add(f"the label column '{name}' has '{wrong[0]}'; a label is 1, 0 or blank (unknown).")
        return np.full(len(column), -1, np.int8)
    return np.array([-1 if value is None else LABELS[value.lower()] for value in column], np.int8)


def _split(column: Column, problems: Problems) -> NDArray[np.int8]:
    wrong = next((value for value in column if value is None or value.lower() not in SPLIT_NAMES), 0)
    if wrong != 0:
        problems.add(f"the column '{SPLIT}' has '{wrong or ''}'; it must be train, validation or test.")
        return np.zeros(len(column), np.int8)
    return np.array([SPLIT_NAMES[value.lower()] for value in column if value is not None], np.int8)


def _notes(columns: Mapping[str, Column], encoding: TableEncoding) -> tuple[str, ...]:
    texts = [name for name, rule in encoding if is_categorical(rule)]
    gaps = [name for name, rule in encoding if not is_categorical(rule) and None in columns[name]]
    notes = []
    if texts:
        notes.append(f"columns of text, one feature per value: {abbreviate(texts)}")
    if gaps:
        notes.append(f"missing numbers were replaced by the mean of the training rows: {abbreviate(gaps)}")
    return tuple(notes)


register("source", "table")(
    Source(
        description="your table of features and labels",
        load=load,
        file="FILE.csv",
        images=False,
        has_clients=True,
        composes=False,
        settings=("classes", "ignore", "group"),
    )
)
