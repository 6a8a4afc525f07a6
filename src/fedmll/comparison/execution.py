"""The runs of a comparison: methods × seeds, resumable. Each method's settings can be tuned on validation data first.

A run that fails does not stop the others. A failure in training is remembered in the run's folder (failed.json): the
same run would fail again. A run that is rejected before training costs nothing, and is tried again each time.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_pipes
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from fedmll.comparison.comparison_folder import ComparisonFolder
from fedmll.comparison.plan import (
    SettingChoices,
    Variant,
    check_tuned_methods,
    choices_for,
    merge_settings,
    setting_combinations,
)
from fedmll.comparison.results import DEFAULT_METRICS, Comparison, ComparisonCell, ComparisonRow, metric_value
from fedmll.config.experiment import Experiment
from fedmll.core.errors import CheckpointError, ConfigError, FedmllError
from fedmll.core.processes import fork_process
from fedmll.core.text import suggest
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.data.fingerprint import Fingerprint
from fedmll.evaluation.metric_definitions import SELECTION
from fedmll.runs.run_folder import DATA_FINGERPRINT_FILE
from fedmll.training.callbacks import Callback, Result
from fedmll.training.round_loop import resume, run
from fedmll.training.trackers import ComparisonTrackers

MakeCallback = Callable[[ComparisonCell], Callback]
SkipRounds = Callable[[int], None]
Train = Callable[[ComparisonCell, Federation, Callback], None]


class ComparisonRunner:
    """Plans all runs of a comparison and runs those that are not done. Creating it validates every experiment.

    Args:
        base: the settings that all rows share.
        variants: the rows.
        seeds: the seeds of the tables.
        folder: where the runs are.
        tune: the settings to choose from, on validation data.
        tune_seed: the seed that settings are chosen on; by default the first seed.
        metrics: the columns of the tables.
        against: the row that margins are computed over.
        trackers: the trackers of the runs.
    """

    def __init__(
        self,
        base: Experiment,
        variants: Sequence[Variant],
        seeds: Sequence[int],
        folder: ComparisonFolder,
        *,
        tune: SettingChoices | None = None,
        tune_seed: int | None = None,
        metrics: Sequence[str] = DEFAULT_METRICS,
        against: str | None = None,
        trackers: ComparisonTrackers | None = None,
    ) -> None:
        self.base, self.variants, self.seeds, self.folder, self.tune = base, variants, list(seeds), folder, tune or {}
        self.against, self.metrics = against, metrics
        self.trackers = trackers or ComparisonTrackers((), folder.path)
        self.tune_seed = self.seeds[0] if tune_seed is None else tune_seed
        self.prepared: tuple[str, Federation] | None = None  # the data that was built last, and its key
        self.started: set[ComparisonCell] = set()
        self.ended: set[ComparisonCell] = set()
        self.plugin_warnings: set[str] = set()  # plug-ins that have changed since runs were finished
        if tune_seed is not None and not tune:
            raise ConfigError("--tune-seed is the seed that settings are chosen on; give the settings with --tune.")
        if against is not None and against not in (known := [variant.label for variant in variants]):
            raise ConfigError(f"There is no row '{against}' to compare with (--against){suggest(against, known)}")
        check_tuned_methods(variants, self.tune)
        self.choices = {variant.label: choices_for(variant, self.tune) for variant in variants}
        self.cells: dict[str, dict[int, list[ComparisonCell]]] = {}  # row → seed → one run per setting of --tune
        self._plan()

    def _plan(self) -> None:
        """Create all cells. ConfigError if two of them are the same run."""
        seen: dict[object, ComparisonCell] = {}
        for variant in self.variants:
            choices = self.choices[variant.label]
            seeds = [*([self.tune_seed] if choices and self.tune_seed not in self.seeds else []), *self.seeds]
            for seed, setting in itertools.product(seeds, setting_combinations(choices)):
                cell = self._create_cell(variant, seed, setting)
                for key in (cell.experiment.model_dump_json(exclude={"engine"}), cell.path):
                    if (other := seen.setdefault(key, cell)) is not cell:
                        raise ConfigError(
                            f"The same run is in the comparison twice: '{other}' and '{cell}'. Leave one of them out."
                        )
                self.cells.setdefault(variant.label, {}).setdefault(seed, []).append(cell)

    def _create_cell(self, variant: Variant, seed: int, setting: dict[str, Any]) -> ComparisonCell:
        overrides = merge_settings(variant.label, variant.overrides, setting)
        experiment = self.base.changed(overrides | {"seed": seed})
        path = self.folder.run_path(variant.label, setting, seed)
        cell = ComparisonCell(variant=variant, seed=seed, setting=setting, path=path, experiment=experiment)
        different = experiment.differs(cell.folder.load_experiment()) if cell.folder.is_run else []
        if different:
            raise ConfigError(
                f"{path} holds another experiment ({', '.join(different)} differ); nothing was changed. Use another "
                "--out, or give the options that this comparison was started with."
            )
        if cell.folder.is_finished:
            cell.summary = cell.folder.read_summary()
            self.plugin_warnings |= set(cell.folder.check_plugins(experiment))
        else:
            cell.failure = cell.folder.read_failure()
        return cell

    @property
    def total_rounds(self) -> int:
        """Of all runs together: every setting at the seed for tuning, then the chosen setting at the other seeds."""
        return sum(
            cell.experiment.training.rounds
            for by_seed in self.cells.values()
            for seed, cells in by_seed.items()
            for cell in (cells if seed == self.tune_seed else cells[:1])
        )

    def comparison(self) -> Comparison:
        """The comparison with all runs that are done so far."""
        return Comparison(
            rows=[self._row(variant) for variant in self.variants],
            seeds=self.seeds,
            tune=self.tune,
            tune_seed=self.tune_seed if self.tune else None,
            metrics=self.metrics,
            against=self.against,
        )

    def _row(self, variant: Variant) -> ComparisonRow:
        by_seed, choices = self.cells[variant.label], self.choices[variant.label]
        if not choices:
            return ComparisonRow(label=variant.label, cells=[by_seed[seed][0] for seed in self.seeds])
        trials = by_seed[self.tune_seed]
        scores = [metric_value(cell.summary, SELECTION) if cell.summary else math.nan for cell in trials]
        known = [place for place, score in enumerate(scores) if not math.isnan(score)]
        cells: list[ComparisonCell] = []
        if known and all(cell.is_done for cell in trials):
            best = max(known, key=lambda place: scores[place])
            cells = [by_seed[seed][best] for seed in self.seeds]
        return ComparisonRow(label=variant.label, cells=cells, trials=trials, choices=choices)

    def run_all(
        self,
        make_callback: MakeCallback,
        skip_rounds: SkipRounds,
        *,
        retry_failed: bool = False,
        jobs: int = 1,
        on_end: Callable[[ComparisonCell], None] = lambda cell: None,
    ) -> Comparison:
        """Run what is not done yet.

        Args:
            make_callback: creates the callback of a run.
            skip_rounds: is called with the number of planned rounds that need no run.
            retry_failed: run again what failed before.
            jobs: how many runs go on at a time.
            on_end: is called after each run.
        """
        self._check_data(make_callback)
        parallel = ParallelRuns(jobs, self._train)
        try:
            while True:
                while parallel.has_room and (cell := next(self._ready_cells(), None)) is not None:
                    self.started.add(cell)
                    if cell.summary is not None or (cell.failure is not None and not retry_failed):
                        skip_rounds(cell.experiment.training.rounds)
                    elif (prepared := self._prepare(cell, make_callback, skip_rounds)) is not None:
                        if jobs > 1:
                            parallel.start(cell, *prepared)
                            continue
                        self._store_outcome(cell, prepared[1], skip_rounds, self._train_here(cell, *prepared))
                        on_end(cell)
                    self._close(cell, skip_rounds)
                if not parallel.runs:
                    return self.comparison()
                for cell, callback, error in parallel.wait():
                    self._store_outcome(cell, callback, skip_rounds, error)
                    self._close(cell, skip_rounds)
                    on_end(cell)
        finally:
            parallel.stop()

    def _ready_cells(self) -> Iterator[ComparisonCell]:
        """Runs that can start, row by row: first the trials of --tune, then the chosen setting at the other seeds."""
        for variant in self.variants:
            trials = self.cells[variant.label].get(self.tune_seed, [])
            yield from (cell for cell in trials if cell not in self.started)
            if not self.choices[variant.label] or self.ended.issuperset(trials):
                yield from (cell for cell in self._row(variant).cells if cell not in self.started)

    def _close(self, cell: ComparisonCell, skip_rounds: SkipRounds) -> None:
        """Mark a run as ended. If every setting of its row failed, the other seeds of the row are skipped."""
        self.ended.add(cell)
        label = cell.variant.label
        trials = self.cells[label].get(self.tune_seed, [])
        is_tuned = self.choices[label] and cell in trials and self.ended.issuperset(trials)
        if is_tuned and not self._row(cell.variant).cells:
            rest = [cells[0] for seed, cells in self.cells[label].items() if seed != self.tune_seed]
            skip_rounds(sum(other.experiment.training.rounds for other in rest))

    def _check_data(self, make_callback: MakeCallback) -> None:
        """Raise DataError if earlier runs had other data: one table is about one dataset."""
        cells = [cell for by_seed in self.cells.values() for of_seed in by_seed.values() for cell in of_seed]
        if all(cell.summary is not None for cell in cells):
            return  # there will be no new run
        fingerprints: dict[str, dict[str, Fingerprint]] = {}
        for cell in cells:
            if cell.folder.has(DATA_FINGERPRINT_FILE):
                key = _data_key(cell.experiment)
                if key not in fingerprints:
                    fingerprints[key] = self._build_federation(cell, make_callback(cell)).fingerprints
                cell.folder.check_data(fingerprints[key])

    def _prepare(
        self, cell: ComparisonCell, make_callback: MakeCallback, skip_rounds: SkipRounds
    ) -> tuple[Federation, Callback] | None:
        """The run's data and callback; None if the data cannot be divided as the run asks."""
        cell.folder.remove_failure()
        cell.failure, callback = None, make_callback(cell)
        try:
            data = self._build_federation(cell, callback)  # unreadable data (DataError) stops the comparison
        except ConfigError as error:  # a partition may be impossible with this seed or this value only
            self._store_outcome(cell, callback, skip_rounds, error)
            return None
        if self.choices[cell.variant.label] and cell.seed == self.tune_seed:
            _check_validation_data(data)
        self.trackers.start()
        return data, callback

    def _train_here(self, cell: ComparisonCell, data: Federation, callback: Callback) -> FedmllError | None:
        try:
            self._train(cell, data, callback)
        except FedmllError as error:
            return error
        return None

    def _train(self, cell: ComparisonCell, data: Federation, callback: Callback) -> None:
        """Start or continue one run, in this process or in a process of its own."""
        callback = self.trackers.add_to(callback, cell.path)
        if cell.folder.is_run:
            resume(cell.path, callback=callback, engine=cell.experiment.engine.model_dump(), prepared=data)
        else:
            run(cell.experiment, cell.path, callback=callback, prepared=data)

    def _store_outcome(
        self, cell: ComparisonCell, callback: Callback, skip_rounds: SkipRounds, error: FedmllError | None
    ) -> None:
        if error is None:
            cell.summary = cell.folder.read_summary()
            return
        cell.failure = str(error)
        if not isinstance(error, ConfigError | CheckpointError | RunKilled):
            cell.folder.write_failure(error)
        callback.on_warning(f"failed: {cell}: {cell.failure}")
        skip_rounds(cell.experiment.training.rounds - len(cell.folder.read_metrics()))

    def _build_federation(self, cell: ComparisonCell, callback: Callback) -> Federation:
        """Load and divide the data; once for all methods of a seed."""
        key = _data_key(cell.experiment)
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = None  # free the old data before the new data is loaded
            self.prepared = (key, federation.build(cell.experiment, callback.on_setup_progress))
        return self.prepared[1]


