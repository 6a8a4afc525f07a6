"""Label embeddings from a file of vectors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SHARED_DATA

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.models.label_embeddings import label_embeddings
from fedmll.testing import experiment

RNG = np.random.default_rng(0)
VECTORS = RNG.normal(size=(4, 8)).astype(np.float16)


def written(folder: Path, names: list[str], **more: np.ndarray) -> str:
    np.savez(folder / "v.npz", x=VECTORS[: len(names)], x_names=np.array(names), **more)
    return f"file:{folder / 'v.npz'}"


def unit(rows: np.ndarray) -> np.ndarray:
    rows = rows.astype(np.float64)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def test_vectors_are_found_by_class_name_and_states_are_learned(tmp_path: Path) -> None:
    found = label_embeddings(written(tmp_path, ["Dog", "cat", "tree"]), ["tree", "dog"], "", 8, 0, {})
    np.testing.assert_allclose(found.labels, unit(VECTORS[[2, 0]]), atol=1e-6)
    assert found.states is None


def test_states_in_the_file_are_used(tmp_path: Path) -> None:
    file = written(tmp_path, ["positive", "cat", "negative", "dog"])
    found = label_embeddings(file, ["cat"], "", 8, 0, {})
    np.testing.assert_allclose(found.states, unit(VECTORS[[2, 0]]), atol=1e-6)  # negative, positive


def test_classes_missing_in_the_file_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no vectors for horse, tree"):
        label_embeddings(written(tmp_path, ["cat", "dog"]), ["cat", "horse", "tree"], "", 8, 0, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        label_embeddings(f"file:{tmp_path / 'nothing.npz'}", ["cat"], "", 8, 0, {})


def test_learned_states_are_trained_and_labels_are_not(tmp_path: Path) -> None:
    digits = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    np.savez(tmp_path / "v.npz", x=RNG.normal(size=(10, 8)), x_names=np.array(digits))
    made = experiment(method__name="fedlgt", method__encoder=f"file:{tmp_path / 'v.npz'}")
    weights = run(made).weights
    assert "states" in weights and "labels" not in weights
    assert torch.isfinite(weights["states"]).all()


@pytest.mark.skipif(not (SHARED_DATA / "clip_label_embeddings.npz").is_file(), reason="CLIP's vectors are not at hand")
def test_clip_vectors_exist_for_coco_classes() -> None:
    file = SHARED_DATA / "clip_label_embeddings.npz"
    with np.load(file, allow_pickle=False) as arrays:
        names = [str(name) for name in arrays["coco80_names"]]
    found = label_embeddings(f"file:{file}", names, "", 512, 0, {})
    assert found.labels is not None and found.labels.shape == (80, 512)
    likeness = found.labels @ found.labels.T
    place = names.index
    assert likeness[place("cat"), place("dog")] > likeness[place("cat"), place("toaster")]
