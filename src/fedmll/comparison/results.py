"""`Comparison`: the rows and runs of a comparison, the tables of their metrics, and the notes that belong to them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.plan import Variant
from fedmll.comparison.statistics import MarginTest, notes_on_tests, table_of_tests
from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest
from fedmll.evaluation.metric_definitions import COMPARISON, COSTS, METRICS, metrics_in
from fedmll.runs.formatting import TextTable, html_table, markdown_table, mean_and_std
from fedmll.runs.run_folder import RunFolder

DEFAULT_METRICS = metrics_in(COMPARISON)
DESCRIPTION = "description"  # in --metrics: a column that says what the method of each row is


@dataclass(eq=False, kw_only=True)
class ComparisonCell:
    """One run: a row at one seed, while tuning also with one setting."""

    variant: Variant  # the row
    seed: int
    setting: dict[str, Any]  # what --tune sets for this run
    path: Path  # the run's folder
    experiment: Experiment
    summary: dict[str, Any] | None = None  # of summary.json; None until the run is finished
    failure: str | None = None  # why the run failed

    @property
    def folder(self) -> RunFolder:
        return RunFolder(self.path)

    @property
    def is_done(self) -> bool:
        return self.summary is not None or self.failure is not None

    def __str__(self) -> str:
        return ", ".join([self.variant.label, *format_settings(self.setting), f"seed {self.seed}"])


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """The runs of a variant."""

    label: str
    cells: list[ComparisonCell]  # one run per seed; empty until the best setting is known, or if every setting failed
    trials: list[ComparisonCell] = field(default_factory=list)  # the runs of one seed with every setting of --tune
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # what --tune tries: key → values

    @property
    def setting(self) -> dict[str, Any]:
        """The setting of --tune that was chosen."""
        return self.cells[0].setting if self.cells else {}

    @property
    def runs(self) -> list[ComparisonCell]:
        return self.trials + [cell for cell in self.cells if cell not in self.trials]

    @property
    def is_done(self) -> bool:
        """Every seed is finished or failed; or every setting failed, and then no other seed is run."""
        return all(cell.is_done for cell in self.cells or self.trials)

    @property
    def description(self) -> str:
        """The summary of the method, and which features it has if no client trains them."""
        experiment = self.runs[0].experiment
        model, summary = experiment.model, str(registry.find("method", experiment.method.name).summary)
        fixed = model.freeze == "backbone" or not experiment.training.rounds
        if fixed and model.pretrained is None and model.backbone != "mlp":
            summary += f"; on features of an untrained {model.backbone}"
        return summary

    @property
    def finished(self) -> list[ComparisonCell]:
        """The finished runs of the table."""
        return [cell for cell in self.cells if cell.summary is not None]

    def values(self, metric: str) -> dict[int, float]:
        """The metric of each finished run, by seed."""
        return {cell.seed: metric_value(cell.summary, metric) for cell in self.cells if cell.summary is not None}


@dataclass(frozen=True, repr=False, kw_only=True)
class Comparison:
    """All rows of a comparison.

    Attributes:
        rows: one per method and variant.
        seeds: the seeds of the tables.
        tune: what --tune tries: key, or method:key → values.
        tune_seed: the seed that settings are chosen on; None without --tune.
        metrics: the columns of the tables.
        against: the row that the margins are computed over.
        tests: tests of the margins, once all runs are done.
    """

    rows: list[ComparisonRow]
    seeds: list[int]
    tune: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    tune_seed: int | None = None
    metrics: Sequence[str] = DEFAULT_METRICS
    against: str | None = None
    tests: Sequence[MarginTest] = ()

    def __repr__(self) -> str:
        """The first table of table.md."""
        return markdown_table(*main_table(self))

    def _repr_html_(self) -> str:
        return html_table(f"mean ± std, seeds {', '.join(map(str, self.seeds))}", *main_table(self))

    @property
    def tables(self) -> list[TextTable]:
        if self.against is None:
            return [main_table(self)]
        tests = [table_of_tests(self.against, self.tests)] if self.tests else []
        return [main_table(self), margin_table(self, self.against), *tests]

    @property
    def notes(self) -> list[str]:
        """What a reader of the tables must know, one line each."""
        lines = []
        if failed := self.failed:
            lines.append(f"{len(failed)} of {len(self.runs)} runs failed (--retry-failed runs them again):")
            lines += [f"failed: {cell}: {cell.failure}" for cell in failed]
        if not self.is_done:
            lines.append("not all runs are done: the same command with the same --out continues.")
        for name in self.metric_names:
            if any(math.isnan(value) for row in self.rows for value in row.values(name).values()):
                needs = METRICS[name].needs if name in METRICS else "what its plug-in needs"
                lines.append(f"{name} is undefined (–) without {needs}.")
        lines += notes_on_tests(self.tests)
        return lines + [line for row in self.rows for line in notes_on_grid_edges(row)]

    @property
    def metric_names(self) -> list[str]:
        return [name for name in self.metrics if name != DESCRIPTION]

    @property
    def runs(self) -> list[ComparisonCell]:
        return [cell for row in self.rows for cell in row.runs]

    @property
    def failed(self) -> list[ComparisonCell]:
        return [cell for cell in self.runs if cell.failure is not None]

    @property
    def finished(self) -> list[ComparisonCell]:
        return [cell for cell in self.runs if cell.summary is not None]

    @property
    def is_done(self) -> bool:
        return all(row.is_done for row in self.rows)


def metric_value(summary: Mapping[str, Any], name: str) -> float:
    """A metric of a finished run, or its cost per round (of a run with zero rounds: of its opening exchange)."""
    exchanges = max(1, summary["rounds"])
    if name == "s/round":
        return float(summary["seconds"] / exchanges)
    if name == "MB/round":
        return float((summary["bytes_up"] + summary["bytes_down"]) / exchanges / 1e6)
    value = summary["metrics"].get(name)
    return math.nan if value is None else float(value)


def check_metrics(names: Sequence[str]) -> None:
    """Raise ConfigError for an unknown metric."""
    known = [*METRICS, *registry.find_added("metric"), *COSTS, DESCRIPTION]
    for name in names:
        if name not in known:
            raise ConfigError(f"There is no metric '{name}' (--metrics){suggest(name, known)}")


def main_table(comparison: Comparison) -> TextTable:
    """Mean ± standard deviation (of the sample) over the finished seeds."""
    columns = list(dict.fromkeys([*comparison.metric_names, *COSTS]))
    last = [DESCRIPTION] if DESCRIPTION in comparison.metrics else []
    rows = []
    for row in comparison.rows:
        tuned = [", ".join(format_settings(row.setting)) or "–"] if comparison.tune else []
        values = [_format_values(comparison, [row], row.values(name)) for name in columns]
        rows.append([row.label, *tuned, *values, *(row.description for _ in last)])
    return ["method", *(["tuned"] if comparison.tune else []), *columns, *last], rows


def margin_table(comparison: Comparison, against: str) -> TextTable:
    """The difference of each row to the row `against`, paired by seed: the spread that all methods share cancels."""
    (base,) = (row for row in comparison.rows if row.label == against)

    def format_margin(row: ComparisonRow, name: str) -> str:
        ours, theirs = row.values(name), base.values(name)
        pairs = {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
        return _format_values(comparison, [row, base], pairs, sign="+")

    names = comparison.metric_names
    return [f"margin over {against}", *names], [
        [row.label, *(format_margin(row, name) for name in names)] for row in comparison.rows if row is not base
    ]


def _format_values(comparison: Comparison, rows: list[ComparisonRow], by_seed: dict[int, float], sign: str = "") -> str:
    """`34.10 ± 0.20`; with ` (2 of 3)` if not every seed of the rows is finished."""
    if not by_seed:
        return "failed" if any(cell.failure is not None for row in rows for cell in row.runs) else "not run"
    values = np.array(list(by_seed.values()))
    if np.isnan(values).any():
        return "–"
    missing = f" ({len(values)} of {len(comparison.seeds)})" if len(values) < len(comparison.seeds) else ""
    return mean_and_std(values, sign) + missing


def notes_on_grid_edges(row: ComparisonRow) -> list[str]:
    """If the lowest or highest value of a grid is chosen, a better value may lie outside of it."""
    lines = []
    for key, value in row.setting.items():
        values = row.choices[key]
        if len(values) > 1 and all(type(v) in (int, float) for v in values) and value in (min(values), max(values)):
            edge = "lowest" if value == min(values) else "highest"
            lines.append(
                f"{row.label}: its best {key}, {value}, is the {edge} of the grid: a wider --tune may find more."
            )
    return lines


def format_settings(setting: Mapping[str, Any]) -> list[str]:
    """Without the section, because columns are narrow: `lr=0.01`."""
    return [f"{key.split('.')[-1]}={value}" for key, value in setting.items()]