def _data_key(experiment: Experiment) -> str:
    """The settings that the division of the data depends on."""
    parts = (experiment.data, experiment.partition, experiment.annotation)
    return f"{[p.model_dump_json() for p in parts]} {experiment.seed} {experiment.training.batch_size}"


def _check_validation_data(data: Federation) -> None:
    labels = data.validation.labels
    if not ((labels == 1).any(axis=0) & (labels == 0).any(axis=0)).any():
        raise ConfigError(
            f"--tune chooses by {SELECTION}, which needs validation data with a positive and a negative of some class; "
            f"there are {len(labels)} validation samples. Raise partition.holdout."
        )


# ---- Several runs at a time, each in its own process. Their callbacks are called here, through pipes.
#
# The processes end with this one, however it ends. A run that is stopped is like a run that is killed: its folder is
# valid, and it continues from its last checkpoint.

FORWARDED_HOOKS = ("on_setup_progress", "on_client_end", "on_round_end", "on_note", "on_warning")
ENDED = "ended"


class RunKilled(FedmllError):
    """The process of a run has ended without a result, and this process did not end it."""


@dataclass
class _ParallelRun:
    cell: ComparisonCell
    data: Federation
    callback: Callback
    process: BaseProcess
    pipe: Connection


class ParallelRuns:
    """Runs in processes of their own.

    Args:
        max_runs: how many at a time.
        train: is called in the run's process.
    """

    def __init__(self, max_runs: int, train: Train) -> None:
        self.max_runs, self.train, self.runs = max_runs, train, list[_ParallelRun]()

    @property
    def has_room(self) -> bool:
        return len(self.runs) < self.max_runs

    def start(self, cell: ComparisonCell, data: Federation, callback: Callback) -> None:
        sys.stdout.flush()  # the fork would write buffered text a second time
        sys.stderr.flush()
        ours, theirs = multiprocessing.Pipe()
        process = fork_process(_train_in_process, theirs, ours, self.train, cell, data, may_fork=True)
        theirs.close()
        self.runs.append(_ParallelRun(cell, data, callback, process, ours))

    def wait(self) -> Iterator[tuple[ComparisonCell, Callback, FedmllError | None]]:
        """Wait for events and call the callbacks. Yields each run that has ended, with its error if it had one."""
        pipes = {entry.pipe: entry for entry in self.runs}
        for pipe in wait_for_pipes(list(pipes)):
            entry = pipes[pipe]  # type: ignore[index]
            try:
                event, arguments = entry.pipe.recv()
            except (EOFError, ConnectionResetError):
                self._close(entry)
                yield entry.cell, entry.callback, RunKilled(_describe_exit(entry.process))
                continue
            if event != ENDED:
                _call_hook(entry, event, arguments)
                continue
            self._close(entry)
            kind, text = arguments
            if kind is not None and not issubclass(kind, FedmllError):
                raise kind(text)
            yield entry.cell, entry.callback, None if kind is None else kind(text)

    def stop(self) -> None:
        """End all runs that are still going; nothing that is on disk is lost."""
        for entry in self.runs:
            entry.process.kill()
        for entry in list(self.runs):
            self._close(entry)

    def _close(self, entry: _ParallelRun) -> None:
        self.runs.remove(entry)
        entry.process.join()
        entry.pipe.close()


