"""Convolutional backbones without pooling and classifier: ConvNet, ResNet, DenseNet-121 and MobileNetV2.

All but ConvNet have torchvision's names of layers, so that torchvision's weight files load.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone, build_norm, check_no_weights, initialise_he, load_pretrained

Outputs = dict[int, Tensor]  # of stages, by number; -1 is the last one

# ---- ConvNet


class ConvNet(Backbone):
    """Four conv blocks for small images. Stride 2 instead of pooling (twice as fast), down to a map of about 4×4."""

    def __init__(self, channels_in: int, size: int, channels: tuple[int, ...], norm: str) -> None:
        super().__init__()
        blocks: list[nn.Module] = []
        for channels_out in channels:
            stride = 2 if size > 6 else 1
            size = -(-size // stride)
            conv = nn.Conv2d(channels_in, channels_out, 3, stride, 1, bias=False)
            blocks.append(nn.Sequential(conv, build_norm(norm, channels_out), nn.ReLU(inplace=True)))
            channels_in = channels_out
        self.blocks = nn.Sequential(*blocks)
        self.width = channels_in

    def stages(self) -> list[nn.Module]:
        return list(self.blocks)

    def forward(self, images: Tensor) -> Tensor:
        # channels_last is faster here (and slower for ResNet-18 on small images)
        tokens: Tensor = self.blocks(images.contiguous(memory_format=torch.channels_last))
        return tokens

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> Outputs:
        return outputs_in_order(images.contiguous(memory_format=torch.channels_last), self.blocks, wanted)


def outputs_in_order(x: Tensor, stages: Iterable[Callable[[Tensor], Tensor]], wanted: frozenset[int]) -> Outputs:
    """The outputs of the wanted stages and of the last one, where each stage takes the output of the one before it."""
    found: Outputs = {}
    for number, stage in enumerate(stages):
        x = stage(x)
        if number in wanted:
            found[number] = x
    return found | {-1: x}


@register("backbone", "convnet")
def convnet(model: ModelSettings, sample_shape: tuple[int, ...]) -> ConvNet:
    check_no_weights(model)
    return ConvNet(sample_shape[0], sample_shape[1], model.channels, model.norm)


# ---- ResNet (He et al., 2016)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.downsample = projection(channels_in, channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)), inplace=True)))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)), inplace=True)


class Bottleneck(nn.Module):
    """The stride is in the 3×3 convolution, as torchvision has it."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride, 1, bias=False)
        self.bn2 = build_norm(norm, channels)
        self.conv3 = nn.Conv2d(channels, self.expansion * channels, 1, bias=False)
        self.bn3 = build_norm(norm, self.expansion * channels)
        self.downsample = projection(channels_in, self.expansion * channels, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return F.relu(out + (x if self.downsample is None else self.downsample(x)), inplace=True)


def projection(channels_in: int, channels: int, stride: int, norm: str) -> nn.Module | None:
    """The shortcut, where the shape changes."""
    if stride == 1 and channels_in == channels:
        return None
    return nn.Sequential(nn.Conv2d(channels_in, channels, 1, stride, bias=False), build_norm(norm, channels))


class ResNet(Backbone):
    """`cifar` stem: 3×3 stride 1 and no max-pooling, for images up to 64 px."""

    def __init__(
        self,
        channels_in: int,
        size: int,
        stem: str,
        norm: str,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, ...],
        channels: int = 64,
    ) -> None:
        super().__init__()
        small = stem == "cifar" or (stem == "auto" and size <= 64)
        kernel, stride, padding = (3, 1, 1) if small else (7, 2, 3)
        self.conv1 = nn.Conv2d(channels_in, channels, kernel, stride, padding, bias=False)
        self.bn1 = build_norm(norm, channels)
        self.maxpool = nn.Identity() if small else nn.MaxPool2d(3, 2, 1)
        self.width, self.depth = channels, len(depths)
        for i, depth in enumerate(depths):
            blocks = []
            for k in range(depth):
                blocks.append(block(self.width, channels << i, 2 if i and k == 0 else 1, norm))
                self.width = (channels << i) * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        initialise_he(self)

    def stages(self) -> list[nn.Module]:
        return [nn.ModuleList([self.conv1, self.bn1]), *self.layers()]

    def layers(self) -> list[nn.Module]:
        return [self.get_submodule(f"layer{i + 1}") for i in range(self.depth)]

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for layer in self.layers():
            x = layer(x)
        return x

    def stem(self, images: Tensor) -> Tensor:
        pooled: Tensor = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        return pooled

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> Outputs:
        return outputs_in_order(images, [self.stem, *self.layers()], wanted)


