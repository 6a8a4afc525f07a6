"""`hf:FOLDER`: a dataset of the Hugging Face hub on disk, with an image column and a column of several labels.

FOLDER/data/train-00000-of-00002.parquet, test-….parquet     a clone or snapshot of a hub repository, or
FOLDER/train/data-00000-of-00001.arrow                       what `Dataset.save_to_disk` writes (extra `tables`)

The image column has the type of the hub's images: {bytes, path}. The labels are lists of names, or of numbers whose
names the dataset's features say (ClassLabel). Splits are called train, validation (or val, valid) and test; without a
test split a fifth is test. It has the licence of its card (README.md).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import register
from fedmll.data.dataset import PRESENT, Dataset, Splits
from fedmll.data.images.cache import content_key
from fedmll.data.images.decode import EncodedImages, decoded_images
from fedmll.data.images.problems import Problems, abbreviate, check_readable, describe_skipped
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.targets import TEST, TRAIN, VALIDATION, make_splits

SPLITS = {"train": TRAIN, "validation": VALIDATION, "val": VALIDATION, "valid": VALIDATION, "test": TEST}
PIECES_KEPT = 4  # row groups that are held while images are decoded


@dataclass(frozen=True)
class RowGroup:
    """A part of a file that is read in one step: a row group of a parquet file, or a batch of an arrow file."""

    file: Path
    number: int
    rows: int
    split: int


def load(request: SourceRequest) -> Splits:
    try:
        import pyarrow
    except ImportError:
        raise DataError("Hugging Face datasets are read with pyarrow: pip install 'fedmll[tables]'.") from None
    folder = request.file()
    where = f"'{folder}'"
    problems = Problems(where)
    files = _files(folder)
    pieces = [piece for file, split in files for piece in _pieces(file, split, problems)]
    if not pieces:
        problems.report()
    schema = _schema(pieces[0].file)
    image, column = _columns(schema, problems)
    problems.report()
    try:
        values = [value for piece in pieces for value in _read(piece, column)[column].to_pylist()]
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{where}: the labels cannot be read ({str(error)[:120]}). Copy the files again.") from None
    classes, labels = _labels(values, _names(schema, column), column, problems)
    encoded = _encoded(pieces, image)
    images = decoded_images(_key(files), lambda: encoded, request.size, request.reading, request.progress)
    kept, skipped = check_readable(
        len(labels), encoded.name, images.unreadable, request.reading, problems, images.window_problem
    )
    samples = Dataset(images.store, labels, classes)
    split = np.repeat([piece.split for piece in pieces], [piece.rows for piece in pieces]).astype(np.int8)
    sides = split[kept] if (split == TEST).any() else None
    splits = make_splits(samples.subset(kept), sides, where, request.require_positives)
    return replace(splits, window=images.window, notes=(*images.notes, *describe_skipped((), skipped)))


def _files(folder: Path) -> list[tuple[Path, int]]:
    """The files of the known splits, in order."""
    found = [(path, path.name.partition("-")[0]) for path in sorted(folder.glob("**/*.parquet"))]
    found += [(path, path.parent.name) for path in sorted(folder.glob("*/*.arrow"))]
    known = [(path, SPLITS[name]) for path, name in found if name in SPLITS]
    if not known:
        raise DataError(
            f"'{folder}' holds no Hugging Face dataset: train-*.parquet (in data/, of a clone) or train/*.arrow (of "
            "save_to_disk) is expected. Give the folder as hf:FOLDER, from here or from --root."
        )
    return known


def _pieces(file: Path, split: int, problems: Problems) -> list[RowGroup]:
    import pyarrow

    try:
        if file.suffix == ".parquet":
            from pyarrow import parquet

            groups = parquet.ParquetFile(file).metadata
            counts = [groups.row_group(number).num_rows for number in range(groups.num_row_groups)]
        else:
            counts = [batch.num_rows for batch in _stream(file)]
    except (pyarrow.ArrowException, OSError) as error:
        problems.add(f"'{file.name}' cannot be read ({str(error)[:120]}). Copy it again.")
        return []
    return [RowGroup(file, number, rows, split) for number, rows in enumerate(counts)]


def _stream(file: Path) -> list[Any]:
    import pyarrow

    return list(pyarrow.ipc.open_stream(pyarrow.memory_map(str(file))))


def _read(piece: RowGroup, column: str) -> Any:
    if piece.file.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.ParquetFile(piece.file).read_row_group(piece.number, columns=[column])
    return _stream(piece.file)[piece.number].select([column])


def _schema(file: Path) -> Any:
    if file.suffix == ".parquet":
        from pyarrow import parquet

        return parquet.read_schema(file)
    return _stream(file)[0].schema


def _columns(schema: Any, problems: Problems) -> tuple[str, str]:
    """The first image column, and the label column: `labels` or `label`, otherwise the first column of lists."""
    from pyarrow import types

    images = [f.name for f in schema if types.is_struct(f.type) and {"bytes", "path"} <= {k.name for k in f.type}]
    lists = [f.name for f in schema if types.is_list(f.type) or types.is_large_list(f.type)]
    for what, found in (("images ({bytes, path})", images), ("lists of labels", lists)):
        if not found:
            problems.add(f"no column has {what}; there are {', '.join(f'{f.name} ({f.type})' for f in schema)}.")
    preferred = next((name for name in ("labels", "label") if name in lists), None)
    return (images or [""])[0], preferred or (lists or [""])[0]


def _names(schema: Any, column: str) -> list[str] | None:
    """The class names of numeric labels, from the dataset's features."""
    try:
        feature = json.loads(schema.metadata[b"huggingface"])["info"]["features"][column]
        inner = feature.get("feature", feature) if isinstance(feature, dict) else feature[0]
        return [str(name) for name in inner["names"]]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        return None


