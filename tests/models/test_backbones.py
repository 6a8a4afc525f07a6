from pathlib import Path

import numpy as np
import pytest
import torch
from batch_norm_statistics import with_statistics
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.models.backbones import build_backbone, pixel_scale
from fedmll.models.backbones.base import build_norm
from fedmll.models.backbones.convolutional import BasicBlock, ConvNet, ResNet18
from fedmll.models.frozen_features import freeze_and_add_neck
from fedmll.models.network import Classifier


@pytest.mark.parametrize(("size", "tokens"), [(8, 4), (16, 4), (28, 4), (32, 4), (64, 4), (112, 7)])
def test_convnet_keeps_a_map_of_tokens(size: int, tokens: int) -> None:
    net = ConvNet(3, size, (8, 8, 16, 16), "batch")
    assert net(torch.zeros(2, 3, size, size)).shape == (2, 16, tokens, tokens)


@pytest.mark.parametrize(("stem", "size", "tokens"), [("auto", 32, 4), ("imagenet", 64, 2), ("auto", 224, 7)])
def test_resnet18_token_maps(stem: str, size: int, tokens: int) -> None:
    net = ResNet18(3, size, stem, "batch")
    assert net(torch.zeros(1, 3, size, size)).shape == (1, 512, tokens, tokens)


def test_resnet18_has_torchvisions_layout() -> None:
    """The names and the number of weights of torchvision's resnet18: 11,689,512 with its 1000-way classifier."""
    net = ResNet18(3, 224, "imagenet", "batch")
    assert sum(p.numel() for p in net.parameters()) == 11_689_512 - 512 * 1000 - 1000
    names = set(net.state_dict())
    assert {"conv1.weight", "bn1.running_var", "layer1.0.conv1.weight", "layer2.0.downsample.0.weight"} <= names
    assert {"layer4.1.bn2.weight", "layer3.0.downsample.1.num_batches_tracked"} <= names
    assert "layer1.0.downsample.0.weight" not in names


