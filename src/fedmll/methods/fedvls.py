"""FedVLS — Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025, adapted to several
labels per image.

A class is vacant at a client without positives of it. Training on its negatives alone would make the model forget the
class. So they are left out of the loss, and the client learns the class from the received global model g:

    BCE over the known entries of the other classes
    + λ mean over batch × vacant classes of KL(p_g ‖ p)          vacant-class distillation
    + μ Σ_c π_c log mean_{i: y_ic = 0} exp z_ic                  logit suppression

π_c is the share of class c among the client's positives. A client's model predicts its frequent classes too often, so
their logits are kept low where the class is absent (π = 0 for a vacant class). λ = 1 and μ = 0.005 as in the released
code, which is for one label per image: a softmax over the vacant classes, and a cross-entropy with logits + log π. The
global model predicts once per round, without augmentation. λ = μ = 0 is FedAvg-PL.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss


class VacantDistillation(Part):
    """λ KL(p_g ‖ p) over the vacant classes, which are left out of the other losses."""

    name = "vacant-distillation"
    provides = frozenset({"unknown-targets"})

    class Options(PartOptions):
        distill: float = option(1.0, "λ: weight of the distillation", ge=0)

    def on_round_start(self, client_round: ClientRound) -> tuple[Tensor, Tensor] | None:
        """The vacant classes: bool (C,); and p_g (N, vacant classes)."""
        vacant = ~(client_round.client.targets == 1).any(0)
        if self.options.distill == 0 or not vacant.any():
            return None
        client_round.unknown_targets_taught = True
        client_round.targets = client_round.targets.masked_fill(vacant, -1)
        return vacant, client_round.outputs().probabilities[:, vacant]

    def loss(self, step: TrainStep, round_state: tuple[Tensor, Tensor] | None) -> Tensor | None:
        if round_state is None:
            return None
        vacant, teacher = round_state[0], round_state[1][step.rows]
        cross = F.binary_cross_entropy_with_logits(step.logits[:, vacant], teacher)
        return self.options.distill * (cross - F.binary_cross_entropy(teacher, teacher))


class LogitSuppression(Part):
    """μ Σ_c π_c log mean_{i: y_ic = 0} exp z_ic: a penalty on large logits of absent classes, larger for frequent
    classes."""

    name = "suppression"

    class Options(PartOptions):
        suppress: float = option(0.005, "μ: weight of the penalty", ge=0)

    def on_round_start(self, client_round: ClientRound) -> Tensor:
        """π (C,): the share of each class among the client's positives."""
        positives = (client_round.client.targets == 1).sum(0).float()
        return positives / positives.sum().clamp(min=1)

    def loss(self, step: TrainStep, share: Tensor) -> Tensor | None:
        if self.options.suppress == 0:
            return None
        absent = step.targets == 0
        count = absent.sum(0)
        logits = step.logits.masked_fill(~absent, -torch.inf)
        counted = (count > 0) & (share > 0)
        mean = torch.logsumexp(logits[:, counted], 0) - torch.log(count[counted])
        return self.options.suppress * (share[counted] * mean).sum()


class FedVLS(Method):
    name = "fedvls"
    summary = (
        "a client learns classes without local positives from the global model; penalty on logits of absent classes"
    )
    paper = "Guo et al., AAAI 2025"
    parts = (VacantDistillation, MaskedLoss, LogitSuppression)
