"""Data given as Python objects: arrays, data frames, torch and Hugging Face datasets, or a list with one per client.

`register_data` converts them to `Splits` and registers them as a data source of this process. The source is named after
its content, so a stored experiment says which data it needs, and the same data can be given again to `resume`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.core.registry import OBJECT_PREFIX, register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.sources.base import Source
from fedmll.data.targets import TEST, TRAIN, VALIDATION, check_classes, make_splits, parse_targets

SPLIT_NAMES = {"train": TRAIN, "validation": VALIDATION, "val": VALIDATION, "valid": VALIDATION, "test": TEST}
LABEL_PREFIX = "label:"  # of the label columns of a data frame
CLIENT, GROUP, SPLIT = "client", "group", "split"  # columns of a data frame with a meaning
ARRAY_KEYS = ("x", "y", "clients", "groups", "split", "classes")
WHERE = "data"
FORMS = (
    "(x, y) arrays, a dict of the arrays x, y, clients, groups, split and classes, a data frame, a torch or Hugging "
    "Face dataset, a dict of them by split (train, validation, test), or a list with one of them per client"
)


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Converted samples before they are divided into splits.

    Attributes:
        x: uint8 (N, channels, height, width) or float32 (N, width).
        y: int8 (N, C): 1, 0 or -1 (unknown).
        classes: the names of the C classes.
        clients: (N,) strings, the client of each sample.
        groups: (N,) strings, the patient of each sample.
        split: (N,) 0 train, 1 validation, 2 test; None: drawn.
    """

    x: NDArray[Any]
    y: NDArray[np.int8]
    classes: tuple[str, ...]
    clients: NDArray[np.str_] | None = None
    groups: NDArray[np.str_] | None = None
    split: NDArray[np.int8] | None = None


def register_data(data: Any, classes: Sequence[str] | None = None) -> str:
    """Register data as a source; returns its name for `data.name`.

    Args:
        data: see FORMS.
        classes: the names of the classes, if the data does not have them.
    """
    splits = data if isinstance(data, Splits) else _splits(data, None if classes is None else tuple(map(str, classes)))
    name = OBJECT_PREFIX + _digest(splits)
    register("source", name)(
        Source(
            description="data given as a Python object",
            load=lambda request: splits,
            images=splits.train.is_images,
            has_clients=splits.train.groups is not None,
            composes=False,
            group=splits.group or "",
        )
    )
    return name


def _splits(data: Any, classes: tuple[str, ...] | None) -> Splits:
    samples = _convert(data, classes, WHERE)
    check_classes(samples.classes, WHERE)
    dataset = Dataset(samples.x, samples.y, samples.classes, groups=samples.clients, patients=samples.groups)
    group = None if samples.groups is None else "groups"
    split = make_splits(dataset, samples.split, WHERE, group=group)
    size = (dataset.sample_shape[1], dataset.sample_shape[2]) if dataset.is_images else None
    return Splits(split.train, split.test, split.validation, size=size, group=group)


def _convert(data: Any, classes: tuple[str, ...] | None, where: str) -> Samples:
    library = type(data).__module__.partition(".")[0]
    if isinstance(data, Mapping):
        return _from_mapping(data, classes, where)
    if isinstance(data, tuple):
        if len(data) != 2:
            raise DataError(f"{where} is a tuple of {len(data)}; it must be (x, y). It can also be {FORMS}.")
        return _from_arrays({"x": data[0], "y": data[1]}, classes, where)
    if isinstance(data, list):
        return _from_clients(data, classes, where)
    if library in ("pandas", "polars") and hasattr(data, "columns"):
        return _from_frame(data, classes, where)
    if library == "datasets" and hasattr(data, "features"):
        return _from_hugging_face(data, classes, where)
    data = getattr(data, "dataset", data)  # a DataLoader
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, np.ndarray):
        return _from_torch(data, classes, where)
    raise DataError(f"{where} is a {type(data).__name__}; it must be {FORMS}.")


def _from_mapping(data: Mapping[str, Any], classes: tuple[str, ...] | None, where: str) -> Samples:
    if data and data.keys() <= SPLIT_NAMES.keys():
        return _from_splits(data, classes, where)
    unknown = [str(key) for key in data if key not in ARRAY_KEYS]
    missing = [key for key in ("x", "y") if key not in data]
    if unknown or missing:
        problem = f"does not know the key '{unknown[0]}'" if unknown else f"lacks '{missing[0]}'"
        raise DataError(
            f"{where} is a dict that {problem}: its keys are {', '.join(ARRAY_KEYS)}, or train, validation and test."
        )
    return _from_arrays(data, classes, where)


