"""Exported models, run by onnxruntime and torch.export: every method, every backbone, any number of samples, against
PyTorch; and the card beside them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file

from fedmll import load_run, run
from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.evaluation.bootstrap import bootstrap_intervals
from fedmll.evaluation.thresholds import format_threshold
from fedmll.inference import preprocess
from fedmll.inference.export import FORMATS, export, write_example, write_onnx
from fedmll.inference.model_card import Example, build_model_card
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
    "mobilenet-v2": (
        (3, 32, 32),
        {
            "model__freeze": "backbone",
            "model__weights": "random",
            "model__stages": (17, 16, 13),
            "model__power": "sqrt",
            "model__flip_average": True,
        },
    ),
    "resnet18": ((1, 16, 16), {"model__stem": "cifar"}),
    "resnet50": ((3, 32, 32), {"model__stem": "imagenet"}),
    "small-vit": ((1, 16, 8), {"model__channels": (32,)}),
}


OWN_BACKBONES = set(registry.all_of("backbone")) - set(registry.find_added("backbone"))


@pytest.mark.parametrize("name", sorted(OWN_BACKBONES - {"vit"}))  # a small-vit has the code of the large one
def test_onnx_of_every_backbone(name: str, tmp_path: Path) -> None:
    shape, settings = BACKBONES[name]
    check_onnx(model_of(small(model__backbone=name, **settings), shape, tmp_path), tmp_path / "model.onnx")


@pytest.mark.parametrize(
    "name",
    ["convnet", "mlp", "mobilenet-v2", "resnet18", "small-vit", "fednca-ml", "fedctran", "fedlgt", "private-fedavg"],
)
def test_pt2_predicts_as_fedmll_for_any_number_of_samples(name: str, tmp_path: Path) -> None:
    if name in BACKBONES:
        shape, settings = BACKBONES[name]
        model = model_of(small(model__backbone=name, **settings), shape, tmp_path)
    else:
        made = small(method__name=name, model__channels=(8, 8), **SMALL.get(name, {}))
        model = model_of(made, (1, 8, 8), tmp_path)
    file = export(model, "pt2", tmp_path / "out")[0]
    extra = {"classes": ""}
    module = torch.export.load(file, extra_files=extra).module()
    assert json.loads(extra["classes"]) == list(CLASSES)
    for count in (1, 4):
        samples = samples_of(model.sample_shape, count)
        known = [torch.tensor([[-1, 1, -1]] * count, dtype=torch.int8)] if model.takes_known_labels else []
        wanted = model.predict(samples, {"b": 1} if known else None)
        found = module(torch.from_numpy(samples), *known).detach().numpy()
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("export") / "run"
    run(small(training__rounds=1, annotation__kind="missing", annotation__missing=3), folder)
    return folder


def test_a_run_is_exported_with_its_card(finished: Path, tmp_path: Path) -> None:
    saved = load_run(finished)
    for kind in FORMATS:
        file, readme, *_ = export(saved, kind, tmp_path / kind)
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
    assert f"| mAP | {saved.metrics['map']:.2f} | {low:.2f} … {high:.2f} |" in text
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


GREY, COLOUR, DEEP = "grey", "colour", "deep"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Runs on 8-bit grey, colour and 12-bit images."""
    folder, generator = tmp_path_factory.mktemp("runs"), np.random.default_rng(0)
    for kind, shape in ((GREY, (9, 12)), (COLOUR, (12, 9, 3)), (DEEP, (12, 12))):
        (folder / f"{kind}-images").mkdir()
        lines = ["image,a,b"]
        for place in range(24):
            pixels = generator.integers(0, 4096 if kind == DEEP else 256, shape)
            image = Image.fromarray(pixels.astype(np.uint16 if kind == DEEP else np.uint8))
            image.save(folder / f"{kind}-images" / f"{place}.png")
            lines.append(f"{kind}-images/{place}.png,{place % 2},{place // 2 % 2}")
        (folder / f"{kind}.csv").write_text("\n".join(lines) + "\n")
        settings = {"data__limit": None, "partition__clients": 2, "training__batch_size": 4, "training__rounds": 2}
        settings |= {"data__size": 11, "training__lr": 0.05, "data__name": f"folder:{folder / f'{kind}.csv'}"}
        run(small(**settings), folder / kind)
    return {kind: folder / kind for kind in (GREY, COLOUR, DEEP)}


