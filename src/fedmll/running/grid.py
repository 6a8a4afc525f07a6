"""compare: methods × seeds, resumable. Each method's settings can be tuned on validation data first.

A run that fails does not stop the others. What fails in training is remembered in the run's folder (failed.json): the
same again would fail the same way. What is refused before training costs nothing, and is tried again each time.
"""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmll import files
from fedmll.data import federation
from fedmll.data.digest import Facts
from fedmll.data.federation import Federation
from fedmll.errors import CheckpointError, ConfigError, FedmllError, nearest
from fedmll.experiment import Experiment, parse_value
from fedmll.running.comparison import SHOWN, Cell, Comparison, Row, Variant, check_metrics, measure
from fedmll.running.folder import DATA, check_data, check_plugins, read_rows
from fedmll.running.loop import SELECTION, Observer, resume, run

FAILED = "failed.json"

Choices = Mapping[str, Sequence[Any]]  # section.key → values


class GridObserver(Observer):
    """What watches a comparison: every run, and the whole."""

    def planned(self, rounds: int) -> None: ...

    def running(self, cell: Cell) -> None: ...

    def skipped(self, rounds: int) -> None: ...


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
) -> Comparison:
    """Methods × seeds on the same data. `out` then has every run and the tables; the same `out` again: it goes on.

    methods   names, with options as `fedprox:mu=0.1+weights=equal`
    tune      section.key → values: each method's best on validation data
    tune_seed the seed that settings are chosen on; default: the first of `seeds`
    vary      section.key → values: every method at every value
    against   a row: also the margins over it, paired by seed
    """
    if out is None:
        with tempfile.TemporaryDirectory() as folder:
            return compare(
                experiment, methods, seeds, folder, tune=tune, tune_seed=tune_seed, vary=vary, metrics=metrics,
                against=against, observer=observer,
            )  # fmt: skip
    check_metrics(metrics)
    watch = observer or GridObserver()
    variants = crossed([parse_variant(name) for name in methods], vary or {})
    plan = Grid(experiment, variants, seeds, Path(out), tune, against, metrics, tune_seed)
    for text in sorted(plan.stale):
        watch.warning(text)
    watch.planned(plan.rounds)

    def watched(cell: Cell) -> Observer:
        watch.running(cell)
        return watch

    try:
        return plan.go(watched, watch.skipped, retry_failed)
    finally:  # what is finished is worth a table, however it ends
        found = plan.comparison()
        if found.finished or found.failed:
            found.write(Path(out))


def parse_variant(text: str) -> Variant:
    """`fedprox`, or with options: of the method `fedprox:mu=0.1+weights=equal`, of a part `compose:proximal.mu=0.1`, of
    a section `fedavg:training.lr=0.1`."""
    name, _, options = text.partition(":")
    overrides: dict[str, Any] = {"method.name": name}
    for option in filter(None, options.split("+")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"'{text}' is not a method: after the colon come options like key=value, joined by +.")
        section, dot, _ = key.partition(".")
        path = key if dot and section in Experiment.model_fields else f"method.{key}"
        overrides = _extended(text, overrides, {path: parse_value(value)})
    return Variant(text, overrides)


def crossed(variants: Sequence[Variant], vary: Choices) -> list[Variant]:
    """Every row at every value of every setting: `fedavg` → `fedavg:training.lr=0.1`, `fedavg:training.lr=0.2`."""
    rows = []
    for setting, variant in itertools.product(combinations(vary), variants):
        options = "+".join(f"{key}={value}" for key, value in setting.items())
        label = ("+" if ":" in variant.label else ":").join(filter(None, [variant.label, options]))
        rows.append(Variant(label, _extended(label, variant.overrides, setting)))
    return rows


def combinations(choices: Choices) -> list[dict[str, Any]]:
    """The cross product: one value of each key, in all ways. Without a key that is one empty setting."""
    return [dict(zip(choices, values, strict=True)) for values in itertools.product(*choices.values())]