def _from_arrays(data: Mapping[str, Any], classes: tuple[str, ...] | None, where: str) -> Samples:
    given = data.get("classes")
    names = classes if given is None else tuple(str(name) for name in given)
    x = _samples(data["x"], f"{where}: x")
    y, names = _targets(data["y"], names, f"{where}: y")
    if len(x) != len(y):
        raise DataError(f"{where}: x has {len(x)} samples and y has {len(y)}; one row of y per sample is needed.")
    columns = {key: _strings(data.get(key), len(x), f"{where}: {key}") for key in ("clients", "groups")}
    return Samples(x=x, y=y, classes=names, split=_split(data.get("split"), len(x), f"{where}: split"), **columns)


def _from_frame(frame: Any, classes: tuple[str, ...] | None, where: str) -> Samples:
    """Columns `label:NAME` (or those in `classes`) are labels; client, group and split have their meaning; every other
    column is a feature."""
    columns = [str(column) for column in frame.columns]
    labels = [name for name in columns if name.startswith(LABEL_PREFIX)] if classes is None else list(classes)
    missing = [name for name in labels if name not in columns]
    if missing or not labels:
        problem = f"has no column '{missing[0]}'" if missing else "has no label columns"
        raise DataError(
            f"{where}: the data frame {problem}. Begin the names of label columns with '{LABEL_PREFIX}', or name the "
            f"columns in `classes`. Its columns are {', '.join(columns[:20])}."
        )
    features = [name for name in columns if name not in (*labels, CLIENT, GROUP, SPLIT)]
    if not features:
        raise DataError(f"{where}: the data frame has labels and no other column; features are needed.")
    special = {
        key: frame[name] for key, name in (("clients", CLIENT), ("groups", GROUP), ("split", SPLIT)) if name in columns
    }
    arrays: dict[str, Any] = {"y": _columns(frame, labels, where), "x": _columns(frame, features, where, finite=True)}
    names = tuple(name.removeprefix(LABEL_PREFIX) for name in labels)
    return _from_arrays(arrays | special | {"classes": names}, None, where)


def _columns(frame: Any, names: list[str], where: str, finite: bool = False) -> NDArray[np.float64]:
    """Columns of numbers; a missing value is NaN."""
    found = []
    for name in names:
        values = frame[name].to_numpy()
        try:
            numbers = np.array(
                [np.nan if v is None else v for v in values] if values.dtype == object else values, float
            )
        except (TypeError, ValueError):
            raise DataError(
                f"{where}: the column '{name}' holds {values.dtype} values, which are not numbers. Encode them as "
                "numbers (for example with pandas.get_dummies), or drop the column."
            ) from None
        if finite and not np.isfinite(numbers).all():
            row = int(np.flatnonzero(~np.isfinite(numbers))[0])
            raise DataError(
                f"{where}: the column '{name}' has no finite number in row {row}. Fill missing values (for example "
                "with the mean of the column), or drop the column."
            )
        found.append(numbers)
    return np.stack(found, 1)


def _from_torch(data: Any, classes: tuple[str, ...] | None, where: str) -> Samples:
    """A map-style dataset whose items are (x, y)."""
    if not len(data):
        raise DataError(f"{where} is an empty {type(data).__name__}; samples are needed.")
    items = []
    for position in range(len(data)):
        item = data[position]
        if not isinstance(item, tuple | list) or len(item) != 2:
            raise DataError(
                f"{where}: item {position} of the {type(data).__name__} is a {type(item).__name__}; every item must be "
                "(x, y): one sample and its labels."
            )
        items.append((np.asarray(item[0]), np.asarray(item[1])))
    for number, name in ((0, "x"), (1, "y")):
        first = items[0][number].shape
        other = next((position for position, item in enumerate(items) if item[number].shape != first), None)
        if other is not None:
            raise DataError(
                f"{where}: {name} of item {other} has the shape {items[other][number].shape}, and that of item 0 has "
                f"{first}; all must have the same."
            )
    names = getattr(data, "classes", None) if classes is None else classes
    return _from_arrays({"x": np.stack([x for x, _ in items]), "y": np.stack([y for _, y in items])}, names, where)


