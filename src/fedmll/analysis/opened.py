"""What pictures of a run are made from: its kept predictions and records, its model, and its test data on request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from fedmll.analysis.look import MOST
from fedmll.data import federation
from fedmll.data.dataset import PRESENT, Dataset
from fedmll.data.images.cache import Progress, silent
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError
from fedmll.message import Tensors
from fedmll.running.folder import MODEL, PREDICTIONS, check_data
from fedmll.running.predictions import Predictions
from fedmll.running.saved import SavedRun


def kept_predictions(run: SavedRun) -> Predictions | None:
    """Of the test data; None where there is none (a real federation's server may have no data)."""
    if not (run.folder / PREDICTIONS).is_file():
        return None
    kept = run.predictions()
    return kept if len(kept) else None


def learner_of(run: SavedRun) -> Learner | None:
    """With the run's model; None where every client keeps its own."""
    return run.learner if (run.folder / MODEL).is_file() else None


def records_of(run: SavedRun, *names: str, last: bool = False) -> dict[int, Tensors]:
    """By round, in their order: the records that have tensors of these names; with `last` only the last such round."""
    found = dict[int, Tensors]()
    for path in sorted((run.folder / "records").glob("*.safetensors"), reverse=True):
        with safe_open(path, "pt") as opened:
            if set(names) <= set(opened.keys()):
                found[int(path.stem)] = {name: opened.get_tensor(name) for name in names}
        if last and found:
            break
    return dict(reversed(found.items()))


def classes_shown(run: SavedRun) -> NDArray[np.int64]:
    """Places of the classes that a picture of all pairs shows: all, or the most frequent ones of the test data."""
    kept, count = kept_predictions(run), len(run.classes)
    frequency = np.zeros(count) if kept is None else (kept.targets == PRESENT).sum(0)
    return np.sort(np.argsort(-frequency, kind="stable")[:MOST])


def data_of(run: SavedRun, progress: Progress = silent, *, moved: Mapping[str, Any] | None = None) -> Dataset:
    """The run's test data, where it is still what it was. `moved`: where it lies now, {"root": …} or {"name": …}."""
    now = {f"data.{key}": value for key, value in (moved or {}).items()}
    data = federation.build(run.experiment.changed(now) if now else run.experiment, progress)
    check_data(run.folder, data.facts)
    return data.test


def check_fits(run: SavedRun, data: Dataset) -> None:
    """Refuse samples that are not the run's test data: the pictures would be of something else."""
    kept = kept_predictions(run)
    if data.classes != run.classes or list(data.sample_shape) != run.summary["sample_shape"]:
        raise ConfigError(
            f"The data given has samples of shape {data.sample_shape} and {len(data.classes)} classes, and the run in "
            f"{run.folder} other ones. Give its own test data."
        )
    if kept is not None and not np.array_equal(kept.targets, data.labels):
        raise ConfigError(f"The labels of the data given are not those of the test data of the run in {run.folder}.")


def name_of(data: Dataset, sample: int) -> str:
    """Its file, or its place in the source."""
    row = int(data.rows[sample])
    return f"sample {row}" if data.files is None else str(data.files[row])
