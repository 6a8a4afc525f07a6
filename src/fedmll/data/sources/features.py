"""`features:FILE.npz`: vectors instead of images: x_train, x_test (N, D), y_train, y_test (N, C) or class numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError, DataError
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.sources.base import Source, SourceRequest
from fedmll.data.sources.npz import class_names, read_npz
from fedmll.data.targets import check_classes, check_positives, count_classes, parse_targets


def load(request: SourceRequest) -> Splits:
    file = request.file()
    if request.size is not None:
        raise ConfigError(f"data.size is set, and '{file}' has feature vectors, which have no size. Leave it out.")
    arrays = read_npz(file, ("x_train", "y_train", "x_test", "y_test"), ("classes",))
    count = max(count_classes(arrays[f"y_{part}"], f"'{file}', y_{part}") for part in ("train", "test"))
    classes = class_names(arrays, count, f"'{file}'")
    check_classes(classes, f"'{file}'")
    train, test = (_dataset(arrays, part, classes, file) for part in ("train", "test"))
    if train.sample_shape != test.sample_shape:
        raise DataError(
            f"'{file}': training vectors have {train.sample_shape[0]} numbers and test vectors {test.sample_shape[0]}; "
            "they must have the same."
        )
    if request.require_positives:
        check_positives(train, f"'{file}'")
    return Splits(train, test)


def _dataset(arrays: dict[str, NDArray[Any]], part: str, classes: tuple[str, ...], file: Path) -> Dataset:
    vectors, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    if vectors.ndim != 2 or vectors.dtype.kind not in "fiu" or len(vectors) == 0 or len(vectors) != len(labels):
        raise DataError(
            f"'{file}': x_{part} must be numbers of shape (N, D) with N ≥ 1 rows in y_{part}; it is {vectors.dtype} "
            f"{vectors.shape} with {len(labels)} rows of labels."
        )
    vectors = vectors.astype(np.float32, copy=False)
    bad = np.flatnonzero(~np.isfinite(vectors).all(axis=1))
    if len(bad):
        raise DataError(
            f"'{file}': {len(bad)} vectors of x_{part} hold NaN or infinite numbers (the first: row {bad[0]}). "
            "Replace them."
        )
    return Dataset(vectors, parse_targets(labels, classes, f"'{file}', y_{part}"), classes)


register("source", "features")(
    Source(
        description="your feature vectors and labels in one file",
        load=load,
        file="FILE.npz",
        images=False,
    )
)
