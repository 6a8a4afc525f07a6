"""Presets: the experiments of papers' tables. `preset:PAPER/TABLE[/GROUP][/small]` is one experiment; `small` finishes
in minutes. Example: `preset:fednca-ml/1/beta-0.1/small`. Without GROUP: the first column group of the table.

Each paper is one file in `config/papers`:

notes             what the paper leaves open or what is different here, for all of its tables
[base]            the settings that all tables share; an empty string removes a setting
[small]           what the small variants change; `rows` and `unavailable` as below
[rows.NAME]       row of the paper → row of a comparison, for tables with rows = "NAME"
[added_rows.NAME] rows that the paper does not have, for the same tables
[datasets.NAME]   settings, for column groups that are NAME
[tables.N]        what (its contents), rows, metrics, groups (column group → settings), and settings for all groups;
                  average: the paper has one more group with the mean over all groups;
                  wilcoxon: two rows; the paper has their signed-rank test over the metrics instead of the metrics;
                  small: as [small], for this table; a group may have a `small` too
[figures]         figures that other commands make

A table whose name begins with `figure-` holds the numbers of a figure. `published.csv` has the published figures.

`preset:coco-voc` and `preset:chest-x-rays[/SITE,SITE…]` are federations of published datasets with different label
sets: experiments with [[sites]] in `config/federations`.
"""

from __future__ import annotations

import copy
import csv
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

from fedmll.core.errors import ConfigError
from fedmll.core.text import suggest

PREFIX = "preset:"
SMALL = "small"
ALL_SITES = "all"  # of a federation
AVERAGE = "average"  # the column group that is the mean of the others
NOT_SETTINGS = ("what", "rows", "added_rows", "unavailable", "metrics", "groups", AVERAGE, "wilcoxon", SMALL)
WILCOXON_METRICS = ("wilcoxon_w", "wilcoxon_p")

Layer = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class PresetTable:
    """A table of a paper, or the numbers of a figure.

    Attributes:
        paper: for example fednca-ml.
        number: for example 1 or A2.
        what: its contents, for people.
        rows: the paper's row → the row of a comparison (`fedprox:mu=0.1`).
        added_rows: the same for rows that the paper does not have.
        unavailable: the paper's rows that cannot be run → the reason.
        metrics: the columns; `ap/NAME` is the average precision of a class.
        groups: the column groups; [""] for a table without them.
        average: whether the paper also has the mean over the groups.
        wilcoxon: two rows that the paper compares by Wilcoxon's signed-rank test over the metrics.
        notes: what the paper leaves open, or what is different here.
    """

    paper: str
    number: str
    what: str
    rows: dict[str, str]
    added_rows: dict[str, str] = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)
    metrics: tuple[str, ...]
    groups: tuple[str, ...]
    average: bool = False
    wilcoxon: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.paper}/{self.number}"

    @property
    def comparison_rows(self) -> dict[str, str]:
        """The rows that can be run: name → row of a comparison."""
        return {row: spec for row, spec in self.rows.items() if row not in self.unavailable} | self.added_rows


@dataclass(frozen=True, kw_only=True)
class PublishedValue:
    """A figure of a table. `note`: why it may be misread; empty if it was found in the paper as it is."""

    row: str
    metric: str
    value: float
    std: float | None
    note: str


@cache
def read_papers() -> dict[str, dict[str, Any]]:
    """Paper → the contents of its file."""
    found = [file for file in (files("fedmll.config") / "papers").iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in sorted(found, key=str)}


@cache
def read_published() -> dict[tuple[str, str], list[PublishedValue]]:
    """The published figures by table (`fednca-ml/1`) and column group."""
    found: dict[tuple[str, str], list[PublishedValue]] = {}
    text = (files("fedmll.config") / "papers" / "published.csv").read_text("utf-8")
    for line in csv.DictReader(text.splitlines()):
        std = float(line["std"]) if line["std"] else None
        figure = PublishedValue(
            row=line["row"], metric=line["metric"], value=float(line["value"]), std=std, note=line["note"]
        )
        found.setdefault((f"{line['paper']}/{line['table']}", line["group"]), []).append(figure)
    return found


def preset_names() -> list[str]:
    """All presets as `PAPER/TABLE`."""
    return [f"{paper}/{table}" for paper, content in read_papers().items() for table in content["tables"]]


