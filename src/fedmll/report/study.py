"""What a report is about: rows of runs, a seed each, as the folders on disk have them.

A comparison's folder is LABEL[/SETTING]/seed-N. Its table.csv says which setting was chosen for each row; while it is
not there, the setting with the most runs is shown, the best on validation data of those.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.errors import ConfigError, printable
from fedmll.report.runs import BROKEN_OFF, FAILED, UNREADABLE, UNREADABLE_FILE, Run, number, read_run
from fedmll.running.comparison import measure
from fedmll.running.folder import EXPERIMENT

TABLE = "table.csv"
SEED = re.compile(r"seed-(-?\d+)")
INSIDE = ("checkpoint", "records", "export")  # folders of a run that hold no other


@dataclass(eq=False)
class Row:
    label: str
    runs: list[Run]  # a seed each

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def first(self) -> Run:
        return (self.finished or self.runs)[0]

    def values(self, metric: str) -> NDArray[np.float64]:
        """Of the runs that are finished and have it; a metric, or a cost a round."""
        found = [_measured(run, metric) for run in self.finished]
        return np.array([value for value in found if np.isfinite(value)])


def _measured(run: Run, metric: str) -> float:
    try:
        return measure(run.summary, metric)
    except UNREADABLE_FILE:
        return float("nan")


@dataclass(eq=False)
class Study:
    title: str
    rows: list[Row]
    trials: list[Run] = field(default_factory=list)  # to choose settings, and not in the table
    refused: list[tuple[str, str]] = field(default_factory=list)  # runs without a folder: name, why

    @property
    def runs(self) -> list[Run]:
        return [run for row in self.rows for run in row.runs]

    @property
    def finished(self) -> list[Run]:
        return [run for run in self.runs if run.finished]

    @property
    def lost(self) -> list[tuple[str, str]]:
        """What is not in the figures, and why: name, words."""
        broken = [(run.name, f"{run.state}: {run.reason}") for run in [*self.runs, *self.trials] if not run.finished]
        return broken + [(name, f"{BROKEN_OFF}: {why}") for name, why in self.refused]

    @property
    def damaged(self) -> list[tuple[str, str]]:
        return [(run.name, why) for run in self.runs for why in run.damaged]


def gather(paths: Sequence[Path]) -> Study:
    """Runs, comparisons, and folders of either. Something in them must be there to be shown."""
    studies, single = [], []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"There is no folder {path}. Give the folder of a run or of a comparison.")
        if (path / EXPERIMENT).is_file():
            single.append(read_run(path, _called(path)))
        else:
            studies.append(_below(path))
    if single:
        studies.append(Study("", _alike(single)))
    rows = [row for study in studies for row in study.rows]
    labels = [row.label for row in rows]
    for study in studies:
        for row in study.rows:
            if study.title and labels.count(row.label) > 1:  # told apart by the folder's name
                row.label = f"{row.label} ({study.title})"
    whole = Study(
        ", ".join(map(_called, paths)),
        rows,
        [run for study in studies for run in study.trials],
        [found for study in studies for found in study.refused],
    )
    if not any(run.finished or run.rows for run in whole.runs):
        _nothing(paths, whole)
    return whole


def _called(path: Path) -> str:
    """The folder's name; of a run in a comparison with its row."""
    folder = path.resolve()
    return f"{folder.parent.name}/{folder.name}" if SEED.fullmatch(folder.name) else folder.name


def _nothing(paths: Sequence[Path], whole: Study) -> None:
    where = ", ".join(map(str, paths))
    if not whole.lost:
        raise ConfigError(f"There is no run in {where}: no {EXPERIMENT} is below it.")
    name, why = whole.lost[0]
    more = f" (and {len(whole.lost) - 1} more)" if len(whole.lost) > 1 else ""
    raise ConfigError(f"No run in {where} has done a round, so there is nothing to show. {name}: {why}{more}.")


