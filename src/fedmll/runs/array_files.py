"""The two array files of a finished run. Figures, thresholds and tests need neither the data nor the model.

`predictions.npz`, the probabilities of the run's model for its test and validation data:
classes                  (C,) strings
PART_probabilities       float32 (N, C)        PART: test, validation, held_out (if that is not the validation data)
PART_targets             int8 (N, C): 1 present, 0 absent, -1 unknown
PART_rows                int64 (N,): the index of the sample in its source
PART_files, PART_patients (N,) strings, if the source has them
held_out_client          (N,) int64: the client that holds out the sample; also if the validation data is the held-out
                         data

`client_labels.npz`, which client had how many samples of which classes:
names      (K,) strings
classes    (C,) strings
samples    int64 (K,): training samples of each client
annotated  bool (K, C): the client annotates the class
positives  int32 (K, C): training samples with the class, as the client annotates them. The server of a real federation
           does not know these counts, and its file does not have them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files
from fedmll.core.errors import DataError
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.data.federation import Federation

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True, kw_only=True)
class Predictions:
    """Probabilities and targets of one part of the data (test, validation or held-out)."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    targets: NDArray[np.int8]
    rows: NDArray[np.int64]
    files: NDArray[np.str_] | None = None
    patients: NDArray[np.str_] | None = None

    def name(self, sample: int) -> str:
        """The file of a sample, or its index in the source."""
        return str(self.files[sample]) if self.files is not None else f"sample {self.rows[sample]}"

    def __len__(self) -> int:
        return len(self.rows)


class NoPredictions(DataError):
    """The run had no data of this kind."""


def sample_name(data: Dataset, sample: int) -> str:
    """The file of a sample of a dataset, or its index in the source."""
    row = int(data.rows[sample])
    return f"sample {row}" if data.files is None else str(data.files[row])


def write_predictions(file: Path, data: Federation, scores: Mapping[str, NDArray[np.float32]]) -> None:
    arrays: Arrays = {"classes": np.array(data.test.classes)}
    for name, probabilities in scores.items():
        part, dataset = name.replace("-", "_"), data.evaluation_sets[name]
        arrays[f"{part}_probabilities"] = np.asarray(probabilities, np.float32)
        arrays[f"{part}_targets"], arrays[f"{part}_rows"] = dataset.labels, dataset.rows
        if dataset.files is not None:
            arrays[f"{part}_files"] = dataset.files[dataset.rows]
        if dataset.patients is not None:
            arrays[f"{part}_patients"] = dataset.patients
    if len(data.held_out) and ("held-out" in scores or "validation" in scores):
        arrays["held_out_client"] = data.held_out_owners
    _write_arrays(file, arrays)


def read_predictions(file: Path, part: str = "test") -> Predictions:
    """Read the predictions of one part of the data; DataError if the file or the part does not exist."""
    if not file.is_file():
        raise DataError(
            f"There are no stored predictions in {file.parent}: the run is not finished, has no common model, or the "
            "file was deleted (`fedmll resume FOLDER` writes it again, without training)."
        )
    arrays = _read_arrays(file, ("classes", f"{part}_"))
    if f"{part}_probabilities" not in arrays:
        raise NoPredictions(f"{file} has no predictions for {part} data: the run had no such data.")
    try:
        return Predictions(
            classes=tuple(map(str, arrays["classes"])),
            probabilities=arrays[f"{part}_probabilities"],
            targets=arrays[f"{part}_targets"],
            rows=arrays[f"{part}_rows"],
            files=arrays.get(f"{part}_files"),
            patients=arrays.get(f"{part}_patients"),
        )
    except (KeyError, TypeError) as error:
        raise _unreadable(file, error) from None


@dataclass(frozen=True, kw_only=True)
class ClientLabels:
    names: tuple[str, ...]
    classes: tuple[str, ...]
    samples: NDArray[np.int64]
    annotated: NDArray[np.bool_]
    positives: NDArray[np.int32] | None


def write_client_labels(file: Path, data: Federation) -> None:
    arrays: Arrays = {
        "names": np.array(data.names),
        "classes": np.array(data.test.classes),
        "samples": data.sizes,
        "annotated": data.annotated,
    }
    if len(data.train):
        arrays["positives"] = positives = np.empty((len(data.samples), data.train.labels.shape[1]), np.int32)
        for client, rows in enumerate(data.samples):
            positives[client] = np.count_nonzero(data.train.labels[rows] == PRESENT, axis=0)
    _write_arrays(file, arrays)


def read_client_labels(file: Path) -> ClientLabels:
    arrays = _read_arrays(file, ("",))
    try:
        return ClientLabels(
            names=tuple(map(str, arrays["names"])),
            classes=tuple(map(str, arrays["classes"])),
            samples=arrays["samples"],
            annotated=arrays["annotated"],
            positives=arrays.get("positives"),
        )
    except (KeyError, TypeError) as error:
        raise _unreadable(file, error) from None


def _write_arrays(file: Path, arrays: Arrays) -> None:
    with files.atomic_replace(file) as temporary, temporary.open("wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, **arrays)


def _read_arrays(file: Path, prefixes: tuple[str, ...]) -> Arrays:
    """The arrays whose names begin with one of these."""
    try:
        with np.load(file, allow_pickle=False) as opened:
            return {name: opened[name] for name in opened.files if name.startswith(prefixes)}
    except Exception as error:  # a damaged archive can raise almost anything
        raise _unreadable(file, error) from None


def _unreadable(file: Path, error: Exception) -> DataError:
    return DataError(f"{file} cannot be read ({error}). `fedmll resume {file.parent}` writes it again.")
