"""compare: methods × seeds, resumable, as mean ± std. Each method's settings can be tuned on validation data first."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmll import federation, files
from fedmll.errors import ConfigError, nearest
from fedmll.experiment import Experiment
from fedmll.federation import Federation
from fedmll.runner import SELECTION, Observer, resume, run

SHOWN = ("macro_auc", "map", "macro_f1", "macro_f1_tuned", "bacc")


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method and what it changes, e.g. `fedavg:weights=equal`."""

    label: str
    overrides: dict[str, Any]


@dataclass
class Cell:
    """One run of the grid."""

    variant: Variant
    seed: int
    folder: Path
    experiment: Experiment
    summary: dict[str, Any] | None = None


@dataclass
class Comparison:
    cells: list[Cell]
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)  # row → its tuned settings

    def values(self, label: str, metric: str) -> np.ndarray:
        found = [measure(c.summary, metric) for c in self.cells if c.variant.label == label and c.summary is not None]
        return np.array(found, dtype=float)

    @property
    def labels(self) -> list[str]:
        return list(dict.fromkeys(cell.variant.label for cell in self.cells))


def measure(summary: Mapping[str, Any], name: str) -> float:
    """A metric of a run, or its cost a round."""
    if name == "s/round":
        return float(summary["seconds"] / summary["rounds"])
    if name == "MB/round":
        return float((summary["bytes_up"] + summary["bytes_down"]) / summary["rounds"] / 1e6)
    value = summary["metrics"].get(name)
    return math.nan if value is None else float(value)


def parse_variant(text: str, parse_value: Callable[[str], Any]) -> Variant:
    """`fedprox`, or with options `fedprox:mu=0.1+weights=equal`; a dot names a section: `fedavg:training.lr=0.1`."""
    name, _, options = text.partition(":")
    overrides: dict[str, Any] = {"method.name": name}
    for option in filter(None, options.split("+")):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"'{text}' is not a method: after the colon come options like key=value, joined by +.")
        overrides[key if "." in key else f"method.{key}"] = parse_value(value)
    return Variant(text, overrides)


def crossed(names: Sequence[str], key: str | None, values: Sequence[Any]) -> list[str]:
    """Every method at every value of a setting: `fedavg` → `fedavg:training.lr=0.1`, `fedavg:training.lr=0.2`."""
    if key is None:
        return list(names)
    return [f"{name}{'+' if ':' in name else ':'}{key}={value}" for value in values for name in names]