def odd_images(folder: Path, deep: bool) -> list[Path]:
    """Images of many modes and sizes, as a user may have them."""
    generator, images = np.random.default_rng(1), {}
    for name, size in (("same", (11, 11)), ("odd", (37, 23)), ("wide", (5, 90)), ("one", (1, 1))):
        images[f"{name}.png"] = Image.fromarray(generator.integers(0, 256, size, dtype=np.uint8))
        images[f"{name}-colour.png"] = Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8))
        if deep:
            images[f"{name}-12.png"] = Image.fromarray(generator.integers(0, 4096, size).astype(np.uint16))
            images[f"{name}-32.tif"] = Image.fromarray(generator.normal(2000, 2000, size).astype(np.float32))
    images["palette.png"] = images["odd-colour.png"].convert("P")
    images["alpha.png"] = images["odd-colour.png"].convert("RGBA")
    images["black-and-white.png"] = images["odd.png"].convert("1")
    images["photo.jpg"] = images["odd-colour.png"]
    folder.mkdir()
    for name, image in images.items():
        image.save(folder / name)
    return sorted(folder.iterdir())


@pytest.mark.parametrize("kind", [GREY, COLOUR, DEEP])
@pytest.mark.parametrize("to", ["onnx", "pt2"])
def test_preprocess_script_predicts_as_fedmll_does(
    fedmll: Any, runs: dict[str, Path], kind: str, to: str, tmp_path: Path
) -> None:
    """The script runs in a folder in which fedmll cannot be imported."""
    code, out, error = fedmll("export", runs[kind], "--to", to, "--out", "exported")
    assert code == 0 and "exported/preprocess.py" in out, error
    paths = odd_images(tmp_path / "odd", kind == DEEP)
    code, _, error = fedmll("predict", runs[kind], *paths, "--out", "expected.json")
    assert code == 0, error
    expected = {row["image"]: row["probabilities"] for row in json.loads((tmp_path / "expected.json").read_text())}
    (tmp_path / "exported" / "fedmll.py").write_text("raise ImportError('preprocess.py must not need fedmll')")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def script(*arguments: str) -> str:
        command = [sys.executable, "preprocess.py", *arguments]
        done = subprocess.run(
            command, cwd=tmp_path / "exported", capture_output=True, text=True, env=environment, timeout=300
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    found = json.loads(script(*map(str, paths)))
    assert found.keys() == expected.keys()
    for path, probabilities in expected.items():
        for name, value in probabilities.items():
            assert found[path][name] == pytest.approx(value, abs=1e-4), (path, name)
    assert len({round(row["a"], 3) for row in found.values()}) > 3  # the images are told apart
    assert "the largest difference to the expected probabilities is" in script("--check")
    settings = json.loads((tmp_path / "exported" / "preprocess.json").read_text())
    card = (tmp_path / "exported" / "README.md").read_text()
    assert all(f"| {value:.6f} |" in card for value in settings["example"]["probabilities"])
    assert "from preprocess import predict" in card and "Resampling.BILINEAR" in card


def test_preprocess_check_fails_if_the_example_does_not_fit(runs: dict[str, Path], tmp_path: Path) -> None:
    files = export(load_run(runs[GREY]), "onnx", tmp_path)
    settings = json.loads((tmp_path / "preprocess.json").read_text())
    settings["shape"] = [1, 11, 11]
    settings["example"]["probabilities"][0] += 0.001
    (tmp_path / "preprocess.json").write_text(json.dumps(settings))
    done = subprocess.run([sys.executable, str(tmp_path / "preprocess.py"), "--check"], capture_output=True, text=True)
    assert done.returncode == 1 and "is 0.001" in done.stdout
    assert {file.name for file in files} == {
        "model.onnx",
        "README.md",
        "preprocess.py",
        "preprocess.json",
        "example.png",
    }


def test_preprocess_scales_the_window_and_leaves_8_bits_as_they_are() -> None:
    """In the window −100 to 156 every value is one step: −100 → 0, 0 → 100. Values outside and NaN are clipped."""
    settings = {"shape": [1, 2, 3], "window": [-100, 156]}
    values = np.array([[np.nan, -100.0, 0.0], [100.4, 155.0, 9000.0]])
    assert preprocess.preprocess(values, settings).tolist() == [[[0, 0, 100], [200, 255, 255]]]
    pixels = np.array([[0, 1, 2], [99, 100, 255]], np.uint8)
    assert preprocess.preprocess(pixels, settings).tolist() == [pixels.tolist()]
    with pytest.raises(ValueError, match="more than 8 bits per pixel"):
        preprocess.preprocess(values, {"shape": [1, 2, 3], "window": None})


def test_preprocess_command_prints_its_help_and_every_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preprocess, "FOLDER", tmp_path)
    monkeypatch.setattr(preprocess, "predict", lambda images: np.array([[0.25, 0.75]] * len(images)))
    (tmp_path / "preprocess.json").write_text('{"classes": ["a", "b"]}')
    assert preprocess.main([]) == 2 and "python preprocess.py --check" in capsys.readouterr().out
    assert preprocess.main(["x.png", "y.png"]) == 0
    assert json.loads(capsys.readouterr().out) == {name: {"a": 0.25, "b": 0.75} for name in ("x.png", "y.png")}
    (tmp_path / "preprocess.json").write_text('{"classes": ["a"]}')  # of another model
    with pytest.raises(ValueError, match="longer"):
        preprocess.main(["x.png"])


