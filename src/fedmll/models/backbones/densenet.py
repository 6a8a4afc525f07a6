"""DenseNet-121 (Huang et al. 2017) without pooling and classifier; names as in torchvision, so its files load."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone, build_norm, initialise_he, load_pretrained

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
        self,
        channels_in: int,
        norm: str,
        counts: tuple[int, ...] = (6, 12, 24, 16),
        growth: int = 32,
        first: int = 64,
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
