"""Partition files, and feature skew: clients whose images look different."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from PIL import Image, ImageFilter
from safetensors.torch import load_file
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.data.partition import APPEARANCES, change_appearance
from fedmll.data.partition_file import write_partition_file
from fedmll.training import round_loop

SKEWED = {"partition__kind": "dirichlet", "partition__presence": 0.5, "partition__beta": 0.3}


def of_file(file: Path, **more: Any) -> federation.Federation:
    return federation.build(small(partition__kind="file", partition__clients=None, partition__file=str(file), **more))


@pytest.mark.parametrize("unassignable", ["drop", "withhold", "negative"])
def test_partition_file_restores_the_same_federation(tmp_path: Path, unassignable: str) -> None:
    made = federation.build(
        small(**SKEWED, partition__unassignable=unassignable, annotation__kind="missing", annotation__missing=3)
    )
    checksum = write_partition_file(made, tmp_path / "mine.json")
    again = of_file(tmp_path / "mine.json", training__rounds=5, training__batch_size=8)
    assert again.names == made.names
    for one, other in zip(made.samples, again.samples, strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(made.train.labels, again.train.labels)
    assert np.array_equal(made.true_labels, again.true_labels)
    assert np.array_equal(made.annotated, again.annotated)
    assert np.array_equal(made.held_out.rows, again.held_out.rows)
    assert np.array_equal(made.held_out_owners, again.held_out_owners)
    assert np.array_equal(made.pooled_rows, again.pooled_rows)
    hidden = int(((made.true_labels == -1) & (made.source.labels != -1)).sum())  # by the partition, not by annotation
    assert again.report["withheld"] == hidden and bool(hidden) == (unassignable == "withhold")
    assert write_partition_file(again, tmp_path / "again.json") == checksum


def test_order_of_the_keys_does_not_matter(tmp_path: Path) -> None:
    made = federation.build(small(**SKEWED))
    write_partition_file(made, tmp_path / "mine.json")
    values = json.loads((tmp_path / "mine.json").read_text())
    (tmp_path / "sorted.json").write_text(json.dumps(dict(sorted(values.items(), reverse=True)), indent=2))
    assert of_file(tmp_path / "sorted.json").names == made.names


def test_run_with_partition_file_gives_the_same_weights(tmp_path: Path) -> None:
    plain = round_loop.run(small(**SKEWED), tmp_path / "one")
    write_partition_file(federation.build(small(**SKEWED)), tmp_path / "mine.json")
    frozen = small(partition__kind="file", partition__clients=None, partition__file=str(tmp_path / "mine.json"))
    result = round_loop.run(frozen, tmp_path / "two")
    assert result.metrics["macro_auc"] == plain.metrics["macro_auc"]
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_freeze_command_writes_documented_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["data", "freeze", "--clients", "3", "--set", "data.limit=90", "--out", "three.json"]
    said = CliRunner().invoke(app, words)
    assert said.exit_code == 0, said.exception
    values = json.loads((tmp_path / "three.json").read_text())
    assert [client["name"] for client in values["clients"]] == ["c000", "c001", "c002"]
    whole = sorted(row for client in values["clients"] for row in client["train"] + client["held_out"])
    assert whole == list(range(90)) and values["samples"] == 90
    assert values["clients"][0]["annotates"] == values["classes"] and len(values["classes"]) == 10


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda values: values["clients"][0]["train"].pop(), "was changed after it was written"),
        (lambda values: values.update(format=2), "its format is 2; only 1 is supported"),
        (lambda values: values.pop("checksum"), "is not a file of `fedmll data freeze`"),
    ],
)
def test_changed_partition_file_is_rejected(tmp_path: Path, change: Any, said: str) -> None:
    file = tmp_path / "mine.json"
    write_partition_file(federation.build(small()), file)
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    with pytest.raises(ConfigError, match=said):
        of_file(file)


def test_partition_file_for_other_data_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    write_partition_file(federation.build(small()), file)
    with pytest.raises(
        ConfigError, match="was written for other training data: 160 samples of ml-digits; here there are 150"
    ):
        of_file(file, data__limit=150)
    with pytest.raises(ConfigError, match="or their targets differ"):
        of_file(file, seed=1)  # composites are drawn by the seed
    with pytest.raises(ConfigError, match=r"other classes \(10; here 4\)"):
        of_file(file, data__top_classes=4)
    with pytest.raises(ConfigError, match=r"partition\.file says which client annotates which classes"):
        of_file(file, annotation__kind="one-class")
    with pytest.raises(ConfigError, match=r"needs partition\.file"):
        federation.build(small(partition__kind="file"))
    with pytest.raises(ConfigError, match="cannot be read"):
        of_file(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="cannot contain samples of the server"):
        write_partition_file(federation.build(small(partition__server=0.2)), file)
    with pytest.raises(ConfigError, match="cannot contain changed images"):
        write_partition_file(federation.build(small(partition__kind="feature-skew")), file)


# Looks


def test_feature_skew_changes_only_the_appearance_of_images() -> None:
    plain = federation.build(small(partition__kind="iid", partition__clients=8))
    found = federation.build(small(partition__kind="feature-skew", partition__clients=8))
    assert sum(map(len, found.samples)) == sum(map(len, plain.samples))
    divided = federation.divide(found.experiment, plain.train)
    assert divided.appearances is not None
    counts = np.bincount(divided.appearances, minlength=len(APPEARANCES))
    assert counts.min() == 1 and counts.max() == 2
    assert np.array_equal(found.test.samples(slice(None)), plain.test.samples(slice(None)))
    assert np.array_equal(found.true_labels, plain.true_labels)
    for rows, look in zip(found.samples, divided.appearances, strict=True):
        before = plain.train.samples(rows)
        assert np.array_equal(found.train.samples(rows), change_appearance(before, APPEARANCES[look]))
    again = federation.build(small(partition__kind="feature-skew", partition__clients=8))
    assert again.fingerprints == found.fingerprints
    assert found.fingerprints["training"]["images"] != plain.fingerprints["training"]["images"]


def test_appearances_change_pixels_as_documented() -> None:
    images = np.random.default_rng(0).integers(256, size=(2, 3, 8, 12), dtype=np.uint8)
    values = images / 255
    assert np.array_equal(change_appearance(images, "plain"), images)
    assert np.abs(change_appearance(images, "dark") - 255 * values**2).max() <= 0.5
    assert np.abs(change_appearance(images, "bright") - 255 * np.sqrt(values)).max() <= 0.5
    assert np.abs(change_appearance(images, "flat") - (64 + images / 2)).max() <= 0.5
    blurred = Image.fromarray(images[1, 2]).filter(ImageFilter.BoxBlur(1))
    assert np.array_equal(change_appearance(images, "blurred")[1, 2], np.asarray(blurred))
    coarse = change_appearance(images, "coarse")[0, 0]
    assert len(np.unique(coarse[:4, :4])) == 1
    assert abs(int(coarse[0, 0]) - images[0, 0, :4, :4].mean()) <= 1


def test_feature_skew_rejects_feature_vectors(tmp_path: Path) -> None:
    numbers = np.arange(40) % 2
    vectors = np.random.default_rng(0).random((40, 3)).astype(np.float32)
    np.savez(tmp_path / "f.npz", x_train=vectors, y_train=numbers, x_test=vectors, y_test=numbers)
    made = small(data__name=f"features:{tmp_path / 'f.npz'}", partition__kind="feature-skew")
    with pytest.raises(ConfigError, match="this data has feature vectors"):
        federation.build(made)
