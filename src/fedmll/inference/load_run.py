"""A finished run, loaded: its numbers, and its model ready to predict. The training data is not needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.data import federation
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation.calibration import apply_calibration
from fedmll.inference.model_file import KnownLabels, Samples, SavedModel, load_model
from fedmll.runs.array_files import Predictions
from fedmll.runs.run_folder import EXPERIMENT_FILE, MODEL_FILE, PER_CLASS_FILE, PREDICTIONS_FILE, RunFolder, Table


@dataclass(frozen=True)
class SavedRun:
    """A finished run; `load_run` returns one.

    Attributes:
        path: the run's folder.
        summary: the content of summary.json.
        plugins: the plug-in files of the run.
    """

    path: Path
    summary: dict[str, Any] = field(repr=False)
    plugins: tuple[Path, ...] = field(repr=False, default=())

    @property
    def folder(self) -> RunFolder:
        """Reads every file of the run."""
        return RunFolder(self.path)

    @cached_property
    def experiment(self) -> Experiment:
        return self.folder.load_experiment({"plugins": [str(file) for file in self.plugins]})

    @property
    def metrics(self) -> dict[str, float]:
        """On the test data, in percent."""
        values: dict[str, float] = self.summary["metrics"]
        return values

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.summary["classes"])

    @cached_property
    def rows(self) -> Any:
        """One row per round: a DataFrame if pandas is installed, otherwise a list of dicts."""
        return _data_frame(self.folder.read_metrics())

    @cached_property
    def per_class(self) -> Any:
        """One row per class, as in per_class.csv: a DataFrame if pandas is installed, otherwise a list of dicts."""
        return _data_frame(self.class_table())

    def class_table(self) -> Table:
        """The rows of per_class.csv."""
        return self.folder.read_table(PER_CLASS_FILE)

    # ---- the model

    @property
    def has_model(self) -> bool:
        """False for methods that keep one model per client."""
        return self.folder.should_have(MODEL_FILE)

    @cached_property
    def model(self) -> SavedModel:
        if not self.has_model:
            raise ConfigError(
                f"The run in {self.path} has no common model: '{self.summary['method']}' keeps one model per client."
            )
        if not self.folder.has(MODEL_FILE):
            raise ConfigError(f"{self.folder.model_file} was deleted. `fedmll resume {self.path}` writes it again.")
        return load_model(self.folder.model_file, plugins=self.plugins)

    @property
    def trainer(self) -> Trainer:
        """Holds the network with the model's weights."""
        return self.model.trainer

    @property
    def trainer_or_none(self) -> Trainer | None:
        """None if the run has no common model."""
        return self.trainer if self.has_model else None

    def predict(self, samples: Samples, known: KnownLabels | None = None) -> NDArray[np.float32]:
        """Probabilities (N, C); see `SavedModel.predict`."""
        return self.model.predict(samples, known)

    # ---- what is stored

    def predictions(self, part: str = "test") -> Predictions:
        """The stored probabilities for the `test`, `validation` or `held_out` data, with the model's calibration."""
        stored = self.folder.read_predictions(part)
        calibration = self.model.calibration if self.has_model else None
        if calibration is None:
            return stored
        return replace(stored, probabilities=apply_calibration(stored.probabilities, calibration).astype("f4"))

    @property
    def test_predictions(self) -> Predictions | None:
        """None if there are none: the server of a real federation may have no test data."""
        if not self.folder.should_have(PREDICTIONS_FILE):
            return None
        predictions = self.predictions()
        return predictions if len(predictions) else None

    def records(self, *names: str, last: bool = False) -> dict[int, Tensors]:
        """Tensors that the method recorded, by round; see `RunFolder.read_records`."""
        return self.folder.read_records(*names, last=last)

    def most_frequent_classes(self, count: int) -> NDArray[np.int64]:
        """Indices of at most `count` classes, in order: the most frequent ones of the test data."""
        stored, classes = self.test_predictions, len(self.classes)
        frequency = np.zeros(classes) if stored is None else (stored.targets == PRESENT).sum(0)
        return np.sort(np.argsort(-frequency, kind="stable")[:count])

    # ---- the data

    def load_test_data(self, progress: Progress = no_progress, *, moved: Mapping[str, Any] | None = None) -> Dataset:
        """Load the run's test data; DataError if the data has changed.

        Args:
            progress: is called while images are read.
            moved: where the data is now: {"root": …} or {"name": …}.
        """
        overrides = {f"data.{key}": value for key, value in (moved or {}).items()}
        experiment = self.experiment.changed(overrides) if overrides else self.experiment
        data = federation.build(experiment, progress)
        self.folder.check_data(data.fingerprints)
        return data.test

    def check_test_data(self, data: Dataset) -> None:
        """Raise ConfigError if these samples are not the run's test data."""
        if data.classes != self.classes or list(data.sample_shape) != self.summary["sample_shape"]:
            raise ConfigError(
                f"The data has samples of shape {data.sample_shape} and {len(data.classes)} classes; this is not the "
                f"test data of the run in {self.path}."
            )
        stored = self.test_predictions
        if stored is not None and not np.array_equal(stored.targets, data.labels):
            raise ConfigError(f"The labels of the data differ from the test data of the run in {self.path}.")


def load_run(folder: Path | str, *, plugins: Sequence[Path | str] | None = None) -> SavedRun:
    """Load the finished run in a folder.

    Args:
        folder: the run's folder.
        plugins: where its plug-in files are now, if they have moved.
    """
    run_folder = RunFolder(folder)
    if not run_folder.is_run:
        raise ConfigError(
            f"{folder} holds no run: it has no {EXPERIMENT_FILE}. Start one with `fedmll run --out {folder}`."
        )
    if not run_folder.is_finished:
        raise ConfigError(f"{folder} holds no finished run; continue it with `fedmll resume {folder}`.")
    paths = run_folder.read_experiment_values().get("plugins", ()) if plugins is None else plugins
    return SavedRun(run_folder.path, run_folder.read_summary(), tuple(Path(path).absolute() for path in paths))


def load_run_or_model(path: Path | str, *, plugins: Sequence[Path | str] | None = None) -> SavedRun | SavedModel:
    """Load a run's folder or a model file: what a command may be given."""
    path = Path(path)
    return load_run(path, plugins=plugins) if path.is_dir() else load_model(path, plugins=plugins or ())


def _data_frame(table: Table) -> Any:
    try:
        import pandas
    except ImportError:
        return table
    return pandas.DataFrame(table)
