"""What semi-supervised parts share: a teacher that follows the model, labels made of confident predictions, ramp-ups.
Two views of a batch: `step.show([step.batch.view("weak"), step.batch.view("strong")])` in a part's `shape`."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.func import functional_call

from fedmll.client import Client


class EmaTeacher:
    """A second set of weights, buffers included, for the worker's only model: w' ← a w' + (1−a) w after a step. What it
    is now is `vector`, which a part may remember for the client's next round."""

    def __init__(self, client: Client, vector: Tensor | None = None) -> None:
        self.client = client
        self.vector = client.weights.vector.clone() if vector is None else vector.to(client.weights.vector, copy=True)
        self.tensors = client.weights.named({"weights": self.vector, "counters": client.weights.counters.clone()})

    def follow(self, decay: float) -> None:
        self.vector.lerp_(self.client.weights.vector, 1 - decay)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """In evaluation mode; the model is in the mode that it was in afterwards."""
        model = self.client.model
        before = model.training
        try:
            logits: Tensor = functional_call(model.eval(), self.tensors, (images,))
        finally:
            model.train(before)
        return torch.sigmoid(logits)


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """σ(z/T) of σ(z): what a teacher says at a temperature."""
    yes, no = probabilities.pow(1 / temperature), (1 - probabilities).pow(1 / temperature)
    return yes / (yes + no)


def pseudo_targets(probabilities: Tensor, low: float, high: float) -> Tensor:
    """1 where p ≥ high, 0 where p ≤ low, else -1: unknown."""
    targets = torch.full(probabilities.shape, -1, dtype=torch.int8, device=probabilities.device)
    return targets.masked_fill_(probabilities <= low, 0).masked_fill_(probabilities >= high, 1)


def ramp_up(round: float, length: float) -> float:
    """exp(−5 (1 − t/T)²), t at most T: from nearly 0 to 1 (Laine and Aila, 2017)."""
    return math.exp(-5 * (1 - min(round, length) / length) ** 2)
