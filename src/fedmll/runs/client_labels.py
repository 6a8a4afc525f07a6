"""`client_labels.npz`: which client had how many samples of which classes. Figures need neither the data nor the seed.

names      (K,) strings
classes    (C,) strings
samples    int64 (K,): training samples of each client
annotated  bool (K, C): the client annotates the class
positives  int32 (K, C): training samples with the class, as the client annotates them. The server of a real federation
           does not know these counts, and its file does not have them.
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import DataError
from fedmll.data.dataset import PRESENT
from fedmll.data.federation import Federation


@dataclass(frozen=True, kw_only=True)
class ClientLabels:
    names: tuple[str, ...]
    classes: tuple[str, ...]
    samples: NDArray[np.int64]
    annotated: NDArray[np.bool_]
    positives: NDArray[np.int32] | None


def write_client_labels(file: Path, data: Federation) -> None:
    arrays: dict[str, NDArray[Any]] = {
        "names": np.array(data.names),
        "classes": np.array(data.test.classes),
        "samples": data.sizes,
        "annotated": data.annotated,
    }
    if len(data.train):
        arrays["positives"] = positives = np.empty((len(data.samples), data.train.labels.shape[1]), np.int32)
        for client, rows in enumerate(data.samples):
            positives[client] = np.count_nonzero(data.train.labels[rows] == PRESENT, axis=0)
    with files.atomic_replace(file) as temporary, temporary.open("wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, **arrays)


def read_client_labels(file: Path) -> ClientLabels:
    try:
        with np.load(file, allow_pickle=False) as opened:
            arrays = {name: opened[name] for name in opened.files}
        return ClientLabels(
            names=tuple(map(str, arrays["names"])),
            classes=tuple(map(str, arrays["classes"])),
            samples=arrays["samples"],
            annotated=arrays["annotated"],
            positives=arrays.get("positives"),
        )
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}). `fedmll resume {file.parent}` writes it again.") from None
