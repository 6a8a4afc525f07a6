"""The vision transformer backbone: a tiny one of ViT-B/16's layout is saved by the test and loaded from its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.data.federation import Federation
from fedmll.inference.load_run import load_run
from fedmll.methods import build_method
from fedmll.methods.framework.task import task_of
from fedmll.models.backbones import build_backbone
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Classifier

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As a published checkpoint: with its classifier and its pixels' mean and std."""
    place = tmp_path_factory.mktemp("vit")
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=48, image_size=32, patch_size=8
    )
    transformers.ViTForImageClassification(config).save_pretrained(place)
    (place / "preprocessor_config.json").write_text(
        json.dumps({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 1]})
    )
    return place


def vit(weights: Path | None, *shape: int, channels: tuple[int, ...] = (32, 32)) -> torch.nn.Module:
    kind = "small-vit" if weights is None else "vit"
    return build_backbone(ModelSettings(backbone=kind, weights=weights, channels=channels), shape, seed=0)


def test_tokens_lie_where_their_patches_lie(folder: Path) -> None:
    """A change in one patch shows most in the token at its row and column, and the map is the network's own output."""
    net = vit(folder, 3, 32, 32).eval()
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    tokens = net(images)
    assert tokens.shape == (2, 24, 4, 4)
    whole = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()(pixel_values=images)
    assert torch.allclose(tokens[:, :, 1, 3], whole.last_hidden_state[:, 1 + 1 * 4 + 3], atol=1e-6)
    changed = images.clone()
    changed[:, :, 8:16, 24:32] += 3
    moved = (net(changed) - tokens).norm(dim=1)[0]
    assert moved.argmax().item() == 1 * 4 + 3


def test_other_image_sizes_interpolate_the_positions_once(folder: Path) -> None:
    net = vit(folder, 3, 64, 32)
    assert net(torch.zeros(1, 3, 64, 32)).shape == (1, 24, 8, 4)
    saved = load_file(folder / "model.safetensors")["vit.embeddings.position_embeddings"]
    grid = saved[0, 1:].reshape(4, 4, 24).permute(2, 0, 1)[None]
    expected = F.interpolate(grid, (8, 4), mode="bicubic", align_corners=False)[0].permute(1, 2, 0).reshape(32, 24)
    positions = net.network.embeddings.position_embeddings
    assert torch.allclose(positions[0, 1:], expected, atol=1e-6)
    assert torch.equal(positions[0, 0], saved[0, 0])


def test_grey_images_take_the_sum_of_the_colour_filters(folder: Path) -> None:
    grey, colour = vit(folder, 1, 32, 32).eval(), vit(folder, 3, 32, 32).eval()
    image = torch.randn(1, 1, 32, 32)
    assert torch.allclose(grey(image), colour(image.expand(1, 3, 32, 32)), atol=1e-5)


def test_small_vit_from_its_configuration() -> None:
    net = vit(None, 1, 28, 28, channels=(64, 64, 64))
    assert net(torch.zeros(2, 1, 28, 28)).shape == (2, 64, 7, 7)
    assert len(net.network.layers) == 3 and net.network.config.num_attention_heads == 2
    again = vit(None, 1, 28, 28, channels=(64, 64, 64))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), again.parameters(), strict=True))
    with pytest.raises(ConfigError, match="multiple of 32"):
        vit(None, 1, 28, 28, channels=(50,))


def test_vit_without_weights_is_vit_b16() -> None:
    """12 layers of width 768 with 12 heads, patches of 16 × 16: 85.8 million parameters at 224 × 224."""
    with torch.device("meta"):
        net = build_backbone(ModelSettings(backbone="vit"), (3, 224, 224), seed=0)
    config = net.network.config
    assert (len(net.network.layers), config.num_attention_heads, config.patch_size, net.width) == (12, 12, 16, 768)
    assert sum(p.numel() for p in net.parameters()) == 85_798_656
    with pytest.raises(ConfigError, match=r"data\.size to a multiple of 16, for example 224"):
        build_backbone(ModelSettings(backbone="vit"), (3, 230, 230), seed=0)
    with pytest.raises(ConfigError, match="a small-vit has no published weights"):
        build_backbone(ModelSettings(backbone="small-vit", weights="x"), (3, 32, 32), seed=0)