def read_table(name: str, small: bool = False) -> PresetTable:
    """The table with this name (`fednca-ml/1`)."""
    paper, number, content, table = _find(name)
    groups = table.get("groups", {"": {}})
    rows = _named(table["rows"], content.get("rows", {}))
    added = dict(content.get("added_rows", {}).get(table["rows"], {})) if isinstance(table["rows"], str) else {}
    unavailable = dict(table.get("unavailable", {}))
    if small:
        for layer in (content[SMALL], table.get(SMALL, {})):
            rows = rows | {row: spec for row, spec in layer.get("rows", {}).items() if row in rows}
            unavailable |= {row: reason for row, reason in layer.get("unavailable", {}).items() if row in rows}
            added |= layer.get("added_rows", {})
    return PresetTable(
        paper=paper,
        number=number,
        what=table["what"],
        rows=rows,
        added_rows=added,
        unavailable=unavailable,
        metrics=tuple(table["metrics"]),
        groups=tuple(groups),
        average=table.get(AVERAGE, False),
        wilcoxon=tuple(table.get("wilcoxon", ())),
        notes=tuple(content.get("notes", ())),
    )


@cache
def read_federations() -> dict[str, dict[str, Any]]:
    """Preset → the contents of its file: an experiment with [[sites]]."""
    found = [file for file in (files("fedmll.config") / "federations").iterdir() if file.name.endswith(".toml")]
    return {file.name.removesuffix(".toml"): tomllib.loads(file.read_text("utf-8")) for file in sorted(found, key=str)}


def _load_federation(name: str, chosen: str) -> dict[str, Any]:
    """The experiment of a federation with the chosen sites: their names, `all`, or "" for the default.

    `annotates` of a site says which classes of the study it has: a study has those of its sites.
    """
    content = copy.deepcopy(read_federations()[name])
    known = [site["name"] for site in content["sites"]]
    default = content.pop("default", known)
    wanted = {"": default, ALL_SITES: known}.get(chosen) or [site.strip() for site in chosen.split(",")]
    wrong = next((site for site in wanted if site not in known), None)
    if wrong is not None:
        raise ConfigError(f"The preset '{PREFIX}{name}' has no site '{wrong}'{suggest(wrong, [*known, ALL_SITES])}")
    sites = [site for site in content["sites"] if site["name"] in wanted]
    annotated = {label for site in sites for label in site.pop("annotates", ())}
    if annotated:
        classes = content["study"]["classes"]
        content["study"]["classes"] = [label for label in classes if label in annotated]
    return content | {"sites": sites}


def load_preset(name: str) -> dict[str, Any]:
    """The values of a preset's experiment, as in an experiment file."""
    path = name.removeprefix(PREFIX).split("/")
    if path[0] in read_federations():
        return _load_federation(path[0], "/".join(path[1:]))
    small = len(path) > 2 and path[-1] == SMALL
    table_name, rest = "/".join(path[:2]), path[2 : len(path) - small]
    _, _, content, table = _find(table_name)
    groups = table.get("groups", {"": {}})
    if len(rest) > 1 or any(group not in groups for group in rest):
        known = [f"{PREFIX}{table_name}/{group}" for group in [*filter(None, groups), SMALL]]
        raise ConfigError(f"There is no preset '{name}'{suggest(name, known)}")
    group = _named(groups[rest[0] if rest else next(iter(groups))], content.get("datasets", {}))
    layers: list[Layer] = [content["base"], table, group]
    if small:
        layers += [content[SMALL], table.get(SMALL, {}), group.get(SMALL, {})]
    return _merge(layers)


def _merge(layers: list[Layer]) -> dict[str, Any]:
    values: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for section, settings in layer.items():
            if section not in NOT_SETTINGS:
                values[section] = values.get(section, {}) | settings
    return {section: {key: v for key, v in found.items() if v != ""} for section, found in values.items()}


def _find(name: str) -> tuple[str, str, dict[str, Any], dict[str, Any]]:
    paper, _, number = name.removeprefix(PREFIX).partition("/")
    content = read_papers().get(paper, {"tables": {}})
    if number not in content["tables"]:
        known = [PREFIX + preset for preset in [*preset_names(), *read_federations()]]
        raise ConfigError(f"There is no preset '{name}'{suggest(name, known)}")
    return paper, number, content, content["tables"][number]


def _named(value: str | dict[str, Any], known: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    return dict(known[value]) if isinstance(value, str) else value
