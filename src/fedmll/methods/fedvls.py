"""FedVLS — Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025, read for several
labels an image.

A class is vacant at a client that has no positive of it. Its negatives alone would teach the model to forget the class,
so they are taken out of the loss, and the round-start global model g teaches the class instead:

    BCE over the known entries of the other classes
    + λ mean over batch × vacant classes of KL(p_g ‖ p)          vacant-class distillation
    + μ Σ_c π_c log mean_{i: y_ic = 0} exp z_ic                  logit suppression

π_c is the class's share of the client's positives: the logits of the classes that a client has most of, which its model
says too often, are held down where they are absent (a vacant class has π = 0). λ = 1 and μ = 0.005 as in the released
code; there the distillation is a softmax over the vacant classes and the cross-entropy is moved by log π, which leaves
vacant classes out of it. The teacher predicts once a round, without augmentation. λ = μ = 0 is FedAvg-PL.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.base import Part, PartOptions, option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.method import Method
from fedmll.methods.parts.target_losses import MaskedLoss


class VacantClassTeacher(NamedTuple):
    vacant: Tensor  # bool (C,)
    says: Tensor  # p_g (N, C)


class VacantDistillation(Part):
    """λ KL(p_g ‖ p) of the classes that the client has no positive of, which are in no other loss."""

    name = "vacant-distillation"
    provides = frozenset({"unknown-targets"})

    class Options(PartOptions):
        distill: float = option(1.0, "λ: how strongly vacant classes follow the global model", ge=0)

    def on_round_start(self, client_round: ClientRound) -> VacantClassTeacher | None:
        vacant = ~(client_round.client.targets == 1).any(0)
        if self.options.distill == 0 or not vacant.any():
            return None
        client_round.unknown_targets_taught = True
        client_round.targets = client_round.targets.masked_fill(vacant, -1)
        return VacantClassTeacher(vacant, client_round.outputs().probabilities)

    def loss(self, step: TrainStep, round_state: VacantClassTeacher | None) -> Tensor | None:
        if round_state is None:
            return None
        says = round_state.says[step.rows][:, round_state.vacant]
        cross = F.binary_cross_entropy_with_logits(step.logits[:, round_state.vacant], says)
        return self.options.distill * (cross - F.binary_cross_entropy(says, says))


class LogitSuppression(Part):
    """μ Σ_c π_c log mean_{i: y_ic = 0} exp z_ic: what is absent gets no large logit, of frequent classes above all."""

    name = "suppression"

    class Options(PartOptions):
        suppress: float = option(0.005, "μ: how strongly logits of absent classes are held down", ge=0)

    def on_round_start(self, client_round: ClientRound) -> Tensor:
        """π (C,)."""
        positives = (client_round.client.targets == 1).sum(0).float()
        return positives / positives.sum().clamp(min=1)

    def loss(self, step: TrainStep, share: Tensor) -> Tensor | None:
        if self.options.suppress == 0:
            return None
        absent = step.targets == 0
        count = absent.sum(0)
        largest = step.logits.masked_fill(~absent, -torch.inf)
        held = (count > 0) & (share > 0)
        mean = torch.logsumexp(largest[:, held], 0) - torch.log(count[held])
        return self.options.suppress * (share[held] * mean).sum()


class FedVLS(Method):
    name = "fedvls"
    summary = "the global model teaches each client the classes that it has none of; absent classes get no large logits"
    paper = "Guo et al., AAAI 2025"
    parts = (VacantDistillation, MaskedLoss, LogitSuppression)
