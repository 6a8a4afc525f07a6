"""Products of a few directions of the features, as additional features of a linear head (`fed-logistic`)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmll.models.backbones import Backbone
from fedmll.models.network import Classifier


class FeatureProducts(nn.Module):
    """f → [f, r_i r_j for i < j, (r_i² − 1) / √2], where r = Q f + q.

    Q and q are buffers of the model, so they are sent, stored and exported with it. The server sets them so that r has
    mean 0 and the identity as covariance. The products of normal variables then have mean 0 and variance 1, and are not
    correlated.
    """

    directions: Tensor
    offset: Tensor
    first: Tensor
    second: Tensor

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        self.width = width + count * (count + 1) // 2
        self.register_buffer("directions", torch.zeros(count, width))
        self.register_buffer("offset", torch.zeros(count))
        for name, places in zip(("first", "second"), torch.triu_indices(count, count), strict=True):
            self.register_buffer(name, places.clone(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        r = nn.functional.linear(features, self.directions, self.offset)
        square = (self.first == self.second).to(r.dtype)
        products = (r[:, self.first] * r[:, self.second] - square) / (1 + square).sqrt()
        return torch.cat([features, products], -1)


class ProductClassifier(Classifier):
    """A linear head on the mean of the tokens and on products of directions of it."""

    def __init__(self, backbone: Backbone, classes: int, count: int) -> None:
        super().__init__(backbone, classes)
        self.products = FeatureProducts(backbone.width, count)
        self.head = nn.Linear(self.products.width, classes)

    @property
    def width(self) -> int:
        return self.products.width

    @property
    def uses_mean_features(self) -> bool:
        return type(self).features is ProductClassifier.features

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        found: Tensor = self.products(super().features(images, states))
        return found
