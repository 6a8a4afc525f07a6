"""Predictions as a file, written while they arrive: CSV, JSON or Parquet. After an error there is no file."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.inference.image_stream import ImagePrediction

ROW_GROUP = 1024  # rows per group of a Parquet file
IMAGE, PREDICTED, REASON = "image", "predicted", "unreadable"

WritePrediction = Callable[[ImagePrediction, list[str]], None]  # arguments: the prediction and the predicted classes


@contextmanager
def open_prediction_writer(file: Path, classes: Sequence[str]) -> Iterator[WritePrediction]:
    """Yield a function that writes one row per image: its path, the predicted classes (`a|b`), the reason if it could
    not be read, and one probability per class."""
    writers = {".csv": _csv_writer, ".json": _json_writer, ".parquet": _parquet_writer}
    if file.suffix not in writers:
        raise ConfigError(f"--out takes FILE.csv, FILE.json or FILE.parquet; '{file}' ends in none of them.")
    header = [IMAGE, PREDICTED, REASON]
    if set(header) & set(classes):
        header = [f"_{name}" for name in header]  # a class has one of these names
    with files.atomic_replace(file) as temporary, writers[file.suffix](temporary, header, classes) as write:
        yield write


def _values(prediction: ImagePrediction, classes: Sequence[str]) -> list[float | None]:
    if prediction.probabilities is None:
        return [None] * len(classes)
    return [round(float(value), 6) for value in prediction.probabilities]


@contextmanager
def _csv_writer(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[WritePrediction]:
    with file.open("w", newline="") as opened:
        lines = csv.writer(opened, lineterminator="\n")
        lines.writerow([*header, *classes])

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            lines.writerow([prediction.path, "|".join(predicted), prediction.reason, *_values(prediction, classes)])

        yield write


@contextmanager
def _json_writer(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[WritePrediction]:
    image_key, predicted_key, reason_key = (name.lstrip("_") for name in header)
    with file.open("w") as opened:
        start = "[\n"

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            nonlocal start
            row: dict[str, Any] = {image_key: str(prediction.path)}
            if prediction.probabilities is None:
                row[reason_key] = prediction.reason
            else:
                row |= {
                    predicted_key: predicted,
                    "probabilities": dict(zip(classes, _values(prediction, classes), strict=True)),
                }
            opened.write(start + json.dumps(row))
            start = ",\n"

        yield write
        opened.write("\n]\n" if start == ",\n" else "[]\n")


@contextmanager
def _parquet_writer(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[WritePrediction]:
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

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            rows.append((str(prediction.path), "|".join(predicted), prediction.reason, *_values(prediction, classes)))
            if len(rows) == ROW_GROUP:
                flush(writer)

        yield write
        if rows:
            flush(writer)
