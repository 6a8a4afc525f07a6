"""`model.weights`: what it can name, what is refused, and how pixels follow it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small
from safetensors.torch import load_file

import fedmll
from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.config.settings import ModelSettings
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.inference.model_file import write_model
from fedmll.models.backbones import build_backbone, pixel_scale
from fedmll.models.backbones.base import read_weights
from fedmll.models.pretrained_weights import IMAGENET_MEAN, IMAGENET_STD, PUBLISHED, find_weights_file


def test_published_weights_are_torchvisions() -> None:
    assert {w.backbone for w in PUBLISHED.values()} == {"resnet18", "resnet50", "mobilenet-v2", "densenet121"}
    assert {w.backbone for w in PUBLISHED.values()} <= registry.all_of("backbone").keys()
    one = PUBLISHED["resnet18-imagenet1k-v1"]
    assert one.url == "https://download.pytorch.org/models/resnet18-f37072fd.pth" and one.sha256 == "f37072fd"
    assert all(len(w.sha256) == 8 and int(w.sha256, 16) for w in PUBLISHED.values())


def test_weights_file_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("w.pth").touch()
    assert ModelSettings(weights="w.pth").weights == str(tmp_path / "w.pth")  # a run goes on from another folder
    assert find_weights_file("w.pth") == Path("w.pth")
    name = "resnet18-imagenet1k-v1"
    assert ModelSettings(weights=name).weights == name
    with pytest.raises(ConfigError, match=f"fedmll weights get {name}"):
        find_weights_file(name)
    PUBLISHED[name].path.parent.mkdir(parents=True)
    PUBLISHED[name].path.touch()
    assert find_weights_file(name) == tmp_path / "cache" / "weights" / "resnet18-f37072fd.pth"
    with pytest.raises(ConfigError, match=r"no weights file 'resnet18'.*did you mean 'resnet18-imagenet1k-v1'"):
        find_weights_file("resnet18")
    with pytest.raises(ConfigError, match=r"is for model\.backbone = 'resnet18', and this is 'resnet50'"):
        build_backbone(ModelSettings(backbone="resnet50", weights=name), (3, 64, 64), 0)
    Path("run").mkdir()
    assert ModelSettings(weights="run:run").weights == f"run:{tmp_path / 'run'}"
    with pytest.raises(ConfigError, match="is not a run"):
        find_weights_file("run:run")
    (tmp_path / "run" / "experiment.toml").write_text(Experiment().to_toml())
    with pytest.raises(ConfigError, match="not finished; continue it with `fedmll resume run`"):
        find_weights_file("run:run")


def test_files_without_weights_are_rejected(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder"):
        read_weights(tmp_path)
    for name in ("w.pth", "w.safetensors"):
        (tmp_path / name).write_bytes(b"<html>not found</html>")
        with pytest.raises(ConfigError, match="is not a file of weights"):
            read_weights(tmp_path / name)
    torch.save({"state_dict": {}}, tmp_path / "w.pth")
    with pytest.raises(ConfigError, match="only named tensors"):
        read_weights(tmp_path / "w.pth")
    torch.save({"a": Path("x")}, tmp_path / "w.pth")  # a pickle that would run code
    with pytest.raises(ConfigError, match="is not a file of weights"):
        read_weights(tmp_path / "w.pth")


def test_pixel_scaling_follows_the_weights_and_is_stored() -> None:
    plain = Experiment()
    assert plain.model.pixel_mean is None and "pixel" not in plain.to_toml()
    assert pixel_scale(plain.model, 3) == ((0.5,), (0.5,))
    pretrained = plain.changed({"model.backbone": "resnet18", "model.weights": "resnet18-imagenet1k-v1"})
    assert (pretrained.model.pixel_mean, pretrained.model.pixel_std) == (IMAGENET_MEAN, IMAGENET_STD)
    assert "pixel_mean" in pretrained.to_toml()
    again = pretrained.changed({"model.weights": None})  # a rule's decision is no wish
    assert again.model.pixel_mean is None and again.fingerprint() != pretrained.fingerprint()
    own = pretrained.changed({"model.pixel_mean": [0.1], "model.pixel_std": [0.2]})
    assert pixel_scale(own.model, 3) == ((0.1,), (0.2,))
    with pytest.raises(ConfigError, match="must have the same number of values"):
        plain.changed({"model.pixel_mean": [0.1]})
    with pytest.raises(ConfigError, match="3 numbers, and the images 4 channels"):
        pixel_scale(pretrained.model, 4)


def test_a_run_starts_from_an_earlier_one(tmp_path: Path) -> None:
    first = small(training__rounds=1).changed({"model.pixel_mean": [0.3], "model.pixel_std": [0.25]})
    fedmll.run(first, tmp_path / "first")
    left = load_file(tmp_path / "first" / "model.safetensors")
    second = small(training__rounds=1, seed=5).changed({"model.weights": f"run:{tmp_path / 'first'}"})
    assert pixel_scale(second.model, 1) == ((0.3,), (0.25,))
    net = build_backbone(second.model, (1, 16, 16), seed=5)
    assert all(torch.equal(w, left[f"backbone.{name}"]) for name, w in net.state_dict().items())
    assert fedmll.run(second, tmp_path / "second").metrics["macro_auc"] > 0
    saved = Experiment.load(tmp_path / "second" / "experiment.toml").model
    assert (saved.weights, saved.pixel_mean, saved.pixel_std) == (second.model.weights, (0.3,), (0.25,))
    other = second.changed({"model.norm": "group"})
    with pytest.raises(ConfigError, match=r"does not fit this ConvNet.*same \[model\] settings"):
        build_backbone(other.model, (1, 16, 16), seed=0)
    with pytest.raises(ConfigError, match=r"a run with model\.backbone = 'convnet', and this one has 'resnet18'"):
        build_backbone(second.changed({"model.backbone": "resnet18"}).model, (1, 16, 16), seed=0)
    with pytest.raises(ConfigError, match="is not a run"):
        small().changed({"model.weights": f"run:{tmp_path}"})


def test_damaged_model_of_an_earlier_run_is_rejected(fedmll: Any, tmp_path: Path) -> None:
    """One flipped bit in the weights would otherwise give another start, without a word."""
    run(small(training__rounds=1), tmp_path / "first")
    file = tmp_path / "first" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 4
    file.write_bytes(content)
    settings = ["--set", "training.rounds=1", "--set", "data.size=16", "--set", "model.weights=run:first"]
    settings += ["--set", "model.channels=[8, 16]", "--set", "partition.clients=2"]
    code, out, error = fedmll("run", *settings)
    assert code == 2, out + error
    assert "is damaged: its content does not match its checksum" in error and "Traceback" not in error


def test_colour_filters_of_an_earlier_run_take_grey_images(tmp_path: Path) -> None:
    model = ModelSettings(backbone="convnet", channels=(4, 4))
    colour = build_backbone(model, (3, 16, 16), seed=0).eval()
    weights = {f"backbone.{name}": w for name, w in colour.state_dict().items()}
    write_model(tmp_path / "model.safetensors", weights, {})
    (tmp_path / "experiment.toml").write_text('[model]\nbackbone = "convnet"\n')
    grey = build_backbone(model.model_copy(update={"weights": f"run:{tmp_path}"}), (1, 16, 16), seed=1).eval()
    image = torch.randn(2, 1, 16, 16)
    torch.testing.assert_close(grey(image), colour(image.expand(2, 3, 16, 16)))


def test_a_transformer_of_an_earlier_run(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=3, intermediate_size=48, image_size=16, patch_size=8
    )
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    trained = build_backbone(ModelSettings(backbone="vit", weights=tmp_path / "vit"), (3, 16, 16), seed=0)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.add_(1)
    weights = {f"backbone.{name}": w for name, w in trained.state_dict().items()}
    write_model(tmp_path / "model.safetensors", weights, {})
    (tmp_path / "experiment.toml").write_text(f'[model]\nbackbone = "vit"\nweights = "{tmp_path / "vit"}"\n')
    again = build_backbone(ModelSettings(backbone="vit", weights=f"run:{tmp_path}"), (3, 16, 16), seed=0)
    assert all(torch.equal(w, trained.state_dict()[name]) for name, w in again.state_dict().items())
