"""What a comparison found: its rows of runs, the tables of them, and the notes without which a table would mislead."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import registry
from fedmll.errors import ConfigError
from fedmll.evaluation.pooled import METRICS
from fedmll.experiment import Experiment
from fedmll.running.margins import MarginTest, notes_on_tests, table_of_tests
from fedmll.running.shown import html_table

SHOWN = ("macro_auc", "map", "macro_f1", "macro_f1_tuned", "bacc")
COSTS = ("s/round", "MB/round")
WHAT = "what"  # among the metrics: a column that says what each row is

Table = tuple[list[str], list[list[str]]]  # header, rows


@dataclass(frozen=True)
class Variant:
    """A row of the table: a method and what it changes, e.g. `fedavg:weights=equal`."""

    label: str
    overrides: dict[str, Any]


@dataclass(eq=False)
class Cell:
    """One run. It has a summary when it is finished, a failure when it broke off, and neither before."""

    variant: Variant
    seed: int
    setting: dict[str, Any]  # what --tune sets for it
    folder: Path
    experiment: Experiment
    summary: dict[str, Any] | None = None
    failure: str | None = None

    def __str__(self) -> str:
        return ", ".join([self.variant.label, *settings(self.setting), f"seed {self.seed}"])


@dataclass(frozen=True)
class Row:
    """The runs of a variant, a seed each."""

    label: str
    cells: list[Cell]  # none while it is not known which setting is best, or if every setting failed
    trials: list[Cell]  # one seed with every setting of --tune
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)  # what --tune tries for it: key → values

    @property
    def setting(self) -> dict[str, Any]:
        return self.cells[0].setting if self.cells else {}

    @property
    def runs(self) -> list[Cell]:
        return self.trials + [cell for cell in self.cells if cell not in self.trials]

    @property
    def done(self) -> bool:
        """Every seed is finished or failed; or every setting failed, and then no seed goes on."""
        return all(cell.summary is not None or cell.failure is not None for cell in self.cells or self.trials)

    @property
    def what(self) -> str:
        """The method's own line, and whose features it has if nobody trains them."""
        experiment = self.runs[0].experiment
        model, summary = experiment.model, str(registry.find("method", experiment.method.name).summary)
        fixed = model.freeze == "backbone" or not experiment.training.rounds
        if fixed and model.weights is None and model.backbone != "mlp":
            summary += f"; on features of an untrained {model.backbone}"
        return summary

    def values(self, metric: str) -> dict[int, float]:
        """By seed, of the runs that are finished."""
        return {cell.seed: measure(cell.summary, metric) for cell in self.cells if cell.summary is not None}


@dataclass(frozen=True, repr=False)
class Comparison:
    rows: list[Row]
    seeds: list[int]
    tuned: Mapping[str, Sequence[Any]]  # --tune: key, or method:key → values
    metrics: Sequence[str] = SHOWN  # the tables' columns
    against: str | None = None  # a row: also the margins over it
    tests: Sequence[MarginTest] = ()  # of the margins, when all runs are done

    def __repr__(self) -> str:
        """Its first table, as table.md has it."""
        return markdown(*table(self, self.metrics))

    def _repr_html_(self) -> str:
        return html_table(f"mean ± std, seeds {', '.join(map(str, self.seeds))}", *table(self, self.metrics))

    @property
    def tables(self) -> list[Table]:
        margin = [] if self.against is None else [margins(self, self.against, self.metrics)]
        tested = [table_of_tests(self.against, self.tests)] if self.against is not None and self.tests else []
        return [table(self, self.metrics), *margin, *tested]

    @property
    def notes(self) -> list[str]:
        return notes(self, self.metrics)

    @property
    def runs(self) -> list[Cell]:
        return [cell for row in self.rows for cell in row.runs]

    @property
    def failed(self) -> list[Cell]:
        return [cell for cell in self.runs if cell.failure is not None]

    @property
    def finished(self) -> list[Cell]:
        return [cell for cell in self.runs if cell.summary is not None]


def measure(summary: Mapping[str, Any], name: str) -> float:
    """A metric of a run, or its cost a round; of one that has an opening exchange alone, of that."""
    exchanges = max(1, summary["rounds"])
    if name == "s/round":
        return float(summary["seconds"] / exchanges)
    if name == "MB/round":
        return float((summary["bytes_up"] + summary["bytes_down"]) / exchanges / 1e6)
    value = summary["metrics"].get(name)
    return math.nan if value is None else float(value)


