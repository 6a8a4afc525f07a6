"""Classifier rows: splits the flat weights of a model at its head, which has one row per class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmll.models.flat_weights import FlatWeights


@dataclass(frozen=True)
class HeadRows:
    """The flat weights are [before the head, matrix of the head, bias of the head, after the head]."""

    start: int
    width: int  # of a row of the matrix

    @classmethod
    def of(cls, weights: FlatWeights) -> HeadRows:
        place = weights.layout["head.weight"]
        return cls(place.start, place.shape[1])

    def split(self, weights: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Before the head; its `count` rows, each with its bias as the last number; after the head."""
        front, matrix, bias, back = weights.split(
            [self.start, count * self.width, count, len(weights) - self.start - count * (self.width + 1)]
        )
        return front, torch.cat([matrix.view(count, self.width), bias[:, None]], 1), back

    def join(self, front: Tensor, rows: Tensor, back: Tensor) -> Tensor:
        return torch.cat([front, rows[:, :-1].flatten(), rows[:, -1], back])

    def replace(self, weights: Tensor, rows: Tensor, which: Tensor) -> Tensor:
        """The weights with new rows (C, width + 1) of the classes `which`, a mask; the other rows stay."""
        front, old, back = self.split(weights, len(rows))
        return self.join(front, torch.where(which[:, None], rows.to(old.dtype), old), back)


def own_rows(classes: Sequence[str], owned: Tensor) -> Tensor:
    """The indices of a client's classes, sorted by name. This order does not depend on the other classes."""
    return torch.tensor(sorted(owned.nonzero().flatten().tolist(), key=lambda row: classes[row]), dtype=torch.int64)
