"""`Dataset`: images or feature vectors, three-valued targets and class names. A subset is a view, never a copy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import TableEncoding
from fedmll.core.errors import DataError

PRESENT, ABSENT, UNKNOWN = 1, 0, -1


def mapped_file(store: NDArray[Any]) -> Path | None:
    """The `.npy` file that is memory-mapped as this array; None if the array is in memory or only a part of a file."""
    if not isinstance(store, np.memmap) or store.filename is None or not store.flags.c_contiguous:
        return None
    path = Path(store.filename)
    whole = path.suffix == ".npy" and path.exists() and store.offset + store.nbytes == path.stat().st_size
    return path if whole else None


@dataclass(frozen=True)
class Dataset:
    """N samples of a store of M samples, which several datasets may share and which may be memory-mapped.

    Attributes:
        store: uint8 (M, channels, height, width), or float32 (M, width) for feature vectors; or an object that is
            indexed like such an array and decodes images on demand (`images.decode.LazyImages`).
        labels: int8 (N, C), the targets in the order of `rows`: 1 present, 0 absent, -1 unknown.
        classes: the names of the C classes.
        rows: int64 (N,), the position of each sample in the store.
        groups: (N,) strings, the client that each sample comes from, if the source has it.
        patients: (N,) strings, the patient of each sample (`data.group`, or `patient` in a packed file), if the source
            has it.
        tokens: float16 (views, M, width, rows, columns), the store's features from a frozen backbone; view 0 is not
            augmented. If the head needs only their mean: float32 (views, M, width).
        sites: (N,) strings, the site (`[[sites]]`) that each sample comes from, if there are sites.
        files: (M,) strings, the image file of each sample of the store, if the source has it.
    """

    store: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int8]
    classes: tuple[str, ...]
    rows: NDArray[np.int64] = field(default=None)  # type: ignore[arg-type]
    groups: NDArray[np.str_] | None = None
    patients: NDArray[np.str_] | None = None
    tokens: NDArray[np.float16] | NDArray[np.float32] | None = None
    files: NDArray[np.str_] | None = None
    sites: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        self._check_types()
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.store), dtype=np.int64))
        if self.labels.shape != (len(self.rows), len(self.classes)) or self.labels.dtype != np.int8:
            raise DataError(
                f"targets must be int8 of shape ({len(self.rows)}, {len(self.classes)}), one row per sample and one "
                f"column per class; they are {self.labels.dtype} {self.labels.shape}."
            )
        if self.store.dtype not in (np.uint8, np.float32) or self.store.ndim not in (2, 4):
            raise DataError(
                "samples must be uint8 images (N, channels, height, width) or float32 features (N, width); "
                f"they are {self.store.dtype} {self.store.shape}."
            )
        for name, values in (("groups", self.groups), ("patients", self.patients), ("sites", self.sites)):
            if values is not None and len(values) != len(self.rows):
                raise DataError(
                    f"there are {len(self.rows)} samples and {len(values)} {name}; one per sample is needed."
                )

    def _check_types(self) -> None:
        """Plug-ins make datasets too: a list instead of an array is explained here, not where it fails later."""
        strings = ("U", "strings (N,)")
        for name, (kinds, wanted) in {"rows": ("iu", "positions (N,)"), "groups": strings, "patients": strings}.items():
            value = getattr(self, name)
            is_right = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in kinds
            if value is not None and not is_right:
                raise DataError(f"Dataset.{name} must be a NumPy array of {wanted}; it is {_describe(value)}.")
        if not isinstance(self.labels, np.ndarray):
            raise DataError(f"Dataset.labels must be a NumPy array of targets (N, C); it is {_describe(self.labels)}.")
        if not all(hasattr(self.store, name) for name in ("shape", "dtype", "ndim", "__getitem__")):
            raise DataError(f"Dataset.store must be a NumPy array of the samples; it is {_describe(self.store)}.")
        if not isinstance(self.classes, tuple) or not all(isinstance(name, str) for name in self.classes):
            raise DataError(f"Dataset.classes must be a tuple of names; it is {_describe(self.classes)}.")

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the name of a memory-mapped file, not its contents: the other process maps the same file."""
        return self.__dict__ | {"store": mapped_file(self.store) or self.store}

    def __setstate__(self, state: dict[str, Any]) -> None:
        store = state["store"]
        if isinstance(store, Path):
            store = np.load(store, mmap_mode="r", allow_pickle=False)
        self.__dict__.update(state | {"store": store})

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def sample_shape(self) -> tuple[int, ...]:
        return tuple(self.store.shape[1:])

    @property
    def is_images(self) -> bool:
        return self.store.ndim == 4

    def subset(self, positions: NDArray[np.integer]) -> Dataset:
        """The samples at `positions` of this dataset; the store is shared."""
        groups = None if self.groups is None else self.groups[positions]
        patients = None if self.patients is None else self.patients[positions]
        sites = None if self.sites is None else self.sites[positions]
        return replace(
            self,
            rows=self.rows[positions],
            labels=self.labels[positions],
            groups=groups,
            patients=patients,
            sites=sites,
        )

    def with_labels(self, labels: NDArray[np.int8]) -> Dataset:
        """The same samples with other targets, for example with some of them unknown."""
        return replace(self, labels=labels)

    def select_classes(self, columns: NDArray[np.integer]) -> Dataset:
        """The same samples with only some of the classes."""
        return replace(self, labels=self.labels[:, columns], classes=tuple(self.classes[c] for c in columns))

    def samples(self, positions: NDArray[np.integer] | slice) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The raw samples at `positions`, copied from the store."""
        return self.store[self.rows[positions]]

    def frozen_features(
        self, positions: NDArray[np.integer] | slice, views: NDArray[np.integer] | int = 0
    ) -> NDArray[np.float16] | NDArray[np.float32]:
        """The stored features of these samples, from one view or from one view per sample."""
        assert self.tokens is not None
        found: NDArray[np.float16] | NDArray[np.float32] = self.tokens[views, self.rows[positions]]
        return found


def _describe(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


@dataclass(frozen=True)
class Splits:
    """The data of a source: training and test data, and validation data if the source has an official split with it.

    Attributes:
        size: height and width of the images after resizing (of a composite: of each source image); None for features.
        window: the values that became 0 and 255, if the images have more than 8 bits per pixel.
        notes: messages for the user about how the data was read.
        group: the column whose samples stay on one side of each split (`data.group`), if the source determines it.
        encoding: how the columns of a table became numbers (`data.encoding`).
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None
    size: tuple[int, int] | None = None
    window: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    group: str | None = None
    encoding: TableEncoding | None = None
