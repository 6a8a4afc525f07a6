"""The backbones that torchvision has too: its names, its sizes, its files; what they compute, against transformers, the
definition and ImageNet."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from batch_norm_statistics import with_statistics
from conftest import SHARED_DATA
from PIL import Image
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.models.backbones import Backbone, build_backbone, pixel_scale
from fedmll.models.backbones.base import load_pretrained
from fedmll.models.backbones.convolutional import BasicBlock, Bottleneck, DenseNet, MobileNetV2, ResNet

MOBILENET = SHARED_DATA / "mobilenet_v2_imagenet.safetensors"
needs_mobilenet = pytest.mark.skipif(not MOBILENET.is_file(), reason="there is no file with MobileNetV2's weights")

# torchvision's models with their classifier of 1000 classes: parameters, tensors of the state_dict; our width
PUBLISHED = {
    "resnet18": (11_689_512, 122, 512),
    "resnet50": (25_557_032, 320, 2048),
    "mobilenet-v2": (3_504_872, 314, 1280),
    "densenet121": (7_978_856, 727, 1024),
}
NAMES = {
    "resnet50": {
        "layer1.0.conv3.weight": (256, 64, 1, 1),
        "layer2.0.conv2.weight": (128, 128, 3, 3),
        "layer2.0.downsample.0.weight": (512, 256, 1, 1),
        "layer3.5.bn3.running_var": (1024,),
    },
    "mobilenet-v2": {
        "features.1.conv.0.0.weight": (32, 1, 3, 3),
        "features.1.conv.1.weight": (16, 32, 1, 1),
        "features.2.conv.3.running_mean": (24,),
        "features.18.0.weight": (1280, 320, 1, 1),
    },
    "densenet121": {
        "features.conv0.weight": (64, 3, 7, 7),
        "features.denseblock1.denselayer6.conv1.weight": (128, 224, 1, 1),
        "features.denseblock3.denselayer24.norm2.bias": (128,),
        "features.transition3.conv.weight": (512, 1024, 1, 1),
        "features.norm5.num_batches_tracked": (),
    },
}


def tiny(kind: str, channels: int = 3) -> Backbone:
    made: dict[str, Backbone] = {
        "resnet18": ResNet(channels, 64, "imagenet", "batch", BasicBlock, (2, 1), 4),
        "resnet50": ResNet(channels, 64, "imagenet", "batch", Bottleneck, (1, 2), 4),
        "mobilenet-v2": MobileNetV2(channels, "batch", ((1, 4, 1, 1), (6, 8, 2, 2)), first=4, width=12),
        "densenet121": DenseNet(channels, "batch", (2, 1, 2), growth=4, first=8),
    }
    return made[kind]


@pytest.mark.parametrize("kind", PUBLISHED)
def test_layout_is_torchvisions(kind: str) -> None:
    parameters, tensors, width = PUBLISHED[kind]
    net = build_backbone(ModelSettings(backbone=kind, stem="imagenet"), (3, 64, 64), seed=0)
    assert net.width == width
    assert sum(p.numel() for p in net.parameters()) + 1000 * width + 1000 == parameters
    weights = net.state_dict()
    assert len(weights) + 2 == tensors
    for name, shape in NAMES.get(kind, {}).items():
        assert weights[name].shape == shape, name
    with torch.no_grad():
        assert net.eval()(torch.zeros(1, 3, 64, 64)).shape == (1, width, 2, 2)


@pytest.mark.parametrize("kind", PUBLISHED)
def test_weights_in_torchvisions_layout_are_loaded(kind: str, tmp_path: Path) -> None:
    """With its classifier, in both formats; grey images give what the same image in three equal colours gives."""
    source = with_statistics(tiny(kind))
    start = "fc." if kind.startswith("resnet") else "classifier."
    weights = {**source.state_dict(), f"{start}weight": torch.zeros(1000, 12), f"{start}bias": torch.zeros(1000)}
    weights = {name: w for name, w in weights.items() if not name.endswith("num_batches_tracked")}  # old files
    save_file(weights, tmp_path / "w.safetensors")
    torch.save(weights, tmp_path / "w.pth", _use_new_zipfile_serialization=False)
    grey = torch.randn(2, 1, 64, 64)
    for name in ("w.safetensors", "w.pth"):
        model = ModelSettings(backbone=kind, weights=tmp_path / name)
        colour = load_pretrained(tiny(kind), model).eval()
        assert all(torch.equal(w, source.state_dict()[name]) for name, w in colour.state_dict().items() if w.ndim)
        with torch.no_grad():
            torch.testing.assert_close(
                load_pretrained(tiny(kind, 1), model).eval()(grey), source(grey.expand(2, 3, 64, 64))
            )
    with pytest.raises(ConfigError, match="does not fit"):
        load_pretrained(tiny(kind, 4), model)


def test_old_names_of_densenet_are_read(tmp_path: Path) -> None:
    source = tiny("densenet121")
    old = {
        name.replace(".norm1.", ".norm.1.").replace(".conv2.", ".conv.2."): weight
        for name, weight in source.state_dict().items()
    }
    assert "features.denseblock1.denselayer2.norm.1.weight" in old and old.keys() != source.state_dict().keys()
    net = tiny("densenet121")
    net.load(old, "an old file")
    assert all(torch.equal(w, net.state_dict()[name]) for name, w in source.state_dict().items())


@pytest.mark.parametrize("kind", [*PUBLISHED, "convnet", "mlp", "small-vit"])
def test_stages_hold_every_parameter_once_in_order(kind: str) -> None:
    if kind == "small-vit":
        pytest.importorskip("transformers")
    shape = (9,) if kind == "mlp" else (3, 32, 32)
    net = build_backbone(ModelSettings(backbone=kind, channels=(32, 32)), shape, seed=0)
    staged = [p for stage in net.stages() for p in stage.parameters()]
    assert len(staged) == len({id(p) for p in staged})
    assert {id(p) for p in staged} == {id(p) for p in net.parameters()}
    assert [id(p) for p in staged] == [id(p) for p in net.parameters()]  # defined in order from the image
    assert len(net.stages()) == {"mobilenet-v2": 19, "convnet": 2, "mlp": 2, "small-vit": 3}.get(kind, 5)


def of_transformers(name: str) -> str:
    """Our (torchvision's) names → those of transformers' ResNet."""
    parts = name.split(".")
    last = parts[-1]
    if parts[0] in ("conv1", "bn1"):
        return f"embedder.embedder.{'convolution' if parts[0] == 'conv1' else 'normalization'}.{last}"
    start = f"encoder.stages.{int(parts[0][-1]) - 1}.layers.{parts[1]}"
    if parts[2] == "downsample":
        return f"{start}.shortcut.{('convolution', 'normalization')[int(parts[3])]}.{last}"
    kind = "convolution" if parts[2].startswith("conv") else "normalization"
    return f"{start}.layer.{int(parts[2][-1]) - 1}.{kind}.{last}"


@pytest.mark.parametrize(
    ("kind", "block", "depths"), [("resnet18", "basic", [2, 2, 2, 2]), ("resnet50", "bottleneck", [3, 4, 6, 3])]
)
def test_resnets_are_those_of_transformers(kind: str, block: str, depths: list[int]) -> None:
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    torch.manual_seed(0)
    net = with_statistics(build_backbone(ModelSettings(backbone=kind, stem="imagenet"), (3, 64, 64), seed=0))
    sizes = [64, 128, 256, 512] if block == "basic" else [256, 512, 1024, 2048]
    config = transformers.ResNetConfig(embedding_size=64, hidden_sizes=sizes, depths=depths, layer_type=block)
    theirs = transformers.ResNetModel(config).eval()
    theirs.load_state_dict({of_transformers(name): w for name, w in net.state_dict().items()})
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        ours, expected = net(images), theirs(pixel_values=images).last_hidden_state
    torch.testing.assert_close(ours / expected.std(), expected / expected.std(), atol=1e-5, rtol=1e-5)


def batch_norm(x: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    mean, var, scale, shift = (
        weights[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / torch.sqrt(var + 1e-5) * scale + shift


def test_densenet_is_its_definition() -> None:
    """Every layer sees all maps before it in its block: BN, ReLU, 1×1, BN, ReLU, 3×3; between blocks BN, ReLU, 1×1 to
    half the channels, mean over 2×2; at the end BN, ReLU."""
    torch.manual_seed(0)
    net = with_statistics(tiny("densenet121"))
    w = {name.removeprefix("features."): t for name, t in net.state_dict().items()}
    images = torch.randn(2, 3, 64, 64)
    x = F.relu(batch_norm(F.conv2d(images, w["conv0.weight"], stride=2, padding=3), w, "norm0"))
    x = F.max_pool2d(x, 3, 2, 1)
    for block, layers in enumerate((2, 1, 2), 1):
        maps = [x]
        for layer in range(1, layers + 1):
            name = f"denseblock{block}.denselayer{layer}"
            y = F.conv2d(F.relu(batch_norm(torch.cat(maps, 1), w, f"{name}.norm1")), w[f"{name}.conv1.weight"])
            maps.append(F.conv2d(F.relu(batch_norm(y, w, f"{name}.norm2")), w[f"{name}.conv2.weight"], padding=1))
        x = torch.cat(maps, 1)
        if block < 3:
            name = f"transition{block}"
            x = F.conv2d(F.relu(batch_norm(x, w, f"{name}.norm")), w[f"{name}.conv.weight"])
            x = (x[..., ::2, ::2] + x[..., 1::2, ::2] + x[..., ::2, 1::2] + x[..., 1::2, 1::2]) / 4
    expected = F.relu(batch_norm(x, w, "norm4"))
    with torch.no_grad():
        torch.testing.assert_close(net(images), expected, atol=1e-4, rtol=1e-4)
    assert net.width == expected.shape[1] == ((8 + 8) // 2 + 4) // 2 + 8


def test_densenet_rejects_small_images() -> None:
    for size, tokens in ((29, 1), (64, 2)):
        net = DenseNet(1, "batch", (1, 1, 1, 1), growth=2, first=4)
        assert net(torch.zeros(2, 1, size, size)).shape[2:] == (tokens, tokens)
    with pytest.raises(ConfigError, match="at least 29 px"):
        build_backbone(ModelSettings(backbone="densenet121"), (1, 28, 64), 0)


# ---- MobileNetV2's real weights


def palace() -> np.ndarray:
    """scikit-learn's photograph of a Chinese palace, as torchvision prepares it: 224 px."""
    picture = Image.fromarray(load_sample_image("china.jpg"))
    scale = 256 / min(picture.size)
    picture = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.BILINEAR)
    left, top = (picture.width - 224) // 2, (picture.height - 224) // 2
    return np.asarray(picture.crop((left, top, left + 224, top + 224))).transpose(2, 0, 1) / np.float32(255)