def _describe_exit(process: BaseProcess) -> str:
    code = process.exitcode or 0
    cause = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
    return (
        f"The process of this run {cause}. Signal 9 usually means that memory ran out: use fewer --jobs. The same "
        "command continues the run."
    )


def _call_hook(entry: _ParallelRun, hook: str, arguments: tuple[Any, ...]) -> None:
    if hook == "on_run_start":
        experiment, first_round = arguments
        entry.callback.on_run_start(experiment, entry.data, first_round)
    else:
        getattr(entry.callback, hook)(*arguments)


class _PipeCallback(Callback):
    """Sends the calls of hooks through a pipe."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe

        def send(hook: str) -> Callable[..., None]:
            return lambda *arguments: pipe.send((hook, arguments))

        for hook in FORWARDED_HOOKS:
            setattr(self, hook, send(hook))

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        self.pipe.send(("on_run_start", (experiment, first_round)))

    def on_run_end(self, result: Result) -> None:
        """Nothing is sent: the summary is in the run's folder."""


def _train_in_process(
    pipe: Connection, parents_end: Connection, train: Train, cell: ComparisonCell, data: Federation
) -> None:
    parents_end.close()
    torch.set_num_threads(1)
    kind: type[BaseException] | None = None
    text = ""
    try:
        train(cell, data, _PipeCallback(pipe))
    except FedmllError as error:
        kind, text = type(error), str(error)
    except Exception:  # a programming error: the traceback must reach the user
        kind, text = RuntimeError, f"in the process of a run:\n{traceback.format_exc()}"
    pipe.send((ENDED, (kind, text)))