def _from_hugging_face(data: Any, classes: tuple[str, ...] | None, where: str) -> Samples:
    """A column of images or of vectors, and a column `labels` or `label` with lists of classes or one value per
    class."""
    columns = list(data.features)
    label = next((name for name in ("labels", "label") if name in columns), None)
    if label is None:
        raise DataError(f"{where}: the dataset has no column 'labels'; it has {', '.join(columns)}. Rename one.")
    inner: Any = data.features[label]
    inner = getattr(inner, "feature", inner[0] if isinstance(inner, list) else inner)
    own_names = getattr(inner, "names", None)  # of a ClassLabel, whose values are class numbers
    names = own_names if classes is None else classes
    special = {"clients": CLIENT, "groups": GROUP, "split": SPLIT}
    rest = [name for name in columns if name not in (label, *special.values())]
    if len(rest) != 1:
        raise DataError(
            f"{where}: the dataset must have one column of samples beside '{label}'; it has "
            f"{', '.join(rest) or 'none'}. Select one with `select_columns`."
        )
    x = [np.asarray(value) for value in data[rest[0]]]
    if len({value.shape for value in x}) > 1:
        raise DataError(f"{where}: the samples in '{rest[0]}' have different shapes. Resize them with `map`.")
    given = {key: data[name] for key, name in special.items() if name in columns}
    y = list(data[label])
    if own_names is not None and isinstance(next((row for row in y if row is not None), None), list):
        y = [None if row is None else [own_names[place] for place in row] for row in y]
    arrays = {"x": np.stack(x), "y": y} | given
    return _from_arrays(arrays | ({} if names is None else {"classes": names}), None, where)


def _from_splits(data: Mapping[str, Any], classes: tuple[str, ...] | None, where: str) -> Samples:
    parts = []
    for key, value in data.items():
        part = _convert(value, classes, f"{where}['{key}']")
        parts.append((part, np.full(len(part.x), SPLIT_NAMES[key], np.int8)))
    if not any(SPLIT_NAMES[key] == TEST for key in data):
        raise DataError(f"{where} has {', '.join(data)} and no 'test'; the test data is needed to evaluate the model.")
    return _join([part for part, _ in parts], np.concatenate([split for _, split in parts]), where)


def _from_clients(data: list[Any], classes: tuple[str, ...] | None, where: str) -> Samples:
    if not data:
        raise DataError(f"{where} is an empty list; it must be {FORMS}.")
    digits = len(str(len(data) - 1))
    parts = [_convert(value, classes, f"{where}[{number}]") for number, value in enumerate(data)]
    names = [np.full(len(part.x), f"c{number:0{max(digits, 3)}d}") for number, part in enumerate(parts)]
    splits = [part.split for part in parts]
    if any(split is None for split in splits) and any(split is not None for split in splits):
        raise DataError(f"{where}: some clients have a split and others have none; give all of them one, or none.")
    split = None if splits[0] is None else np.concatenate([split for split in splits if split is not None])
    joined = _join(parts, split, where)
    return Samples(**vars(joined) | {"clients": np.concatenate(names)})


def _join(parts: list[Samples], split: NDArray[np.int8] | None, where: str) -> Samples:
    """One after the other. A class that a part does not name is unknown there."""
    shapes = {part.x.shape[1:] for part in parts}
    if len(shapes) > 1 or len({part.x.dtype for part in parts}) > 1:
        raise DataError(f"{where}: samples have the shapes {', '.join(map(str, sorted(shapes)))}; all must be alike.")
    classes = tuple(dict.fromkeys(name for part in parts for name in part.classes))
    place = {name: number for number, name in enumerate(classes)}
    labels = []
    for part in parts:
        y = np.full((len(part.x), len(classes)), -1, np.int8)
        y[:, [place[name] for name in part.classes]] = part.y
        labels.append(y)

    def together(name: str) -> NDArray[np.str_] | None:
        values = [getattr(part, name) for part in parts]
        return None if any(value is None for value in values) else np.concatenate(values)

    return Samples(
        x=np.concatenate([part.x for part in parts]), y=np.concatenate(labels), classes=classes,
        clients=together("clients"), groups=together("groups"), split=split,
    )  # fmt: skip


# ---- columns


def _samples(x: Any, where: str) -> NDArray[Any]:
    """Images as uint8 (N, channels, height, width), or vectors as float32 (N, width)."""
    try:
        found = np.asarray(x)
    except Exception as error:
        raise DataError(f"{where} cannot be made an array ({error}).") from None
    if found.dtype.kind not in "fiub" or found.ndim not in (2, 3, 4) or not found.size:
        raise DataError(
            f"{where} is {found.dtype} {found.shape}; it must be vectors (N, width), or images (N, height, width), "
            "(N, height, width, channels) or (N, channels, height, width)."
        )
    if found.dtype.kind == "f" and not np.isfinite(found).all():
        row = int(np.flatnonzero(~np.isfinite(found.reshape(len(found), -1)).all(1))[0])
        raise DataError(f"{where} holds NaN or infinite numbers (the first: sample {row}). Replace them.")
    if found.ndim == 2:
        return found.astype(np.float32)
    if found.ndim == 3:
        found = found[:, None]
    elif found.shape[1] not in (1, 3) and found.shape[3] in (1, 3):
        found = found.transpose(0, 3, 1, 2)
    low, high = found.min(), found.max()
    if found.dtype.kind == "f" and low >= 0 and high <= 1:
        found = np.round(found * 255)
    elif found.dtype != np.uint8 and not (found.dtype.kind in "iu" and low >= 0 and high <= 255):
        raise DataError(
            f"{where}: pixels must be uint8, or floating-point numbers from 0 to 1; they are {found.dtype} from "
            f"{low:g} to {high:g}. Scale them."
        )
    return np.ascontiguousarray(found.astype(np.uint8))


