"""`reproduce`: run a table of a paper and set the results beside the published figures.

Each column group of the table is one comparison, in a folder of its own. The same folder again continues.

GROUP/                   a comparison (see `comparison_folder`); the folder itself for a table without column groups
reproduction.md, .tex    the tables below, for people
reproduction.csv         one line per group, row and metric: published, ours, difference
reproduction.json        the same tables and notes, and the value of each seed, for `fedmll report` and claims.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedmll.comparison.compare import ComparisonCallback, compare
from fedmll.comparison.reproduction_record import REPRODUCTION_FILE
from fedmll.comparison.results import Comparison, ComparisonRow
from fedmll.comparison.tables import UPPER_BOUND, escape_latex, tabular
from fedmll.config.experiment import Experiment
from fedmll.config.presets import (
    AVERAGE,
    PREFIX,
    SMALL,
    WILCOXON_METRICS,
    PresetTable,
    PublishedValue,
    load_preset,
    read_published,
    read_table,
)
from fedmll.config.toml_values import flatten, merge_overrides
from fedmll.core import files
from fedmll.core.errors import ConfigError, DataError
from fedmll.core.text import suggest
from fedmll.evaluation.metric_definitions import lower_is_better
from fedmll.runs.formatting import TextTable, escape_markdown, format_csv, markdown_table, mean_and_std, to_json
from fedmll.runs.run_folder import PER_CLASS_FILE

CLASS_AP = "ap/"  # prefix of a metric: the average precision of the class that follows
NOT_A_SETTING = ("engine.", "data.root", "seed", "plugins")  # what may differ without a difference to the paper
FEWEST_RANKED = 2


@dataclass(frozen=True, kw_only=True)
class ReproducedValue:
    """A published figure and what came out here.

    Attributes:
        group: the column group.
        row: the row of the paper, or of one that was added.
        metric: the column.
        published: the figure of the paper; None for an added row and for figures without published numbers.
        ours: the value of each finished seed.
        is_bound: the row is an upper bound, which is not ranked.
    """

    group: str
    row: str
    metric: str
    published: PublishedValue | None
    ours: Mapping[int, float]
    is_bound: bool = False

    @property
    def mean(self) -> float:
        return float(np.mean(list(self.ours.values()))) if self.ours else math.nan

    @property
    def difference(self) -> float:
        return math.nan if self.published is None else self.mean - self.published.value


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The results of a table beside the published figures.

    Attributes:
        table: the table of the paper.
        small: whether the small variant was run.
        seeds: one run of each row per seed.
        values: one entry per group, row and metric.
        changed_settings: group → setting → the value of the full table and the value here.
        skipped: groups that could not be run → the reason.
        comparison_notes: what a reader of the comparisons must know.
        finished_runs: the folders of the runs that are finished.
    """

    table: PresetTable
    small: bool
    seeds: Sequence[int]
    values: list[ReproducedValue]
    changed_settings: dict[str, dict[str, tuple[str, str]]] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    comparison_notes: list[str] = field(default_factory=list)
    finished_runs: list[Path] = field(default_factory=list)

    @property
    def title(self) -> str:
        variant = ", small variant" if self.small else ""
        return f"{self.table.name}{variant}: {self.table.what}"

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(value.group for value in self.values))

    @property
    def tables(self) -> list[tuple[str, TextTable]]:
        """Title and table: the values of each group, the order of the rows, and the settings that differ."""
        found = [(_group_title("published and ours", group), self._value_table(group)) for group in self.groups]
        orders = [row for group in self.groups for row in self._orders(group)]
        if orders:
            header = ["group", "metric", "published order", "our order", "rank correlation"]
            found.append(("order of the rows, best first", (header, orders)))
        settings = [
            [group, key, paper, here]
            for group, changed in self.changed_settings.items()
            for key, (paper, here) in changed.items()
        ]
        if settings:
            found.append(("settings that differ", (["group", "setting", "full table", "here"], settings)))
        return found

    @property
    def notes(self) -> list[str]:
        """What a reader of the tables must know, one line each."""
        lines = [f"seeds: {', '.join(map(str, self.seeds))}."]
        lines += [f"not run: {group or self.table.name}: {reason}" for group, reason in self.skipped.items()]
        lines += [f"row {row} cannot be run: {reason}." for row, reason in self.table.unavailable.items()]
        lines += [f"row {row} is not in the paper." for row in self.table.added_rows]
        marked = [value for value in self.values if value.published is not None and value.published.note]
        lines += [f"{value.group}, {value.row}, {value.metric}: {value.published.note}." for value in marked]  # type: ignore[union-attr]
        return [*lines, *self.table.notes, *self.comparison_notes]

    def _value_table(self, group: str) -> TextTable:
        rows = []
        for value in self.values:
            if value.group == group:
                ours = mean_and_std(np.array(list(value.ours.values()))) if value.ours else "not run"
                difference = f"{value.difference:+.2f}" if math.isfinite(value.difference) else "–"
                ours = ours if math.isfinite(value.mean) or not value.ours else "–"
                rows.append([value.row, value.metric, _format_published(value.published), ours, difference])
        return ["row", "metric", "published", "ours", "difference"], rows

    def _orders(self, group: str) -> list[list[str]]:
        """One line per metric: the rows that both have, without upper bounds, and Spearman's correlation of ranks."""
        lines = []
        for metric in dict.fromkeys(value.metric for value in self.values if value.group == group):
            both = [
                value
                for value in self.values
                if (value.group, value.metric) == (group, metric)
                and not value.is_bound
                and math.isfinite(value.difference)
            ]
            if len(both) < FEWEST_RANKED or metric in WILCOXON_METRICS:
                continue
            sign = 1 if lower_is_better(metric) else -1
            published = [sign * value.published.value for value in both if value.published is not None]
            ours = [sign * value.mean for value in both]
            orders = [
                " > ".join(both[place].row for place in np.argsort(numbers, kind="stable"))
                for numbers in (published, ours)
            ]
            lines.append([group, metric, *orders, _rank_correlation(published, ours)])
        return lines

    def csv_rows(self) -> list[list[Any]]:
        header = ["group", "row", "metric", "published", "published_std", "ours", "ours_std", "seeds", "difference"]
        lines: list[list[Any]] = [header]
        for value in self.values:
            numbers, figure = np.array(list(value.ours.values())), value.published
            spread = float(numbers.std(ddof=1)) if len(numbers) > 1 else math.nan
            of_paper: list[Any] = ["", ""] if figure is None else [figure.value, _or_empty(figure.std)]
            ours = [_or_empty(value.mean), _or_empty(spread), len(numbers), _or_empty(value.difference)]
            lines.append([value.group, value.row, value.metric, *of_paper, *ours])
        return lines

    def write(self, out: Path) -> None:
        """Write all files into a folder."""
        parts = [f"# {escape_markdown(self.title)}\n"]
        parts += [f"## {escape_markdown(title)}\n\n{markdown_table(*table)}" for title, table in self.tables]
        parts.append("".join(f"- {escape_markdown(note)}\n" for note in self.notes))
        files.write_atomic(out / "reproduction.md", "\n".join(parts))
        files.write_atomic(out / "reproduction.csv", format_csv(self.csv_rows()))
        latex = [
            f"% {escape_latex(title)}\n"
            + tabular([escape_latex(name) for name in header], [[escape_latex(text) for text in row] for row in rows])
            for title, (header, rows) in self.tables
        ]
        files.write_atomic(out / "reproduction.tex", "\n".join([f"% {escape_latex(self.title)}\n", *latex]))
        values = [
            {
                "group": value.group,
                "row": value.row,
                "metric": value.metric,
                "published": None if value.published is None else value.published.value,
                "ours": dict(value.ours),
            }
            for value in self.values
        ]
        record = {
            "table": self.table.name,
            "small": self.small,
            "seeds": list(self.seeds),
            "title": self.title,
            "groups": list(self.changed_settings),  # those that were run
            "some_groups": len(self.changed_settings) < len(self.table.groups),
            "changed_settings": self.changed_settings,
            "values": values,
            "tables": [{"title": title, "header": header, "rows": rows} for title, (header, rows) in self.tables],
            "notes": self.notes,
        }
        files.write_atomic(out / REPRODUCTION_FILE, to_json(record, indent=1) + "\n")


