"""Image files in, tables of predictions out, both as streams: memory does not grow with the number of files."""

from __future__ import annotations

import csv
import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.images.decode import Window, decode_image
from fedmll.data.images.open_image import IMAGE_ENDINGS, IMAGE_ERRORS, WIDE_MODES, describe_image_error, open_image
from fedmll.runs.formatting import escape_cell

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class ImagePrediction:
    path: Path
    probabilities: NDArray[np.float32] | None  # (C,); None if the file cannot be read
    reason: str = ""  # why it cannot be read


def decode_batches(
    paths: Sequence[Path], shape: tuple[int, int, int], window: Window | None, size: int
) -> Iterator[list[tuple[Path, Pixels | str]]]:
    """Decode image files in order.

    Args:
        paths: the files.
        shape: channels, height and width of the model's input.
        window: the range of values of images with more than 8 bits per pixel.
        size: the largest number of images in a batch.

    Yields:
        Batches: each path with its pixels, or with the reason why there are none.
    """
    workers = min(8, os.cpu_count() or 1)
    waiting: deque[tuple[Path, Future[Pixels | str]]] = deque()
    remaining, pool = iter(paths), ThreadPoolExecutor(workers)

    def submit_more() -> None:
        for path in islice(remaining, size + workers - len(waiting)):
            waiting.append((path, pool.submit(read_pixels, path, shape, window)))

    try:
        submit_more()
        while waiting:
            batch = []
            for _ in range(min(size, len(waiting))):
                path, future = waiting.popleft()
                batch.append((path, future.result()))
                submit_more()
            yield batch
    finally:  # a consumer that stops early does not wait for files that nobody has started to read
        pool.shutdown(cancel_futures=True)


def read_pixels(path: Path, shape: tuple[int, int, int], window: Window | None) -> Pixels | str:
    """The same pixels as in training, or the reason why there are none."""
    try:
        if window is None:
            with open_image(path) as image:
                if image.mode.startswith("I;16") or image.mode in WIDE_MODES:
                    return "it has more than 8 bits per pixel, and the model was trained on 8-bit images"
        return decode_image(path, shape, window)
    except IMAGE_ERRORS as error:
        return describe_image_error(error)


def find_images(paths: Iterable[Path]) -> tuple[list[Path], list[Path]]:
    """The images: files as they are, and for each folder all images in it and below it, sorted; and the other files of
    these folders, whose names do not end like those of images."""
    images: list[Path] = []
    others: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = sorted(file for file in path.rglob("*") if file.is_file())
            found = [file for file in inside if file.suffix.lower() in IMAGE_ENDINGS]
            if not found:
                raise DataError(f"The folder {display_path(path)} holds no images.")
            images += found
            others += [file for file in inside if file.suffix.lower() not in IMAGE_ENDINGS]
        else:
            images.append(path)
    return images, others


def display_path(path: Path) -> str:
    """A path as text. Bytes that are not UTF-8 are shown as \\xff: they cannot be printed or written to a table."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


# ---- tables of predictions

ROW_GROUP = 1024  # rows per group of a Parquet file
IMAGE, PREDICTED, REASON = "image", "predicted", "unreadable"

WritePrediction = Callable[[ImagePrediction, list[str]], None]  # arguments: the prediction and the predicted classes


@contextmanager
def open_prediction_writer(file: Path, classes: Sequence[str]) -> Iterator[WritePrediction]:
    """Yield a function that writes one row per image: its path, the predicted classes (`a|b`), the reason if it could
    not be read, and one probability per class. After an error there is no file."""
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


def _row(prediction: ImagePrediction, predicted: list[str], classes: Sequence[str]) -> list[Any]:
    return [display_path(prediction.path), "|".join(predicted), prediction.reason, *_values(prediction, classes)]


@contextmanager
def _csv_writer(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[WritePrediction]:
    with file.open("w", newline="") as opened:
        lines = csv.writer(opened, lineterminator="\n")
        lines.writerow(map(escape_cell, [*header, *classes]))

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            lines.writerow(map(escape_cell, _row(prediction, predicted, classes)))

        yield write


@contextmanager
def _json_writer(file: Path, header: Sequence[str], classes: Sequence[str]) -> Iterator[WritePrediction]:
    image_key, predicted_key, reason_key = (name.lstrip("_") for name in header)
    with file.open("w") as opened:
        start = "[\n"

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            nonlocal start
            row: dict[str, Any] = {image_key: display_path(prediction.path)}
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
    rows: list[list[Any]] = []

    def flush(writer: Any) -> None:
        columns = [
            pyarrow.array(column, field.type) for column, field in zip(zip(*rows, strict=True), schema, strict=True)
        ]
        writer.write_table(pyarrow.Table.from_arrays(columns, schema=schema))
        rows.clear()

    with pyarrow.parquet.ParquetWriter(str(file), schema) as writer:

        def write(prediction: ImagePrediction, predicted: list[str]) -> None:
            rows.append(_row(prediction, predicted, classes))
            if len(rows) == ROW_GROUP:
                flush(writer)

        yield write
        if rows:
            flush(writer)
