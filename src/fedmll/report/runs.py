"""One run as its folder tells it: no code of its method, no data and no model is needed, and no file is believed.

A file that cannot be read costs the report what is in that file, and is named; it never ends the report.
"""

from __future__ import annotations

import csv
import json
import math
import re
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedmll.errors import DataError, printable
from fedmll.evaluation.metrics import best_thresholds
from fedmll.running.clients import ClientLabels, read_clients
from fedmll.running.folder import (
    CLIENTS,
    DATA,
    EXPERIMENT,
    METRICS,
    PER_CLASS,
    PER_CLIENT,
    PREDICTIONS,
    SUMMARY,
    read_rows,
)
from fedmll.running.predictions import Predictions, read_predictions

FAILED, LOG = "failed.json", "log.txt"
FINISHED, BROKEN_OFF, UNFINISHED, UNREADABLE = "finished", "failed", "unfinished", "unreadable"
NEEDED = ("method", "data", "seed", "round", "rounds", "clients", "classes", "samples", "seconds", "metrics")
UNREADABLE_FILE = (OSError, ValueError, KeyError, TypeError, AttributeError)  # what a damaged file can end in
STOPPED = re.compile(r" ERROR stopped: (.*)$")

T = TypeVar("T")
Table = list[dict[str, Any]]


@dataclass(eq=False)
class Run:
    folder: Path
    name: str  # as it is called in the report
    experiment: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)  # of a finished run
    rows: Table = field(default_factory=list)  # one a round
    state: str = UNFINISHED
    reason: str = ""  # why it is not finished
    damaged: list[str] = field(default_factory=list)  # files that could not be read, and why

    @property
    def method(self) -> str:
        return str(self.experiment.get("method", {}).get("name", "?"))

    @property
    def seed(self) -> int:
        return int(self.experiment.get("seed", 0))

    @property
    def rounds(self) -> int:
        return int(self.experiment.get("training", {}).get("rounds", 0))

    @property
    def finished(self) -> bool:
        return self.state == FINISHED

    @cached_property
    def per_class(self) -> Table:
        return self._kept(PER_CLASS, _table, [])

    @cached_property
    def per_client(self) -> Table:
        return self._kept(PER_CLIENT, _table, [])

    @cached_property
    def clients(self) -> ClientLabels | None:
        return self._kept(CLIENTS, read_clients, None)

    @cached_property
    def predictions(self) -> Predictions | None:
        """Of the test data."""
        return self._kept(PREDICTIONS, read_predictions, None)

    @cached_property
    def tuned(self) -> NDArray[np.float64] | None:
        """The thresholds of macro_f1_tuned, where there was validation data."""
        return self._kept(PREDICTIONS, _tuned, None)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What data.json says of the training data; empty at the server of a real federation."""
        return self._kept(DATA, lambda file: dict(json.loads(file.read_text()).get("training", {})), {})

    def _kept(self, name: str, read: Callable[[Path], T], without: T) -> T:
        if not (self.folder / name).is_file():
            return without
        try:
            return read(self.folder / name)
        except (*UNREADABLE_FILE, DataError) as error:
            self.damaged.append(f"{name} cannot be read ({printable(error, 120)})")
            return without


def read_run(folder: Path, name: str | None = None) -> Run:
    run = Run(folder, str(folder) if name is None else name)
    try:
        run.experiment = tomllib.loads((folder / EXPERIMENT).read_text())
        run.rows = [row for row in read_rows(folder / METRICS) if type(row.get("round")) is int]
        run.state, run.reason = _state(run)
    except UNREADABLE_FILE as error:
        run.state, run.reason = UNREADABLE, f"cannot be read: {printable(error, 160)}"
    return run


def _state(run: Run) -> tuple[str, str]:
    if (run.folder / SUMMARY).is_file():
        try:
            found = json.loads((run.folder / SUMMARY).read_text())
            lacking = [key for key in NEEDED if key not in found]
        except UNREADABLE_FILE as error:
            return UNREADABLE, f"its {SUMMARY} cannot be read ({printable(error, 120)})"
        if lacking:
            return UNREADABLE, f"its {SUMMARY} has no {lacking[0]}"
        run.summary = found
        return FINISHED, ""
    if (run.folder / FAILED).is_file():
        return BROKEN_OFF, printable(json.loads((run.folder / FAILED).read_text())["reason"], 600)
    done = max((row["round"] for row in run.rows), default=0)
    return UNFINISHED, f"{done} of {run.rounds} rounds are done{_last_words(run.folder / LOG)}"


def _last_words(log: Path) -> str:
    """Why it stopped, if it said so."""
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    found = STOPPED.search(lines[-1]) if lines else None
    return f"; it stopped: {printable(found[1], 600)}" if found else ""


def _tuned(file: Path) -> NDArray[np.float64] | None:
    with np.load(file, allow_pickle=False) as opened:
        there = len(opened["validation_rows"]) if "validation_rows" in opened.files else 0
    kept = read_predictions(file, "validation") if there else None
    return None if kept is None else best_thresholds(kept.probabilities, kept.targets)


def _table(file: Path) -> Table:
    with file.open(newline="") as opened:
        rows = list(csv.DictReader(opened))
    names = ("class", "client")
    return [{key: text if key in names else float(text) for key, text in row.items()} for row in rows]


def number(value: Any) -> float:
    """A figure of a file; NaN for what is none."""
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