def reproduce(
    name: str,
    out: Path | str,
    *,
    small: bool = False,
    groups: Sequence[str] = (),
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Mapping[str, Any] | None = None,
    retry_failed: bool = False,
    jobs: int = 1,
    callback: ComparisonCallback | None = None,
    track: Sequence[str] = (),
    command: str | None = None,
) -> Reproduction:
    """Run a table of a paper, and compare it with the published figures.

    Args:
        name: PAPER/TABLE, as `fedmll reproduce --list` shows it.
        out: the folder for all runs and tables. The same folder again continues.
        small: run the small variant: other data or fewer images, a frozen backbone, few rounds.
        groups: only these column groups; all if empty.
        seeds: one run of each row per seed.
        overrides: section.key → value, for all rows.
        retry_failed: run again what failed before.
        callback: watches the runs.
        jobs: how many runs go on at a time.
        track: trackers of every run.
        command: the command line, for comparison.json.

    Raises:
        DataError: the data of no column group is on this machine.
    """
    table, out = read_table(name, small), Path(out)
    for group in groups:
        if group not in table.groups or not group:
            raise ConfigError(f"{name} has no column group '{group}'{suggest(group, table.groups)}")
    if not table.comparison_rows:
        reasons = "; ".join(f"{row}: {reason}" for row, reason in table.unavailable.items())
        raise ConfigError(f"No row of {name} can be run in the small variant ({reasons}). Run it without --small.")
    metrics = list(dict.fromkeys("map" if metric.startswith(CLASS_AP) else metric for metric in table.metrics))
    result = Reproduction(table=table, small=small, seeds=seeds, values=[])
    errors = []
    for group in groups or table.groups:
        preset = "/".join(filter(None, [PREFIX + name, group]))
        full = Experiment.make(load_preset(preset))
        values = merge_overrides(load_preset(f"{preset}/{SMALL}") if small else load_preset(preset), overrides or {})
        experiment = Experiment.make(values)
        try:
            comparison = compare(
                experiment, list(table.comparison_rows.values()), seeds, out / group, metrics=metrics, jobs=jobs,
                retry_failed=retry_failed, callback=callback, track=track, command=command,
            )  # fmt: skip
        except DataError as error:
            result.skipped[group] = str(error)
            errors.append(error)
            continue
        result.values.extend(_group_values(table, group, comparison))
        result.changed_settings[group] = _changed_settings(full, experiment)
        result.comparison_notes.extend(f"{group}: {note}" if group else note for note in comparison.notes)
        result.comparison_notes.extend(_annotation_rates(table, comparison))
        result.finished_runs.extend(cell.path for cell in comparison.finished)
        result.write(out)
    if not result.values:
        raise errors[0]
    if table.average and set(result.groups) == set(table.groups):
        result.values.extend(_average_values(result))
    result.write(out)
    return result


