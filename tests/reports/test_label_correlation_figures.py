"""Label correlations of a run: learned, consensus and true."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.data.federation import Federation
from fedmll.methods import build_method
from fedmll.methods.framework.task import task_of
from fedmll.reports.figures.label_correlation import (
    FILE,
    describe_difference,
    frobenius_distance,
    structure_correlation,
    write_matrices,
    write_run_correlations,
)


def phi(scores: np.ndarray) -> np.ndarray:
    spread = scores.mean(0) * (1 - scores.mean(0))
    return np.cov(scores.T.astype(float), bias=True) / np.sqrt(np.outer(spread, spread) + 1e-6)


@pytest.mark.parametrize("method", ["fedharmony", "fedavg"])
def test_correlations_of_a_run(tmp_path: Path, small_federation: Federation, method: str) -> None:
    out = tmp_path / "run"
    run(small(method__name=method), out, prepared=small_federation)
    found = write_run_correlations(out, small_federation)
    task = task_of(small_federation)
    model = build_method(task).build_model()
    model.load_state_dict(load_file(out / "model.safetensors"))
    model.eval()
    with torch.no_grad():
        images = torch.tensor(small_federation.test.samples(slice(None)))
        scores = torch.sigmoid(model(task.preprocess(images))).double().numpy()
    assert np.allclose(found.learned, phi(scores), atol=1e-6)
    assert np.allclose(found.true, phi(small_federation.test.labels), atol=1e-9)
    stored = load_file(out / FILE)
    if method == "fedharmony":
        last = load_file(out / "records" / "000002.safetensors")["consensus"]
        assert found.consensus is not None and np.allclose(found.consensus, last)
        assert set(stored) == {"learned", "true", "consensus", "blocks"}
    else:
        assert found.consensus is None
    assert np.allclose(stored["learned"], found.learned)
    with safe_open(out / FILE, "pt") as file:
        assert tuple(json.loads(file.metadata()["classes"])) == small_federation.test.classes


def test_a_run_that_is_not_finished_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        write_run_correlations(tmp_path)
    (tmp_path / "experiment.toml").write_text(small().to_toml())
    with pytest.raises(ConfigError, match="no finished run"):
        write_run_correlations(tmp_path)


def test_distance_and_structure_correlation() -> None:
    a = np.array([[1.0, 0.1, 0.2], [0.1, 1.0, np.nan], [0.2, np.nan, 1.0]])
    b = np.array([[0.0, 0.4, 0.1], [0.4, 0.0, 0.3], [0.1, 0.3, 0.0]])
    assert frobenius_distance(a, b) == pytest.approx(
        np.sqrt(2 * (0.3**2 + 0.1**2))
    )  # neither the diagonal nor the unknown pair
    rng = np.random.default_rng(0)
    c, d = rng.normal(size=(2, 5, 5))
    upper = np.triu_indices(5, 1)
    assert structure_correlation(c, d) == pytest.approx(np.corrcoef(c[upper], d[upper])[0, 1])
    assert structure_correlation(c, 3 * c) == pytest.approx(1)
    assert np.isnan(structure_correlation(c, np.zeros((5, 5))))
    assert describe_difference(c, 3 * c).endswith(", r 1.00")
    assert "r" not in describe_difference(c, np.zeros((5, 5)))


def test_the_image_shows_the_blocks_in_order(tmp_path: Path) -> None:
    """Two planted blocks whose labels alternate: in the image two squares on the diagonal are red, the others not."""
    blocks = np.arange(8) % 2
    true = np.where(blocks[:, None] == blocks, 0.8, 0.0)
    write_matrices(tmp_path / "p.png", {"true": true}, [f"label {i}" for i in range(8)], blocks)
    pixels = np.asarray(Image.open(tmp_path / "p.png").convert("RGB")).astype(int)
    red = pixels[..., 0] - pixels[..., 1] > 80
    red[:, pixels.shape[1] * 2 // 3 :] = False  # the colour bar
    rows, columns = np.flatnonzero(red.any(1)), np.flatnonzero(red.any(0))
    square = red[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
    half, gap = len(square) // 2, 5
    assert square[: half - gap, : half - gap].mean() > 0.6  # all but the diagonal and the frame
    assert square[half + gap :, half + gap :].mean() > 0.6
    assert not square[: half - gap, half + gap :].any() and not square[half + gap :, : half - gap].any()


def test_many_classes_are_drawn_without_names(tmp_path: Path) -> None:
    true = np.random.default_rng(0).uniform(-1, 1, (60, 60))
    write_matrices(tmp_path / "p.png", {"true": true}, [f"c{i}" for i in range(60)], np.zeros(60, dtype=np.int64))
    assert Image.open(tmp_path / "p.png").size[0] > 500
