"""Exported models, run by onnxruntime and TorchScript: every method, every backbone, any number of samples, against
PyTorch; and the card beside them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from numpy.typing import NDArray

from fedmll import load_run, run
from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.evaluation.thresholds import format_threshold
from fedmll.inference.export import FORMATS, export, write_onnx
from fedmll.inference.model_file import SavedModel, describe_model, load_model, write_model
from fedmll.testing import make_trainer

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

SMALL = {
    "fedctran": {"method__layers": 1},
    "fedlgt": {"method__layers": 1, "method__encoder": "learned", "method__inducing": 2},
    "fednova": {"training__optimizer": "sgd"},
    "private-fedavg": {"data__name": "digits"},  # a softmax
    "private-fedprox": {"method__loss": "sigmoid"},
    "scaffold": {"training__optimizer": "sgd"},
}
CLASSES = ("a", "b", "c")


def model_of(made: Experiment, shape: tuple[int, ...], folder: Path) -> SavedModel:
    """As a run of this experiment writes it, with weights that nobody trained."""
    trainer = make_trainer(made, CLASSES, shape)
    trainer.model.eval()
    for module in trainer.model.modules():  # statistics as of data: with those of the start deep networks see nothing
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
            module.train()
    with torch.no_grad():
        trainer.model(trainer.task.preprocess(torch.from_numpy(samples_of(shape, 8))))
    weights = (
        trainer.named(trainer.method.final_model(trainer.method.initial_state() | trainer.weights.dump()))
        | trainer.frozen()
    )
    file = folder / "model.safetensors"
    write_model(file, weights, describe_model(made, trainer, None, 1))
    return load_model(file)


def samples_of(shape: tuple[int, ...], count: int) -> NDArray[np.generic]:
    generator = np.random.default_rng(count)
    if len(shape) == 1:
        return generator.standard_normal((count, *shape)).astype(np.float32)
    return generator.integers(0, 256, (count, *shape), dtype=np.uint8)


def check_onnx(model: SavedModel, file: Path) -> None:
    write_onnx(model, file)
    session = onnxruntime.InferenceSession(file)
    name = "images" if len(model.sample_shape) == 3 else "features"
    assert [entry.name for entry in session.get_inputs()] == [name]  # what must be given
    for count in (1, 5):
        samples = samples_of(model.sample_shape, count)
        (found,) = session.run(None, {name: samples})
        np.testing.assert_allclose(found, model.predict(samples), atol=1e-4)
        if model.takes_known_labels:
            for known in (np.array([[1, -1, 0]] * count, np.int8), np.array([[1, -1, 0]], np.int8)):
                (told,) = session.run(None, {name: samples, "known": known})
                np.testing.assert_allclose(told, model.predict(samples, {"a": 1, "c": 0}), atol=1e-4)
                assert not np.allclose(told, found, atol=1e-3)
    assert np.ptp(model.predict(samples), axis=0).max() > 1e-6  # it does look at its input
    kept = session.get_modelmeta().custom_metadata_map
    assert json.loads(kept["classes"]) == ["a", "b", "c"] and json.loads(kept["fedmll"]) == model.description


@pytest.mark.parametrize("name", sorted(set(registry.all_of("method")) - set(registry.find_added("method"))))
def test_onnx_of_every_method(name: str, tmp_path: Path) -> None:
    made = small(method__name=name, model__channels=(8, 8), **SMALL.get(name, {}))
    check_onnx(model_of(made, (1, 8, 8), tmp_path), tmp_path / "model.onnx")


BACKBONES = {
    "convnet": ((3, 12, 8), {"model__channels": (4, 8), "model__norm": "group", "model__width": 16}),
    "densenet121": ((3, 32, 32), {}),
    "mlp": ((7,), {"model__channels": (8,), "data__name": "features:x.npz"}),
    "mobilenet-v2": ((3, 32, 32), {"model__freeze": "backbone", "model__weights": "random"}),
    "resnet18": ((1, 16, 16), {"model__stem": "cifar"}),
    "resnet50": ((3, 32, 32), {"model__stem": "imagenet"}),
    "vit": ((1, 16, 8), {"model__channels": (32,)}),
}


@pytest.mark.parametrize("name", sorted(set(registry.all_of("backbone")) - set(registry.find_added("backbone"))))
def test_onnx_of_every_backbone(name: str, tmp_path: Path) -> None:
    shape, settings = BACKBONES[name]
    check_onnx(model_of(small(model__backbone=name, **settings), shape, tmp_path), tmp_path / "model.onnx")


@pytest.mark.parametrize("name", ["fedavg", "fednca-ml", "fedctran"])
def test_torchscript_takes_any_number(name: str, tmp_path: Path) -> None:
    made = small(method__name=name, model__channels=(8, 8), **SMALL.get(name, {}))
    model = model_of(made, (1, 8, 8), tmp_path)
    file, _ = export(model, "torchscript", tmp_path / "out")
    extra = {"classes": ""}
    traced = torch.jit.load(io.BytesIO(file.read_bytes()), _extra_files=extra)
    assert json.loads(extra["classes"]) == list(CLASSES)
    for count in (1, 4):
        samples = samples_of(model.sample_shape, count)
        known = [torch.tensor([[-1, 1, -1]] * count, dtype=torch.int8)] if model.takes_known_labels else []
        wanted = model.predict(samples, {"b": 1} if known else None)
        np.testing.assert_allclose(traced(torch.from_numpy(samples), *known).numpy(), wanted, atol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    run(small(training__rounds=1, annotation__kind="missing", annotation__missing=3), folder)
    return folder


def test_a_run_is_exported_with_its_card(finished: Path, tmp_path: Path) -> None:
    saved = load_run(finished)
    for kind in FORMATS:
        file, readme = export(saved, kind, tmp_path / kind)
        assert file.is_file() and file.name in readme.read_text()
    np.testing.assert_array_equal(
        load_model(tmp_path / "safetensors" / "model.safetensors").predict(np.zeros((1, 1, 16, 16), np.uint8)),
        saved.predict(np.zeros((1, 1, 16, 16), np.uint8)),
    )
    text = (tmp_path / "onnx" / "README.md").read_text()
    front = text.split("---\n")[1]
    index = json.loads(next(line for line in front.splitlines() if line.startswith("model-index: "))[13:])
    reported = {entry["type"]: entry["value"] for entry in index[0]["results"][0]["metrics"]}
    assert reported["macro_auc"] == pytest.approx(saved.metrics["macro_auc"], abs=1e-4)
    kept = saved.predictions()
    low, high = bootstrap_intervals(kept.probabilities, kept.targets, kept.classes, 0)["map"]
    assert f"| map | {saved.metrics['map']:.2f} | {low:.2f} … {high:.2f} |" in text
    annotating = saved.summary["annotating_clients"]
    assert sum(annotating.values()) == 4 * 7 and f"| zero | {annotating['zero']} of 4 |" in text
    threshold = saved.model.tuned_thresholds[0]  # type: ignore[index]
    assert f"| zero | {format_threshold(threshold)} |" in text
    for word in ("FUTURE-AI", "Traceability", "## Limits", "fedavg", "ml-digits"):
        assert word in text
    alone = export(saved.model, "safetensors", tmp_path / "alone")[1].read_text()
    assert (
        "Not available here" in alone
        and f"| zero | {format_threshold(threshold)} |" in alone
        and "model-index" not in alone
    )


def test_impossible_exports_are_rejected(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = load_run(finished)
    with pytest.raises(ConfigError, match="not to 'tflite'"):
        export(saved, "tflite", tmp_path)
    with pytest.raises(ConfigError, match="holds the model itself"):
        export(saved, "safetensors", finished)
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"pip install 'fedmll\[export\]'"):
        export(saved, "onnx", tmp_path)
    assert not (tmp_path / "model.onnx").exists()


NAMES = ("<img src=x onerror=alert(1)>", "[lung](javascript:alert(1))", "a|b\n# c", "`x` **y** ~~z~~ &lt;", "__x__ \\")


def test_class_names_are_neither_html_nor_links_in_the_card(tmp_path: Path) -> None:
    """The card is rendered as the hub and GitHub do, with HTML allowed."""
    markdown = pytest.importorskip("markdown_it")
    trainer = make_trainer(small(), NAMES, (1, 8, 8))
    weights = trainer.named(Message(trainer.weights.dump())) | trainer.frozen()
    write_model(tmp_path / "model.safetensors", weights, describe_model(small(), trainer, np.full(5, 0.4), 1))
    card = export(load_model(tmp_path / "model.safetensors"), "safetensors", tmp_path / "out")[1].read_text()
    tokens = markdown.MarkdownIt("commonmark", {"html": True}).enable("table").parse(card.split("---\n", 2)[2])
    inline = [child for token in tokens for child in token.children or ()]
    kinds = {token.type for token in (*tokens, *inline)}
    assert not kinds & {"html_block", "html_inline", "link_open", "image", "strong_open", "em_open", "s_open"}
    shown = [token.content for token in inline if token.type == "text"]
    for name in NAMES:
        assert " ".join(name.split()) in " ".join("".join(shown).split()), name
