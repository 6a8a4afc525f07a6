"""A user's own data source with a mistake: one sentence that names it, before training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core import registry
from fedmll.core.errors import FedmllError

START = """
import numpy as np
from fedmll.core.registry import register
from fedmll.data.dataset import Dataset, Splits
from fedmll.data.sources.base import Source

pixels = np.random.default_rng(0).integers(0, 256, (60, 1, 8, 8), dtype=np.uint8)
vectors = np.random.default_rng(0).random((60, 4), dtype=np.float32)
labels = (pixels.mean((2, 3)) > [[127, 128]]).astype(np.int8)
names = ("bright", "brighter")

def halves(data):
    return Splits(data.subset(np.arange(40)), data.subset(np.arange(40, 60)))

"""
REGISTER = """
register("source", "mine")(Source(description="mine", load=load))
"""
GOOD = "def load(request): return halves(Dataset(pixels, labels, names))"


@pytest.fixture(autouse=True)
def without_plugin() -> Iterator[None]:
    yield
    registry._registered["source"].pop("mine", None)
    registry._modules.pop(("source", "mine"), None)


def run_with(folder: Path, text: str, *more: str) -> str:
    """The error of `fedmll run` with this plug-in; empty if it trains."""
    file = folder / "mine.py"
    file.write_text(START + text)
    words = ["run", "--data", "mine", "--plugin", str(file), "--rounds", "1", "--clients", "2", "--backbone", "convnet"]
    result = CliRunner().invoke(app, [*words, "--out", str(folder / "run"), *more])
    if result.exit_code == 0:
        return ""
    assert isinstance(result.exception, FedmllError), result.exception
    assert not (folder / "run" / "metrics.jsonl").exists()
    return str(result.exception)


def test_good_source_trains(tmp_path: Path) -> None:
    assert run_with(tmp_path, GOOD + REGISTER) == ""


@pytest.mark.parametrize(
    ("load", "error"),
    [
        (
            "def load(): return None",
            "failed because its function load must take one argument, the SourceRequest: TypeError",
        ),
        ("def load(request): return 1 / 0", "failed in mine.py, line 15: ZeroDivisionError: division by zero"),
        ("def load(request): pass", "must return Splits(train, test); its function load returned None."),
        ("def load(request): return pixels, labels", "its function load returned a value of type tuple."),
        (
            "def load(request): return Splits(pixels, labels)",
            "Splits.train must be a Dataset; it is a value",
        ),
        (
            "def load(request): return Splits(Dataset(pixels, labels, names), None)",
            "Splits.test must be a Dataset; it is None.",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels.tolist(), names))",
            "Dataset.labels must be a NumPy array of targets (N, C); it is a list.",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels[:, 0], names))",
            "targets must be int8 of shape (60, 2), one row per sample and one column per class; they are int8 (60,).",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels.astype(int), names))",
            "they are int64 (60, 2).",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels * 3, names))",
            "the labels of Splits.train must be 1 (present), 0 (absent) or -1 (unknown).",
        ),
        (
            "def load(request): return halves(Dataset(pixels.tolist(), labels, names))",
            "Dataset.store must be a NumPy array of the samples; it is a list.",
        ),
        (
            "def load(request): return halves(Dataset(pixels / 255, labels, names))",
            "samples must be uint8 images (N, channels, height, width) or float32 features (N, width); they are",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels, list(names)))",
            "Dataset.classes must be a tuple of names; it is a list.",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels, ('a', 'a')))",
            "the class 'a' appears twice.",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels, names, groups=np.arange(60)))",
            "Dataset.groups must be a NumPy array of strings (N,); it is int64 (60,).",
        ),
        (
            "def load(request): return halves(Dataset(pixels, labels, names, rows=np.arange(60) + 1))",
            "the rows of Splits.test must be positions in its 60 samples.",
        ),
        (
            "def load(request): return Splits(Dataset(pixels, labels, names), Dataset(pixels[:0], labels[:0], names))",
            "Splits.test has no samples.",
        ),
        (
            "def load(request): return Splits(Dataset(pixels, labels, names), Dataset(pixels, labels, ('x', 'y')))",
            "Splits.test must have the classes and the sample shape of Splits.train;",
        ),
        (
            "def load(request): return halves(Dataset(vectors, labels, names))",
            "returned feature vectors (4,); say so with images=False in its Source.",
        ),
    ],
)
def test_wrong_source_is_explained_before_training(tmp_path: Path, load: str, error: str) -> None:
    found = run_with(tmp_path, load + REGISTER)
    assert found.startswith("The data source 'mine'") and error in found
    assert "\n" not in found


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (
            '@register("source", "mine")\ndef load(request): pass\n',
            "must be a Source (fedmll.data.sources.base)",
        ),
        ('register("source", "mine")(Source)\n', "the data source 'mine' must be a Source"),
        (GOOD + '\nregister("source", "mine")(Source(load=load))\n', "missing 1 required keyword-only argument: 'desc"),
        (
            'register("source", "mine")(Source(description="mine", load=3))\n',
            "load of a Source must be a function",
        ),
    ],
)
def test_wrong_registration_is_explained_with_the_file(tmp_path: Path, text: str, error: str) -> None:
    found = run_with(tmp_path, text)
    assert f"The plug-in file {tmp_path / 'mine.py'} cannot be imported" in found and error in found


def test_declared_vectors_do_not_fit_an_image_backbone(tmp_path: Path) -> None:
    text = "def load(request): return halves(Dataset(vectors, labels, names))\n"
    text += 'register("source", "mine")(Source(description="mine", load=load, images=False))\n'
    assert "model.backbone = 'convnet' does not fit data.name = 'mine': mlp is for feature vectors" in run_with(
        tmp_path, text
    )
    assert run_with(tmp_path, text, "--backbone", "mlp") == ""