def _group_values(table: PresetTable, group: str, comparison: Comparison) -> list[ReproducedValue]:
    published = {(figure.row, figure.metric): figure for figure in read_published().get((table.name, group), [])}
    names = {spec: row for row, spec in table.comparison_rows.items()}
    by_row = {names[row.label]: row for row in comparison.rows}
    if table.wilcoxon:
        return _wilcoxon_values(table, group, by_row, published)
    return [
        ReproducedValue(
            group=group,
            row=row,
            metric=metric,
            published=published.get((row, metric)),
            ours=_row_values(by_row[row], metric) if row in by_row else {},
            is_bound=table.rows.get(row, "").partition(":")[0] == UPPER_BOUND,
        )
        for row in (*table.rows, *table.added_rows)
        for metric in table.metrics
    ]


def _annotation_rates(table: PresetTable, comparison: Comparison) -> list[str]:
    """For a table of classes: by seed, how many clients annotate each class, if not all do."""
    lines = []
    for cell in comparison.rows[0].finished if table.metrics[0].startswith(CLASS_AP) else []:
        summary = cell.folder.read_summary()
        rates = summary["annotating_clients"]
        if any(count != summary["clients"] for count in rates.values()):
            counts = ", ".join(f"{name} {count}" for name, count in rates.items())
            lines.append(f"seed {cell.seed}: of {summary['clients']} clients annotate: {counts}.")
    return lines


