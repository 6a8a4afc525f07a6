"""Presets are whole tables of the papers: rows, column groups, metrics and settings."""

from __future__ import annotations

import csv
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
from conftest import SHARED_DATA

from fedmll.cli.options import ExperimentArguments, as_published
from fedmll.comparison.plan import parse_variant
from fedmll.config.experiment import Experiment
from fedmll.config.presets import (
    AVERAGE,
    SMALL,
    WILCOXON_METRICS,
    load_preset,
    preset_names,
    read_papers,
    read_published,
    read_table,
)
from fedmll.config.toml_values import flatten
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import federation
from fedmll.evaluation.metric_definitions import COSTS, METRICS

PUBLISHED_TABLES = sorted({table for table, _ in read_published()})
EXPERIMENTS = [f"{name}/{group}".rstrip("/") for name in preset_names() for group in read_table(name).groups]


def test_the_tables_with_published_figures_are_those_of_the_papers() -> None:
    assert sorted(name for name in preset_names() if "figure" not in name and "private" not in name) == PUBLISHED_TABLES


@pytest.mark.parametrize("name", PUBLISHED_TABLES)
def test_preset_has_every_row_group_and_metric_of_the_published_table_and_no_other(name: str) -> None:
    table = read_table(name)
    published = {group: figures for (of_table, group), figures in read_published().items() if of_table == name}
    assert published.keys() == {*table.groups, *([AVERAGE] if table.average else [])}
    for group, figures in published.items():
        rows, metrics = list(table.rows), table.metrics
        if table.wilcoxon:
            assert set(table.wilcoxon) == set(rows)
            rows, metrics = [" against ".join(table.wilcoxon)], WILCOXON_METRICS
        assert sorted({figure.row for figure in figures}) == sorted(rows), group
        assert {figure.metric for figure in figures} == set(metrics), group
        assert len(figures) == len(rows) * len(metrics), group
    assert not table.added_rows.keys() & table.rows.keys()
    assert table.unavailable.keys() <= table.rows.keys()


def test_published_figures_are_those_of_the_papers() -> None:
    """The figures that were collected from the papers, under the names that they have here."""
    file = SHARED_DATA.parent / "papers" / "published.csv"
    if not file.is_file():
        pytest.skip(f"{file} is not here: the collected figures are for development only")
    with file.open(newline="") as stream:
        collected = sorted(
            (row["paper"], row["table"], float(row["value"]) / (10 if row["metric"] == "seconds" else 1))
            for row in csv.DictReader(stream)
        )
    ours = sorted(
        (*table.split("/"), figure.value)
        for (table, group), figures in read_published().items()
        for figure in figures
        if (table, group) != ("fedlgt/A7", "rounds-50")  # the paper's table repeats Table 1
    )
    assert ours == collected


def test_five_figures_of_a_scanned_paper_are_marked() -> None:
    published = read_published().items()
    marked = [(table, figure.row) for (table, _), figures in published for figure in figures if figure.note]
    assert len(marked) == 5 and all(table.startswith("fedharmony") for table, _ in marked)


def settings_of_papers() -> list[tuple[str, str, Any]]:
    """(experiment, section.key, value of the paper)"""
    papers = tomllib.loads((Path(__file__).parent / "paper_settings.toml").read_text())
    return [
        (experiment, key, value)
        for paper, tables in papers.items()
        for pattern, settings in tables.items()
        for key, value in settings.items()
        for experiment in EXPERIMENTS
        if fnmatchcase(experiment, f"{paper}/{pattern}") or experiment == f"{paper}/{pattern}".removesuffix("/*")
    ]


def test_presets_have_the_settings_that_the_papers_state() -> None:
    checked, wrong = set(), []
    for experiment, key, expected in settings_of_papers():
        checked.add(experiment)
        found = flatten(resolved(experiment).model_dump()).get(key)
        if ("" if found is None else found) != expected:
            wrong.append(f"{experiment}: {key} is {found!r}; the paper: {expected!r}")
    assert not wrong
    published = {f"{table}/{group}".rstrip("/") for table, group in read_published() if group != AVERAGE}
    assert published <= checked


def resolved(name: str) -> Experiment:
    return ExperimentArguments(file=Path(f"preset:{name}"), options={}).experiment()


