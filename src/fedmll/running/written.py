"""Predictions as a file, written while they come: CSV, JSON or Parquet. Whole if all goes well, else not there."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.errors import ConfigError
from fedmll.running.images import Prediction

AT_ONCE = 1024  # rows of a Parquet file's group
IMAGE, PREDICTED, REASON = "image", "predicted", "unreadable"

Write = Callable[[Prediction, list[str]], None]


@contextmanager
def table_file(file: Path, classes: Sequence[str]) -> Iterator[Write]:
    """A row an image: its path, the predicted classes (`a|b`), why it could not be read, a probability a class."""
    kinds = {".csv": _csv, ".json": _json, ".parquet": _parquet}
    if file.suffix not in kinds:
        raise ConfigError(f"--out takes FILE.csv, FILE.json or FILE.parquet; '{file}' ends in none of them.")
    header = [IMAGE, PREDICTED, REASON]
    if set(header) & set(classes):
        header = [f"_{name}" for name in header]  # a class has the name: what is ours steps back
    with files.replacing(file) as temporary, kinds[file.suffix](temporary, header, classes) as write:
        yield write


def _values(prediction: Prediction, classes: Sequence[str]) -> list[float | None]:
    if prediction.probabilities is None:
        return [None] * len(classes)
    return [round(float(value), 6) for value in prediction.probabilities]


@contextmanager
def _csv(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[Write]:
    with file.open("w", newline="") as opened:
        lines = csv.writer(opened, lineterminator="\n")
        lines.writerow([*header, *classes])

        def write(prediction: Prediction, chosen: list[str]) -> None:
            lines.writerow([prediction.path, "|".join(chosen), prediction.reason, *_values(prediction, classes)])

        yield write


@contextmanager
def _json(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[Write]:
    image, predicted, reason = (name.lstrip("_") for name in header)
    with file.open("w") as opened:
        start = "[\n"

        def write(prediction: Prediction, chosen: list[str]) -> None:
            nonlocal start
            row: dict[str, Any] = {image: str(prediction.path)}
            if prediction.probabilities is None:
                row[reason] = prediction.reason
            else:
                row |= {
                    predicted: chosen,
                    "probabilities": dict(zip(classes, _values(prediction, classes), strict=True)),
                }
            opened.write(start + json.dumps(row))
            start = ",\n"

        yield write
        opened.write("\n]\n" if start == ",\n" else "[]\n")


@contextmanager
def _parquet(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[Write]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError("Parquet needs a package that is not installed: pip install 'fedmll[tables]'.") from None
    schema = pyarrow.schema(
        [(name, pyarrow.string()) for name in header] + [(name, pyarrow.float32()) for name in classes]
    )
    rows: list[tuple[Any, ...]] = []

    def flush(writer: Any) -> None:
        columns = [
            pyarrow.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
        ]
        writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
        rows.clear()

    with pyarrow.parquet.ParquetWriter(str(file), schema) as writer:

        def write(prediction: Prediction, chosen: list[str]) -> None:
            rows.append((str(prediction.path), "|".join(chosen), prediction.reason, *_values(prediction, classes)))
            if len(rows) == AT_ONCE:
                flush(writer)

        yield write
        if rows:
            flush(writer)