def check_metrics(names: Sequence[str]) -> None:
    """Refuse what is no metric, before anything runs."""
    known = [*METRICS, *registry.added("metric"), *COSTS, WHAT]
    for name in names:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean '{close[0]}'?" if close else "."
            raise ConfigError(f"There is no metric '{name}' (--metrics){hint} Known: {', '.join(known)}.")


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def table(comparison: Comparison, metrics: Sequence[str]) -> Table:
    """Mean ± std (of the sample) over the seeds that finished."""
    columns = list(dict.fromkeys([*measured(metrics), *COSTS]))
    last = [f"{WHAT} it is"] if WHAT in metrics else []
    rows = []
    for row in comparison.rows:
        tuned = [", ".join(settings(row.setting)) or "–"] if comparison.tuned else []
        figures = [_figure(comparison, [row], row.values(name)) for name in columns]
        rows.append([row.label, *tuned, *figures, *(row.what for _ in last)])
    return ["method", *(["tuned"] if comparison.tuned else []), *columns, *last], rows


def measured(metrics: Sequence[str]) -> list[str]:
    return [name for name in metrics if name != WHAT]


def margins(comparison: Comparison, reference: str, metrics: Sequence[str]) -> Table:
    """How far each row is from the reference, seed by seed: the spread that all methods share does not count."""
    (base,) = (row for row in comparison.rows if row.label == reference)

    def margin(row: Row, name: str) -> str:
        ours, theirs = row.values(name), base.values(name)
        pairs = {seed: ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()}
        return _figure(comparison, [row, base], pairs, sign="+")

    names = measured(metrics)
    return [f"margin over {reference}", *names], [
        [row.label, *(margin(row, name) for name in names)] for row in comparison.rows if row is not base
    ]


def _figure(comparison: Comparison, rows: list[Row], values: dict[int, float], sign: str = "") -> str:
    """`34.10 ± 0.20`; with ` (2 of 3)` where not every seed of the rows is finished."""
    if not values:
        return "failed" if any(cell.failure is not None for row in rows for cell in row.runs) else "not run"
    found = np.array(list(values.values()))
    if np.isnan(found).any():
        return "–"
    missing = f" ({len(found)} of {len(comparison.seeds)})" if len(found) < len(comparison.seeds) else ""
    return mean_and_spread(found, sign) + missing


def mean_and_spread(values: NDArray[np.float64], sign: str = "") -> str:
    return f"{values.mean():{sign}.2f}" + (f" ± {values.std(ddof=1):.2f}" if len(values) > 1 else "")


def notes(comparison: Comparison, metrics: Sequence[str]) -> list[str]:
    """What a reader of the tables must know, a line each."""
    lines = []
    if failed := comparison.failed:
        lines.append(f"{len(failed)} of {len(comparison.runs)} runs failed (--retry-failed tries them again):")
        lines += [f"failed: {cell}: {cell.failure}" for cell in failed]
    if not all(row.done for row in comparison.rows):
        lines.append("not all runs are done: the same command with the same --out goes on.")
    for name in measured(metrics):
        if any(math.isnan(value) for row in comparison.rows for value in row.values(name).values()):
            lines.append(f"{name} is undefined (–) without {METRICS.get(name, 'what its plug-in needs')}.")
    lines += notes_on_tests(comparison.tests)
    return lines + [line for row in comparison.rows for line in edges(row)]


def edges(row: Row) -> list[str]:
    """The best value may lie outside of a grid whose lowest or highest value won."""
    lines = []
    for key, value in row.setting.items():
        values = row.choices[key]
        if len(values) > 1 and all(type(v) in (int, float) for v in values) and value in (min(values), max(values)):
            which = "lowest" if value == min(values) else "highest"
            lines.append(
                f"{row.label}: its best {key}, {value}, is the {which} of the grid: a wider --tune may find more."
            )
    return lines


def settings(setting: Mapping[str, Any]) -> list[str]:
    """Without the section, as the columns are narrow: `lr=0.01`."""
    return [f"{key.split('.')[-1]}={value}" for key, value in setting.items()]
