"""For feature vectors."""

from __future__ import annotations

from torch import Tensor, nn

from fedmll.config.settings import ModelSettings
from fedmll.core.registry import register
from fedmll.models.backbones.base import Backbone, check_no_weights


class Mlp(Backbone):
    """A hidden layer for each number in `channels`."""

    def __init__(self, features: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for width in widths:
            layers += [nn.Linear(features, width), nn.ReLU(inplace=True)]
            features = width
        self.layers = nn.Sequential(*layers)
        self.width = features

    def stages(self) -> list[nn.Module]:
        return [layer for layer in self.layers if isinstance(layer, nn.Linear)]

    def forward(self, features: Tensor) -> Tensor:
        vectors: Tensor = self.layers(features)
        return vectors


@register("backbone", "mlp")
def mlp(model: ModelSettings, sample_shape: tuple[int, ...]) -> Mlp:
    check_no_weights(model)
    return Mlp(sample_shape[0], model.channels)
