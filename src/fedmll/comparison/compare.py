"""`compare`: methods × seeds on the same data, resumable. Each method's settings can be tuned on validation data first.

A run that fails does not stop the others. A failure in training is remembered in the run's folder (failed.json): the
same run would fail again. A run that is rejected before training costs nothing, and is tried again each time.
"""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedmll.comparison import plan
from fedmll.comparison.comparison_folder import ComparisonFolder, add_command, describe_command
from fedmll.comparison.parallel_runs import ParallelRuns, RunKilled
from fedmll.comparison.plan import SettingChoices, Variant
from fedmll.comparison.results import (
    DEFAULT_METRICS,
    Comparison,
    ComparisonCell,
    ComparisonRow,
    check_metrics,
    metric_value,
)
from fedmll.comparison.statistics import compute_margin_tests
from fedmll.comparison.tables import TABLE_FILES
from fedmll.config.experiment import Experiment
from fedmll.core import files
from fedmll.core.errors import CheckpointError, ConfigError, DataError, FedmllError
from fedmll.core.text import suggest
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.data.fingerprint import Fingerprint
from fedmll.engines.start import check_parallel_runs, prepare_engine, shared_engine
from fedmll.evaluation.metric_definitions import SELECTION
from fedmll.runs.run_folder import DATA_FINGERPRINT_FILE
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import resume, run
from fedmll.training.trackers import ComparisonTrackers, check_trackers


class ComparisonCallback(Callback):
    """Watches a comparison: each of its runs, and the whole.

    With `jobs` > 1 the hook `on_run_end` of a run is not called: the result is in the run's folder when `on_cell_end`
    is called.
    """

    def on_comparison_start(self, rounds: int) -> None:
        """`rounds` is the number of rounds of all runs together."""

    def on_cell_start(self, cell: ComparisonCell) -> None: ...

    def on_cell_end(self, cell: ComparisonCell) -> None: ...

    def on_rounds_skipped(self, rounds: int) -> None:
        """So many of the planned rounds are not run: they are done already, or their run failed."""

    def callback_for(self, cell: ComparisonCell, parallel: bool) -> Callback:
        """The callback of one run. `parallel`: several runs go on at the same time."""
        self.on_cell_start(cell)
        return self


def compare(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | str | None = None,
    *,
    tune: SettingChoices | None = None,
    tune_seed: int | None = None,
    vary: SettingChoices | None = None,
    metrics: Sequence[str] = DEFAULT_METRICS,
    against: str | None = None,
    retry_failed: bool = False,
    callback: ComparisonCallback | None = None,
    jobs: int = 1,
    track: Sequence[str] = (),
    command: str | None = None,
) -> Comparison:
    """Compare methods over seeds on the same data.

    Args:
        experiment: the settings that all rows share.
        methods: names, with options as `fedprox:mu=0.1+weighting=equal`.
        seeds: one run of each row per seed.
        out: the folder for all runs and tables. The same folder again continues the comparison. None: nothing is kept.
        tune: section.key → values: for each method the best on validation data; `fedprox:mu` → values: for that method
            only.
        tune_seed: the seed that settings are chosen on; by default the first of `seeds`.
        vary: section.key → values: every method at every value.
        metrics: the columns of the tables.
        against: a row; the tables then have the margins over it, paired by seed, with tests.
        retry_failed: run again what failed before.
        callback: watches the comparison.
        jobs: how many runs go on at a time, each in its own process (without workers, if their number is "auto").
        track: trackers of every run: tensorboard, mlflow.
        command: the command line, for comparison.json.
    """
    if out is None:
        with tempfile.TemporaryDirectory() as temporary:
            return compare(
                experiment, methods, seeds, temporary, tune=tune, tune_seed=tune_seed, vary=vary, metrics=metrics,
                against=against, callback=callback, jobs=jobs, track=track, command=command,
            )  # fmt: skip
    check_metrics(metrics)
    check_trackers(track)
    if jobs < 1:
        raise ConfigError(f"jobs is the number of runs at a time, 1 or more; it is {jobs}.")
    if jobs > 1:
        check_parallel_runs(experiment.engine)
    else:
        prepare_engine(experiment.engine)
    if jobs > 1 and experiment.engine.workers == "auto":
        experiment = experiment.changed({"engine.workers": 0})
    callback, folder = callback or ComparisonCallback(), ComparisonFolder(out)
    runner = ComparisonRunner(
        experiment,
        plan.cross_variants([plan.parse_variant(name) for name in methods], vary or {}),
        seeds,
        folder,
        tune=tune,
        tune_seed=tune_seed,
        metrics=metrics,
        against=against,
        callback=callback,
        trackers=ComparisonTrackers(track, folder.path, callback.on_warning),
    )
    with folder.lock(), shared_engine(experiment.engine):
        runner.read_folders()
        callback.on_comparison_start(runner.total_rounds)
        commands = add_command(_earlier_commands(folder, callback), describe_command(command))

        def write(comparison: Comparison) -> Comparison:
            if comparison.finished or comparison.failed:
                folder.write(comparison, commands)
            return comparison

        comparison = runner.comparison()
        try:
            comparison = runner.run_all(retry_failed=retry_failed, jobs=jobs, on_run_end=write)
            if against is not None:
                tests = compute_margin_tests(comparison, against, comparison.metric_names)
                comparison = replace(comparison, tests=tests)
            return write(comparison)
        except BaseException:  # the tables have what is finished, however the comparison ends
            comparison = write(runner.comparison())
            raise
        finally:
            runner.trackers.end(comparison.is_done, [folder.path / name for name in TABLE_FILES])