@pytest.mark.parametrize(
    ("window", "name", "mode"),
    [
        (None, "example.png", "L"),
        ([0, 4095], "example.png", "I;16"),
        ([100, 65535], "example.png", "I;16"),
        ([0, 65536], "example.tif", "F"),
        ([-1, 4095], "example.tif", "F"),
    ],
)
def test_example_has_the_bits_of_the_training_images(
    window: list[int] | None, name: str, mode: str, tmp_path: Path
) -> None:
    """The values cover the window; the size is not the model's, so the example also shows that images are resized."""
    model = SimpleNamespace(sample_shape=(1, 12, 9), description={"window": window}, predict=lambda _: np.ones((1, 2)))
    example = write_example(model, tmp_path)  # type: ignore[arg-type]
    assert example == Example(image=name, probabilities=[1.0, 1.0])
    image = Image.open(tmp_path / name)
    assert image.mode == mode and image.size == (18, 15)
    low, high = window or (0, 255)
    noise = np.random.default_rng(0).random((15, 18))
    np.testing.assert_allclose(np.asarray(image, np.float64), low + (high - low) * noise, rtol=0, atol=0.51)


def test_example_of_a_colour_model_is_a_colour_image(tmp_path: Path) -> None:
    model = SimpleNamespace(sample_shape=(3, 8, 8), description={"window": None}, predict=lambda _: np.ones((1, 2)))
    image = Image.open(tmp_path / write_example(model, tmp_path).image)  # type: ignore[arg-type]
    pixels = np.asarray(image)
    assert image.mode == "RGB" and (pixels[..., 0] != pixels[..., 1]).any() and (pixels[..., 1] != pixels[..., 2]).any()


def test_card_describes_the_input_of_the_model(tmp_path: Path) -> None:
    example = Example(image="example.png", probabilities=[0.5, 0.25, 0.125])
    for channels, words in ((1, ("to grey", 'convert("L")')), (3, ("to colour", 'convert("RGB")'))):
        folder = tmp_path / str(channels)
        folder.mkdir()
        model = model_of(small(model__channels=(4, 8)), (channels, 8, 8), folder)
        text = build_model_card(model, "model.onnx", example)
        assert all(word in text for word in words) and f"uint8 (N, {channels}, 8, 8)" in text
        assert "| a |" in text and "| 0.125000 |" in text and "Training started from" not in text
        assert '{"images": samples}' in build_model_card(model, "model.onnx", None)
    shape, settings = BACKBONES["mlp"]
    vectors = model_of(small(model__backbone="mlp", **settings), shape, tmp_path)
    text = build_model_card(vectors, "model.onnx", None)
    assert '{"features": samples}' in text and "float32 (N, 7)" in text and "## Preprocessing" not in text


def test_card_names_the_initial_weights_and_leaves_quotation_marks_as_they_are(tmp_path: Path) -> None:
    model = model_of(small(model__channels=(4, 8)), (1, 8, 8), tmp_path)
    weights = load_file(model.file)
    write_model(
        model.file, weights, {**model.description, "initial_weights": "resnet's.pt", "classes": ['"a"', "b", "c"]}
    )
    text = build_model_card(load_model(model.file), "model.onnx", None)
    assert "Training started from the weights resnet's.pt." in text and '| "a" |' in text
