"""A finished run, loaded: its numbers, and its model ready to predict. The training data is not needed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file

from fedmll.client import Task
from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running.folder import METRICS, MODEL, SUMMARY, Row, experiment_in, read_rows


@dataclass(frozen=True)
class SavedRun:
    folder: Path
    experiment: Experiment = field(repr=False)
    summary: dict[str, Any] = field(repr=False)

    @property
    def metrics(self) -> dict[str, float]:
        values: dict[str, float] = self.summary["metrics"]
        return values

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.summary["classes"])

    @cached_property
    def rows(self) -> list[Row]:
        """One a round."""
        return read_rows(self.folder / METRICS)

    @cached_property
    def learner(self) -> Learner:
        shape = tuple(self.summary["sample_shape"])
        learner = Learner(Task(self.experiment, self.classes, shape, self.summary["clients"], torch.device("cpu")))
        learner.load(load_file(self.folder / MODEL))
        return learner

    def predict(self, samples: NDArray[Any] | Dataset) -> NDArray[np.float32]:
        """Probabilities (N, C) of images (N, channels, height, width) with bytes for pixels, or of feature vectors."""
        if not isinstance(samples, Dataset):
            samples = Dataset(samples, np.zeros((len(samples), len(self.classes)), np.int8), self.classes)
        if samples.sample_shape != tuple(self.summary["sample_shape"]):
            raise ConfigError(
                f"The model of {self.folder} takes samples of shape {tuple(self.summary['sample_shape'])}, and these "
                f"are {samples.sample_shape}."
            )
        found: NDArray[np.float32] = self.learner.predict(samples, 0, len(samples)).numpy()
        return found


def load_run(folder: Path | str) -> SavedRun:
    """The finished run in a folder."""
    folder = Path(folder)
    experiment = experiment_in(folder)
    if (folder / SUMMARY).is_file() and not (folder / MODEL).is_file():
        raise ConfigError(f"The run in {folder} has no common model: '{experiment.method.name}' keeps one a client.")
    if not (folder / SUMMARY).is_file():
        raise ConfigError(f"{folder} holds no finished run; go on with it by `fedmll resume {folder}`.")
    return SavedRun(folder, experiment, json.loads((folder / SUMMARY).read_text()))
