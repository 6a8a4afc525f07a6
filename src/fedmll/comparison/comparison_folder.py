"""`ComparisonFolder`: the one reader and writer of a comparison's folder.

ROW[/SETTING]/seed-N   the run of a row at a seed; SETTING is what --tune sets
table.md, .csv, .tex   the tables (see `tables`); also tests.csv and tuning.md
comparison.json        the record: what was compared, so that it can be read, shown and repeated

The record has these keys:

commands   each command that worked on the comparison, with versions and, if known, the git commits of the current
           folder and of fedmll's own source; the last one is the latest
data       the data that the runs began with: name, number of samples, and a digest of labels and images
seeds, tune, tune_seed, metrics, against   what the command asked for
done       whether all runs are finished or failed
rows       every row and its runs: folder, seed, setting of --tune, state, reason, and whether it is in the table
tables     as in table.md, with its notes
checksum   of all of this, so that a damaged record is noticed
"""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from fedmll.comparison.results import Comparison, ComparisonCell, ComparisonRow
from fedmll.comparison.tables import MARKDOWN_FILE, write_tables
from fedmll.core import files
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.text import printable
from fedmll.core.versions import UNINSTALLED, package_version
from fedmll.evaluation.metric_definitions import HEADLINE, metrics_in
from fedmll.runs.formatting import TextTable, from_checked_json, mean_and_std, to_checked_json
from fedmll.runs.run_folder import DATA_FINGERPRINT_FILE, EXPERIMENT_FILE, LOCK_FILE, RunState
from fedmll.runs.run_overview import RunRecord, find_runs

RECORD_FILE = "comparison.json"
PACKAGES = ("fedmll", "torch", "numpy", "scipy")  # whose versions are recorded
GIT_SECONDS = 5
MISSING_RUN = f"its folder is gone or has no {EXPERIMENT_FILE}"


class RecordedRun(BaseModel):
    """A run in comparison.json. `folder` is relative to the comparison's folder."""

    folder: str
    seed: int
    setting: dict[str, Any]
    state: RunState
    reason: str | None
    in_table: bool


class RecordedRow(BaseModel):
    label: str
    runs: list[RecordedRun]


class RecordedTable(BaseModel):
    header: list[str]
    rows: list[list[str]]


class ComparisonRecord(BaseModel):
    """What a reader needs of comparison.json."""

    commands: list[dict[str, Any]] = []
    rows: list[RecordedRow]
    tables: list[RecordedTable]
    notes: list[str]
    done: bool

    def missing_runs(self, found: Iterable[str]) -> list[str]:
        """Finished runs of the record that are not among the folders that were found."""
        known = set(found)
        runs = [run for row in self.rows for run in row.runs]
        return [run.folder for run in runs if run.state is RunState.FINISHED and run.folder not in known]


@dataclass(frozen=True, kw_only=True)
class ComparisonOverview:
    """A comparison as `fedmll show` shows it: its tables, its notes, and all runs that have begun."""

    tables: list[TextTable]
    notes: list[str]
    runs: list[RunRecord]

    @property
    def unfinished(self) -> list[RunRecord]:
        return [run for run in self.runs if not run.is_finished]