def _labels(
    values: list[Any], names: list[str] | None, column: str, problems: Problems
) -> tuple[tuple[str, ...], NDArray[np.int8]]:
    """Targets from lists of labels. A null is unknown; an empty list is an image without any of the classes."""
    seen = {value for row in values if row is not None for value in row}
    if names is None and not all(isinstance(value, str) for value in seen):
        problems.add(f"the column '{column}' has numbers, and the dataset does not say which class each is.")
        names = []
    classes = tuple(names) if names is not None else tuple(sorted(seen))
    place = {name: number for number, name in enumerate(classes)}
    column_of = {value: place.get(value, value) for value in seen}  # a number is the column itself
    wrong = {v for v, number in column_of.items() if not isinstance(number, int) or not 0 <= number < len(classes)}
    if wrong and classes:
        problems.add(
            f"the column '{column}' has {abbreviate(sorted(map(str, wrong)))}; there are {len(classes)} classes."
        )
    elif not classes and not problems.found:
        problems.add(f"the column '{column}' names no class in any row.")
    labels = np.full((len(values), len(classes)), -1, dtype=np.int8)
    for row, listed in enumerate(values):
        if listed is not None:
            labels[row] = 0
            labels[row, [column_of[value] for value in listed if value not in wrong]] = PRESENT
    return classes, labels


def _key(files: list[tuple[Path, int]]) -> str:
    status = [(path.absolute(), path.stat().st_size, path.stat().st_mtime_ns) for path, _ in files]
    return content_key("hf", *status)


def _encoded(pieces: list[RowGroup], image: str) -> EncodedImages:
    starts = np.cumsum([0, *(piece.rows for piece in pieces)])
    column: Callable[[int], Any] = lru_cache(PIECES_KEPT)(lambda place: _read(pieces[place], image)[image])

    def at(position: int) -> tuple[int, int]:
        place = int(np.searchsorted(starts, position, side="right")) - 1
        return place, position - int(starts[place])

    def read(position: int) -> bytes:
        place, row = at(position)
        found = column(place)[row].as_py()
        if not found or not found.get("bytes"):
            raise ValueError("the file has no bytes of this image")
        return bytes(found["bytes"])

    def name(position: int) -> str:
        place, row = at(position)
        return f"row {row} of part {pieces[place].number} of '{pieces[place].file.name}'"

    return EncodedImages(int(starts[-1]), read, name)


register("source", "hf")(
    Source(
        description="a Hugging Face dataset on disk with images and lists of labels, parquet or arrow",
        load=load,
        file="FOLDER",
        composes=False,
        licence="as its card says",
    )
)
