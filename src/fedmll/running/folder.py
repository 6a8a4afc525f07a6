"""A run's folder: what is in it, and who may write there."""

from __future__ import annotations

import csv
import fcntl
import io
import json
import logging
import math
import struct
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files, registry
from fedmll.data.digest import Facts, changes
from fedmll.errors import ConfigError, DataError
from fedmll.experiment import Experiment

EXPERIMENT, DATA, SUMMARY, METRICS, LOCK = "experiment.toml", "data.json", "summary.json", "metrics.jsonl", ".lock"
MODEL, PREDICTIONS, CLIENTS = "model.safetensors", "predictions.npz", "clients.npz"
PER_CLASS, PER_CLIENT = "per_class.csv", "per_client.csv"
METRICS_CSV = "metrics.csv"
MEMORY = Path("checkpoint") / "memory"
PLUGINS, FAILED, COMPARISON = "plugins.json", "failed.json", "comparison.json"

Row = dict[str, Any]


def check_vacant(out: Path) -> None:
    """A new run needs a folder that is empty, or none."""
    if not out.exists():
        return
    if not out.is_dir() or any(path.name != LOCK and not files.is_leftover(path) for path in out.iterdir()):
        raise ConfigError(
            f"{out} is not empty; nothing was changed. Choose another --out, or go on with the run that is there by "
            f"`fedmll resume {out}`."
        )


def create(out: Path, experiment: Experiment) -> None:
    """A new run's folder, which `resume` can start."""
    out.mkdir(parents=True, exist_ok=True)
    with locked(out):
        check_vacant(out)
        files.write(out / EXPERIMENT, experiment.to_toml())
        found = _plugins(experiment)
        if any(found.values()):
            files.write(out / PLUGINS, json.dumps(found, indent=1) + "\n")


def _plugins(experiment: Experiment) -> dict[str, dict[str, str]]:
    """Plug-in files and their checksums; installed packages with plug-ins and their versions."""
    packages = {entry.dist.name: entry.dist.version for entry in registry.installed() if entry.dist}
    return {"files": {file: files.checksum(Path(file)) for file in experiment.plugins}, "packages": packages}


def check_plugins(out: Path, experiment: Experiment) -> list[str]:
    """A warning for each plug-in that is not what the run began with: the result may be another."""
    if not (out / PLUGINS).is_file():
        return []
    saved, warnings = json.loads((out / PLUGINS).read_text()), []
    sums, versions = _plugins(experiment).values()
    for file, checksum in saved["files"].items():
        if checksum not in sums.values():
            what = "has changed since" if file in sums else "is no longer used; it was when"
            warnings.append(f"The plug-in file {file} {what} the run began: the result may be another.")
    for package, version in saved["packages"].items():
        if versions.get(package) != version:
            what = f"has the version {versions[package]} now" if package in versions else "is not installed any more"
            warnings.append(f"The package {package} {what}; the run began with {version}: the result may be another.")
    return warnings


def experiment_in(out: Path, overrides: dict[str, Any] | None = None) -> Experiment:
    """The experiment of a run's folder."""
    file = out / EXPERIMENT
    if not file.is_file():
        raise ConfigError(f"{out} holds no run: it has no {EXPERIMENT}. Start one by `fedmll run --out {out}`.")
    try:
        return Experiment.load(file, overrides)
    except ConfigError as error:
        saved = json.loads((out / PLUGINS).read_text())["packages"] if (out / PLUGINS).is_file() else {}
        here = {entry.dist.name for entry in registry.installed() if entry.dist}
        gone = " ".join(f"{name}=={version}" for name, version in saved.items() if name not in here)
        if not gone:
            raise
        raise ConfigError(f"{error} The run in {out} began with packages that are gone: pip install {gone}.") from None


def check_data(out: Path, facts: dict[str, Facts]) -> None:
    """A run goes on with the data it began with, or not at all. The first time, the data is written down."""
    file = out / DATA
    if not file.is_file():
        files.write(file, json.dumps(facts, indent=1) + "\n")
        return
    try:
        found = changes(json.loads(file.read_text()), facts)
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(
            f"{file}, which says what data the run began with, cannot be read. Put it back; or, if you are sure that "
            "the data is the same, move it away, and it is written anew."
        ) from None
    if found:
        raise DataError(
            f"The data is not what the run in {out} began with: {'; '.join(found)}. Nothing was changed. Put the data "
            "back as it was, or start a new run with another --out."
        )


def read_rows(path: Path) -> list[Row]:
    """The rows of a metrics.jsonl; a last line that was cut off by a kill is left out."""
    rows: list[Row] = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:
                break
    return rows


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: an undefined metric is null."""

    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(inner) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [plain(inner) for inner in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(plain(value), indent=indent, allow_nan=False)


def write_csv(path: Path, columns: dict[str, NDArray[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    for values in zip(*columns.values(), strict=True):
        writer.writerow([f"{v:.4f}" if isinstance(v, np.floating) else v for v in values])
    files.write(path, text.getvalue())


def write_rows(path: Path, rows: list[Row]) -> None:
    """The rows as a CSV, a column for every number that some round has."""
    names = dict.fromkeys(name for row in rows for name in row)
    text = io.StringIO()
    writer = csv.DictWriter(text, list(names), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    files.write(path, text.getvalue())


@contextmanager
def locked(out: Path) -> Iterator[None]:
    """One process a run's folder. The lock goes with the process, however it ends; its workers do not inherit it
    (a record lock: with flock, a worker that outlives a killed parent by a moment would still hold it)."""
    with (out / ".lock").open("w") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"Another process is running the experiment in {out}; wait for it or stop it first."
            ) from None
        yield


def in_use(out: Path) -> bool:
    """Whether a process runs the experiment there now. Asks only: to take the lock, even for a moment, could turn a run
    away that starts in it. Where the system's answer is not known (not Linux): no."""
    if not (out / LOCK).is_file() or sys.platform != "linux":
        return False
    shape = "hhqqi4x"  # struct flock: type, whence, start, length, process
    with (out / LOCK).open("rb") as file:
        found = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack(shape, fcntl.F_RDLCK, 0, 0, 0, 0))
    return bool(struct.unpack(shape, found)[0] != fcntl.F_UNLCK)


class _Log(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A disk that is full ends the run by what matters more than its log."""


@contextmanager
def logging_to(out: Path) -> Iterator[logging.Logger]:
    log = logging.getLogger(f"fedmll.run.{out.resolve()}")
    log.setLevel(logging.INFO)
    log.propagate = False
    if log.handlers:  # who called us writes there already
        yield log
        return
    handler = _Log(out / "log.txt")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    log.addHandler(handler)
    try:
        yield log
    finally:
        log.removeHandler(handler)
        handler.close()