def test_weights_file_of_torchvisions_layout_is_loaded(tmp_path: Path) -> None:
    source = ResNet18(3, 224, "imagenet", "batch")
    weights = {**source.state_dict(), "fc.weight": torch.zeros(1000, 512), "fc.bias": torch.zeros(1000)}
    save_file(weights, tmp_path / "r.safetensors")
    torch.save(weights, tmp_path / "r.pth")
    for name in ("r.safetensors", "r.pth"):
        setting = ModelSettings(backbone="resnet18", stem="imagenet", weights=tmp_path / name)
        loaded = build_backbone(setting, (3, 112, 112), seed=0)
        assert torch.equal(loaded.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    grey = build_backbone(setting, (1, 112, 112), seed=0)
    assert torch.allclose(grey.conv1.weight[:, 0], source.conv1.weight.sum(1))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="does not fit this ResNet18"):
        build_backbone(ModelSettings(backbone="resnet18", weights=tmp_path / "bad.safetensors"), (3, 32, 32), 0)
    with pytest.raises(ConfigError, match="no weights file"):
        build_backbone(ModelSettings(backbone="resnet18", weights=tmp_path / "none.pth"), (3, 32, 32), 0)


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = build_backbone(ModelSettings(backbone="convnet"), (1, 16, 16), seed=3).state_dict()
    torch.manual_seed(2)
    again = build_backbone(ModelSettings(backbone="convnet"), (1, 16, 16), seed=3).state_dict()
    other = build_backbone(ModelSettings(backbone="convnet"), (1, 16, 16), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.0.weight"], other["blocks.0.0.weight"])


def test_mlp_gives_one_token_as_a_vector() -> None:
    net = build_backbone(ModelSettings(backbone="mlp", channels=(7, 5)), (9,), seed=0)
    x = torch.randn(2, 9)
    classifier = Classifier(net, 4)
    assert net(x).shape == (2, 5) and classifier(x).shape == (2, 4)
    assert torch.equal(classifier.tokens(x), net(x)[:, :, None, None])
    necked = freeze_and_add_neck(net, ModelSettings(backbone="mlp", channels=(7, 5), width=3, norm="group"), seed=0)
    assert Classifier(necked, 4)(x).shape == (2, 4) and necked.width == 3


# ---- what the networks compute


def batch_norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    """(x − mean)/√(var + 1e-5) · γ + β with the running statistics, written out."""
    mean, var, scale, shift = (
        weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / torch.sqrt(var + 1e-5) * scale + shift


def resnet18(x: Tensor, weights: dict[str, Tensor], imagenet: bool) -> Tensor:
    """He et al.: 7×7 stride 2 and 3×3 pooling (or 3×3 stride 1), then 64, 128, 256, 512 with two blocks each."""
    x = F.conv2d(x, weights["conv1.weight"], stride=2 if imagenet else 1, padding=3 if imagenet else 1)
    x = F.relu(batch_norm(x, weights, "bn1"))
    if imagenet:
        x = F.max_pool2d(x, 3, 2, 1)
    for layer in (1, 2, 3, 4):
        for block in (0, 1):
            name = f"layer{layer}.{block}"
            stride = 2 if layer > 1 and block == 0 else 1
            out = F.conv2d(x, weights[f"{name}.conv1.weight"], stride=stride, padding=1)
            out = F.relu(batch_norm(out, weights, f"{name}.bn1"))
            out = batch_norm(F.conv2d(out, weights[f"{name}.conv2.weight"], padding=1), weights, f"{name}.bn2")
            if f"{name}.downsample.0.weight" in weights:
                x = F.conv2d(x, weights[f"{name}.downsample.0.weight"], stride=stride)
                x = batch_norm(x, weights, f"{name}.downsample.1")
            x = F.relu(out + x)
    return x


@pytest.mark.parametrize(("stem", "size"), [("cifar", 16), ("imagenet", 64)])
def test_resnet18_is_its_definition(stem: str, size: int) -> None:
    torch.manual_seed(0)
    net = with_statistics(ResNet18(3, size, stem, "batch"))
    images = torch.randn(2, 3, size, size)
    with torch.no_grad():
        expected = resnet18(images, net.state_dict(), stem == "imagenet")
        torch.testing.assert_close(net(images), expected, atol=1e-3, rtol=1e-3)


def test_stem_follows_the_size_of_the_images() -> None:
    assert ResNet18(3, 64, "auto", "batch").conv1.kernel_size == (3, 3)
    assert ResNet18(3, 65, "auto", "batch").conv1.kernel_size == (7, 7)
    assert ResNet18(3, 224, "cifar", "batch").conv1.kernel_size == (3, 3)
    assert ResNet18(1, 28, "imagenet", "batch").conv1.weight.shape == (64, 1, 7, 7)


def test_resnet18_starts_with_he_weights() -> None:
    """N(0, 2/fan_out), fan_out = k² · channels out."""
    torch.manual_seed(0)
    net = ResNet18(3, 32, "cifar", "batch")
    for conv in (net.layer2[0].conv1, net.layer4[1].conv2, net.layer3[0].downsample[0]):
        fan_out = conv.kernel_size[0] ** 2 * conv.out_channels
        assert conv.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.03)
        assert conv.bias is None


@pytest.mark.parametrize("stride", [1, 2])
def test_a_block_has_a_projection_where_the_shape_changes(stride: int) -> None:
    assert (BasicBlock(8, 8, stride, "batch").downsample is None) == (stride == 1)
    assert BasicBlock(4, 8, stride, "batch").downsample is not None


@pytest.mark.parametrize("size", [6, 7, 13])
def test_convnet_is_its_definition(size: int) -> None:
    """Blocks of a 3×3 convolution without bias, norm, ReLU; stride 2 while the map is larger than 6."""
    torch.manual_seed(0)
    net = with_statistics(ConvNet(2, size, (4, 8, 12), "batch"))
    x = images = torch.randn(3, 2, size, size)
    weights, width = net.state_dict(), size
    for block in range(3):
        stride = 2 if width > 6 else 1
        width = -(-width // stride)
        assert f"blocks.{block}.0.bias" not in weights
        x = F.conv2d(x, weights[f"blocks.{block}.0.weight"], stride=stride, padding=1)
        x = F.relu(batch_norm(x, weights, f"blocks.{block}.1"))
    assert net(images).shape == (3, 12, width, width)
    torch.testing.assert_close(net(images), x, atol=1e-4, rtol=1e-4)
    assert net.width == 12


def test_norms() -> None:
    assert isinstance(build_norm("batch", 16), nn.BatchNorm2d)
    for channels, groups in ((4, 4), (8, 8), (32, 8)):
        norm = build_norm("group", channels)
        assert isinstance(norm, nn.GroupNorm)
        assert (norm.num_groups, norm.num_channels) == (groups, channels)
    assert not any(isinstance(m, nn.BatchNorm2d) for m in ResNet18(3, 32, "auto", "group").modules())


def test_mlp_and_classifier_are_their_formulas() -> None:
    torch.manual_seed(0)
    net = Classifier(build_backbone(ModelSettings(backbone="mlp", channels=(7, 5)), (9,), seed=0), 12)
    x = np.random.default_rng(0).normal(size=(4, 9)).astype(np.float32)
    w = {name: value.numpy() for name, value in net.state_dict().items()}
    hidden = np.maximum(x @ w["backbone.layers.0.weight"].T + w["backbone.layers.0.bias"], 0)
    features = np.maximum(hidden @ w["backbone.layers.2.weight"].T + w["backbone.layers.2.bias"], 0)
    np.testing.assert_allclose(net.features(torch.tensor(x)).detach().numpy(), features, atol=1e-5)
    expected = features @ w["head.weight"].T + w["head.bias"]
    np.testing.assert_allclose(net(torch.tensor(x)).detach().numpy(), expected, atol=1e-5)


def test_features_are_means_over_the_tokens_and_in_eval_mode_do_not_depend_on_the_batch() -> None:
    torch.manual_seed(0)
    net = Classifier(ConvNet(1, 16, (4, 8), "batch"), 12)
    images = torch.randn(5, 1, 16, 16) * 2 + 1
    net.train()(images)
    training = net.features(images)
    net.eval()
    tokens = net.backbone(images)
    assert tokens.shape == (5, 8, 4, 4)
    torch.testing.assert_close(net.features(images), tokens.flatten(2).mean(2))
    alone = torch.cat([net.features(image[None]) for image in images])
    torch.testing.assert_close(net.features(images), alone, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(training, alone, atol=1e-2)


# ---- what is built from an experiment


def test_building_leaves_torchs_generator_alone() -> None:
    before = torch.random.get_rng_state()
    build_backbone(ModelSettings(backbone="convnet"), (1, 16, 16), seed=3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_model_settings_reach_the_network(tmp_path: Path) -> None:
    convnet = build_backbone(ModelSettings(backbone="convnet", channels=(4, 6), norm="group"), (2, 16, 16), 0)
    assert isinstance(convnet, ConvNet) and convnet.width == 6
    assert isinstance(convnet.blocks[0][1], nn.GroupNorm) and convnet.blocks[0][0].in_channels == 2
    resnet = build_backbone(ModelSettings(backbone="resnet18", norm="group"), (1, 32, 32), 0)
    assert isinstance(resnet, ResNet18) and isinstance(resnet.bn1, nn.GroupNorm)
    assert Classifier(resnet, 12)(torch.zeros(2, 1, 32, 32)).shape == (2, 12)  # its width is what it gives
    with pytest.raises(ConfigError, match="no published weights of"):
        build_backbone(ModelSettings(backbone="convnet", weights=tmp_path / "w.pth"), (1, 16, 16), 0)


def test_colour_filters_stay_as_they_are_for_colour_images(tmp_path: Path) -> None:
    source = ResNet18(3, 32, "cifar", "batch")
    save_file(source.state_dict(), tmp_path / "r.safetensors")
    setting = ModelSettings(backbone="resnet18", stem="cifar", weights=tmp_path / "r.safetensors")
    assert torch.equal(build_backbone(setting, (3, 32, 32), 0).conv1.weight, source.conv1.weight)
    own = ResNet18(1, 32, "cifar", "batch")  # weights of grey images for grey images
    save_file(own.state_dict(), tmp_path / "r.safetensors")
    assert torch.equal(build_backbone(setting, (1, 32, 32), 0).conv1.weight, own.conv1.weight)


def test_pixels_are_scaled_as_the_weights_want_it(tmp_path: Path) -> None:
    weights = tmp_path / "r.pth"
    assert pixel_scale(ModelSettings(backbone="resnet18"), 3) == ((0.5,), (0.5,))
    experiment = Experiment().changed({"model.backbone": "resnet18", "model.weights": weights})
    mean, std = pixel_scale(experiment.model, 3)
    assert mean == (0.485, 0.456, 0.406) and std == (0.229, 0.224, 0.225)  # torchvision's ImageNet constants
    (grey,), (spread,) = pixel_scale(experiment.model, 1)
    assert (grey, spread) == pytest.approx((0.449, 0.226))
