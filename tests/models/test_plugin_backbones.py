"""A user's own backbone or text encoder with a mistake: one sentence that names it and says what it must be."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedmll import load_model, run
from fedmll.testing import experiment

PLUGIN = """
import torch
from torch import nn
from fedmll import register
from fedmll.models.backbones import Backbone

class Net(Backbone):
    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, 2)
        self.width = 6

    def forward(self, images):
        return self.conv(images).relu()

class NoWidth(Net):
    def __init__(self, channels):
        super().__init__(channels)
        del self.width

class WrongWidth(Net):
    def __init__(self, channels):
        super().__init__(channels)
        self.width = 7

class TextWidth(Net):
    def __init__(self, channels):
        super().__init__(channels)
        self.width = "6"

class NoSuper(Backbone):
    def __init__(self, channels):
        self.conv = nn.Conv2d(channels, 6, 3)

class Sequence(Net):
    def forward(self, images):
        return super().forward(images).flatten(2)

class Tuple(Net):
    def forward(self, images):
        return super().forward(images), None

class OneSample(Net):
    def forward(self, images):
        return super().forward(images[:1])

class Plain(nn.Conv2d):
    width = 6

class Vectors(Net):
    def forward(self, vectors):
        return nn.functional.linear(vectors, torch.zeros(6, 40))

for name, build in {
    "good": lambda model, shape: Net(shape[0]),
    "one-argument": lambda model: Net(1),
    "no-width": lambda model, shape: NoWidth(shape[0]),
    "wrong-width": lambda model, shape: WrongWidth(shape[0]),
    "text-width": lambda model, shape: TextWidth(shape[0]),
    "no-super": lambda model, shape: NoSuper(shape[0]),
    "sequence": lambda model, shape: Sequence(shape[0]),
    "tuple": lambda model, shape: Tuple(shape[0]),
    "one-sample": lambda model, shape: OneSample(shape[0]),
    "plain": lambda model, shape: Plain(shape[0], 6, 3),
    "nothing": lambda model, shape: None,
    "vectors": lambda model, shape: Vectors(shape[0]),
}.items():
    register("backbone", f"own-{name}")(build)
"""
MISTAKES = {
    "one-argument": "cannot be built (TypeError: ",
    "no-width": "(NoWidth) has the width None: its `width` must be the number of channels",
    "wrong-width": "into (2, 6, 7, 7): its output must be (batch, width, rows, columns) or (batch, width)",
    "text-width": "(TextWidth) has the width '6'",
    "no-super": "cannot be built (AttributeError: ",
    "sequence": "into (2, 6, 49): its output must be",
    "tuple": "into tuple: its output must be",
    "one-sample": "into (1, 6, 7, 7): its output must be",
    "plain": "is a Plain: it must be an instance of fedmll.models.backbones.Backbone",
    "nothing": "is a NoneType: it must be an instance of",
    "vectors": "(Vectors) fails on a batch of shape (2, 1, 16, 16) (RuntimeError: ",
}
OPTIONS = ["--set", "training.rounds=1", "--set", "partition.clients=3", "--set", "data.limit=60"]


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_in_a_backbone_is_one_sentence(fedmll: Any, tmp_path: Path, name: str) -> None:
    (tmp_path / "own.py").write_text(PLUGIN)
    code, out, error = fedmll("run", "--plugin", "own.py", "--set", f"model.backbone=own-{name}", *OPTIONS)
    assert code == 2, out + error
    assert f"error: The backbone 'own-{name}' " in error and MISTAKES[name] in error
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error


def test_correct_backbone_runs_and_starts_in_training_mode(tmp_path: Path) -> None:
    plugin = tmp_path / "own.py"
    plugin.write_text(PLUGIN)
    made = experiment(plugins=[str(plugin)], model__backbone="own-good", training__rounds=1)
    run(made, tmp_path / "run")
    model = load_model(tmp_path / "run" / "model.safetensors", plugins=[plugin])
    assert model.predict(np.zeros((1, *model.sample_shape), np.uint8)).shape == (1, len(model.classes))


def damage(folder: Path, kind: str) -> str:
    """A text encoder with a mistake; returns method.encoder."""
    names = np.array(["zero", "one"])
    arrays: dict[str, Any] = {
        "flat": {"labels": np.zeros(2), "labels_names": names},
        "text": {"labels": np.array([["a"], ["b"]]), "labels_names": names},
        "more-names": {"labels": np.zeros((1, 4)), "labels_names": names},
        "one-name": {"labels": np.zeros((1, 4)), "labels_names": np.array("zero")},
        "nan": {"labels": np.full((2, 4), np.nan), "labels_names": names},
    }
    file = folder / f"{kind}.npz"
    if kind in arrays:
        np.savez(file, **arrays[kind])
        return f"file:{file}"
    if kind == "cut":
        np.savez(file, labels=np.zeros((2, 4)), labels_names=names)
        file.write_bytes(file.read_bytes()[:-30])
        return f"file:{file}"
    if kind == "array":
        np.save(folder / "array.npy", np.zeros(3))
        return f"file:{folder / 'array.npy'}"
    if kind == "huge":
        with zipfile.ZipFile(file, "w") as archive:
            header = b"{'descr': '<f8', 'fortran_order': False, 'shape': (60000000, 60000000), }".ljust(117) + b"\n"
            archive.writestr("labels.npy", b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        return f"file:{file}"
    text = b"zero 1 2\none 1 x\n" if kind == "glove-words" else b"zero 1 2\n\xff\xfe 3 4\n"
    (folder / "glove.txt").write_bytes(text)
    return f"glove:{folder / 'glove.txt'}"


ENCODERS = {
    "flat": "must be numbers of shape (names, width)",
    "text": "must be numbers of shape (names, width)",
    "more-names": "and `labels_names` one name per row",
    "one-name": "and `labels_names` one name per row",
    "nan": "has values that are NaN or infinite",
    "cut": "it must be an .npz file",
    "array": "it must be an .npz file",
    "huge": "",
    "glove-words": "each line must have a word and its numbers",
    "glove-bytes": "each line must have a word and its numbers",
}


@pytest.mark.parametrize("kind", ENCODERS)
def test_mistake_in_a_text_encoder_is_one_sentence(fedmll: Any, tmp_path: Path, kind: str) -> None:
    encoder = damage(tmp_path, kind)
    code, out, error = fedmll("run", "--method", "fedlgt", "--set", f"method.encoder={encoder}", *OPTIONS)
    assert code == 2, out + error
    assert error.startswith("error: ") and encoder.partition(":")[2] in error and ENCODERS[kind] in error
    assert len(error.strip().splitlines()) == 1 and "Traceback" not in error