class ResNet18(ResNet):
    def __init__(self, channels_in: int, size: int, stem: str, norm: str) -> None:
        super().__init__(channels_in, size, stem, norm, BasicBlock, (2, 2, 2, 2))


class ResNet50(ResNet):
    def __init__(self, channels_in: int, size: int, stem: str, norm: str) -> None:
        super().__init__(channels_in, size, stem, norm, Bottleneck, (3, 4, 6, 3))


@register("backbone", "resnet18")
def resnet18(model: ModelSettings, sample_shape: tuple[int, ...]) -> ResNet:
    return load_pretrained(ResNet18(sample_shape[0], sample_shape[1], model.stem, model.norm), model)


@register("backbone", "resnet50")
def resnet50(model: ModelSettings, sample_shape: tuple[int, ...]) -> ResNet:
    return load_pretrained(ResNet50(sample_shape[0], sample_shape[1], model.stem, model.norm), model)


# ---- DenseNet-121 (Huang et al., 2017)

SMALLEST = 29  # px; the map of a smaller image is empty at the end
OLD_NAME = re.compile(r"(denselayer\d+\.(?:norm|conv))\.([12]\.)")  # torchvision's files have norm.1 for norm1


class DenseLayer(nn.Module):
    """Adds `growth` channels to those that it gets."""

    def __init__(self, channels_in: int, growth: int, norm: str) -> None:
        super().__init__()
        self.norm1 = build_norm(norm, channels_in)
        self.conv1 = nn.Conv2d(channels_in, 4 * growth, 1, bias=False)
        self.norm2 = build_norm(norm, 4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, 1, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        new = self.conv1(F.relu(self.norm1(x), inplace=True))
        new = self.conv2(F.relu(self.norm2(new), inplace=True))
        return torch.cat([x, new], dim=1)


def dense_block(channels_in: int, count: int, growth: int, norm: str) -> nn.Sequential:
    block = nn.Sequential()
    for i in range(count):
        block.add_module(f"denselayer{i + 1}", DenseLayer(channels_in + i * growth, growth, norm))
    return block


def transition(channels_in: int, norm: str) -> nn.Sequential:
    """Half the channels, half the size."""
    layers = nn.Sequential()
    layers.add_module("norm", build_norm(norm, channels_in))
    layers.add_module("relu", nn.ReLU(inplace=True))
    layers.add_module("conv", nn.Conv2d(channels_in, channels_in // 2, 1, bias=False))
    layers.add_module("pool", nn.AvgPool2d(2))
    return layers


class DenseNet(Backbone):
    def __init__(
        self, channels_in: int, norm: str, counts: tuple[int, ...] = (6, 12, 24, 16), growth: int = 32, first: int = 64
    ) -> None:
        super().__init__()
        self.features = nn.Sequential()
        self.features.add_module("conv0", nn.Conv2d(channels_in, first, 7, 2, 3, bias=False))
        self.features.add_module("norm0", build_norm(norm, first))
        self.features.add_module("relu0", nn.ReLU(inplace=True))
        self.features.add_module("pool0", nn.MaxPool2d(3, 2, 1))
        self.width, self.blocks = first, len(counts)
        for i, count in enumerate(counts, 1):
            self.features.add_module(f"denseblock{i}", dense_block(self.width, count, growth, norm))
            self.width += count * growth
            if i < len(counts):
                self.features.add_module(f"transition{i}", transition(self.width, norm))
                self.width //= 2
        self.features.add_module(f"norm{len(counts) + 1}", build_norm(norm, self.width))
        initialise_he(self)

    def stages(self) -> list[nn.Module]:
        """The stem; then every dense block with what follows it."""
        parts = dict(self.features.named_children())
        last = f"norm{self.blocks + 1}"
        after = [parts.get(f"transition{i + 1}", parts[last]) for i in range(self.blocks)]
        blocks = [nn.ModuleList([parts[f"denseblock{i + 1}"], after[i]]) for i in range(self.blocks)]
        return [nn.ModuleList([parts["conv0"], parts["norm0"]]), *blocks]

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(self.features(images), inplace=True)

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> Outputs:
        """The stem, then every dense block with its transition; the last one with its norm."""
        ends = [self.features.pool0, *(getattr(self.features, f"transition{i + 1}") for i in range(self.blocks - 1))]
        found, x = Outputs(), images
        for layer in self.features:
            x = layer(x)
            number = next((number for number, end in enumerate(ends) if layer is end), None)
            if number in wanted:
                found[number] = x
        return found | {-1: F.relu(x, inplace=True)}

    def load(self, weights: dict[str, Tensor], origin: str) -> None:
        super().load({OLD_NAME.sub(r"\1\2", name): weight for name, weight in weights.items()}, origin)


@register("backbone", "densenet121")
def densenet121(model: ModelSettings, sample_shape: tuple[int, ...]) -> DenseNet:
    if min(sample_shape[1:]) < SMALLEST:
        raise ConfigError(
            f"model.backbone = 'densenet121' takes images of at least {SMALLEST} px, and these are "
            f"{sample_shape[1]} × {sample_shape[2]}: set data.size to 32 or more, or choose another backbone."
        )
    return load_pretrained(DenseNet(sample_shape[0], model.norm), model)


# ---- MobileNetV2 (Sandler et al., 2018)

# expansion, channels, blocks, stride of the first one
BLOCKS = (*((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2)), (6, 320, 1, 1))


def convolution(
    channels_in: int, channels: int, norm: str, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(channels_in, channels, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, build_norm(norm, channels), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Widen, convolve each channel alone, narrow; no activation after that."""

    def __init__(self, channels_in: int, channels: int, stride: int, expansion: int, norm: str) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.conv = nn.Sequential(
            *([convolution(channels_in, hidden, norm)] if expansion != 1 else []),
            convolution(hidden, hidden, norm, kernel=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, channels, 1, bias=False),
            build_norm(norm, channels),
        )
        self.shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.conv(x)
        return x + out if self.shortcut else out


class MobileNetV2(Backbone):
    def __init__(
        self,
        channels_in: int,
        norm: str,
        blocks: tuple[tuple[int, int, int, int], ...] = BLOCKS,
        first: int = 32,
        width: int = 1280,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = [convolution(channels_in, first, norm, kernel=3, stride=2)]
        previous = first
        for expansion, channels, count, stride in blocks:
            for k in range(count):
                layers.append(InvertedResidual(previous, channels, stride if k == 0 else 1, expansion, norm))
                previous = channels
        layers.append(convolution(previous, width, norm))
        self.features = nn.Sequential(*layers)
        self.width = width
        initialise_he(self)

    def stages(self) -> list[nn.Module]:
        return list(self.features)

    def forward(self, images: Tensor) -> Tensor:
        tokens: Tensor = self.features(images)
        return tokens

    def stage_outputs(self, images: Tensor, wanted: frozenset[int]) -> Outputs:
        return outputs_in_order(images, self.features, wanted)


@register("backbone", "mobilenet-v2")
def mobilenet_v2(model: ModelSettings, sample_shape: tuple[int, ...]) -> MobileNetV2:
    return load_pretrained(MobileNetV2(sample_shape[0], model.norm), model)
