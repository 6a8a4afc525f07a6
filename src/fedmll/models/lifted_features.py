"""Additional nonlinear features for a linear head: φ(f) = [f, ℓ(f̂)], where f̂ is f scaled to mean 0 and variance 1.

    relu      max(0, W f̂ + b)          random features, W and b from the shared seed: W ~ N(0, 1/d), b ~ N(0, 1)
    fourier   √2 cos(W f̂ + b)          b uniform in [0, 2π): a Gaussian kernel's (Rahimi and Recht, 2007)
    second    (U f̂) ⊙ (V f̂)            random second-order forms: the products f_i f_j, of which there are d²/2,
                                        projected to a chosen width

Each machine draws the same matrices. They are never trained, sent or averaged; they are checked when a site joins.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.core.seeding import numpy_generator
from fedmll.models.backbones import Backbone
from fedmll.models.network import Classifier

KINDS = ("relu", "fourier", "second")


class Lift(nn.Module):
    """Concatenates features with random nonlinear features of them."""

    first: Tensor
    second: Tensor  # for "second" a matrix like the first, otherwise a shift

    def __init__(self, kind: str, width: int, added: int, seed: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width + added
        draw = numpy_generator(seed, "lift", kind)
        matrix = draw.standard_normal((added, width)) / math.sqrt(width)
        other = {
            "relu": lambda: draw.standard_normal(added),
            "fourier": lambda: draw.uniform(0, 2 * math.pi, added),
            "second": lambda: draw.standard_normal((added, width)) / math.sqrt(width),
        }[kind]()
        for name, values in (("first", matrix), ("second", other)):
            self.register_buffer(name, torch.from_numpy(values.astype(np.float32)), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        scaled = F.layer_norm(features, features.shape[-1:])
        if self.kind == "second":
            more = F.linear(scaled, self.first) * F.linear(scaled, self.second)
        else:
            turned = F.linear(scaled, self.first, self.second)
            more = turned.relu() if self.kind == "relu" else math.sqrt(2) * turned.cos()
        return torch.cat([features, more], -1)


class LiftedClassifier(Classifier):
    """A linear head on the mean of the tokens and its lifted features."""

    def __init__(self, backbone: Backbone, classes: int, lift: Lift) -> None:
        super().__init__(backbone, classes)
        self.lift = lift
        self.head = nn.Linear(lift.width, classes)

    @property
    def width(self) -> int:
        return self.lift.width

    @property
    def uses_mean_features(self) -> bool:
        return type(self).features is LiftedClassifier.features

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        lifted: Tensor = self.lift(super().features(images, states))
        return lifted
