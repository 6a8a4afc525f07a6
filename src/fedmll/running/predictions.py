"""`predictions.npz`: what the model of a run says of its test and validation data. Later pictures, thresholds and tests
need neither the data nor the model.

classes                  (C,) strings
PART_probabilities       float32 (N, C)        PART: test, validation, held_out (where that is not the validation data)
PART_targets             int8 (N, C): 1 present, 0 absent, -1 unknown
PART_rows                int64 (N,), the sample's place in its source
PART_files, PART_patients (N,) strings, where the source has them
held_out_client          (N,) int64, who holds the sample out; for `validation` where that is the held-out data
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.federation import Federation
from fedmll.errors import DataError


@dataclass(frozen=True)
class Predictions:
    """Of one part of the data."""

    classes: tuple[str, ...]
    probabilities: NDArray[np.float32]
    targets: NDArray[np.int8]
    rows: NDArray[np.int64]
    files: NDArray[np.str_] | None
    patients: NDArray[np.str_] | None

    def name(self, sample: int) -> str:
        """Its file, or its place in the source."""
        return str(self.files[sample]) if self.files is not None else f"sample {self.rows[sample]}"

    def __len__(self) -> int:
        return len(self.rows)


def write_predictions(file: Path, data: Federation, scores: Mapping[str, NDArray[np.float32]]) -> None:
    """Whole, or not at all; no pickles."""
    arrays: dict[str, NDArray[Any]] = {"classes": np.array(data.test.classes)}
    for name, found in scores.items():
        part, known = name.replace("-", "_"), data.evaluated[name]
        arrays[f"{part}_probabilities"] = np.asarray(found, np.float32)
        arrays[f"{part}_targets"], arrays[f"{part}_rows"] = known.labels, known.rows
        if known.files is not None:
            arrays[f"{part}_files"] = known.files[known.rows]
        if known.patients is not None:
            arrays[f"{part}_patients"] = known.patients
    if len(data.held_out) and ("held-out" in scores or "validation" in scores):
        arrays["held_out_client"] = data.held_out_owner
    with files.replacing(file) as temporary, temporary.open("wb") as opened:
        np.savez_compressed(opened, allow_pickle=False, **arrays)


def read_predictions(file: Path, part: str = "test") -> Predictions:
    if not file.is_file():
        raise DataError(
            f"There are no kept predictions in {file.parent}: the run is not finished, has no common model, or is from "
            "before they were kept (`fedmll resume FOLDER` writes them then, without training again)."
        )
    try:
        with np.load(file, allow_pickle=False) as opened:
            found = {name: opened[name] for name in opened.files if name == "classes" or name.startswith(f"{part}_")}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{file} cannot be read ({error}). `fedmll resume {file.parent}` writes it anew.") from None
    if f"{part}_probabilities" not in found:
        raise DataError(f"{file} has no predictions of {part} data: the run had none.")
    return Predictions(
        tuple(map(str, found["classes"])),
        *(found[f"{part}_{name}"] for name in ("probabilities", "targets", "rows")),
        *(found.get(f"{part}_{name}") for name in ("files", "patients")),
    )
