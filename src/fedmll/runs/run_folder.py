"""`RunFolder`: the one reader and writer of a run's folder. All of its file names are here.

experiment.toml          the experiment
data_fingerprint.json    what data the run began with; a resumed run must have the same
plugins.json             plug-in files and packages of the run, if it has any
metrics.jsonl, .csv      one row per round
log.txt                  the log
checkpoint/              the last two checkpoints; client_state/ has the state that clients keep between rounds
records/ROUND.safetensors  tensors that the method records, one file per round
failed.json              why the run failed, if a comparison ran it
model.safetensors        the model; only the finished run has this file and those below
predictions.npz          probabilities for the test and validation data
client_labels.npz        samples and annotated classes of each client
per_class.csv, per_client.csv   metrics of each class and of each client
site_metrics.json        metrics of each site of a real federation, from the histograms of the sites
summary.json             settings, costs and metrics; a run with this file is finished

summary.json is written last. It has its own checksum and those of the other files that are read again, so that a
finished run shows what was written or an error, never something else. Tensor files have checksums of their own.
"""

from __future__ import annotations

import csv
import errno
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.config.experiment import Experiment
from fedmll.config.toml_values import parse_toml
from fedmll.core import files, registry
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.message import Tensors
from fedmll.core.tensor_files import DamagedFile, read_facts, read_tensors, write_tensors
from fedmll.core.text import printable
from fedmll.data.federation import Federation
from fedmll.data.fingerprint import Fingerprint, describe_changes
from fedmll.runs.array_files import (
    ClientLabels,
    Predictions,
    read_client_labels,
    read_predictions,
    write_client_labels,
    write_predictions,
)
from fedmll.runs.formatting import dicts_to_csv, from_checked_json, to_checked_json, to_json, unescape_cell, write_csv

EXPERIMENT_FILE, DATA_FINGERPRINT_FILE, PLUGINS_FILE = "experiment.toml", "data_fingerprint.json", "plugins.json"
METRICS_FILE, METRICS_CSV_FILE, LOG_FILE, LOCK_FILE = "metrics.jsonl", "metrics.csv", "log.txt", ".lock"
FAILURE_FILE, SUMMARY_FILE, MODEL_FILE = "failed.json", "summary.json", "model.safetensors"
PREDICTIONS_FILE, CLIENT_LABELS_FILE = "predictions.npz", "client_labels.npz"
PER_CLASS_FILE, PER_CLIENT_FILE, SITE_METRICS_FILE = "per_class.csv", "per_client.csv", "site_metrics.json"
CHECKPOINT_FOLDER, CLIENT_STATE_FOLDER, RECORDS_FOLDER = "checkpoint", "client_state", "records"

STOPPED_LINE = re.compile(r" ERROR stopped: (.*)$")  # the last line of the log of a run that ended with an error
TEXT_COLUMNS = ("class", "client")  # of per_class.csv and per_client.csv; the other columns are numbers

FILES_IN_SUMMARY = (  # whose checksums are in summary.json
    EXPERIMENT_FILE, DATA_FINGERPRINT_FILE, PLUGINS_FILE, METRICS_FILE, PREDICTIONS_FILE, CLIENT_LABELS_FILE,
    PER_CLASS_FILE, PER_CLIENT_FILE, SITE_METRICS_FILE,
)  # fmt: skip
FINGERPRINT_TYPES = {  # of each part of the data
    "samples": int, "shape": list, "classes": list, "present": list, "unknown": list, "labels": str, "images": str
}  # fmt: skip
RESTORE_ONLY = "Restore it from a copy."
RESTORE = "Restore it from a copy. If you are sure that {}, delete it."

MetricsRow = dict[str, Any]  # the numbers of one round
CLOSING = "closing"  # a column: 1 in the row of the closing exchanges, which follows the last round
Table = list[dict[str, Any]]


