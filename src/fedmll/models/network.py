"""`Network`: a backbone and a head. Features and logits are separate steps, so that each is computed once. The linear
heads are here."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.core.errors import ConfigError
from fedmll.core.seeding import numpy_generator
from fedmll.models.backbones import Backbone
from fedmll.models.frozen_features import as_map, compute_tokens
from fedmll.models.standardise import pool_tokens

CLASSIFIER_ROWS = "classifier rows"  # a key of Network.class_vectors


class Network(nn.Module):
    """The base of all models. `features` are (batch, width), or (batch, classes, width) with one feature per class."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    @property
    def width(self) -> int:
        return self.backbone.width

    def tokens(self, images: Tensor) -> Tensor:
        """Tokens (batch, width, rows, columns) from images or from stored tokens."""
        if self.backbone.stores_means and images.dim() == 2:
            raise ConfigError(
                "Only the means of the frozen backbone's tokens were stored, because the head uses means, but the "
                "tokens are needed: give the network its own features(), or leave model.freeze out."
            )
        tokens = compute_tokens(self.backbone, images)
        return tokens if tokens.dim() == 4 else as_map(tokens)

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """The features of images.

        `states` (batch, classes) are known labels (1, 0, -1 unknown), for heads that use them.
        """
        return pool_tokens(compute_tokens(self.backbone, images))

    @property
    def uses_mean_features(self) -> bool:
        """Whether the features need only the mean of the tokens. A subclass with its own `features` overrides this."""
        return type(self).features is Network.features

    def logits(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    @property
    def class_bias(self) -> str | None:
        """The name of the parameter that has one bias per class, if there is one."""
        return None

    def forward(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        return self.logits(self.features(images, states))

    # For figures

    def class_vectors(self) -> dict[str, Tensor]:
        """Vectors of the head, one per class: description → (classes, width)."""
        return {}

    def class_maps(self, images: Tensor) -> Tensor | None:
        """Attention maps per class, for heads with attention: (batch, heads, classes, rows, columns); each sums to
        1."""
        return None


class Classifier(Network):
    """A linear head on the mean of the tokens, as in FedAvg."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.width, classes)

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    @property
    def class_bias(self) -> str | None:
        return "head.bias"

    def class_vectors(self) -> dict[str, Tensor]:
        return {CLASSIFIER_ROWS: self.head.weight}


def normal_matrix(generator: np.random.Generator, rows: int, columns: int) -> np.ndarray:
    """Draw float64 values from N(0, 1). torch allocates them, so that the limit for loaded model files applies."""
    return generator.standard_normal(out=torch.empty(rows, columns, dtype=torch.float64).numpy())


class Lift(nn.Module):
    """Additional nonlinear features for a linear head: φ(f) = [f, ℓ(f̂)], where f̂ is f scaled to mean 0 and variance 1.

        relu      max(0, W f̂ + b)     random features, W and b from the shared seed: W ~ N(0, 1/d), b ~ N(0, 1)
        fourier   √2 cos(W f̂ + b)     b uniform in [0, 2π): a Gaussian kernel's (Rahimi and Recht, 2007)
        second    (U f̂) ⊙ (V f̂)       random second-order forms: the products f_i f_j, of which there are d²/2,
                                       projected to a chosen width

    Each machine draws the same matrices. They are never trained, sent or averaged; they are checked when a site joins.
    """

    first: Tensor
    second: Tensor  # for "second" a matrix like the first, otherwise a shift

    def __init__(self, kind: str, width: int, added: int, seed: int) -> None:
        super().__init__()
        self.kind, self.width = kind, width + added
        draw = numpy_generator(seed, "lift", kind)
        matrix = normal_matrix(draw, added, width) / math.sqrt(width)
        other = {
            "relu": lambda: draw.standard_normal(added),
            "fourier": lambda: draw.uniform(0, 2 * math.pi, added),
            "second": lambda: normal_matrix(draw, added, width) / math.sqrt(width),
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
    """A linear head on the mean of the tokens and its lifted features, which are not standardised."""

    def __init__(self, backbone: Backbone, classes: int, lift: Lift) -> None:
        backbone.standardise = None
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