def _extended(label: str, overrides: dict[str, Any], setting: dict[str, Any]) -> dict[str, Any]:
    """`overrides` and `setting`, if the setting does not take back what the row already says."""
    if twice := [key for key in setting if key in overrides]:
        raise ConfigError(f"The row '{label}' sets {twice[0]} twice. Say it once: in --methods, --vary or --tune.")
    return overrides | setting


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
        self.stale: set[str] = set()  # what finished runs began with and is no more
        if tune_seed is not None and not tune:
            raise ConfigError("--tune-seed says on which seed settings are chosen; give the settings with --tune.")
        if against is not None and against not in (known := [variant.label for variant in variants]):
            raise ConfigError(f"There is no row '{against}' to compare with (--against){nearest(against, known)}")
        self.cells: dict[str, dict[int, list[Cell]]] = {}  # row → seed → a run of each setting of --tune
        self._plan()

    def _plan(self) -> None:
        """The same run twice is refused: it would only look like more of them."""
        seen: dict[str | Path, Cell] = {}
        seeds = [*([] if self.first in self.seeds else [self.first]), *self.seeds]
        for variant, seed, setting in itertools.product(self.variants, seeds, combinations(self.tune)):
            cell = self._cell(variant, seed, setting)
            for same in (cell.experiment.model_dump_json(exclude={"engine"}), cell.folder):
                if (twin := seen.setdefault(same, cell)) is not cell:
                    raise ConfigError(
                        f"The same run is in the comparison twice: '{twin}' and '{cell}'. Leave one of them out."
                    )
            self.cells.setdefault(variant.label, {}).setdefault(seed, []).append(cell)

    def _cell(self, variant: Variant, seed: int, setting: dict[str, Any]) -> Cell:
        overrides = _extended(variant.label, variant.overrides, setting)
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
        self, watch: Callable[[Cell], Observer], skipped: Callable[[int], None], retry_failed: bool = False
    ) -> Comparison:
        """Run what is not done yet. `watch` gives the observer of a run; `skipped` hears of rounds that need no run."""
        self._check_data(watch)
        for variant in self.variants:
            for cell in self.cells[variant.label][self.first]:
                self._run(cell, watch, skipped, retry_failed)
            chosen, rest = self._row(variant).cells, [seed for seed in self.seeds if seed != self.first]
            for cell in chosen:
                if cell.seed in rest:
                    self._run(cell, watch, skipped, retry_failed)
            if not chosen:
                skipped(sum(self.cells[variant.label][seed][0].experiment.training.rounds for seed in rest))
        return self.comparison()

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
        by_seed = self.cells[variant.label]
        first = by_seed[self.first]
        best: int | None = 0
        if self.tune:
            scores = [measure(cell.summary, SELECTION) if cell.summary else math.nan for cell in first]
            undecided = any(cell.summary is None and cell.failure is None for cell in first)
            known = [place for place, score in enumerate(scores) if not math.isnan(score)]
            best = None if undecided or not known else max(known, key=lambda place: scores[place])
        cells = [] if best is None else [by_seed[seed][best] for seed in self.seeds]
        return Row(variant.label, cells, first if self.tune else [])

    def _run(
        self, cell: Cell, watch: Callable[[Cell], Observer], skipped: Callable[[int], None], retry_failed: bool
    ) -> None:
        if cell.summary is not None or (cell.failure is not None and not retry_failed):
            skipped(cell.experiment.training.rounds)
            return
        (cell.folder / FAILED).unlink(missing_ok=True)
        cell.failure, observer = None, watch(cell)
        try:
            data = self._federation(cell, observer)  # data that cannot be read (DataError) stop the comparison
        except ConfigError as error:  # but a division can be impossible with this seed or this value only
            self._fail(cell, error, observer, skipped)
            return
        if self.tune and cell.seed == self.first:
            _check_validation(data)
        try:
            if (cell.folder / "experiment.toml").is_file():
                engine = cell.experiment.engine.model_dump()
                resume(cell.folder, observer=observer, engine=engine, prepared=data)
            else:
                run(cell.experiment, cell.folder, observer=observer, prepared=data)
        except FedmllError as error:
            self._fail(cell, error, observer, skipped)
        else:
            cell.summary = json.loads((cell.folder / "summary.json").read_text())

    def _fail(self, cell: Cell, error: FedmllError, observer: Observer, skipped: Callable[[int], None]) -> None:
        cell.failure = str(error)
        if not isinstance(error, ConfigError | CheckpointError):
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
