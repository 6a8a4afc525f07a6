"""A finished run, loaded: its numbers, and its model ready to predict. The training data is not needed."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment, read_toml
from fedmll.running.folder import EXPERIMENT, METRICS, MODEL, PER_CLASS, PREDICTIONS, SUMMARY, experiment_in, read_rows
from fedmll.running.model import Known, SavedModel, load_model, recalibrated
from fedmll.running.predictions import Predictions, read_predictions


@dataclass(frozen=True)
class SavedRun:
    folder: Path
    summary: dict[str, Any] = field(repr=False)
    plugins: tuple[Path, ...] = field(repr=False, default=())

    @cached_property
    def experiment(self) -> Experiment:
        return experiment_in(self.folder, {"plugins": [str(file) for file in self.plugins]})

    @property
    def metrics(self) -> dict[str, float]:
        """On the test data, percent."""
        values: dict[str, float] = self.summary["metrics"]
        return values

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.summary["classes"])

    @cached_property
    def rows(self) -> Any:
        """One a round: a DataFrame where pandas is installed, else a list of dicts."""
        return _frame(read_rows(self.folder / METRICS))

    @cached_property
    def per_class(self) -> Any:
        """One a class, as in per_class.csv: a DataFrame where pandas is installed, else a list of dicts."""
        return _frame(self.table_of_classes())

    def table_of_classes(self) -> list[dict[str, Any]]:
        with (self.folder / PER_CLASS).open(newline="") as file:
            return [{k: v if k == "class" else _number(v) for k, v in row.items()} for row in csv.DictReader(file)]

    @cached_property
    def model(self) -> SavedModel:
        if not (self.folder / MODEL).is_file() and (self.folder / PREDICTIONS).is_file():
            raise ConfigError(f"{self.folder / MODEL} is gone. `fedmll resume {self.folder}` writes it anew.")
        if not (self.folder / MODEL).is_file():
            method = self.summary["method"]
            raise ConfigError(f"The run in {self.folder} has no common model: '{method}' keeps one a client.")
        return load_model(self.folder / MODEL, plugins=self.plugins)

    @property
    def learner(self) -> Learner:
        return self.model.learner

    def predictions(self, part: str = "test") -> Predictions:
        """What its model says of the test, `validation` or `held_out` data."""
        kept = read_predictions(self.folder / PREDICTIONS, part)
        by = self.model.calibration if (self.folder / MODEL).is_file() else None
        return kept if by is None else replace(kept, probabilities=recalibrated(kept.probabilities, by).astype("f4"))

    def predict(
        self, samples: NDArray[Any] | Dataset | Path | str | Sequence[Path | str], known: Known | None = None
    ) -> NDArray[np.float32]:
        """Probabilities (N, C); see SavedModel.predict."""
        return self.model.predict(samples, known)


def load_run(folder: Path | str, *, plugins: Sequence[Path | str] | None = None) -> SavedRun:
    """The finished run in a folder. `plugins`: where its plug-in files lie now, if they have moved."""
    folder = Path(folder)
    if not (folder / EXPERIMENT).is_file():
        raise ConfigError(f"{folder} holds no run: it has no {EXPERIMENT}. Start one by `fedmll run --out {folder}`.")
    if not (folder / SUMMARY).is_file():
        raise ConfigError(f"{folder} holds no finished run; go on with it by `fedmll resume {folder}`.")
    files = read_toml(folder / EXPERIMENT).get("plugins", ()) if plugins is None else plugins
    return SavedRun(folder, json.loads((folder / SUMMARY).read_text()), tuple(Path(file).absolute() for file in files))


def run_or_model(path: Path | str, *, plugins: Sequence[Path | str] | None = None) -> SavedRun | SavedModel:
    """What a command may be given: a run's folder, or the file of a model."""
    path = Path(path)
    return load_run(path, plugins=plugins) if path.is_dir() else load_model(path, plugins=plugins or ())


def _frame(table: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        return table
    return pandas.DataFrame(table)


def _number(text: str) -> float | int:
    return int(text) if text.lstrip("-").isdigit() else float(text)
