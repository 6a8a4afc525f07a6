"""MobileNetV2 (Sandler et al. 2018) without pooling and classifier; names as in torchvision, so its files load."""

from __future__ import annotations

from torch import Tensor, nn

from fedmll.config.settings import ModelSettings
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone, build_norm, initialise_he, load_pretrained

# expansion, channels, blocks, stride of the first one
BLOCKS = (
    *((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2)),
    (6, 320, 1, 1),
)


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


@register("backbone", "mobilenet-v2")
def mobilenet_v2(model: ModelSettings, sample_shape: tuple[int, ...]) -> MobileNetV2:
    return load_pretrained(MobileNetV2(sample_shape[0], model.norm), model)
