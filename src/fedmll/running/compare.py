"""compare: methods × seeds on the same data; what they are planned as, run as and written down as."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running import tracking
from fedmll.running.comparison import SHOWN, Cell, Comparison, check_metrics, measured
from fedmll.running.grid import Grid
from fedmll.running.margins import margin_tests
from fedmll.running.observers import Observer
from fedmll.running.record import Record
from fedmll.running.tables import WRITTEN, write_tables
from fedmll.running.variants import Choices, crossed, parse_variant


class GridObserver(Observer):
    """What watches a comparison: every run, and the whole. With `jobs` > 1 a run's `finished` is not told: its result
    is in its folder when the run is `over`."""

    def planned(self, rounds: int) -> None: ...

    def running(self, cell: Cell) -> None: ...

    def skipped(self, rounds: int) -> None: ...

    def over(self, cell: Cell) -> None: ...

    def watching(self, cell: Cell, alone: bool) -> Observer:
        """Who watches this run; `alone`: no other runs beside it."""
        self.running(cell)
        return self


def compare(
    experiment: Experiment,
    methods: Sequence[str],
    seeds: Sequence[int] = (0, 1, 2),
    out: Path | str | None = None,
    *,
    tune: Choices | None = None,
    tune_seed: int | None = None,
    vary: Choices | None = None,
    metrics: Sequence[str] = SHOWN,
    against: str | None = None,
    retry_failed: bool = False,
    observer: GridObserver | None = None,
    jobs: int = 1,
    track: Sequence[str] = (),
    command: str | None = None,
) -> Comparison:
    """Methods × seeds on the same data. `out` then has every run and the tables; the same `out` again: it goes on.

    methods   names, with options as `fedprox:mu=0.1+weights=equal`
    tune      section.key → values: each method's best on validation data; `fedprox:mu` → values: of that method alone
    tune_seed the seed that settings are chosen on; default: the first of `seeds`
    vary      section.key → values: every method at every value
    against   a row: also the margins over it, paired by seed, with tests
    jobs      so many runs at a time, each in a process of its own (and without workers, if that was left open)
    track     trackers of every run: tensorboard, mlflow
    command   what was typed, for comparison.json
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return compare(
                experiment, methods, seeds, folder, tune=tune, tune_seed=tune_seed, vary=vary, metrics=metrics,
                against=against, observer=observer, jobs=jobs, track=track, command=command,
            )  # fmt: skip
    check_metrics(metrics)
    tracking.check(track)
    if jobs < 1:
        raise ConfigError(f"jobs is how many runs go on at a time, 1 or more; it is {jobs}.")
    if jobs > 1 and experiment.engine.workers == "auto":
        experiment = experiment.changed({"engine.workers": 0})
    watch, out = observer or GridObserver(), Path(out)
    variants = crossed([parse_variant(name) for name in methods], vary or {})
    plan = Grid(experiment, variants, seeds, out, tune, against, metrics, tune_seed)
    plan.trackers = tracking.Trackers(track, out, watch.warning)
    for text in sorted(plan.stale):
        watch.warning(text)
    watch.planned(plan.rounds)
    return _go(plan, Record(out, command, plan), watch, retry_failed, jobs)


def _go(plan: Grid, record: Record, watch: GridObserver, retry_failed: bool, jobs: int) -> Comparison:
    """Run it; after every run, and in the end however that comes, the tables are those of what is finished."""
    out = plan.out

    def written(found: Comparison) -> Comparison:
        if found.finished or found.failed:
            write_tables(found, out)
            record.write(found)
        return found

    def ended(cell: Cell) -> None:
        watch.over(cell)
        written(plan.comparison())

    try:
        found = plan.go(lambda cell: watch.watching(cell, jobs == 1), watch.skipped, retry_failed, jobs, ended)
        if found.against is not None:
            found = replace(found, tests=margin_tests(found, found.against, measured(found.metrics)))
        return written(found)
    except BaseException:
        found = written(plan.comparison())
        raise
    finally:
        plan.trackers.leave(all(row.done for row in found.rows), [out / name for name in WRITTEN])
