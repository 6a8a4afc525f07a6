"""ResNets (He et al. 2016) without pooling and classifier; names as in torchvision, so its weight files load."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.config.settings import ModelSettings
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone, build_norm, initialise_he, load_pretrained


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
        x = self.maxpool(F.relu(self.bn1(self.conv1(images)), inplace=True))
        for layer in self.layers():
            x = layer(x)
        return x


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
