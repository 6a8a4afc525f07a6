"""`ComparedRuns`: the runs and comparisons in some folders, as rows with one run per seed. Reports show them.

The rows of a comparison are those of its comparison.json. A run that the record does not have (it is not written
yet, or damaged) is grouped by its folder, ROW[/SETTING]/seed-N: of several settings the one with the most runs is
shown, of these the best on validation data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedmll.comparison.comparison_folder import MISSING_RUN, ComparisonFolder, ComparisonRecord
from fedmll.comparison.reproduction_record import ReproductionRecord, read_reproduction
from fedmll.comparison.results import metric_value
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.text import printable
from fedmll.evaluation.metric_definitions import SELECTION
from fedmll.runs.run_folder import CHECKPOINT_FOLDER, EXPERIMENT_FILE, FAILURE_FILE, RECORDS_FOLDER, RunFolder, RunState
from fedmll.runs.run_overview import DAMAGED_FILE_ERRORS, RunRecord, float_or_nan, read_run

SEED_FOLDER = re.compile(r"seed-(-?\d+)")
FOLDERS_IN_RUNS = (CHECKPOINT_FOLDER, RECORDS_FOLDER, "export")  # they hold no other runs


@dataclass(eq=False)
class ComparedRow:
    """A method or variant with one run per seed."""

    label: str
    runs: list[RunRecord]

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_finished]

    @property
    def first(self) -> RunRecord:
        return (self.finished or self.runs)[0]

    def values(self, metric: str) -> NDArray[np.float64]:
        """A metric, or a cost per round, of the finished runs that have it."""
        values = [_metric_or_nan(run, metric) for run in self.finished]
        return np.array([value for value in values if np.isfinite(value)])


def _metric_or_nan(run: RunRecord, metric: str) -> float:
    try:
        return metric_value(run.summary, metric)
    except DAMAGED_FILE_ERRORS:
        return float("nan")


@dataclass(eq=False, kw_only=True)
class ComparedRuns:
    """Rows of runs."""

    title: str = ""  # the names of the folders
    rows: list[ComparedRow]
    trials: list[RunRecord] = field(default_factory=list)  # runs that only chose a setting of --tune: in no row
    rejected: list[tuple[str, str]] = field(default_factory=list)  # failed before they had a folder: name and reason
    deleted: list[tuple[str, str]] = field(default_factory=list)  # finished, but no longer there: name and reason
    damaged_records: list[tuple[str, str]] = field(default_factory=list)  # folder of a comparison, and what happened
    reproductions: list[ReproductionRecord] = field(default_factory=list)  # tables of papers, with published figures

    @property
    def runs(self) -> list[RunRecord]:
        return [run for row in self.rows for run in row.runs]

    @property
    def finished(self) -> list[RunRecord]:
        return [run for run in self.runs if run.is_finished]

    @property
    def missing(self) -> list[tuple[str, str]]:
        """Runs that the metrics do not include: name and reason."""
        runs = [(run.name, f"{run.state}: {run.reason}") for run in [*self.runs, *self.trials] if not run.is_finished]
        return runs + [(name, f"{RunState.FAILED}: {reason}") for name, reason in self.rejected] + self.deleted

    @property
    def damaged(self) -> list[tuple[str, str]]:
        """Files that could not be read: name of the run or comparison, and what happened."""
        return self.damaged_records + [(run.name, reason) for run in self.runs for reason in run.damaged]


def read_compared_runs(paths: Sequence[Path]) -> ComparedRuns:
    """Read runs, comparisons, tables of papers, and folders of these. ConfigError if no run has done a round."""
    studies, single_runs, folders, reproductions = [], [], list[Path](), []
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"There is no folder {path}. Give the folder of a run or of a comparison.")
        record = read_reproduction(path)
        folders += [path] if record is None else [path / group for group in record.groups]
        reproductions += [] if record is None else [record]
    for path in folders:
        if RunFolder(path).is_run:
            single_runs.append(read_run(path, _short_name(path)))
        else:
            studies.append(_read_below(path))
    if single_runs:
        studies.append(ComparedRuns(rows=_group_by_experiment(single_runs)))
    rows = [row for compared in studies for row in compared.rows]
    labels = [row.label for row in rows]
    for compared in studies:
        for row in compared.rows:
            if compared.title and labels.count(row.label) > 1:
                row.label = f"{row.label} ({compared.title})"
    whole = ComparedRuns(
        title=", ".join(map(_short_name, paths)),
        rows=rows,
        trials=[run for compared in studies for run in compared.trials],
        rejected=[run for compared in studies for run in compared.rejected],
        deleted=[run for compared in studies for run in compared.deleted],
        damaged_records=[record for compared in studies for record in compared.damaged_records],
        reproductions=reproductions,
    )
    _check_not_empty(paths, whole)
    return whole


def _short_name(path: Path) -> str:
    """The folder's name; for a run of a comparison with the name of its row."""
    folder = path.resolve()
    return f"{folder.parent.name}/{folder.name}" if SEED_FOLDER.fullmatch(folder.name) else folder.name


