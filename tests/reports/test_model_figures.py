"""The figures of a run: those that it has the numbers for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import small

from fedmll import load_run, run
from fedmll.core.errors import ConfigError, DataError
from fedmll.data.federation import Federation, build
from fedmll.inference.load_run import SavedRun
from fedmll.reports.figures import class_features, label_coverage
from fedmll.reports.html_report import model_figures


@pytest.fixture(autouse=True)
def few_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """A t-SNE of 400 points takes a second."""
    monkeypatch.setattr(class_features, "MAX_POINTS", 40)


def named(saved: SavedRun, data: Any = None) -> list[str]:
    return [figure.name for figure in model_figures(saved, data)]


def composite(folder: Path, count: int = 40) -> Path:
    """Feature vectors with labels, as a file."""
    x = np.random.default_rng(0).normal(size=(count * 2, 6)).astype(np.float32)
    y = (x[:, :3] > 0.3).astype(np.int8)
    file = folder / "f.npz"
    np.savez(file, x_train=x[:count], y_train=y[:count], x_test=x[count:], y_test=y[count:])
    return file


def test_figures_with_and_without_the_test_data(tmp_path: Path, small_federation: Federation) -> None:
    run(small(method__name="fednca-ml", model__channels=(4, 16)), tmp_path / "run", prepared=small_federation)
    shutil.move(tmp_path / "run", tmp_path / "moved")
    saved = load_run(tmp_path / "moved")
    assert named(saved) == ["correlation", "class-vectors"]
    figures = model_figures(saved, saved.load_test_data())
    assert [figure.name for figure in figures] == [
        "correlation", "class-vectors", "class-features", "tsne", "attention", "examples",
    ]  # fmt: skip
    for figure in figures:
        assert figure.rows and figure.title and figure.caption.endswith(".")
        assert len({tuple(row) for row in figure.rows}) == 1  # the same columns in every row
    with pytest.raises(ConfigError, match="labels of the data differ"):
        model_figures(saved, small_federation.test.subset(np.arange(5)))
    with pytest.raises(ConfigError, match="3 classes"):
        model_figures(saved, small_federation.test.select_classes(np.arange(3)))


def test_pseudo_labels_and_coverage(tmp_path: Path) -> None:
    tagging = small(
        method__name="fedmlp", annotation__kind="missing", annotation__missing=5, method__first_stage=1,
        method__adaptive=False, method__negative_share=0.3, method__positive_share=0.3,
    )  # fmt: skip
    run(tagging, tmp_path / "tags")
    expected = ["correlation", "class-vectors", "pseudo-labels", "pseudo-labels-by-class"]
    tags = model_figures(load_run(tmp_path / "tags"))
    assert [figure.name for figure in tags] == expected
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
    *_, figure = model_figures(load_run(tmp_path / "private"))
    assert figure.name == "coverage"
    assert [list(row.values())[1:] for row in figure.rows] == label_coverage.compute_coverage(divided, 2).tolist()


def test_a_run_with_one_model_per_client_has_no_figures(tmp_path: Path, small_federation: Federation) -> None:
    run(small(method__name="local-only", training__rounds=1), tmp_path / "run", prepared=small_federation)
    saved = load_run(tmp_path / "run")
    assert model_figures(saved) == [] and model_figures(saved, small_federation.test) == []


def test_feature_vectors_have_no_image_figures(tmp_path: Path) -> None:
    file = composite(tmp_path)
    setting = {"data__name": f"features:{file}", "data__limit": None, "model__backbone": "auto"}
    run(small(method__name="fednca-ml", model__channels=(16,), partition__clients=2, **setting), tmp_path / "run")
    saved = load_run(tmp_path / "run")
    expected = ["correlation", "class-vectors", "class-features", "tsne"]
    assert named(saved, saved.load_test_data()) == expected
    moved = file.rename(tmp_path / "elsewhere.npz")
    assert named(saved) == expected[:2]
    with pytest.raises(DataError):
        saved.load_test_data()
    assert len(saved.load_test_data(moved={"name": f"features:{moved}"})) == 40
    composite(tmp_path, 39)
    with pytest.raises(DataError, match="differs from what the run"):
        saved.load_test_data()
