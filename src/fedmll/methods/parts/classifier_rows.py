"""Classifier rows: a model's flat weights taken apart at its head, which has one row a class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmll.models.flat_weights import FlatWeights


@dataclass(frozen=True)
class HeadRows:
    """Flat weights are [what comes before the head, its matrix, its bias, what comes after it]."""

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


def own_rows(classes: Sequence[str], owned: Tensor) -> Tensor:
    """A client's classes in its own order: by name, which does not depend on what other classes there are."""
    return torch.tensor(sorted(owned.nonzero().flatten().tolist(), key=lambda row: classes[row]), dtype=torch.int64)