class RunState(StrEnum):
    NOT_STARTED = "not started"
    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    UNREADABLE = "unreadable"  # a file that says what the run is cannot be read


class RunFolder:
    """The files of one run.

    Every method reads or writes one file. Readers of a damaged file raise a DataError (of a damaged experiment, a
    ConfigError) that names it; `run_overview.read_run` turns it into a reason.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    # ---- paths

    @property
    def model_file(self) -> Path:
        return self.path / MODEL_FILE

    @property
    def predictions_file(self) -> Path:
        return self.path / PREDICTIONS_FILE

    @property
    def checkpoint_folder(self) -> Path:
        return self.path / CHECKPOINT_FOLDER

    @property
    def client_state_folder(self) -> Path:
        return self.path / CHECKPOINT_FOLDER / CLIENT_STATE_FOLDER

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def should_have(self, name: str) -> bool:
        """Whether the file exists, or existed when the run finished. Its reader then raises an error."""
        return self.has(name) or name in self._recorded_checksums()

    @property
    def is_run(self) -> bool:
        return self.has(EXPERIMENT_FILE)

    @property
    def is_finished(self) -> bool:
        return self.has(SUMMARY_FILE)

    # ---- creation and lock

    def check_vacant(self) -> None:
        """Raise ConfigError unless the folder is empty or does not exist."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or any(
            path.name != LOCK_FILE and not files.is_leftover(path) for path in self.path.iterdir()
        ):
            raise ConfigError(
                f"{self.path} is not empty; nothing was changed. Choose another --out, or continue the run in it with "
                f"`fedmll resume {self.path}`."
            )

    def create(self, experiment: Experiment) -> None:
        """Create the folder of a new run, which `resume` can start."""
        is_new = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            with self.lock():
                self.check_vacant()
                plugins = registry.plugin_versions(experiment.plugins)
                if any(plugins.values()):
                    self._write(PLUGINS_FILE, json.dumps(plugins, indent=1) + "\n")
                self.write_experiment(experiment)  # last: with it the folder is a run
        except OSError:
            if is_new:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let one process at a time write to the folder. Worker processes do not inherit the lock: a worker that
        survives a killed parent for a moment would still hold it."""
        problem, advice = f"Another process is running the experiment in {self.path}", "Wait for it or stop it first."
        with files.exclusive_lock(self.path / LOCK_FILE, problem, advice, inherited=False):
            yield

    @property
    def is_locked(self) -> bool:
        return files.is_file_locked(self.path / LOCK_FILE)

    def remove_partial_files(self) -> None:
        """Remove what a process that was killed while it wrote a file left behind."""
        for path in filter(files.is_leftover, self.path.rglob("*")):
            path.unlink()

    # ---- experiment, plug-ins and data

    def read_experiment_values(self) -> dict[str, Any]:
        """The values of experiment.toml as they are, without validation."""
        self._check_experiment()
        return parse_toml(self.path / EXPERIMENT_FILE)

    def load_experiment(self, overrides: Mapping[str, Any] | None = None) -> Experiment:
        if not self.is_run:
            raise ConfigError(
                f"{self.path} holds no run: it has no {EXPERIMENT_FILE}. Start one with `fedmll run --out {self.path}`."
            )
        self._check_experiment()
        try:
            return Experiment.load(self.path / EXPERIMENT_FILE, overrides)
        except ConfigError as error:
            saved = self._read_plugins()["packages"] if self.has(PLUGINS_FILE) else {}
            installed = {entry.dist.name for entry in registry.installed_plugins() if entry.dist}
            missing = " ".join(f"{name}=={version}" for name, version in saved.items() if name not in installed)
            if not missing:
                file = str(self.path / EXPERIMENT_FILE)
                raise ConfigError(f"{'' if file in str(error) else f'{file}: '}{error}") from None
            raise ConfigError(
                f"{error} The run in {self.path} began with packages that are not installed: pip install {missing}."
            ) from None

    def _check_experiment(self) -> None:
        self._check(
            EXPERIMENT_FILE,
            f"Restore it from a copy. If you changed it on purpose, delete {SUMMARY_FILE}, which `fedmll resume "
            f"{self.path}` writes again.",
        )

    def write_experiment(self, experiment: Experiment) -> None:
        self._write(EXPERIMENT_FILE, experiment.to_toml())

    def check_plugins(self, experiment: Experiment) -> list[str]:
        """Compare the plug-ins with those that the run began with. Returns one warning per difference."""
        if not self.has(PLUGINS_FILE):
            return []
        saved, warnings = self._read_plugins(), []
        checksums, versions = registry.plugin_versions(experiment.plugins).values()
        for file, checksum in saved["files"].items():
            if checksum not in checksums.values():
                change = "has changed since the run began" if file in checksums else "is no longer used"
                warnings.append(f"The plug-in file {file} {change}: the result may differ.")
        for package, version in saved["packages"].items():
            if versions.get(package) != version:
                now = f"now has version {versions[package]}" if package in versions else "is no longer installed"
                warnings.append(f"The package {package} {now}; the run began with {version}: the result may differ.")
        return warnings

    def _read_plugins(self) -> dict[str, dict[str, str]]:
        saved = self._read_json(PLUGINS_FILE, RESTORE.format("the plug-ins are the same"))
        if all(isinstance(saved.get(kind), dict) for kind in ("files", "packages")):
            return saved
        raise self._damaged(PLUGINS_FILE, "it has no files or no packages", RESTORE.format("the plug-ins are the same"))

    def check_data(self, fingerprints: dict[str, Fingerprint]) -> None:
        """Compare the data with that of the run's start (DataError if it differs); at the start, record it."""
        if not self.has(DATA_FINGERPRINT_FILE):
            self._write(DATA_FINGERPRINT_FILE, json.dumps(fingerprints, indent=1) + "\n")
            return
        if differences := describe_changes(self.read_data_fingerprints(), fingerprints):
            raise DataError(
                f"The data differs from what the run in {self.path} began with: {'; '.join(differences)}. Nothing was "
                "changed. Restore the data, or start a new run with another --out."
            )

    def read_data_fingerprints(self) -> dict[str, Any]:
        """The fingerprint of each part of the data: training, validation, test."""
        advice = RESTORE.format("the data is the same")
        saved = self._read_json(DATA_FINGERPRINT_FILE, advice)
        for part, values in saved.items():
            if not (
                isinstance(values, dict)
                and all(isinstance(values.get(key), kind) for key, kind in FINGERPRINT_TYPES.items())
                and len(values["classes"]) == len(values["present"]) == len(values["unknown"])
            ):
                raise self._damaged(DATA_FINGERPRINT_FILE, f"'{part}' is incomplete or has wrong types", advice)
        return saved

    # ---- rounds

    def read_metrics(self) -> list[MetricsRow]:
        """One row per round, without lines that cannot be read."""
        self.check_metrics()
        return self.read_metrics_lines()[0]

    def check_metrics(self) -> None:
        """Raise DataError if rows have changed: any of a finished run, of others those up to the last checkpoint."""
        advice = f"Restore it from a copy, or keep the rows that it has now with `fedmll resume {self.path}`."
        self._check(METRICS_FILE, advice)
        checkpoints = sorted(self.checkpoint_folder.glob("[0-9]*.safetensors"))
        if self.is_finished or not checkpoints:
            return
        try:
            facts = read_facts(checkpoints[-1])
        except DamagedFile:
            return  # `resume` warns about a damaged checkpoint; a running process has deleted an old one
        rows = [row for row in self.read_metrics_lines()[0] if row["round"] <= facts["round"]]
        if facts.get("metrics_checksum") != _checksum(_format_rows(rows)):
            raise self._damaged(METRICS_FILE, f"its checksum in {checkpoints[-1].name} does not match", advice)

    def read_metrics_lines(self, required: Iterable[str] = ("round",)) -> tuple[list[MetricsRow], list[int]]:
        """The rows that can be read, and the numbers of the other lines, from 1 on.

        A last line that a kill cut off is neither. `required` are names of numbers that every row has. Nothing is
        compared with a checksum.
        """
        rows: list[MetricsRow] = []
        damaged: list[int] = []
        if self.has(METRICS_FILE):
            *lines, last = (self.path / METRICS_FILE).read_bytes().split(b"\n")
            for number, line in enumerate([*lines, last], 1):
                row = _parse_row(line, required)
                if row is not None:
                    rows.append(row)
                elif number <= len(lines):
                    damaged.append(number)
        return rows, damaged

    def recover_metrics(self, last_round: int, checksum: str) -> tuple[list[MetricsRow], str | None]:
        """The rows up to a round, for a run that continues. Other rows are removed from the file.

        Args:
            last_round: the round of the checkpoint that the run continues from; 0 without one.
            checksum: `metrics_checksum` when the checkpoint was written.

        Returns:
            The rows; and a warning if the file is damaged, which is then kept under another name.
        """
        path, warning = self.path / METRICS_FILE, None
        rows, damaged = self.read_metrics_lines(("round", "seconds", "bytes_up", "bytes_down"))
        kept = [row for row in rows if row["round"] <= last_round and last_round]
        if last_round and not self.has(METRICS_FILE):
            warning = f"{path} is missing: the rows of the first {last_round} rounds are lost."
        elif damaged or (last_round and _checksum(_format_rows(kept)) != checksum):
            copy = files.free_name_for_damaged(path)
            files.write_atomic(copy, path.read_bytes())
            lines = f"line{'s' if len(damaged) > 1 else ''} {', '.join(map(str, damaged))} cannot be read"
            warning = (
                f"{path} is damaged: {lines if damaged else 'its checksum does not match'}. All rows that can be read "
                f"are kept, and the damaged file as {copy.name}."
            )
        if warning is not None:
            warning += " If you have a copy of the file, restore it after the run."
        self.write_metrics(kept)
        return kept, warning

    def metrics_checksum(self) -> str:
        """The SHA-256 of the rows so far, for a checkpoint."""
        return files.checksum(self.path / METRICS_FILE)

    def write_metrics(self, rows: Iterable[MetricsRow]) -> None:
        self._write(METRICS_FILE, _format_rows(rows))

    def append_metrics(self, row: MetricsRow) -> None:
        """Add a row. On a full disk no part of it is written."""
        path, line = self.path / METRICS_FILE, f"{to_json(row)}\n".encode()
        with path.open("ab", buffering=0) as file:
            before = file.tell()
            try:
                if file.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError as error:
                file.truncate(before)
                raise OSError(error.errno, error.strerror, str(path)) from None

    def write_metrics_csv(self, rows: Iterable[MetricsRow]) -> None:
        """The same rows as a CSV file, with one column for each number that some round has."""
        self._write(METRICS_CSV_FILE, dicts_to_csv(list(rows)))

    @property
    def rounds_done(self) -> int:
        return max((int(row["round"]) for row in self.read_metrics_lines()[0] if CLOSING not in row), default=0)

    def write_records(self, round: int, tensors: Tensors) -> None:
        """Tensors that the parts of the method record in a round."""
        write_tensors(self.path / RECORDS_FOLDER / f"{round:06d}.safetensors", tensors)

    def read_records(self, *names: str, last: bool = False) -> dict[int, Tensors]:
        """Recorded tensors by round, in order: the rounds that have all of these names; with `last` the last one."""
        for warning in self.check_records():
            raise DataError(f"{warning} {RESTORE_ONLY}")
        records = dict[int, Tensors]()
        for path in sorted((self.path / RECORDS_FOLDER).glob("*.safetensors"), reverse=True):
            tensors = read_tensors(path)
            if set(names) <= tensors.keys():
                records[int(path.stem)] = {name: tensors[name] for name in names}
            if last and records:
                break
        return dict(reversed(records.items()))

    def check_records(self) -> list[str]:
        """One warning for each tensor file of a finished run that is missing."""
        recorded = [name for name in self._recorded_checksums() if name.startswith(f"{RECORDS_FOLDER}/")]
        return [f"{self.path / name} is missing." for name in recorded if not self.has(name)]

    @contextmanager
    def open_log(self) -> Iterator[logging.Logger]:
        log = logging.getLogger(f"fedmll.run.{self.path.resolve()}")
        log.setLevel(logging.INFO)
        log.propagate = False
        if log.handlers:  # the caller has opened it
            yield log
            return
        handler = _LogHandler(self.path / LOG_FILE)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        log.addHandler(handler)
        try:
            yield log
        finally:
            log.removeHandler(handler)
            handler.close()

    # ---- the end of a run

    def read_summary(self) -> dict[str, Any]:
        """The summary as it was written, without checksums."""
        return {key: value for key, value in self._read_checked_summary().items() if key != "files"}

    def write_summary(self, summary: dict[str, Any]) -> None:
        """Write the summary, with the checksums of the files that the folder has now."""
        checksums: dict[str, str | None] = {
            name: files.checksum(self.path / name) for name in FILES_IN_SUMMARY if self.has(name)
        }
        tensor_files = [*self.path.glob(MODEL_FILE), *sorted((self.path / RECORDS_FOLDER).glob("*.safetensors"))]
        checksums |= {path.relative_to(self.path).as_posix(): None for path in tensor_files}
        self._write(SUMMARY_FILE, to_checked_json(summary | {"files": checksums}, indent=2))

    def _read_checked_summary(self) -> dict[str, Any]:
        try:
            return from_checked_json((self.path / SUMMARY_FILE).read_bytes())
        except ValueError as error:
            raise self._damaged(SUMMARY_FILE, str(error), self._write_again) from None

    def _recorded_checksums(self) -> dict[str, str | None]:
        """The SHA-256 of each file of a finished run; None for a file with a checksum of its own.

        Empty if the summary is damaged: commands report that when they read it.
        """
        try:
            return dict(self._read_checked_summary()["files"]) if self.is_finished else {}
        except DataError:
            return {}

    def _check(self, name: str, advice: str) -> None:
        """Raise DataError if a file of a finished run is missing or has changed."""
        checksum = self._recorded_checksums().get(name)
        if checksum is None:
            return
        if not self.has(name):
            raise DataError(f"{self.path / name} is missing. {advice}")
        if files.checksum(self.path / name) != checksum:
            raise self._damaged(name, f"its checksum in {SUMMARY_FILE} does not match", advice)

    @property
    def _write_again(self) -> str:
        return f"`fedmll resume {self.path}` writes it again."

    def remove_summary(self) -> None:
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)

    def read_failure(self) -> str | None:
        """Why the run failed; None if it did not."""
        if not self.has(FAILURE_FILE):
            return None
        try:
            return str(self._read_json(FAILURE_FILE, "")["reason"])
        except (DataError, KeyError):
            return f"unknown, because {FAILURE_FILE} is damaged"

    def write_failure(self, error: Exception) -> None:
        failure = {"error": type(error).__name__, "reason": str(error)}
        self._write(FAILURE_FILE, json.dumps(failure, indent=2) + "\n")

    def remove_failure(self) -> None:
        (self.path / FAILURE_FILE).unlink(missing_ok=True)

    def read_stop_reason(self) -> str | None:
        """Why the run stopped, if its log ends with that."""
        log = self.path / LOG_FILE
        lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
        match = STOPPED_LINE.search(lines[-1]) if lines else None
        return None if match is None else match[1]

    @property
    def state(self) -> RunState:
        """The state as the files say it, without reading them: never `UNREADABLE`."""
        if self.is_finished:
            return RunState.FINISHED
        if self.is_locked:
            return RunState.RUNNING
        if self.has(FAILURE_FILE):
            return RunState.FAILED
        return RunState.STOPPED if self.has(LOG_FILE) or self.rounds_done else RunState.NOT_STARTED

    def read_predictions(self, part: str = "test") -> Predictions:
        """The stored predictions for the `test`, `validation` or `held_out` data, without calibration."""
        self._check(PREDICTIONS_FILE, self._write_again)
        return read_predictions(self.predictions_file, part)

    def write_predictions(self, data: Federation, scores: Mapping[str, NDArray[np.float32]]) -> None:
        write_predictions(self.predictions_file, data, scores)

    def read_client_labels(self) -> ClientLabels:
        self._check(CLIENT_LABELS_FILE, self._write_again)
        return read_client_labels(self.path / CLIENT_LABELS_FILE)

    def write_client_labels(self, data: Federation) -> None:
        write_client_labels(self.path / CLIENT_LABELS_FILE, data)

    def read_table(self, name: str) -> Table:
        """The rows of PER_CLASS_FILE or PER_CLIENT_FILE."""
        self._check(name, self._write_again)
        try:
            with (self.path / name).open(newline="") as file:
                rows = list(csv.DictReader(file))
            return [
                {key: unescape_cell(text) if key in TEXT_COLUMNS else _number(text) for key, text in row.items()}
                for row in rows
            ]
        except (ValueError, AttributeError, csv.Error) as error:
            raise self._damaged(name, str(error), self._write_again) from None

    def write_table(self, name: str, columns: dict[str, NDArray[Any]]) -> None:
        write_csv(self.path / name, columns)

    def read_site_metrics(self) -> dict[str, Any] | None:
        """The metrics of each site (see `training.federated_evaluation`); None for other runs."""
        return self._read_json(SITE_METRICS_FILE, RESTORE_ONLY) if self.should_have(SITE_METRICS_FILE) else None

    def write_site_metrics(self, metrics: dict[str, Any]) -> None:
        self._write(SITE_METRICS_FILE, to_json(metrics, indent=1) + "\n")

    def _write(self, name: str, text: str) -> None:
        files.write_atomic(self.path / name, text)

    def _read_json(self, name: str, advice: str) -> dict[str, Any]:
        """The object in a JSON file. `advice` is the end of the error message for a damaged file."""
        self._check(name, advice)
        try:
            content = json.loads((self.path / name).read_bytes())
        except (ValueError, RecursionError) as error:
            raise self._damaged(name, str(error), advice) from None
        if not isinstance(content, dict):
            raise self._damaged(name, "it is not a JSON object", advice)
        return content

    def _damaged(self, name: str, reason: str, advice: str) -> DataError:
        return DataError(f"{self.path / name} is damaged ({printable(reason, 120)}). {advice}")


def _parse_row(line: bytes, required: Iterable[str]) -> MetricsRow | None:
    """A line of metrics.jsonl; None if it is not a row of numbers."""
    try:
        row = json.loads(line)
        values = [row[name] for name in required]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    numbers = all(value is None or isinstance(value, int | float) for value in row.values())
    return row if numbers and type(row["round"]) is int and None not in values else None


def _format_rows(rows: Iterable[MetricsRow]) -> str:
    return "".join(to_json(row) + "\n" for row in rows)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _number(text: str) -> float | int:
    return int(text) if text.lstrip("-").isdigit() else float(text)


class _LogHandler(logging.FileHandler):
    """A full disk must not end the run because of its log, nor hide which other file could not be written."""

    def handleError(self, record: logging.LogRecord) -> None: ...

    def close(self) -> None:
        with suppress(OSError):
            super().close()
