"""`RunRecord`: everything that a folder says about its run, finished or not.

Only small files are read and no code is loaded, so runs of plug-ins that are not installed can be shown too. A file
that cannot be read is named in `damaged`; it never ends a report or a list of runs.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import ConfigError, DataError, FedmllError
from fedmll.core.text import printable
from fedmll.evaluation.metric_definitions import HEADLINE, RUN_LIST, metrics_in
from fedmll.evaluation.thresholds import best_thresholds
from fedmll.runs.array_files import ClientLabels, NoPredictions, Predictions
from fedmll.runs.formatting import TextTable, format_number
from fedmll.runs.run_folder import (
    CLIENT_LABELS_FILE,
    DATA_FINGERPRINT_FILE,
    EXPERIMENT_FILE,
    METRICS_FILE,
    PER_CLASS_FILE,
    PER_CLIENT_FILE,
    PREDICTIONS_FILE,
    SUMMARY_FILE,
    MetricsRow,
    RunFolder,
    RunState,
    Table,
)

DAMAGED_FILE_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, FedmllError)

T = TypeVar("T")


@dataclass(eq=False, kw_only=True)
class RunRecord:
    folder: RunFolder
    name: str  # in a report: the folder's name
    state: RunState = RunState.UNREADABLE
    reason: str = ""  # why the run is not finished
    experiment: dict[str, Any] = field(default_factory=dict)  # the values of experiment.toml
    summary: dict[str, Any] = field(default_factory=dict)  # of a finished run
    rows: list[MetricsRow] = field(default_factory=list)  # one per round
    damaged: list[str] = field(default_factory=list)  # files that cannot be read, and why

    @property
    def is_finished(self) -> bool:
        return self.state is RunState.FINISHED

    @property
    def method(self) -> str:
        return str(self._setting("method", "name", "?"))

    @property
    def data_name(self) -> str:
        """The name of the data; of a file without its folder."""
        name = str(self._setting("data", "name", "?"))
        kind, colon, file = name.partition(":")
        return f"{kind}:{Path(file).name}" if colon else name

    @property
    def seed(self) -> int:
        return int(self.experiment.get("seed", 0))

    @property
    def rounds(self) -> int:
        return int(self._setting("training", "rounds", 0))

    @property
    def rounds_done(self) -> int:
        return max((row["round"] for row in self.rows), default=0)

    @property
    def metrics(self) -> dict[str, Any]:
        """The metrics of the result; before the end those of the last round with an evaluation."""
        if self.is_finished:
            return dict(self.summary["metrics"])
        return next((row for row in reversed(self.rows) if any(name in row for name in metrics_in(RUN_LIST))), {})

    @property
    def main_metric(self) -> str:
        """`macro_auc 83.61`"""
        metrics = self.metrics
        known = (
            f"{name} {format_number(metrics[name])}" for name in metrics_in(RUN_LIST) if metrics.get(name) is not None
        )
        return next(known, "–")

    @property
    def last_written(self) -> str:
        """Day and time of the last change."""
        paths = (self.folder.path / name for name in (SUMMARY_FILE, METRICS_FILE, EXPERIMENT_FILE))
        times = [path.stat().st_mtime for path in paths if path.is_file()]
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(max(times))) if times else "–"

    @cached_property
    def per_class(self) -> Table:
        return self._read_if_there(PER_CLASS_FILE, lambda: self.folder.read_table(PER_CLASS_FILE), [])

    @cached_property
    def per_client(self) -> Table:
        return self._read_if_there(PER_CLIENT_FILE, lambda: self.folder.read_table(PER_CLIENT_FILE), [])

    @cached_property
    def client_labels(self) -> ClientLabels | None:
        return self._read_if_there(CLIENT_LABELS_FILE, self.folder.read_client_labels, None)

    @cached_property
    def predictions(self) -> Predictions | None:
        """Of the test data."""
        return self._read_if_there(PREDICTIONS_FILE, self.folder.read_predictions, None)

    @cached_property
    def tuned_thresholds(self) -> NDArray[np.float64] | None:
        """The thresholds of macro_f1_tuned; None without validation data."""
        return self._read_if_there(PREDICTIONS_FILE, self._tune, None)

    @cached_property
    def training_data(self) -> dict[str, Any]:
        """Fingerprint about the training data; empty at the server of a real federation."""
        return self._read_if_there(
            DATA_FINGERPRINT_FILE, lambda: dict(self.folder.read_data_fingerprints().get("training", {})), {}
        )

    def _tune(self) -> NDArray[np.float64] | None:
        try:
            validation = self.folder.read_predictions("validation")
        except NoPredictions:
            return None
        return best_thresholds(validation.probabilities, validation.targets) if len(validation) else None

    def _setting(self, section: str, key: str, default: Any) -> Any:
        values = self.experiment.get(section, {})
        return values.get(key, default) if isinstance(values, dict) else default

    def _read_if_there(self, name: str, read: Callable[[], T], default: T) -> T:
        if not self.folder.should_have(name):
            return default
        try:
            return read()
        except DAMAGED_FILE_ERRORS as error:
            self.damaged.append(f"{name} cannot be read ({printable(error, 120)})")
            return default


def read_run(path: Path, name: str | None = None) -> RunRecord:
    """Read a run's folder; damaged files make the run `UNREADABLE`, with the reason. `name` is for tables."""
    run = RunRecord(folder=RunFolder(path), name=str(path) if name is None else name)
    try:
        if not run.folder.is_run and (failure := run.folder.read_failure()) is not None:
            run.state, run.reason = RunState.FAILED, printable(failure, 600)  # it failed before its first round
            return run
        run.experiment = run.folder.read_experiment_values()
        try:
            _ = run.experiment["method"]["name"], run.experiment["data"]["name"], int(run.experiment["seed"])
            _ = int(run.experiment["training"]["rounds"])
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"{path / EXPERIMENT_FILE} is damaged ({printable(repr(error), 120)}).") from None
        run.rows, damaged = run.folder.read_metrics_lines()
        run.damaged += [f"line {number} of {METRICS_FILE} cannot be read" for number in damaged]
        if not damaged:
            _check_metrics(run)
        run.state, run.reason = _read_state(run)
    except DAMAGED_FILE_ERRORS as error:
        kind = "" if isinstance(error, FedmllError) else f"{type(error).__name__}: "
        run.state, run.reason = RunState.UNREADABLE, f"{kind}{printable(error, 600)}"
    return run


