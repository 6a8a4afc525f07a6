"""The runs of a comparison: methods × seeds, resumable. Each method's settings can be tuned on validation data first.

A run that fails does not stop the others. What fails in training is remembered in the run's folder (failed.json): the
same again would fail the same way. What is refused before training costs nothing, and is tried again each time.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.data import federation
from fedmll.data.digest import Facts
from fedmll.data.federation import Federation
from fedmll.errors import CheckpointError, ConfigError, FedmllError, nearest
from fedmll.experiment import Experiment
from fedmll.running import tracking
from fedmll.running.comparison import SHOWN, Cell, Comparison, Row, Variant, measure
from fedmll.running.folder import DATA, FAILED, check_data, check_plugins, read_rows
from fedmll.running.jobs import Jobs, RunKilled
from fedmll.running.loop import SELECTION, Observer, resume, run
from fedmll.running.variants import Choices, check_tuned, choices_of, combinations, extended


class Grid:
    """Every experiment is made, and so checked, before the first one runs."""

    def __init__(
        self,
        base: Experiment,
        variants: Sequence[Variant],
        seeds: Sequence[int],
        out: Path,
        tune: Choices | None = None,
        against: str | None = None,
        metrics: Sequence[str] = SHOWN,
        tune_seed: int | None = None,
    ) -> None:
        self.against, self.metrics = against, metrics
        self.base, self.variants, self.seeds, self.out, self.tune = base, variants, list(seeds), out, tune or {}
        self.first = self.seeds[0] if tune_seed is None else tune_seed  # settings are tried on it
        self.prepared: tuple[str, Federation] | None = None
        self.trackers = tracking.Trackers((), out)
        self.begun: set[Cell] = set()  # what needs no decision any more, and
        self.over: set[Cell] = set()  # what is done with
        self.stale: set[str] = set()  # what finished runs began with and is no more
        if tune_seed is not None and not tune:
            raise ConfigError("--tune-seed says on which seed settings are chosen; give the settings with --tune.")
        if against is not None and against not in (known := [variant.label for variant in variants]):
            raise ConfigError(f"There is no row '{against}' to compare with (--against){nearest(against, known)}")
        check_tuned(variants, self.tune)
        self.choices = {variant.label: choices_of(variant, self.tune) for variant in variants}
        self.cells: dict[str, dict[int, list[Cell]]] = {}  # row → seed → a run of each setting of --tune
        self._plan()

    def _plan(self) -> None:
        """The same run twice is refused: it would only look like more of them."""
        seen: dict[str | Path, Cell] = {}
        for variant in self.variants:
            choices = self.choices[variant.label]
            seeds = [*([self.first] if choices and self.first not in self.seeds else []), *self.seeds]
            for seed, setting in itertools.product(seeds, combinations(choices)):
                cell = self._cell(variant, seed, setting)
                for same in (cell.experiment.model_dump_json(exclude={"engine"}), cell.folder):
                    if (twin := seen.setdefault(same, cell)) is not cell:
                        raise ConfigError(
                            f"The same run is in the comparison twice: '{twin}' and '{cell}'. Leave one of them out."
                        )
                self.cells.setdefault(variant.label, {}).setdefault(seed, []).append(cell)

    def _cell(self, variant: Variant, seed: int, setting: dict[str, Any]) -> Cell:
        overrides = extended(variant.label, variant.overrides, setting)
        experiment = self.base.changed(overrides | {"seed": seed})
        names = [variant.label, *(["+".join(f"{k}={v}" for k, v in setting.items())] if setting else [])]
        folder = self.out.joinpath(*(name.replace(":", "-").replace("/", "-") for name in names), f"seed-{seed}")
        saved, finished, failed = (folder / name for name in ("experiment.toml", "summary.json", FAILED))
        different = experiment.differs(Experiment.load(saved)) if saved.is_file() else []
        if different:
            raise ConfigError(
                f"{folder} holds another experiment ({', '.join(different)} differ); nothing was changed. Use another "
                "--out, or give the options that this comparison was started with."
            )
        cell = Cell(variant, seed, setting, folder, experiment)
        if finished.is_file():
            cell.summary = json.loads(finished.read_text())
            self.stale |= set(check_plugins(folder, experiment))
        elif failed.is_file():
            cell.failure = json.loads(failed.read_text())["reason"]
        return cell

    @property
    def rounds(self) -> int:
        """Of all runs together: while tuning, every setting on the first seed; then the chosen one on the rest."""
        return sum(
            cell.experiment.training.rounds
            for by_seed in self.cells.values()
            for seed, cells in by_seed.items()
            for cell in (cells if seed == self.first else cells[:1])
        )

    def go(
        self,
        watch: Callable[[Cell], Observer],
        skipped: Callable[[int], None],
        retry_failed: bool = False,
        jobs: int = 1,
        ended: Callable[[Cell], None] = lambda cell: None,
    ) -> Comparison:
        """Run what is not done yet, `jobs` at a time. `watch` gives the observer of a run; `skipped` hears of rounds
        that need no run, `ended` of every run that was made."""
        self._check_data(watch)
        beside = Jobs(jobs, self._train)
        try:
            while True:
                while beside.free and (cell := next(self._ready(), None)) is not None:
                    self.begun.add(cell)
                    if cell.summary is not None or (cell.failure is not None and not retry_failed):
                        skipped(cell.experiment.training.rounds)
                    elif (begun := self._begin(cell, watch, skipped)) is not None:
                        if jobs > 1:
                            beside.start(cell, *begun)
                            continue
                        self._end(cell, begun[1], skipped, self._alone(cell, *begun))
                        ended(cell)
                    self._close(cell, skipped)
                if not beside.jobs:
                    return self.comparison()
                for cell, observer, error in beside.ended():
                    self._end(cell, observer, skipped, error)
                    self._close(cell, skipped)
                    ended(cell)
        finally:
            beside.stop()

    def _ready(self) -> Iterator[Cell]:
        """Runs that can begin: row by row, what is tried on the first seed; then, with what was chosen, the rest."""
        for variant in self.variants:
            trials = self.cells[variant.label].get(self.first, [])
            yield from (cell for cell in trials if cell not in self.begun)
            if not self.choices[variant.label] or self.over.issuperset(trials):
                yield from (cell for cell in self._row(variant).cells if cell not in self.begun)

    def _close(self, cell: Cell, skipped: Callable[[int], None]) -> None:
        """A row of which every setting failed goes no further."""
        self.over.add(cell)
        label = cell.variant.label
        trials = self.cells[label].get(self.first, [])
        tried = self.choices[label] and cell in trials and self.over.issuperset(trials)
        if tried and not self._row(cell.variant).cells:
            rest = [cells[0] for seed, cells in self.cells[label].items() if seed != self.first]
            skipped(sum(other.experiment.training.rounds for other in rest))

    def _check_data(self, watch: Callable[[Cell], Observer]) -> None:
        """One table is of one dataset: what was run before is not shown beside runs on other data (DataError)."""
        every = [cell for by_seed in self.cells.values() for cells in by_seed.values() for cell in cells]
        if all(cell.summary is not None for cell in every):
            return  # nothing new comes in
        facts: dict[str, dict[str, Facts]] = {}
        for cell in every:
            if (cell.folder / DATA).is_file():
                key = _data_key(cell.experiment)
                if key not in facts:
                    facts[key] = self._federation(cell, watch(cell)).facts
                check_data(cell.folder, facts[key])

    def comparison(self) -> Comparison:
        """As far as it is known."""
        rows = [self._row(variant) for variant in self.variants]
        return Comparison(rows, self.seeds, self.tune, self.metrics, self.against)

    def _row(self, variant: Variant) -> Row:
        by_seed, choices = self.cells[variant.label], self.choices[variant.label]
        if not choices:
            return Row(variant.label, [by_seed[seed][0] for seed in self.seeds], [])
        trials = by_seed[self.first]
        scores = [measure(cell.summary, SELECTION) if cell.summary else math.nan for cell in trials]
        undecided = any(cell.summary is None and cell.failure is None for cell in trials)
        known = [place for place, score in enumerate(scores) if not math.isnan(score)]
        if undecided or not known:
            return Row(variant.label, [], trials, choices)
        best = max(known, key=lambda place: scores[place])
        return Row(variant.label, [by_seed[seed][best] for seed in self.seeds], trials, choices)

    def _begin(
        self, cell: Cell, watch: Callable[[Cell], Observer], skipped: Callable[[int], None]
    ) -> tuple[Federation, Observer] | None:
        """The run's data, and who watches it; None if its data cannot be divided as it wants."""
        (cell.folder / FAILED).unlink(missing_ok=True)
        cell.failure, observer = None, watch(cell)
        try:
            data = self._federation(cell, observer)  # data that cannot be read (DataError) stop the comparison
        except ConfigError as error:  # but a division can be impossible with this seed or this value only
            self._end(cell, observer, skipped, error)
            return None
        if self.choices[cell.variant.label] and cell.seed == self.first:
            _check_validation(data)
        self.trackers.begin()
        return data, observer

    def _alone(self, cell: Cell, data: Federation, observer: Observer) -> FedmllError | None:
        try:
            self._train(cell, data, observer)
        except FedmllError as error:
            return error
        return None

    def _train(self, cell: Cell, data: Federation, observer: Observer) -> None:
        """In this process, or in one of its own."""
        told = self.trackers.beside(cell, observer)
        if (cell.folder / "experiment.toml").is_file():
            resume(cell.folder, observer=told, engine=cell.experiment.engine.model_dump(), prepared=data)
        else:
            run(cell.experiment, cell.folder, observer=told, prepared=data)

    def _end(self, cell: Cell, observer: Observer, skipped: Callable[[int], None], error: FedmllError | None) -> None:
        if error is None:
            cell.summary = json.loads((cell.folder / "summary.json").read_text())
            return
        cell.failure = str(error)
        if not isinstance(error, ConfigError | CheckpointError | RunKilled):
            record = {"error": type(error).__name__, "reason": cell.failure}
            files.write(cell.folder / FAILED, json.dumps(record, indent=2) + "\n")
        observer.warning(f"failed: {cell}: {cell.failure}")
        skipped(cell.experiment.training.rounds - len(read_rows(cell.folder / "metrics.jsonl")))

    def _federation(self, cell: Cell, observer: Observer) -> Federation:
        """The same data for all methods of a seed is loaded and divided once."""
        key = _data_key(cell.experiment)
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = None  # let the old one go before the new one is loaded
            self.prepared = (key, federation.build(cell.experiment, observer.preparing))
        return self.prepared[1]


def _data_key(experiment: Experiment) -> str:
    """What the division of the data depends on."""
    parts = (experiment.data, experiment.partition, experiment.annotation)
    return f"{[p.model_dump_json() for p in parts]} {experiment.seed} {experiment.training.batch_size}"


def _check_validation(data: Federation) -> None:
    labels = data.validation.labels
    if not ((labels == 1).any(axis=0) & (labels == 0).any(axis=0)).any():
        raise ConfigError(
            f"--tune chooses by {SELECTION}, which needs validation data with a positive and a negative of some class; "
            f"there are {len(labels)} validation samples. Raise partition.holdout."
        )