class Grid:
    def __init__(
        self,
        base: Experiment,
        variants: Sequence[Variant],
        seeds: Sequence[int],
        out: Path,
        tune: tuple[str, Sequence[Any]] | None = None,
        against: str | None = None,
    ) -> None:
        self.base, self.variants, self.seeds, self.out, self.tune = base, variants, seeds, out, tune
        self.prepared: tuple[str, Federation] | None = None
        if against is not None and against not in (known := [variant.label for variant in variants]):
            raise ConfigError(f"There is no row '{against}' to compare with (--against){nearest(against, known)}.")
        # every experiment is made (and so checked) before the first one runs
        settings: list[Any] = [None] if tune is None else list(tune[1])
        self.all = {(v.label, s, x): self._cell(v, s, x) for v in variants for s in seeds for x in settings}

    def _cell(self, variant: Variant, seed: int, setting: Any) -> Cell:
        overrides = variant.overrides | {"seed": seed}
        folder = variant.label.replace(":", "-").replace("/", "-")
        if self.tune is not None:
            overrides = overrides | {self.tune[0]: setting}
            folder += f"/{self.tune[0]}={setting}"
        experiment = self.base.changed(overrides)
        cell = Cell(variant, seed, self.out / folder / f"seed-{seed}", experiment)
        saved = cell.folder / "experiment.toml"
        different = experiment.differs(Experiment.load(saved)) if saved.is_file() else []
        if different:
            raise ConfigError(
                f"{cell.folder} holds another experiment ({', '.join(different)} differ); nothing was changed. Use "
                "another --out, or give the options that this comparison was started with."
            )
        return cell

    @property
    def rounds(self) -> int:
        """Rounds of all runs together: while tuning, every value on the first seed; then the chosen one on the rest."""
        runs = len(self.variants) * (len(self.seeds) if self.tune is None else len(self.tune[1]) + len(self.seeds) - 1)
        return runs * self.base.training.rounds

    def go(self, watch: Callable[[Cell], Observer], skipped: Callable[[int], None]) -> Comparison:
        """Run what is not done yet. `watch` gives the observer of a run, `skipped` hears of rounds done before."""
        comparison = Comparison([])
        for variant in self.variants:
            setting = None
            if self.tune is not None:
                first = [self.all[variant.label, self.seeds[0], value] for value in self.tune[1]]
                for cell in first:
                    self._run(cell, watch, skipped)
                scores = [measure(cell.summary or {}, SELECTION) for cell in first]
                setting = self.tune[1][int(np.argmax(np.nan_to_num(scores, nan=-1.0)))]
                comparison.chosen[variant.label] = {self.tune[0]: setting}
            for seed in self.seeds:
                cell = self.all[variant.label, seed, setting]
                if cell.summary is None:
                    self._run(cell, watch, skipped)
                comparison.cells.append(cell)
        return comparison

    def _run(self, cell: Cell, watch: Callable[[Cell], Observer], skipped: Callable[[int], None]) -> None:
        finished = cell.folder / "summary.json"
        if finished.is_file():
            skipped(cell.experiment.training.rounds)
        elif (cell.folder / "experiment.toml").is_file():
            engine = cell.experiment.engine.model_dump()
            resume(cell.folder, observer=watch(cell), engine=engine, prepared=self._federation(cell, watch(cell)))
        else:
            observer = watch(cell)
            run(cell.experiment, cell.folder, observer=observer, prepared=self._federation(cell, observer))
        cell.summary = json.loads(finished.read_text())

    def _federation(self, cell: Cell, observer: Observer) -> Federation:
        """The same data for all methods of a seed is loaded and divided once."""
        e = cell.experiment
        parts = (e.data, e.partition, e.annotation)
        key = f"{[p.model_dump_json() for p in parts]} {e.seed} {e.training.batch_size}"
        if self.prepared is None or self.prepared[0] != key:
            self.prepared = None  # let the old one go before the new one is loaded
            self.prepared = (key, federation.build(e, observer.preparing))
        return self.prepared[1]


def table(comparison: Comparison, metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and rows, mean ± std (of the sample) over the seeds."""
    columns = [*metrics, "s/round", "MB/round"]
    header = ["method", *([] if not comparison.chosen else ["tuned"]), *columns]
    rows = []
    for label in comparison.labels:
        row = [label]
        if comparison.chosen:
            row.append(", ".join(f"{key.split('.')[-1]}={value}" for key, value in comparison.chosen[label].items()))
        rows.append(row + [mean_and_spread(comparison.values(label, name)) for name in columns])
    return header, rows


def margins(comparison: Comparison, reference: str, metrics: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """How far each row is from the reference, seed by seed: the spread that all methods share does not count."""
    others = [label for label in comparison.labels if label != reference]

    def margin(label: str, name: str) -> str:
        return mean_and_spread(comparison.values(label, name) - comparison.values(reference, name), sign="+")

    return [f"margin over {reference}", *metrics], [
        [label, *(margin(label, name) for name in metrics)] for label in others
    ]


def mean_and_spread(values: np.ndarray, sign: str = "") -> str:
    if not len(values) or np.isnan(values).any():
        return "–"
    return f"{values.mean():{sign}.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def write_csv(comparison: Comparison, path: Path) -> None:
    """Every metric of every run: one line a method, seed and metric."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["method", "tuned", "seed", "metric", "value"])
    for cell in comparison.cells:
        assert cell.summary is not None
        tuned = " ".join(f"{k}={v}" for k, v in comparison.chosen.get(cell.variant.label, {}).items())
        for name in [*cell.summary["metrics"], "s/round", "MB/round"]:
            writer.writerow([cell.variant.label, tuned, cell.seed, name, measure(cell.summary, name)])
    files.write(path, text.getvalue())
