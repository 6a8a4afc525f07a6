"""`features:FILE.npz`: vectors instead of images: x_train, x_test (N, D), y_train, y_test (N, C) or class numbers.

Optional: x_validation and y_validation; clients_train, the client of each sample; groups_train, groups_validation and
groups_test, the patient of each sample.
"""

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
from fedmll.data.targets import (
    check_classes,
    check_positives,
    count_classes,
    describe_split_groups,
    find_split_groups,
    parse_targets,
)


def load(request: SourceRequest) -> Splits:
    file = request.file()
    if request.size is not None:
        raise ConfigError(f"data.size is set, and '{file}' has feature vectors, which have no size. Leave it out.")
    named = [f"{kind}_{part}" for kind in ("x", "y", "groups") for part in ("train", "validation", "test")]
    needed = ("x_train", "y_train", "x_test", "y_test")
    arrays = read_npz(file, needed, ("classes", "clients_train", *(name for name in named if name not in needed)))
    parts = [part for part in ("train", "validation", "test") if f"x_{part}" in arrays and f"y_{part}" in arrays]
    count = max(count_classes(arrays[f"y_{part}"], f"'{file}', y_{part}") for part in parts)
    classes = class_names(arrays, count, f"'{file}'")
    check_classes(classes, f"'{file}'")
    found = {part: _dataset(arrays, part, classes, file) for part in parts}
    train = found["train"]
    for part, data in found.items():
        if train.sample_shape != data.sample_shape:
            raise DataError(
                f"'{file}': training vectors have {train.sample_shape[0]} numbers and {part} vectors "
                f"{data.sample_shape[0]}; they must have the same."
            )
    patients = [data.patients for data in found.values()]
    grouped = all(names is not None for names in patients)
    if grouped:
        split = np.repeat(np.arange(len(patients)), [len(data) for data in found.values()])
        both = find_split_groups(split, np.concatenate([names for names in patients if names is not None]))
        if both:
            raise DataError(f"'{file}': {describe_split_groups(both, 'groups')}")
    if request.require_positives:
        check_positives(train, f"'{file}'")
    return Splits(train, found["test"], found.get("validation"), group="groups" if grouped else None)


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
    targets = parse_targets(labels, classes, f"'{file}', y_{part}")
    clients, patients = (_names(arrays, f"{kind}_{part}", len(vectors), file) for kind in ("clients", "groups"))
    return Dataset(vectors, targets, classes, groups=clients, patients=patients)


def _names(arrays: dict[str, NDArray[Any]], name: str, count: int, file: Path) -> NDArray[np.str_] | None:
    if name not in arrays:
        return None
    values = arrays[name]
    if values.shape != (count,) or values.dtype.kind not in "iuU":
        raise DataError(
            f"'{file}': {name} must be {count} names or whole numbers, one per sample; it is {values.dtype} "
            f"{values.shape}."
        )
    return values.astype(str)


register("source", "features")(
    Source(
        description="your feature vectors and labels in one file",
        load=load,
        file="FILE.npz",
        images=False,
        has_clients=True,
        group="groups",
    )
)
