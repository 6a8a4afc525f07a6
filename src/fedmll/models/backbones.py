"""Backbones: images → a map of tokens (batch, width, rows, columns). Feature vectors give a map of one token."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll import registry
from fedmll.errors import ConfigError
from fedmll.registry import register
from fedmll.seeding import derive
from fedmll.settings import Model

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Backbone(nn.Module):
    """`width` is the number of channels of the token map that `forward` gives."""

    width: int

    def __init__(self) -> None:
        super().__init__()
        self.neck: nn.Module | None = None  # between tokens and head (models/frozen.py)
        self.frozen: tuple[nn.Module, ...] = ()

    @property
    def whole_is_frozen(self) -> bool:
        own = [child for child in self.children() if child is not self.neck]
        return len(self.frozen) > 0 and all(any(child is stage for stage in self.frozen) for child in own)

    def train(self, mode: bool = True) -> Self:
        """What is frozen stays in evaluation mode: its batch statistics are not those of a batch."""
        super().train(mode)
        for stage in self.frozen:
            stage.eval()
        return self

    def stages(self) -> list[nn.Module]:
        """Its modules in order, from the image on."""
        return list(self.children())


def normalisation(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(min(8, channels), channels)


class ConvNet(Backbone):
    """Four conv blocks for small images. Stride 2 instead of pooling (twice as fast), down to a map of about 4×4."""

    def __init__(self, channels_in: int, size: int, channels: tuple[int, ...], norm: str) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for channels_out in channels:
            stride = 2 if size > 6 else 1
            size = -(-size // stride)
            conv = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
            blocks.append(nn.Sequential(conv, normalisation(norm, channels_out), nn.ReLU(inplace=True)))
            channels_in = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.width = channels_in

    def forward(self, images: Tensor) -> Tensor:
        # channels_last is faster here (and slower for ResNet-18 on small images)
        tokens: Tensor = self.blocks(images.contiguous(memory_format=torch.channels_last))
        return tokens


class BasicBlock(nn.Module):
    def __init__(self, channels_in: int, channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = normalisation(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = normalisation(norm, channels)
        self.downsample: nn.Module | None = None
        if stride != 1 or channels_in != channels:
            shortcut = nn.Conv2d(channels_in, channels, 1, stride, bias=False)
            self.downsample = nn.Sequential(shortcut, normalisation(norm, channels))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)), inplace=True)


class ResNet18(Backbone):
    """ResNet-18 without pooling and classifier; names as in torchvision, so its weight files load.
    `cifar` stem: 3×3 stride 1 and no max-pooling, for images up to 64 px."""

    width = 512

    def __init__(self, channels_in: int, size: int, stem: str, norm: str) -> None:
        super().__init__()
        small = stem == "cifar" or (stem == "auto" and size <= 64)
        self.conv1 = nn.Conv2d(channels_in, 64, 3 if small else 7, 1 if small else 2, 1 if small else 3, bias=False)
        self.bn1 = normalisation(norm, 64)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        previous = 64
        for i, channels in enumerate((64, 128, 256, 512)):
            first = BasicBlock(previous, channels, 1 if i == 0 else 2, norm)
            self.add_module(f"layer{i + 1}", nn.Sequential(first, BasicBlock(channels, channels, 1, norm)))
            previous = channels
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for i in range(4):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return x

    def load(self, path: Path) -> None:
        """torchvision's file: the classifier is left out; a grey image gets the sum of the colour filters."""
        weights = read_weights(path)
        weights = {name: w for name, w in weights.items() if not name.startswith("fc.")}
        first = weights.get("conv1.weight")
        if first is not None and self.conv1.in_channels == 1 and first.shape[1] == 3:
            weights["conv1.weight"] = first.sum(1, keepdim=True)
        try:
            self.load_state_dict(weights)
        except RuntimeError as error:
            raise ConfigError(
                f"model.weights = {path} does not fit resnet18 ({' '.join(str(error).split())[:300]}). It must be in "
                "torchvision's format; ImageNet weights need model.stem = 'imagenet' and model.norm = 'batch'."
            ) from None


class Mlp(Backbone):
    """For feature vectors: a hidden layer for each number in `channels`."""

    def __init__(self, features: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(features, width), nn.ReLU(inplace=True)]
            features = width
        self.layers = nn.Sequential(*layers)
        self.width = features

    def forward(self, features: Tensor) -> Tensor:
        tokens: Tensor = self.layers(features)
        return tokens[:, :, None, None]


def read_weights(path: Path) -> dict[str, Tensor]:
    """Tensors of a .safetensors or a .pth file; of the latter nothing but tensors is read."""
    if not path.is_file():
        raise ConfigError(
            f"There is no weights file {path} (model.weights); give the path of a .safetensors or .pth file."
        )
    if path.suffix == ".safetensors":
        return load_file(path)
    weights: dict[str, Tensor] = torch.load(path, map_location="cpu", weights_only=True)
    return weights


def build_backbone(model: Model, sample_shape: tuple[int, ...], seed: int) -> Backbone:
    """The same initial weights for every method: they depend on the seed and on nothing else."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, "backbone"))
        backbone: Backbone = registry.find("backbone", model.backbone)(model, sample_shape)
        return backbone


@register("backbone", "mlp")
def mlp(model: Model, sample_shape: tuple[int, ...]) -> Backbone:
    return Mlp(sample_shape[0], model.channels)


@register("backbone", "convnet")
def convnet(model: Model, sample_shape: tuple[int, ...]) -> Backbone:
    if model.weights is not None:
        raise ConfigError("model.weights is for resnet18 and vit; model.backbone is 'convnet'.")
    return ConvNet(sample_shape[0], sample_shape[1], model.channels, model.norm)


@register("backbone", "resnet18")
def resnet18(model: Model, sample_shape: tuple[int, ...]) -> Backbone:
    resnet = ResNet18(sample_shape[0], sample_shape[1], model.stem, model.norm)
    if model.weights is not None:
        resnet.load(model.weights)
    return resnet


def pixel_scale(model: Model, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of pixels in [0, 1], one a channel or one for all: what pretrained weights were trained with."""
    if model.weights is None or channels != 3:
        return (0.5,), (0.5,)
    if model.backbone == "vit":
        from fedmll.models.vit import vit_pixel_scale

        return vit_pixel_scale(model.weights)
    return IMAGENET_MEAN, IMAGENET_STD