def _below(path: Path) -> Study:
    """All runs below a folder: those of a comparison by its rules, others by what they are."""
    found = sorted({file.parent for name in (EXPERIMENT, FAILED) for file in path.rglob(name)}, key=_in_order)
    found = [folder for folder in found if not set(INSIDE) & set(folder.relative_to(path).parts)]
    cells = [folder for folder in found if SEED.fullmatch(folder.name) and folder.parent != path]
    others = [read_run(folder, str(folder.relative_to(path))) for folder in found if folder not in cells]
    study = _comparison(path, cells)
    study.rows += _alike(others)
    return study


def _comparison(path: Path, cells: Sequence[Path]) -> Study:
    table = _read_table(path / TABLE)
    by_label: dict[str, dict[str, list[Run]]] = {}
    for folder in cells:
        label, *setting = folder.relative_to(path).parts[:-1]
        run = read_run(folder, str(folder.relative_to(path)))
        by_label.setdefault(label, {}).setdefault("/".join(setting), []).append(run)
    study = Study(path.resolve().name, [])
    labels = {_as_folder(label): label for label in table.labels}
    for label in sorted(by_label, key=lambda name: [*labels, name].index(name)):
        shown, left = _chosen(label, by_label[label], table.finished)
        study.rows.append(Row(labels.get(label, label), shown))
        study.trials += left
    there = {folder.relative_to(path) for folder in cells}
    study.refused = [
        (str(Path(*filter(None, cell))), why) for cell, why in table.failed if Path(*filter(None, cell)) not in there
    ]
    return study


def _in_order(folder: Path) -> list[tuple[int, str]]:
    """seed-2 before seed-10."""
    return [(int(m[1]), "") if (m := SEED.fullmatch(part)) else (0, part) for part in folder.parts]


def _as_folder(label: str) -> str:
    return label.replace(":", "-").replace("/", "-")


Cell = tuple[str, str, str]  # the folders of a run: label, setting, seed-N


@dataclass
class _Table:
    """What table.csv tells of a comparison."""

    labels: list[str] = field(default_factory=list)
    finished: set[Cell] = field(default_factory=set)  # what is in the table; not what only chose a setting
    failed: list[tuple[Cell, str]] = field(default_factory=list)


def _read_table(file: Path) -> _Table:
    table = _Table()
    try:
        with file.open(newline="") as opened:
            for line in csv.DictReader(opened):
                setting = "+".join(line["tuned"].split())
                cell = (_as_folder(line["method"]), _as_folder(setting), f"seed-{line['seed']}")
                if line["method"] not in table.labels:
                    table.labels.append(line["method"])
                if line["metric"] == "failed":
                    table.failed.append((cell, printable(line["value"], 600)))
                else:
                    table.finished.add(cell)
    except UNREADABLE_FILE:
        return _Table()  # not written yet, or damaged: the folders themselves say enough
    return table


def _chosen(label: str, settings: dict[str, list[Run]], finished: set[Cell]) -> tuple[list[Run], list[Run]]:
    """Of a row: the runs that it shows, and the others."""
    known = [setting for name, setting, _ in finished if name == label and setting in settings]
    by_rule = max(settings, key=lambda name: (len(settings[name]), _validated(settings[name])))
    shown = settings[known[0] if known else by_rule]
    seeds = {seed for _, _, seed in finished}
    if finished and len(settings) > 1:  # a seed that only chose the setting is not in the table
        shown = [run for run in shown if run.folder.name in seeds or not run.finished] or shown
    return shown, [run for runs in settings.values() for run in runs if run not in shown]


def _validated(runs: Sequence[Run]) -> float:
    scores = [number(run.summary["metrics"].get("val_macro_auc")) for run in runs if run.finished]
    return max((score for score in scores if np.isfinite(score)), default=-1.0)


def _alike(runs: Sequence[Run]) -> list[Row]:
    """A row for runs that differ by their seed alone; rows of one method have their folder's name as well."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {k: v for k, v in run.experiment.items() if k not in ("seed", "engine", "plugins")}
        groups.setdefault(repr(same) if run.state != UNREADABLE else run.name, []).append(run)
    rows = [Row(group[0].method if group[0].experiment else group[0].name, group) for group in groups.values()]
    twice = {row.label for row in rows if sum(other.label == row.label for other in rows) > 1}
    for row in rows:
        if row.label in twice:
            row.label = f"{row.label} ({row.first.name})"
    return rows
