"""Dataset: images (or feature vectors), targets with three values, class names. A subset is a view, never a copy."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.errors import DataError

PRESENT, ABSENT, UNKNOWN = 1, 0, -1


def mapped_file(store: NDArray[Any]) -> Path | None:
    """The `.npy` file that is mapped as this whole array, or None if the array is in memory or a part of a file."""
    if not isinstance(store, np.memmap) or store.filename is None or not store.flags.c_contiguous:
        return None
    path = Path(store.filename)
    whole = path.suffix == ".npy" and path.exists() and store.offset + store.nbytes == path.stat().st_size
    return path if whole else None


@dataclass(frozen=True)
class Dataset:
    """Samples `rows` of a store that may be shared by many datasets and may be memory-mapped.

    store    uint8 (M, channels, height, width), or float32 (M, width) for feature vectors; it may be what is indexed
             like such an array and decodes when it is asked (images.lazy)
    labels   int8 (N, C), the targets of the N samples in the order of `rows`: 1 present, 0 absent, -1 unknown
    rows     int64 (N,), the place of each sample in the store
    groups   (N,) strings, the client that a sample comes from, if the source says
    tokens   fp16 (views, M, width, rows, columns), what a frozen backbone makes of the store; view 0 is as it is.
             Where a head needs their mean alone: float32 (views, M, width)
    patients (N,) strings, whose sample it is (`data.group`, else a packed file's own `patient`), if the source says
    files    (M,) strings, the image file of each sample of the store, if the source says
    """

    store: NDArray[np.uint8] | NDArray[np.float32]
    labels: NDArray[np.int8]
    classes: tuple[str, ...]
    rows: NDArray[np.int64] = field(default=None)  # type: ignore[arg-type]
    groups: NDArray[np.str_] | None = None
    patients: NDArray[np.str_] | None = None
    tokens: NDArray[np.float16] | NDArray[np.float32] | None = None
    files: NDArray[np.str_] | None = None

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", np.arange(len(self.store), dtype=np.int64))
        if self.labels.shape != (len(self.rows), len(self.classes)) or self.labels.dtype != np.int8:
            raise DataError(
                f"targets must be int8 of shape ({len(self.rows)}, {len(self.classes)}), one row a sample and one "
                f"column a class; they are {self.labels.dtype} {self.labels.shape}."
            )
        if self.store.dtype not in (np.uint8, np.float32) or self.store.ndim not in (2, 4):
            raise DataError(
                "samples must be uint8 images (N, channels, height, width) or float32 features (N, width); "
                f"they are {self.store.dtype} {self.store.shape}."
            )
        for name, values in (("groups", self.groups), ("patients", self.patients)):
            if values is not None and len(values) != len(self.rows):
                raise DataError(f"there are {len(self.rows)} samples and {len(values)} {name}; one a sample is needed.")

    def __getstate__(self) -> dict[str, Any]:
        """Another process gets the name of a mapped file, not its contents: it maps the same memory."""
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
        return replace(self, rows=self.rows[positions], labels=self.labels[positions], groups=groups, patients=patients)

    def with_labels(self, labels: NDArray[np.int8]) -> Dataset:
        """The same samples with other targets, e.g. with some of them unknown."""
        return replace(self, labels=labels)

    def only(self, columns: NDArray[np.integer]) -> Dataset:
        """The same samples with only some of the classes."""
        return replace(self, labels=self.labels[:, columns], classes=tuple(self.classes[c] for c in columns))

    def samples(self, positions: NDArray[np.integer] | slice) -> NDArray[np.uint8] | NDArray[np.float32]:
        """The raw samples at `positions`, gathered from the store: the one place where data is copied."""
        return self.store[self.rows[positions]]

    def kept(
        self, positions: NDArray[np.integer] | slice, views: NDArray[np.integer] | int = 0
    ) -> NDArray[np.float16] | NDArray[np.float32]:
        """The tokens of these samples, of one view or of a view for each."""
        assert self.tokens is not None
        found: NDArray[np.float16] | NDArray[np.float32] = self.tokens[views, self.rows[positions]]
        return found


@dataclass(frozen=True)
class Splits:
    """What a source gives: training and test data, and validation data where the source has an official one.

    size     height and width that its images have now, of a composite: each source image; None for feature vectors
    window   the values that became 0 and 255, where images have more than 8 bits a pixel
    notes    what the user should know of how the data was read
    group    whose samples stay on one side of every split (`data.group`), where the source knows it by itself
    """

    train: Dataset
    test: Dataset
    validation: Dataset | None = None
    size: tuple[int, int] | None = None
    window: tuple[float, float] | None = None
    notes: tuple[str, ...] = ()
    group: str | None = None