def _row_values(row: ComparisonRow, metric: str) -> dict[int, float]:
    if not metric.startswith(CLASS_AP):
        return row.values(metric)
    wanted, found = metric.removeprefix(CLASS_AP), {}
    for cell in row.finished:
        for line in cell.folder.read_table(PER_CLASS_FILE):
            if line["class"] == wanted:
                found[cell.seed] = float(line["ap"])
    return found


def _wilcoxon_values(
    table: PresetTable,
    group: str,
    by_row: Mapping[str, ComparisonRow],
    published: Mapping[tuple[str, str], PublishedValue],
) -> list[ReproducedValue]:
    """Wilcoxon's signed-rank test of two rows over the metrics, for each seed."""
    from scipy.stats import wilcoxon  # here: it takes most of a second

    label, ours = " against ".join(table.wilcoxon), {metric: dict[int, float]() for metric in WILCOXON_METRICS}
    first, second = (by_row[row] for row in table.wilcoxon)
    for seed in {cell.seed for cell in first.finished} & {cell.seed for cell in second.finished}:
        pairs = np.array([[row.values(metric)[seed] for metric in table.metrics] for row in (first, second)])
        if np.isfinite(pairs).all() and (pairs[0] != pairs[1]).any():
            test = wilcoxon(pairs[0], pairs[1])
            for metric, value in zip(WILCOXON_METRICS, (test.statistic, test.pvalue), strict=True):
                ours[metric][seed] = float(value)
    return [
        ReproducedValue(
            group=group, row=label, metric=metric, published=published.get((label, metric)), ours=ours[metric]
        )
        for metric in WILCOXON_METRICS
    ]


def _average_values(result: Reproduction) -> list[ReproducedValue]:
    """The mean over all column groups, by seed."""
    published = {(fig.row, fig.metric): fig for fig in read_published().get((result.table.name, AVERAGE), [])}
    found: dict[tuple[str, str], list[ReproducedValue]] = {}
    for value in result.values:
        found.setdefault((value.row, value.metric), []).append(value)
    averages = []
    for (row, metric), values in found.items():
        seeds = set.intersection(*(set(value.ours) for value in values))
        ours = {seed: float(np.mean([value.ours[seed] for value in values])) for seed in sorted(seeds)}
        averages.append(
            ReproducedValue(
                group=AVERAGE,
                row=row,
                metric=metric,
                published=published.get((row, metric)),
                ours=ours,
                is_bound=values[0].is_bound,
            )
        )
    return averages


def _changed_settings(full: Experiment, ran: Experiment) -> dict[str, tuple[str, str]]:
    paper, here = flatten(full.model_dump(mode="json")), flatten(ran.model_dump(mode="json"))
    return {
        key: (_show(paper.get(key)), _show(here.get(key)))
        for key in dict.fromkeys([*paper, *here])
        if not key.startswith(NOT_A_SETTING) and paper.get(key) != here.get(key)
    }


def _show(value: Any) -> str:
    """A setting without the folders of a file."""
    if value is None:
        return "–"
    kind, colon, path = str(value).rpartition(":")
    return f"{kind}{colon}{Path(path).name}" if isinstance(value, str) and Path(path).is_absolute() else str(value)


def _rank_correlation(published: Sequence[float], ours: Sequence[float]) -> str:
    """Spearman's ρ; undefined if all values of one side are equal."""
    from scipy.stats import spearmanr  # here: it takes most of a second

    if len(set(published)) < FEWEST_RANKED or len(set(ours)) < FEWEST_RANKED:
        return "–"
    return f"{spearmanr(published, ours).statistic:.2f}"


def _format_published(figure: PublishedValue | None) -> str:
    if figure is None:
        return "–"
    return (
        f"{figure.value:g}" + (f" ± {figure.std:g}" if figure.std is not None else "") + (" (?)" if figure.note else "")
    )


def _group_title(text: str, group: str) -> str:
    return f"{group}: {text}" if group else text


def _or_empty(value: float | None) -> float | str:
    return "" if value is None or not math.isfinite(value) else value