@pytest.mark.parametrize("variant", ["", "/small"])
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_row_of_every_preset_is_accepted(name: str, variant: str) -> None:
    found, table = resolved(name + variant), read_table("/".join(name.split("/")[:2]), small=bool(variant))
    for row in table.comparison_rows.values():
        found.changed(parse_variant(row).overrides)
    for metric in table.metrics:
        assert metric in METRICS or metric in COSTS or metric.startswith("ap/")
    if variant:
        assert found.training.rounds <= 16
        assert found.data.source in ("packed", "cifar10", "fashion-mnist")


def test_rows_that_cannot_be_run_are_named_with_a_reason() -> None:
    found = {(name, row) for name in preset_names() for row in read_table(name, small=True).unavailable}
    assert found == {
        *(("fedlgt/A2", row) for row in ("glove", "bert", "clip")),
        *(("fedlgt/A3", row) for row in ("average", "concatenate")),
        ("fedharmony/1", "fedrdn"),
        ("fedharmony/figure-6", "fedrdn"),
    }
    assert not any(read_table(name).unavailable for name in preset_names())


def test_small_variants_change_single_rows() -> None:
    assert read_table("fednca-ml/1").rows["fedlgt"].endswith("clip-vit-base-patch16")
    assert read_table("fednca-ml/1", small=True).rows["fedlgt"] == "fedlgt"
    assert read_table("fedlgt/A2", small=True).comparison_rows.keys() == {"wordllama", "all-minilm-l6-v2"}


@pytest.mark.parametrize("variant", ["", "/small"])
def test_preset_without_data_names_the_missing_files(tmp_path: Path, variant: str) -> None:
    sources = set()
    for name in EXPERIMENTS:
        found = ExperimentArguments(
            file=Path(f"preset:{name}{variant}"), options={"data.root": str(tmp_path)}
        ).experiment()
        if found.data.name in sources or found.data.name == "fashion-mnist":  # it may be installed on the machine
            continue
        sources.add(found.data.name)
        with pytest.raises(DataError, match=r"not found|does not exist") as error:
            federation.build(found)
        assert str(tmp_path) in str(error.value)
    assert len(sources) == (5 if variant else 11)


def test_published_number_of_clients_does_not_merge_the_users_of_flair() -> None:
    flair: dict[str, Any] = {"data": {"name": "flair:coarse"}, "method": {"name": "fedlgt"}}
    assert "partition" not in as_published("fedlgt", flair)
    assert as_published("fedlgt", {**flair, "data": {"name": "coco:2014"}})["partition"]["clients"] == 50
    natural = as_published("fedlgt", {**flair, "data": {"name": "folder:x.csv"}, "partition": {"kind": "natural"}})
    assert natural["partition"] == {"kind": "natural"}


def test_the_first_column_group_is_the_default() -> None:
    assert load_preset("preset:fednca-ml/1") == load_preset("preset:fednca-ml/1/beta-0.5")
    assert load_preset("preset:fednca-ml/1/small") == load_preset("preset:fednca-ml/1/beta-0.5/small")
    assert load_preset("preset:fednca-ml/1/beta-0.1")["partition"]["beta"] == 0.1


def test_options_override_a_preset_and_a_misspelt_name_gets_a_suggestion() -> None:
    changed = ExperimentArguments(
        file=Path("preset:fednca-ml/1"), options={"training.rounds": 3}, settings=["partition.beta=0.1"]
    ).experiment()
    assert (changed.training.rounds, changed.partition.beta) == (3, 0.1)
    for name in ("fednca-ml/9", "fednca/1", "fednca-ml/1/beta-1", "", "fednca-ml/1/small/x", "fednca-ml/5/beta-0.5"):
        with pytest.raises(ConfigError, match=r"There is no preset.*(did you mean '|known: )preset:(fed|chest)"):
            load_preset(name)


def test_files_of_papers_have_only_known_keys() -> None:
    """A misspelt key would be ignored."""
    sections = {*Experiment.model_fields}
    of_variant = {"rows", "unavailable", "added_rows", *sections}
    for content in read_papers().values():
        assert content.keys() <= {"notes", "base", SMALL, "rows", "added_rows", "datasets", "tables", "figures"}
        assert content["base"].keys() <= sections and content[SMALL].keys() <= of_variant
        for table in content["tables"].values():
            assert table.keys() <= {"what", "metrics", "groups", AVERAGE, "wilcoxon", SMALL, *of_variant}
            assert table.get(SMALL, {}).keys() <= of_variant
            for group in table.get("groups", {}).values():
                settings = content["datasets"][group] if isinstance(group, str) else group
                assert settings.keys() <= {SMALL, *sections} and settings.get(SMALL, {}).keys() <= sections
        for figure in content.get("figures", {}).values():
            assert figure.keys() == {"what", "command"}
