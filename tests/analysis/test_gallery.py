"""The gallery of a run has what the run has data for, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmll import load_run, run
from fedmll.analysis import class_features, coverage
from fedmll.analysis.gallery import gallery
from fedmll.analysis.opened import data_of
from fedmll.data.federation import Federation, build
from fedmll.errors import ConfigError, DataError
from fedmll.running.saved import SavedRun


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A t-SNE of 400 points takes a second."""
    monkeypatch.setattr(class_features, "POINTS", 40)


def named(saved: SavedRun, data: Any = None) -> list[str]:
    return [picture.name for picture in gallery(saved, data)]


def composite(folder: Path, count: int = 40) -> Path:
    """Feature vectors with labels, as a file."""
    x = np.random.default_rng(0).normal(size=(count * 2, 6)).astype(np.float32)
    y = (x[:, :3] > 0.3).astype(np.int8)
    file = folder / "f.npz"
    np.savez(file, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    return file


def test_with_and_without_the_images(tmp_path: Path, small_federation: Federation) -> None:
    run(small(method__name="fednca-ml", model__channels=(4, 16)), tmp_path / "run", prepared=small_federation)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    saved = load_run(tmp_path / "moved")
    assert named(saved) == ["correlation", "class-vectors"]
    pictures = gallery(saved, data_of(saved))
    assert [picture.name for picture in pictures] == [
        "correlation", "class-vectors", "class-features", "tsne", "attention", "examples",
    ]  # fmt: skip
    for picture in pictures:
        assert picture.rows and picture.title and picture.words.endswith(".")
        assert len({tuple(row) for row in picture.rows}) == 1  # a table: the same columns in every row
    with pytest.raises(ConfigError, match="labels of the data given are not those"):
        gallery(saved, small_federation.test.subset(np.arange(5)))
    with pytest.raises(ConfigError, match="3 classes"):
        gallery(saved, small_federation.test.only(np.arange(3)))


def test_pseudo_labels_and_coverage(tmp_path: Path) -> None:
    tagging = small(
        method__name="fedmlp", annotation__kind="missing", annotation__missing=5, method__first_stage=1,
        method__adaptive=False, method__negative_share=0.3, method__positive_share=0.3,
    )  # fmt: skip
    run(tagging, tmp_path / "tags")
    expected = ["correlation", "class-vectors", "pseudo-labels", "pseudo-labels-by-class"]
    tags = gallery(load_run(tmp_path / "tags"))
    assert [picture.name for picture in tags] == expected
    by_class, (last,) = tags[3].rows, tags[2].rows
    for kind in ("absent", "present"):
        made, true = (sum(row[f"{what}_{kind}"] for row in by_class) for what in ("made", "true"))
        assert made == last[f"tags_{kind}"] > 0
        assert last[f"precision_{kind}"] == pytest.approx(100 * true / made)
    private = small(
        method__name="private-fedavg", method__loss="sigmoid", partition__kind="labels-per-client",
        partition__labels_per_client=3, participation__count=2,
    )  # fmt: skip
    divided = build(private)
    run(private, tmp_path / "private", prepared=divided)
    *_, picture = gallery(load_run(tmp_path / "private"))
    assert picture.name == "coverage"
    assert [list(row.values())[1:] for row in picture.rows] == coverage.coverage(divided, 2).tolist()


def test_a_model_a_client_has_no_picture(tmp_path: Path, small_federation: Federation) -> None:
    run(small(method__name="local-only", training__rounds=1), tmp_path / "run", prepared=small_federation)
    saved = load_run(tmp_path / "run")
    assert gallery(saved) == [] and gallery(saved, small_federation.test) == []


def test_feature_vectors_have_no_images_and_the_data_may_go_or_move(tmp_path: Path) -> None:
    file = composite(tmp_path)
    setting = {"data__name": f"features:{file}", "data__limit": None, "model__backbone": "auto"}
    run(small(method__name="fednca-ml", model__channels=(16,), partition__clients=2, **setting), tmp_path / "run")
    saved = load_run(tmp_path / "run")
    expected = ["correlation", "class-vectors", "class-features", "tsne"]
    assert named(saved, data_of(saved)) == expected
    moved = file.rename(tmp_path / "elsewhere.npz")
    assert named(saved) == expected[:2]
    with pytest.raises(DataError):
        data_of(saved)
    assert len(data_of(saved, moved={"name": f"features:{moved}"})) == 40
    composite(tmp_path, 39)
    with pytest.raises(DataError, match="not what the run"):
        data_of(saved)
