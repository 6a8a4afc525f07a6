"""`compare`: methods × seeds on the same data."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedmll.comparison.comparison_folder import ComparisonFolder, add_command, describe_command
from fedmll.comparison.execution import ComparisonRunner
from fedmll.comparison.plan import SettingChoices, cross_variants, parse_variant
from fedmll.comparison.results import DEFAULT_METRICS, Comparison, ComparisonCell, check_metrics
from fedmll.comparison.statistics import compute_margin_tests
from fedmll.comparison.tables import TABLE_FILES
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.training.callbacks import Callback
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
    if jobs > 1 and experiment.engine.workers == "auto":
        experiment = experiment.changed({"engine.workers": 0})
    callback, folder = callback or ComparisonCallback(), ComparisonFolder(out)
    runner = ComparisonRunner(
        experiment,
        cross_variants([parse_variant(name) for name in methods], vary or {}),
        seeds,
        folder,
        tune=tune,
        tune_seed=tune_seed,
        metrics=metrics,
        against=against,
        trackers=ComparisonTrackers(track, folder.path, callback.on_warning),
    )
    for text in sorted(runner.plugin_warnings):
        callback.on_warning(text)
    callback.on_comparison_start(runner.total_rounds)
    return _run_and_write(runner, callback, command, retry_failed, jobs)


def _run_and_write(
    runner: ComparisonRunner, callback: ComparisonCallback, command: str | None, retry_failed: bool, jobs: int
) -> Comparison:
    """Run the comparison. The tables are written after every run, and at the end, however it comes."""
    folder = runner.folder
    commands = add_command(folder.read_commands(), describe_command(command))

    def write(comparison: Comparison) -> Comparison:
        if comparison.finished or comparison.failed:
            folder.write(comparison, commands)
        return comparison

    def on_end(cell: ComparisonCell) -> None:
        callback.on_cell_end(cell)
        write(runner.comparison())

    comparison = runner.comparison()
    try:
        comparison = runner.run_all(
            lambda cell: callback.callback_for(cell, jobs > 1),
            callback.on_rounds_skipped,
            retry_failed=retry_failed,
            jobs=jobs,
            on_end=on_end,
        )
        if comparison.against is not None:
            tests = compute_margin_tests(comparison, comparison.against, comparison.metric_names)
            comparison = replace(comparison, tests=tests)
        return write(comparison)
    except BaseException:
        comparison = write(runner.comparison())
        raise
    finally:
        runner.trackers.end(comparison.is_done, [folder.path / name for name in TABLE_FILES])
