"""`clients.npz`: who had what in a run. A later map needs neither the data nor the seed that divided it.

names      (K,) strings
classes    (C,) strings
samples    int64 (K,), what each client trains on
annotated  bool (K, C): the client knows a label of the class
positives  int32 (K, C): samples with the class, as the client annotates them. Not in the file where nobody here knows
           it: at the server of a federation between machines
"""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.dataset import PRESENT
from fedmll.data.federation import Federation
from fedmll.errors import DataError


@dataclass(frozen=True)
class ClientLabels:
    names: tuple[str, ...]
    classes: tuple[str, ...]
    samples: NDArray[np.int64]
    annotated: NDArray[np.bool_]
    positives: NDArray[np.int32] | None


def write_clients(file: Path, data: Federation) -> None:
    """Whole, or not at all; no pickles."""
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
    with files.replacing(file) as temporary, temporary.open("wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, **arrays)


def read_clients(file: Path) -> ClientLabels:
    try:
        with np.load(file, allow_pickle=False) as opened:
            found = {name: opened[name] for name in opened.files}
        return ClientLabels(
            tuple(map(str, found["names"])),
            tuple(map(str, found["classes"])),
            found["samples"],
            found["annotated"],
            found.get("positives"),
        )
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}). `fedmll resume {file.parent}` writes it anew.") from None
