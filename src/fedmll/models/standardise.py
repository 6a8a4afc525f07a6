"""Standardised features: a layer between a frozen backbone and what is trained. It subtracts the mean of each feature
and divides by its standard deviation.

Both are buffers of the model, so they are sent, stored and exported with it. The server computes them before round 1
from the sums of all clients (methods/parts/standardisation.py). Until then the layer changes nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

SMALLEST_SHARE = 0.01  # a standard deviation is at least this share of the root mean square of all of them


class StandardiseFeatures(nn.Module):
    """(f − mean) · scale, for each feature of vectors (batch, width) or of tokens (batch, width, rows, columns)."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))
        self.pools = False  # the head uses only the mean of the tokens: its statistics are those of the mean

    @property
    def width(self) -> int:
        return self.mean.numel()

    def inputs(self, tokens: Tensor) -> Tensor:
        """What is standardised: the tokens, or their mean."""
        return pool_tokens(tokens) if self.pools else tokens

    def forward(self, tokens: Tensor) -> Tensor:
        features = self.inputs(tokens)
        shape = (-1, *(1 for _ in features.shape[2:]))
        return (features - self.mean.view(shape)) * self.scale.view(shape)


def mean_and_scale(moments: Tensor) -> tuple[Tensor, Tensor]:
    """The buffers from (3, width): the number of samples, the sums of the features and the sums of their squares.

    A feature that hardly varies is not enlarged to the variance of the others: its few other values are noise.
    """
    count, total, squares = moments
    mean = total / count
    deviation = (squares / count - mean.square()).clamp(min=0).sqrt()
    smallest = SMALLEST_SHARE * deviation.square().mean().sqrt()
    return mean, 1 / torch.where(deviation > smallest, deviation, smallest if smallest > 0 else 1.0)


def pool_tokens(tokens: Tensor) -> Tensor:
    """The mean over a map of tokens (batch, width, rows, columns); a map of one token or a vector is not changed."""
    if tokens.dim() == 2:
        return tokens
    return tokens.flatten(1) if tokens.shape[2:] == (1, 1) else tokens.mean((2, 3))