def scaled(pixels: np.ndarray, experiment: Experiment) -> Tensor:
    mean, std = (np.array(v, np.float32)[:, None, None] for v in pixel_scale(experiment.model, len(pixels)))
    return torch.from_numpy((pixels - mean) / std)[None]


@needs_mobilenet
def test_mobilenet_recognises_a_photograph() -> None:
    """The file's own classifier on our features: the palace is ImageNet's 698 palace, before its 663 monastery."""
    experiment = Experiment().changed({"model.backbone": "mobilenet-v2", "model.weights": MOBILENET})
    net = build_backbone(experiment.model, (3, 224, 224), seed=0).eval()
    file = load_file(MOBILENET)
    with torch.no_grad():
        features = net(scaled(palace(), experiment)).mean((2, 3))
    likely = (features @ file["classifier.1.weight"].T + file["classifier.1.bias"]).softmax(1)[0]
    assert likely.topk(2).indices.tolist() == [698, 663] and likely[698] > 0.5


@needs_mobilenet
def test_grey_photograph_gets_nearly_the_same_prediction() -> None:
    """One grey channel through the summed filters ≈ three equal channels through the colour filters."""
    experiment = Experiment().changed({"model.backbone": "mobilenet-v2", "model.weights": MOBILENET})
    colour, grey = (build_backbone(experiment.model, (c, 224, 224), seed=0).eval() for c in (3, 1))
    pixels = palace().mean(0, keepdims=True)
    with torch.no_grad():
        one = grey(scaled(pixels, experiment)).mean((2, 3))
        three = colour(scaled(np.repeat(pixels, 3, 0), experiment)).mean((2, 3))
    assert F.cosine_similarity(one, three).item() > 0.97
