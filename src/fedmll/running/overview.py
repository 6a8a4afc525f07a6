"""Runs and comparisons as they lie on disk, finished or not: read, never changed. What cannot be read is named.

Nothing is loaded but small files, and no code: also runs of plug-ins that are not here, and of other versions, show.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.errors import ConfigError
from fedmll.running.comparison import Table, mean_and_spread
from fedmll.running.folder import COMPARISON, EXPERIMENT, FAILED, METRICS, SUMMARY, in_use, read_rows
from fedmll.running.shown import HEADLINES, TOGETHER, number

MAIN = ("macro_auc", "pooled_macro_auc", "sites_macro_auc", "accuracy", "map")  # the first that a run has
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Shown:
    """A run. state: finished, failed, running, stopped, unreadable"""

    folder: Path
    state: str
    method: str = "?"
    data: str = "?"
    seed: int | None = None
    done: int = 0
    rounds: int = 0
    metrics: Mapping[str, float | None] | None = None  # of the result, or of the last round that was measured
    reason: str = ""  # of what failed or cannot be read
    when: float = 0.0

    @property
    def main(self) -> str:
        """`macro_auc 83.61`"""
        known = self.metrics or {}
        return next((f"{name} {number(known[name])}" for name in MAIN if known.get(name) is not None), "–")

    @property
    def day(self) -> str:
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(self.when)) if self.when else "–"


def is_run(folder: Path) -> bool:
    return (folder / EXPERIMENT).is_file()


def read(folder: Path) -> Shown:
    """The run in a folder."""
    try:
        return _read(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:  # damaged files, or not ours
        reason = f"{type(error).__name__}: {error}"
        return Shown(folder, UNREADABLE, reason=" ".join(reason.split())[:300], when=_when(folder))


def _read(folder: Path) -> Shown:
    values = tomllib.loads((folder / EXPERIMENT).read_text())
    rows = read_rows(folder / METRICS)
    state, reason = "running" if in_use(folder) else "stopped", ""
    metrics = next((row for row in reversed(rows) if any(name in row for name in MAIN)), None)
    if (folder / SUMMARY).is_file():
        state, metrics = "finished", json.loads((folder / SUMMARY).read_text())["metrics"]
    elif (folder / FAILED).is_file() and state == "stopped":
        state, reason = "failed", str(json.loads((folder / FAILED).read_text())["reason"])
    name = str(values["data"]["name"])
    kind, colon, file = name.partition(":")
    return Shown(
        folder,
        state,
        str(values["method"]["name"]),
        f"{kind}:{Path(file).name}" if colon else name,
        int(values["seed"]),
        max((int(row["round"]) for row in rows), default=0),
        int(values["training"]["rounds"]),
        metrics,
        reason,
        _when(folder),
    )


def _when(folder: Path) -> float:
    """When something was last written."""
    times = [file.stat().st_mtime for file in map(folder.joinpath, (SUMMARY, METRICS, EXPERIMENT)) if file.is_file()]
    return max(times, default=0.0)


def runs_below(folder: Path) -> Iterator[Shown]:
    """Every run below a folder, in the order of their paths; a run is not looked into further."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is no folder. `fedmll runs FOLDER` lists the runs below one; runs/ is the default."
        )
    for place, folders, files in os.walk(folder):
        if EXPERIMENT in files:
            folders.clear()
            yield read(Path(place))
        folders.sort()


def run_table(runs: Sequence[Shown], base: Path) -> Table:
    header = ["folder", "method", "data", "seed", "rounds", "state", "metric, %", "last written"]
    rows = [
        [
            run.folder.relative_to(base).as_posix(),
            run.method,
            run.data,
            "?" if run.seed is None else str(run.seed),
            f"{run.done} of {run.rounds}",
            run.state,
            run.main,
            run.day,
        ]
        for run in runs
    ]
    return header, rows


def headline_table(run: Shown) -> Table:
    names = [name for name in (*HEADLINES, *TOGETHER) if (run.metrics or {}).get(name) is not None]
    return ["metric", "test, %"], [[name, number((run.metrics or {})[name])] for name in names]


@dataclass(frozen=True)
class ShownComparison:
    folder: Path
    tables: list[Table]
    notes: list[str]
    runs: list[Shown]

    @property
    def open(self) -> list[Shown]:
        return [run for run in self.runs if run.state != "finished"]


def read_comparison(folder: Path) -> ShownComparison:
    """The tables as they were last written; of a folder without a record (an older version's, or one in its first
    run), a table of what lies there."""
    runs = list(runs_below(folder))
    if not runs:
        raise ConfigError(f"{folder} holds no run and no comparison: there is no {EXPERIMENT} in it or below it.")
    try:
        record = json.loads((folder / COMPARISON).read_text())
        tables = [(list(table["header"]), [list(row) for row in table["rows"]]) for table in record["tables"]]
        return ShownComparison(folder, tables, [str(note) for note in record["notes"]], runs)
    except FileNotFoundError:
        notes = []
    except (OSError, ValueError, KeyError, TypeError) as error:
        notes = [f"{folder / COMPARISON} cannot be read ({error}); this is what the runs' folders say."]
    return ShownComparison(folder, [_found(folder, runs)], notes, runs)


def _found(base: Path, runs: Sequence[Shown]) -> Table:
    """A row for each folder of seeds: mean ± std over those that are finished."""
    together: dict[str, list[Shown]] = {}
    for run in runs:
        together.setdefault(run.folder.relative_to(base).parent.as_posix(), []).append(run)
    finished = {label: [run for run in group if run.state == "finished"] for label, group in together.items()}
    known = {name for group in finished.values() for run in group for name in run.metrics or {}}
    names = [name for name in HEADLINES if name in known]
    rows = []
    for label, group in together.items():
        cells = [_mean([(run.metrics or {}).get(name) for run in finished[label]]) for name in names]
        rows.append([label, f"{len(finished[label])} of {len(group)}", *cells])
    return ["runs", "finished", *names], rows


def _mean(values: Sequence[Any]) -> str:
    known = np.array([value for value in values if value is not None], np.float64)
    return mean_and_spread(known) if len(known) and len(known) == len(values) else "–"