def _targets(y: Any, classes: tuple[str, ...] | None, where: str) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Targets and class names. NaN and None are unknown."""
    if hasattr(y, "columns") and classes is None:
        classes = tuple(str(column) for column in y.columns)
    rows = y.tolist() if isinstance(y, np.ndarray) and y.dtype == object else y
    if isinstance(rows, list) and any(isinstance(row, list | tuple | set) for row in rows):
        named = {name for row in rows if row is not None for name in row}
        if all(isinstance(name, str) for name in named):
            return _from_names(rows, classes, where)
    try:
        found = np.asarray(rows if not hasattr(rows, "to_numpy") else rows.to_numpy())
        if found.dtype.kind == "f" or found.dtype == object:
            numbers = found.astype(float)
            whole = np.where(np.isnan(numbers), -1, numbers)
            if found.ndim == 2 and not np.isin(whole, (-1, 0, 1)).all():
                row, column = np.argwhere(~np.isin(whole, (-1, 0, 1)))[0]
                raise DataError(
                    f"{where}: sample {row} has {numbers[row, column]:g} for class {column}; it must be 1 (present), 0 "
                    "(absent), or -1 or NaN (unknown)."
                )
            found = whole.astype(np.int64)
    except (TypeError, ValueError):
        raise DataError(
            f"{where} must have one row per sample and one column per class with 1, 0 or -1 (unknown), or one list of "
            "class names per sample."
        ) from None
    if found.ndim not in (1, 2) or not len(found):
        raise DataError(f"{where} has the shape {found.shape}; one row per sample and one column per class are needed.")
    count = found.shape[1] if found.ndim == 2 else int(found.max(initial=0)) + 1
    names = tuple(f"class {number}" for number in range(count)) if classes is None else classes
    return parse_targets(found, names, where), names


def _from_names(
    rows: list[Any], classes: tuple[str, ...] | None, where: str
) -> tuple[NDArray[np.int8], tuple[str, ...]]:
    """Targets from lists of class names; None: all classes of the sample are unknown."""
    names = classes or tuple(sorted({name for row in rows if row is not None for name in row}))
    place = {name: number for number, name in enumerate(names)}
    targets = np.zeros((len(rows), len(names)), np.int8)
    for number, row in enumerate(rows):
        if row is None:
            targets[number] = -1
            continue
        unknown = next((name for name in row if name not in place), None)
        if unknown is not None:
            raise DataError(f"{where}: sample {number} has the class '{unknown}', which is not in `classes`.")
        targets[number, [place[name] for name in row]] = 1
    return targets, names


def _strings(values: Any, count: int, where: str) -> NDArray[np.str_] | None:
    if values is None:
        return None
    found = np.asarray(values)
    if found.shape != (count,):
        raise DataError(
            f"{where} has the shape {found.shape}, and there are {count} samples; one per sample is needed."
        )
    return found.astype(str)


def _split(values: Any, count: int, where: str) -> NDArray[np.int8] | None:
    """Codes from the names train, validation and test, or from the codes themselves."""
    names = _strings(values, count, where)
    if names is None:
        return None
    codes = SPLIT_NAMES | {str(code): code for code in (TRAIN, VALIDATION, TEST)}
    wrong = next((name for name in names.tolist() if name not in codes), None)
    if wrong is not None:
        raise DataError(f"{where} has '{wrong}'; it must be train, validation or test (or 0, 1, 2).")
    return np.array([codes[name] for name in names.tolist()], np.int8)


def _digest(splits: Splits) -> str:
    """The first digits of a hash of all samples, targets, names, clients and splits."""
    digest = hashlib.blake2b(digest_size=6)
    digest.update(repr(splits.train.classes).encode())
    for part in (splits.train, splits.validation, splits.test):
        if part is None:
            continue
        for values in (part.store, part.rows, part.labels, part.groups, part.patients):
            digest.update(b"" if values is None else np.ascontiguousarray(values).view(np.uint8).data)
    return digest.hexdigest()