class ComparisonFolder:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @property
    def record_file(self) -> Path:
        return self.path / RECORD_FILE

    def run_path(self, label: str, setting: Mapping[str, Any], seed: int) -> Path:
        """The folder of one run."""
        names = [label, *(["+".join(f"{key}={value}" for key, value in setting.items())] if setting else [])]
        return self.path.joinpath(*map(folder_name, names), f"seed-{seed}")

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Let one command at a time work on the comparison."""
        self.path.mkdir(parents=True, exist_ok=True)
        problem = f"Another `fedmll compare` is working in {self.path}"
        advice = "Wait until it has finished, stop it, or use another --out."
        with files.exclusive_lock(self.path / LOCK_FILE, problem, advice, inherited=False):
            yield

    # ---- writing

    def write(self, comparison: Comparison, commands: Sequence[dict[str, Any]]) -> None:
        """Write the record and the tables."""
        record = {
            "commands": list(commands),
            "data": self._describe_data(comparison),
            "seeds": comparison.seeds,
            "tune": {key: list(values) for key, values in comparison.tune.items()},
            "tune_seed": comparison.tune_seed,
            "metrics": list(comparison.metrics),
            "against": comparison.against,
            "done": comparison.is_done,
            "rows": [self._describe_row(row) for row in comparison.rows],
            "tables": [{"header": header, "rows": rows} for header, rows in comparison.tables],
            "notes": comparison.notes,
        }
        files.write_atomic(self.record_file, to_checked_json(record, indent=1))
        write_tables(comparison, self.path)

    def _describe_row(self, row: ComparisonRow) -> dict[str, Any]:
        runs = [
            {
                "folder": cell.path.relative_to(self.path).as_posix(),
                "seed": cell.seed,
                "setting": cell.setting,
                "state": _cell_state(cell),
                "reason": cell.failure,
                "in_table": cell in row.cells,
            }
            for cell in row.runs
        ]
        return {"label": row.label, "settings": row.runs[0].variant.overrides, "chosen": row.setting, "runs": runs}

    def _describe_data(self, comparison: Comparison) -> list[dict[str, Any]]:
        """Each dataset once, however many runs share it."""
        described: dict[str, dict[str, Any]] = {}
        for cell in comparison.runs:
            try:
                fingerprints = cell.folder.read_data_fingerprints() if cell.folder.has(DATA_FINGERPRINT_FILE) else {}
            except DataError:
                continue  # `compare` has warned about the damaged file
            if fingerprints:
                digest = hashlib.blake2b(json.dumps(fingerprints, sort_keys=True).encode(), digest_size=16).hexdigest()
                samples = {part: of_part["samples"] for part, of_part in fingerprints.items()}
                described[digest] = {"name": cell.experiment.data.label, "digest": digest, "samples": samples}
        return list(described.values())

    # ---- reading

    def read_record(self) -> ComparisonRecord | None:
        """The record; None if there is none yet. DataError if it is damaged, or missing although there are tables."""
        if not self.record_file.is_file():
            if (self.path / MARKDOWN_FILE).is_file():
                raise DataError(f"{self.record_file} is missing.")
            return None
        try:
            return ComparisonRecord.model_validate(from_checked_json(self.record_file.read_bytes()))
        except ValueError as error:
            raise DataError(f"{self.record_file} is damaged ({printable(error, 160)}).") from None

    def read_overview(self) -> ComparisonOverview:
        """The tables of the record; without a record (in the first run, or if it is damaged) a table of the runs."""
        runs = list(find_runs(self.path))
        if not runs:
            raise ConfigError(
                f"{self.path} holds no run and no comparison: there is no {EXPERIMENT_FILE} in it or below it."
            )
        notes = []
        try:
            if (record := self.read_record()) is not None:
                tables = [(table.header, table.rows) for table in record.tables]
                missing = record.missing_runs(run.name for run in runs)
                notes = [f"The run {folder} is in the table, but {MISSING_RUN}." for folder in missing]
                return ComparisonOverview(tables=tables, notes=record.notes + notes, runs=runs)
        except DataError as error:
            notes = [f"{error} The table was made from the folders of the runs."]
        return ComparisonOverview(tables=[_table_of_runs(runs)], notes=notes, runs=runs)


def folder_name(label: str) -> str:
    """A label without the characters that a folder's name cannot have."""
    return label.replace(":", "-").replace("/", "-")


def _cell_state(cell: ComparisonCell) -> RunState:
    if cell.failure is not None:
        return RunState.FAILED  # also a run that was rejected before it had a folder
    return RunState.FINISHED if cell.summary is not None else cell.folder.state


def _table_of_runs(runs: Sequence[RunRecord]) -> TextTable:
    """One row for each folder of seeds: mean ± standard deviation over the finished ones."""
    groups: dict[str, list[RunRecord]] = {}
    for run in runs:
        groups.setdefault(Path(run.name).parent.as_posix(), []).append(run)
    finished = {label: [run for run in group if run.is_finished] for label, group in groups.items()}
    known = {name for group in finished.values() for run in group for name in run.metrics}
    names = [name for name in metrics_in(HEADLINE) if name in known]
    rows = []
    for label, group in groups.items():
        values = [_format_mean([run.metrics.get(name) for run in finished[label]]) for name in names]
        rows.append([label, f"{len(finished[label])} of {len(group)}", *values])
    return ["runs", "finished", *names], rows


def _format_mean(values: Sequence[Any]) -> str:
    known = np.array([value for value in values if value is not None], np.float64)
    return mean_and_std(known) if len(known) and len(known) == len(values) else "–"


# ---- commands


def describe_command(command: str | None) -> dict[str, Any]:
    """The command that works on a comparison now, with versions and git commits."""
    commits = {"here": git_commit(Path.cwd()), "fedmll": git_commit(Path(__file__).parent, Path(__file__).name)}
    return {
        "command": command,
        "versions": _package_versions(),
        "commit": {name: commit for name, commit in commits.items() if commit},
    }


def add_command(earlier: Sequence[dict[str, Any]], command: dict[str, Any]) -> list[dict[str, Any]]:
    """All commands, the latest last. The same command again replaces the earlier entry."""
    others = [entry for entry in earlier if {key: entry.get(key) for key in command} != command]
    return [*others, command | {"when": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}]


def _package_versions() -> dict[str, str]:
    versions = {package: package_version(package) or UNINSTALLED for package in PACKAGES}
    return {"python": platform.python_version()} | versions


def git_commit(folder: Path, tracked_file: str | None = None) -> str | None:
    """The commit of a folder, with -dirty if files differ from it. None if there is none, or if git does not track
    `tracked_file` there (an installed package in the virtual environment of another project)."""

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *words], capture_output=True, text=True, timeout=GIT_SECONDS, check=False
            )
        except (OSError, subprocess.SubprocessError):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if tracked_file is not None and not git("ls-files", "--", tracked_file):
        return None
    return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*") or None