def test_class_token_for_heads_that_use_means(folder: Path, small_federation: Federation) -> None:
    """The first token of the network's own output; a head with label queries keeps the patch tokens."""
    settings = {"model.backbone": "vit", "model.weights": str(folder), "model.class_token": True}
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    own = transformers.ViTModel.from_pretrained(folder, add_pooling_layer=False).eval()(pixel_values=images)
    for method, expected in (("fedavg", own.last_hidden_state[:, 0]), ("fednca-ml", None)):
        experiment = Experiment().changed(settings | {"method.name": method})
        task = replace(task_of(small_federation), experiment=experiment, sample_shape=(3, 32, 32))
        net = build_method(task).build_model().eval()
        if expected is None:
            assert net.backbone(images).shape == (2, 24, 4, 4)
        else:
            assert torch.allclose(net.features(images), expected, atol=1e-6)
            assert torch.allclose(net.backbone.stage_outputs(images, frozenset({0}))[-1], expected, atol=1e-6)


def test_features_of_the_class_token_are_cached_apart(folder: Path, tmp_path: Path) -> None:
    frozen = {
        "model__backbone": "vit", "model__weights": str(folder), "model__freeze": "backbone", "data__limit": 40,
        "data__size": 32, "training__rounds": 1,
    }  # fmt: skip
    mean, token = (run(small(**frozen, model__class_token=on), out=tmp_path / str(on)) for on in (False, True))
    assert mean.metrics["macro_auc"] != token.metrics["macro_auc"]
    saved = load_run(tmp_path / "True")
    stored = saved.test_predictions
    assert stored is not None
    data = saved.load_test_data()
    assert np.allclose(saved.predict(data.store[data.rows[:8]]), stored.probabilities[:8], atol=1e-3)


def test_class_token_of_other_backbones_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"model\.class_token = true, but a convnet has no class token"):
        Experiment().changed({"model.class_token": True})


def test_every_weight_is_in_the_vector_and_gets_a_gradient(folder: Path) -> None:
    model = Classifier(vit(folder, 3, 32, 32), 5)
    weights = FlatWeights(model)
    assert weights.parameter_end == sum(p.numel() for p in model.parameters())
    model(torch.randn(2, 3, 32, 32)).square().sum().backward()
    assert all(p.grad is not None for p in weights.parameters)


def test_pixels_are_scaled_as_the_checkpoint_says(folder: Path, small_federation: Federation) -> None:
    experiment = Experiment().changed({"model.backbone": "vit", "model.weights": str(folder)})
    task = replace(task_of(small_federation), experiment=experiment, sample_shape=(3, 32, 32))
    raw = torch.full((1, 3, 2, 2), 51, dtype=torch.uint8)  # 0.2
    assert np.allclose(task.preprocess(raw)[0, :, 0, 0], [(0.2 - 0.1) / 0.5, 0, -0.1], atol=1e-6)


def test_unloadable_weights_are_rejected(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match=r"data\.size to a multiple of 8, for example 32"):
        vit(folder, 3, 33, 33)
    with pytest.raises(ConfigError, match="takes 3"):
        vit(folder, 4, 32, 32)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(ConfigError, match="no vision transformer"):
        vit(tmp_path, 3, 32, 32)
    part = {k: t for k, t in load_file(folder / "model.safetensors").items() if "layernorm" not in k}
    save_file(part, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match="it lacks"):
        vit(tmp_path, 3, 32, 32)
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="not a 'vit'"):
        vit(tmp_path, 3, 32, 32)


def test_vit_trains_in_a_federation() -> None:
    experiment = small(model__backbone="small-vit", model__channels=(32, 32), data__limit=80, training__rounds=1)
    before, after = (run(experiment.changed({"method.name": name})) for name in ("fedavg", "fedharmony"))
    assert np.isfinite(before.metrics["macro_auc"])
    assert before.weights.keys() == after.weights.keys()
