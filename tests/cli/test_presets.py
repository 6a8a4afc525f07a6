"""Presets: every table of the papers is an experiment that is accepted, and so is every row of its comparison."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from conftest import SHARED_DATA
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.cli.options import ExperimentArguments
from fedmll.comparison.plan import parse_variant
from fedmll.config.experiment import Experiment
from fedmll.config.presets import load_preset, preset_methods, preset_names
from fedmll.core.errors import ConfigError, DataError
from fedmll.data import federation

TABLES = {  # of the papers; what is published of them is in their own tables
    "fedharmony": "1 2 3 4 5",
    "fedlgt": "1 2 3 4 A1 A2 A3 A4 A5 A6 A7",
    "fedmlp": "1 2 3",
    "fednca-ml": "1 2 3 4 5 6 7 8",
}


def test_every_table_has_a_preset() -> None:
    assert preset_names() == [f"{paper}/{table}" for paper, tables in TABLES.items() for table in tables.split()]


def test_every_published_table_has_a_preset() -> None:
    file = SHARED_DATA.parent / "papers" / "published.csv"
    if not file.is_file():
        pytest.skip(f"{file} is not here: the published figures are for development only")
    with file.open(newline="") as stream:
        published = {f"{row['paper']}/{row['table']}" for row in csv.DictReader(stream)}
    assert published == set(preset_names())


@pytest.mark.parametrize("variant", ["", "/small"])
@pytest.mark.parametrize("name", preset_names())
def test_every_preset_and_every_row_of_its_table_is_accepted(name: str, variant: str) -> None:
    found = ExperimentArguments(file=Path(f"preset:{name}{variant}"), options={}).experiment()
    assert found.method.name == name.partition("/")[0]
    for row in preset_methods(name + variant):
        found.changed(parse_variant(row).overrides)
    if variant:
        assert found.model.freeze == "backbone" and found.training.rounds <= 16
        assert found.data.source in ("packed", "cifar10")


@pytest.mark.parametrize("variant", ["", "/small"])
def test_preset_without_data_names_the_missing_files(tmp_path: Path, variant: str) -> None:
    sources = set()
    for name in preset_names():
        found = ExperimentArguments(
            file=Path(f"preset:{name}{variant}"), options={"data.root": str(tmp_path)}
        ).experiment()
        if found.data.name in sources:
            continue
        sources.add(found.data.name)
        with pytest.raises(DataError, match=r"not found|does not exist") as error:
            federation.build(found)
        assert str(tmp_path) in str(error.value)
    assert len(sources) == (4 if variant else 10)


def test_preset_has_the_settings_of_its_paper() -> None:
    one = Experiment.make(load_preset("preset:fednca-ml/1"))
    assert (one.data.name, one.partition.beta, one.partition.presence, one.partition.clients) == (
        "ml-cifar10",
        0.5,
        0.5,
        10,
    )
    assert one.model.weights is None and one.training.lr == 1e-4 and one.method.options["lambda_neg"] == 1.0
    two = Experiment.make(load_preset("preset:fednca-ml/2"))
    assert two.model.weights == "resnet18-imagenet1k-v1" and two.partition.presence == 0.71
    lgt = Experiment.make(load_preset("preset:fedlgt/1"))
    assert (lgt.participation.count, lgt.participation.sampling, lgt.partition.kind) == (50, "size", "natural")
    mlp = Experiment.make(load_preset("preset:fedmlp/2"))
    assert (mlp.data.name, mlp.data.top_classes, mlp.annotation.missing, mlp.training.rounds) == (
        "chestxray14:pa",
        8,
        1,
        500,
    )


def test_options_override_a_preset_and_a_misspelt_name_gets_a_suggestion() -> None:
    changed = ExperimentArguments(
        file=Path("preset:fednca-ml/1"), options={"training.rounds": 3}, settings=["partition.beta=0.1"]
    ).experiment()
    assert (changed.training.rounds, changed.partition.beta) == (3, 0.1)
    for name in ("preset:fednca-ml/9", "preset:fednca/1", "preset:fednca-ml/1/tiny", "preset:"):
        with pytest.raises(ConfigError, match="There is no preset"):
            load_preset(name)
    listed = CliRunner().invoke(app, ["presets"]).stdout
    assert "preset:fedlgt/A7" in listed