def _check_metrics(run: RunRecord) -> None:
    try:
        run.folder.check_metrics()
    except DataError as error:
        run.damaged.append(str(error))


def _read_state(run: RunRecord) -> tuple[RunState, str]:
    state = run.folder.state
    if state is RunState.FINISHED:
        try:
            run.summary = run.folder.read_summary()
        except DAMAGED_FILE_ERRORS as error:
            return RunState.UNREADABLE, printable(error, 600)
        return state, ""
    if state is RunState.FAILED:
        return state, printable(run.folder.read_failure(), 600)
    stop_reason = run.folder.read_stop_reason() if state is RunState.STOPPED else None
    stopped = "" if stop_reason is None else f"; it stopped: {printable(stop_reason, 600)}"
    missing = f", but there is no {SUMMARY_FILE}" if state is RunState.STOPPED and run.rounds_done == run.rounds else ""
    return state, f"{run.rounds_done} of {run.rounds} rounds are done{missing}{stopped}"


def find_runs(folder: Path) -> Iterator[RunRecord]:
    """Every run below a folder, in the order of the paths. Folders inside a run are not searched."""
    if not folder.is_dir():
        raise ConfigError(
            f"There is no folder {folder}. `fedmll runs FOLDER` lists the runs below a folder; the default is runs/."
        )
    for place, folders, names in os.walk(folder):
        if EXPERIMENT_FILE in names or RunFolder(place).should_have(EXPERIMENT_FILE):  # deleted from a finished run
            folders.clear()
            yield read_run(Path(place), Path(place).relative_to(folder).as_posix())
        folders.sort()


def run_table(runs: Sequence[RunRecord]) -> TextTable:
    """One row per run."""
    header = ["folder", "method", "data", "seed", "rounds", "state", "metric, %", "last written"]
    rows = [
        [
            run.name,
            run.method,
            run.data_name,
            str(run.seed) if run.experiment else "?",
            f"{run.rounds_done} of {run.rounds}",
            str(run.state),
            run.main_metric,
            run.last_written,
        ]
        for run in runs
    ]
    return header, rows


def headline_table(run: RunRecord) -> TextTable:
    """The main metrics of one run."""
    metrics = run.metrics
    names = [name for name in metrics_in(HEADLINE) if metrics.get(name) is not None]
    return ["metric", "test, %"], [[name, format_number(metrics[name])] for name in names]


def float_or_nan(value: Any) -> float:
    """A number from a file; NaN for anything else."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
