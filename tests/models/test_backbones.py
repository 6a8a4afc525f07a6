from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedmll.errors import ConfigError
from fedmll.experiment import Model
from fedmll.models.backbones import Classifier, ConvNet, ResNet18, build_backbone


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
        setting = Model(backbone="resnet18", stem="imagenet", weights=tmp_path / name)
        loaded = build_backbone(setting, (3, 112, 112), seed=0)
        assert torch.equal(loaded.layer4[1].conv2.weight, source.layer4[1].conv2.weight)
    grey = build_backbone(setting, (1, 112, 112), seed=0)
    assert torch.allclose(grey.conv1.weight[:, 0], source.conv1.weight.sum(1))


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save_file({"conv1.weight": torch.zeros(1)}, tmp_path / "bad.safetensors")
    with pytest.raises(ConfigError, match="does not fit resnet18"):
        build_backbone(Model(backbone="resnet18", weights=tmp_path / "bad.safetensors"), (3, 32, 32), 0)
    with pytest.raises(ConfigError, match="no weights file"):
        build_backbone(Model(backbone="resnet18", weights=tmp_path / "none.pth"), (3, 32, 32), 0)


def test_initial_weights_depend_on_the_seed_only() -> None:
    torch.manual_seed(1)
    first = build_backbone(Model(backbone="convnet"), (1, 16, 16), seed=3).state_dict()
    torch.manual_seed(2)
    again = build_backbone(Model(backbone="convnet"), (1, 16, 16), seed=3).state_dict()
    other = build_backbone(Model(backbone="convnet"), (1, 16, 16), seed=4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["blocks.0.0.weight"], other["blocks.0.0.weight"])


def test_mlp_gives_one_token() -> None:
    net = build_backbone(Model(backbone="mlp", channels=(7, 5)), (9,), seed=0)
    assert net(torch.zeros(2, 9)).shape == (2, 5, 1, 1)
    assert Classifier(net, 4)(torch.zeros(2, 9)).shape == (2, 4)
