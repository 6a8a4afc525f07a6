"""Pooled stages: the features of a frozen backbone as one vector per image, made of more than the mean of its last map
(`model.stages`, `model.power`, `model.flip_average`).

    f(image) = [r(mean of the last stage), means of the other stages],   r(v) = v, or sign(v) √|v|

With `flip_average` the features are the mean of f over the image and its mirror image. Earlier stages see smaller
things, the root reduces the few large values of a feature, and the flip halves the noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedmll.config.settings import ModelSettings
from fedmll.core.errors import ConfigError
from fedmll.models.backbones.base import Backbone
from fedmll.models.standardise import pool_tokens


@dataclass(frozen=True)
class PooledStages:
    """What one vector per image is made of."""

    stages: tuple[int, ...] = ()  # beside the last
    power: str = "none"
    flip_average: bool = False

    @classmethod
    def of(cls, model: ModelSettings, backbone: Backbone) -> PooledStages | None:
        """What the settings ask for; None: the map of the last stage."""
        if model.stages == "auto" or model.power == "auto" or model.flip_average == "auto":
            raise ValueError("The settings of an experiment must be resolved first.")
        last = len(backbone.stages()) - 1
        wrong = [number for number in model.stages if number >= last]
        if wrong:
            raise ConfigError(
                f"model.stages has {wrong[0]}, and the stages of {model.backbone} before its last are 0 to {last - 1}. "
                "The last stage is always included."
            )
        found = cls(tuple(sorted(set(model.stages), reverse=True)), model.power, model.flip_average)
        return None if found == cls() else found

    def width(self, backbone: Backbone, sample_shape: tuple[int, ...]) -> int:
        """The number of features. It is found with an empty image."""
        if not self.stages:
            return backbone.width
        parameter = next(backbone.parameters())
        was_training = backbone.training
        with torch.no_grad():
            width = self.features(backbone.eval(), torch.zeros(1, *sample_shape, device=parameter.device)).shape[1]
        backbone.train(was_training)
        return int(width)

    def features(self, backbone: Backbone, images: Tensor) -> Tensor:
        """(batch, width) from images."""
        found = self._of_view(backbone, images)
        return (found + self._of_view(backbone, images.flip(3))) / 2 if self.flip_average else found

    def _of_view(self, backbone: Backbone, images: Tensor) -> Tensor:
        outputs = backbone.stage_outputs(images, frozenset(self.stages)) if self.stages else {}
        last = pool_tokens(outputs[-1] if outputs else backbone(images))
        if self.power == "sqrt":
            last = last.sign() * last.abs().sqrt()
        return torch.cat([last, *(pool_tokens(outputs[number]) for number in self.stages)], 1)