def _earlier_commands(folder: ComparisonFolder, callback: Callback) -> list[dict[str, Any]]:
    try:
        record = folder.read_record()
    except DataError as error:
        kept = ""
        if folder.record_file.is_file():
            kept = f"kept as {files.move_damaged_file(folder.record_file).name}, and "
        callback.on_warning(f"{error} It is {kept}written again without the earlier commands.")
        record = None
    return [] if record is None else record.commands


class ComparisonRunner:
    """Plans all runs of a comparison and runs those that are not done. Creating it validates every experiment and reads
    no file. The arguments are those of `compare`; `variants` are the rows."""

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
        callback: ComparisonCallback | None = None,
        trackers: ComparisonTrackers | None = None,
    ) -> None:
        self.base, self.variants, self.seeds, self.folder, self.tune = base, variants, list(seeds), folder, tune or {}
        self.against, self.metrics = against, metrics
        self.callback = callback or ComparisonCallback()
        self.trackers = trackers or ComparisonTrackers((), folder.path)
        self.tune_seed = self.seeds[0] if tune_seed is None else tune_seed
        self.prepared: tuple[str, Federation] | None = None  # the data that was built last, and its key
        self.started: set[ComparisonCell] = set()
        self.ended: set[ComparisonCell] = set()
        self.damaged: set[ComparisonCell] = set()  # a file of the run cannot be read
        if tune_seed is not None and not tune:
            raise ConfigError("--tune-seed is the seed that settings are chosen on; give the settings with --tune.")
        if against is not None and against not in (known := [variant.label for variant in variants]):
            raise ConfigError(f"There is no row '{against}' to compare with (--against){suggest(against, known)}")
        plan.check_tuned_methods(variants, self.tune)
        self.choices = {variant.label: plan.choices_for(variant, self.tune) for variant in variants}
        self.cells: dict[str, dict[int, list[ComparisonCell]]] = {}  # row → seed → one run per setting of --tune
        self._create_cells()

    def _create_cells(self) -> None:
        """ConfigError if two of them are the same run."""
        seen: dict[object, ComparisonCell] = {}
        for variant in self.variants:
            choices = self.choices[variant.label]
            seeds = [*([self.tune_seed] if choices and self.tune_seed not in self.seeds else []), *self.seeds]
            for seed, setting in itertools.product(seeds, plan.setting_combinations(choices)):
                cell = self._create_cell(variant, seed, setting)
                for key in (cell.experiment.model_dump_json(exclude={"engine"}), cell.path):
                    if (other := seen.setdefault(key, cell)) is not cell:
                        raise ConfigError(
                            f"The same run is in the comparison twice: '{other}' and '{cell}'. Leave one of them out."
                        )
                self.cells.setdefault(variant.label, {}).setdefault(seed, []).append(cell)

    def _create_cell(self, variant: Variant, seed: int, setting: dict[str, Any]) -> ComparisonCell:
        overrides = plan.merge_settings(variant.label, variant.overrides, setting)
        experiment = self.base.changed(overrides | {"seed": seed})
        path = self.folder.run_path(variant.label, setting, seed)
        return ComparisonCell(variant=variant, seed=seed, setting=setting, path=path, experiment=experiment)

    @property
    def all_cells(self) -> list[ComparisonCell]:
        return [cell for by_seed in self.cells.values() for cells in by_seed.values() for cell in cells]

    def read_folders(self) -> None:
        """Read what earlier commands have done. A run with a damaged file counts as failed, and the others go on."""
        warnings: set[str] = set()
        for cell in self.all_cells:
            saved = None
            try:
                if cell.folder.is_run:
                    saved = cell.folder.load_experiment()
                if cell.folder.is_finished:
                    cell.summary = cell.folder.read_summary()
                    warnings |= set(cell.folder.check_plugins(cell.experiment))
                else:
                    cell.failure = cell.folder.read_failure()
                if cell.folder.has(DATA_FINGERPRINT_FILE):
                    cell.folder.read_data_fingerprints()
            except FedmllError as error:
                self.damaged.add(cell)
                cell.failure = None if cell.summary else str(error)
                warnings.add(f"{cell}: {error}")
            if saved is not None and (different := cell.experiment.differs(saved)):
                raise ConfigError(
                    f"{cell.path} holds another experiment ({', '.join(different)} differ); nothing was changed. Use "
                    "another --out, or give the options that this comparison was started with."
                )
        for text in sorted(warnings):
            self.callback.on_warning(text)

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
        *,
        retry_failed: bool = False,
        jobs: int = 1,
        on_run_end: Callable[[Comparison], object] = lambda comparison: None,
    ) -> Comparison:
        """Run what is not done yet. `on_run_end` gets the comparison after each run."""
        self._check_data()
        parallel = ParallelRuns(jobs, self._train)

        def end(cell: ComparisonCell, callback: Callback, error: FedmllError | None) -> None:
            self._store_outcome(cell, callback, error)
            self._close(cell)
            self.callback.on_cell_end(cell)
            on_run_end(self.comparison())

        try:
            while True:
                while parallel.has_room and (cell := next(self._ready_cells(), None)) is not None:
                    self.started.add(cell)
                    if cell.summary is not None or (cell.failure is not None and not retry_failed):
                        self.callback.on_rounds_skipped(cell.experiment.training.rounds)
                        self._close(cell)
                        continue
                    cell.folder.remove_failure()
                    cell.failure, callback = None, self.callback.callback_for(cell, jobs > 1)
                    try:
                        data = self._prepare(cell, callback)  # unreadable data (DataError) stops the comparison
                    except ConfigError as error:  # a partition may be impossible with this seed or this value only
                        end(cell, callback, error)
                        continue
                    self._check_validation_data(cell, data)
                    self.trackers.start()
                    if jobs > 1:
                        parallel.start(cell, data, callback)
                    else:
                        end(cell, callback, self._train_here(cell, data, callback))
                if not parallel.runs:
                    return self.comparison()
                for ended in parallel.wait():
                    end(*ended)
        finally:
            parallel.stop()

    def _ready_cells(self) -> Iterator[ComparisonCell]:
        """Runs that can start, row by row: first the trials of --tune, then the chosen setting at the other seeds."""
        for variant in self.variants:
            trials = self.cells[variant.label].get(self.tune_seed, [])
            yield from (cell for cell in trials if cell not in self.started)
            if not self.choices[variant.label] or self.ended.issuperset(trials):
                yield from (cell for cell in self._row(variant).cells if cell not in self.started)

    def _close(self, cell: ComparisonCell) -> None:
        """Mark a run as ended. If every setting of its row failed, the other seeds of the row are skipped."""
        self.ended.add(cell)
        label = cell.variant.label
        trials = self.cells[label].get(self.tune_seed, [])
        is_tuned = self.choices[label] and cell in trials and self.ended.issuperset(trials)
        if is_tuned and not self._row(cell.variant).cells:
            rest = [cells[0] for seed, cells in self.cells[label].items() if seed != self.tune_seed]
            self.callback.on_rounds_skipped(sum(other.experiment.training.rounds for other in rest))

    def _check_data(self) -> None:
        """Raise DataError if earlier runs had other data: one table is about one dataset."""
        if all(cell.summary is not None for cell in self.all_cells):
            return  # there will be no new run
        fingerprints: dict[str, dict[str, Fingerprint]] = {}
        for cell in self.all_cells:
            if cell.folder.has(DATA_FINGERPRINT_FILE) and cell not in self.damaged:
                key = federation.data_key(cell.experiment)
                if key not in fingerprints:
                    fingerprints[key] = self._prepare(cell, self.callback).fingerprints
                cell.folder.check_data(fingerprints[key])

    def _prepare(self, cell: ComparisonCell, callback: Callback) -> Federation:
        """Load and divide the data; once for all methods of a seed."""
        key = federation.data_key(cell.experiment)
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = None  # free the old data before the new data is loaded
            self.prepared = (key, federation.build(cell.experiment, callback.on_setup_progress))
        return self.prepared[1]

    def _check_validation_data(self, cell: ComparisonCell, data: Federation) -> None:
        labels = data.validation.labels
        is_trial = self.choices[cell.variant.label] and cell.seed == self.tune_seed
        if is_trial and not ((labels == 1).any(axis=0) & (labels == 0).any(axis=0)).any():
            raise ConfigError(
                f"--tune chooses by {SELECTION}, which needs validation data with a positive and a negative of some "
                f"class; there are {len(labels)} validation samples. Raise partition.holdout."
            )

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

    def _store_outcome(self, cell: ComparisonCell, callback: Callback, error: FedmllError | None) -> None:
        if error is None:
            cell.summary = cell.folder.read_summary()
            return
        cell.failure = str(error)
        if not isinstance(error, ConfigError | CheckpointError | RunKilled):
            cell.folder.write_failure(error)
        callback.on_warning(f"failed: {cell}: {cell.failure}")
        self.callback.on_rounds_skipped(cell.experiment.training.rounds - cell.folder.rounds_done)