def _check_not_empty(paths: Sequence[Path], compared: ComparedRuns) -> None:
    if any(run.is_finished or run.rows for run in compared.runs):
        return
    where = ", ".join(map(str, paths))
    if not compared.missing:
        raise ConfigError(f"There is no run in {where}: no {EXPERIMENT_FILE} is below it.")
    name, reason = compared.missing[0]
    more = f" (and {len(compared.missing) - 1} more)" if len(compared.missing) > 1 else ""
    raise ConfigError(f"No run in {where} has done a round, so there is nothing to show. {name}: {reason}{more}.")


def _read_below(path: Path) -> ComparedRuns:
    """All runs below a folder."""
    folders = sorted({file.parent for name in (EXPERIMENT_FILE, FAILURE_FILE) for file in path.rglob(name)}, key=_order)
    names = [folder.relative_to(path) for folder in folders if not _is_inside_run(folder.relative_to(path))]
    runs = {name.as_posix(): read_run(path / name, str(name)) for name in names}
    compared = ComparedRuns(title=path.resolve().name, rows=[])
    try:
        if (record := ComparisonFolder(path).read_record()) is not None:
            _add_recorded_rows(compared, record, runs)
    except DataError as error:
        compared.damaged_records.append((compared.title, f"{error} The rows were made from the folders of the runs."))
    cells = {name: run for name, run in runs.items() if SEED_FOLDER.fullmatch(Path(name).name) and "/" in name}
    _add_rows_by_folder(compared, cells)
    compared.rows += _group_by_experiment([run for name, run in runs.items() if name not in cells])
    return compared


def _is_inside_run(folder: Path) -> bool:
    return bool(set(FOLDERS_IN_RUNS) & set(folder.parts))


def _order(folder: Path) -> list[tuple[int, str]]:
    """seed-2 before seed-10."""
    return [(int(m[1]), "") if (m := SEED_FOLDER.fullmatch(part)) else (0, part) for part in folder.parts]


def _add_recorded_rows(compared: ComparedRuns, record: ComparisonRecord, runs: dict[str, RunRecord]) -> None:
    """Add the rows of comparison.json, and remove their runs from `runs`."""
    compared.deleted += [(folder, f"{RunState.UNREADABLE}: {MISSING_RUN}") for folder in record.missing_runs(runs)]
    for row in record.rows:
        shown, others = [], dict[str, list[RunRecord]]()
        for recorded in row.runs:
            run = runs.pop(recorded.folder, None)
            if run is None and recorded.state is RunState.FAILED:
                compared.rejected.append((recorded.folder, printable(recorded.reason, 600)))
            elif run is not None and recorded.in_table:
                shown.append(run)
            elif run is not None:
                others.setdefault(str(recorded.setting), []).append(run)
        if not shown and others:  # no setting is chosen yet
            shown = others.pop(_best_setting(others))
        if shown:
            compared.rows.append(ComparedRow(row.label, shown))
        compared.trials += [run for group in others.values() for run in group]


def _add_rows_by_folder(compared: ComparedRuns, runs: Mapping[str, RunRecord]) -> None:
    rows: dict[str, dict[str, list[RunRecord]]] = {}
    for name, run in runs.items():
        label, *setting = Path(name).parts[:-1]
        rows.setdefault(label, {}).setdefault("/".join(setting), []).append(run)
    for label, settings in rows.items():
        compared.rows.append(ComparedRow(label, settings.pop(_best_setting(settings))))
        compared.trials += [run for group in settings.values() for run in group]


def _best_setting(settings: Mapping[str, Sequence[RunRecord]]) -> str:
    def score(setting: str) -> tuple[int, float]:
        values = [float_or_nan(run.metrics.get(SELECTION)) for run in settings[setting] if run.is_finished]
        return len(settings[setting]), max((value for value in values if np.isfinite(value)), default=-1.0)

    return max(settings, key=score)


def _group_by_experiment(runs: Sequence[RunRecord]) -> list[ComparedRow]:
    """One row for runs that differ only by their seed. Rows of the same method have the folder's name in the label."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        settings = {key: value for key, value in run.experiment.items() if key not in ("seed", "engine", "plugins")}
        known = run.experiment and run.state is not RunState.UNREADABLE
        groups.setdefault(repr(settings) if known else run.name, []).append(run)
    rows = [ComparedRow(group[0].method if group[0].experiment else group[0].name, group) for group in groups.values()]
    repeated = {row.label for row in rows if sum(other.label == row.label for other in rows) > 1}
    for row in rows:
        if row.label in repeated:
            row.label = f"{row.label} ({row.first.name})"
    return rows
