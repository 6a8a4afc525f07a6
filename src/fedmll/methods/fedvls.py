"""FedVLS — Guo et al., "Exploring Vacant Classes in Label-Skewed Federated Learning", AAAI 2025, adapted to several
labels per image.

A class is vacant at a client without positives of it. Training on its negatives alone would make the model forget the
class. So they are left out of the loss, and the client learns the class from the received global model g:

    BCE(σ(z + log π' − log(1 − π')), y) over the known entries of the other classes        prior shift
    + λ mean over batch × vacant classes of KL(p_g ‖ p)                                    vacant-class distillation
    + μ Σ_c π_c log mean_i exp([y_ic = 0] (z_ic − log π_c − log C))                         logit suppression

π'_c is the share of the client's samples that have class c, and π_c the share of class c among its positives. A
client's model predicts its frequent classes too often: the shift takes this out of z, and the suppression keeps the
logits of absent classes low. A sample with the class counts as exp(0), as in the released code; an unknown entry does
not count. λ = 1 and μ = 0.005 as in the released code. The global model predicts once per round, without augmentation.

The paper has one label per image: a softmax over the vacant classes, and a cross-entropy of z + log π, which leaves
vacant classes out because log π is very negative. With several labels each class has its own sigmoid, so the shift is
that of the class's prior odds, KL is that of Bernoulli variables, and vacant classes are left out explicitly. λ = μ = 0
without `prior_shift` is FedAvg-PL.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import EntrywiseLoss, MaskedLoss, masked_mean
from fedmll.methods.parts.semi_supervised import log_prior_odds


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


class PriorShiftedLoss(EntrywiseLoss):
    """BCE over the known entries of σ(z + log π' − log(1 − π')), where π' is the client's own share of the class."""

    name = "prior-shifted"
    accepts = "known-targets"

    def on_round_start(self, client_round: ClientRound) -> Any:
        targets = client_round.client.targets
        odds = log_prior_odds((targets == 1).sum(0), (targets >= 0).sum(0).clamp(min=1), len(targets))
        return odds, super().on_round_start(client_round)

    def loss(self, step: TrainStep, round_state: tuple[Tensor, Tensor | None]) -> Tensor:
        odds, weights = round_state
        return masked_mean(self.entries(step, step.logits + odds, weights), step.known)


class LogitSuppression(Part):
    """μ Σ_c π_c log mean_i exp([y_ic = 0] (z_ic − log π_c − log C)): a penalty on large logits of absent classes."""

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
        known = step.targets >= 0
        counted = known.any(0) & (share > 0)
        shifted = step.logits[:, counted] - torch.log(share[counted] * len(share))
        shifted = shifted.masked_fill(step.targets[:, counted] == 1, 0.0)
        shifted = shifted.masked_fill(~known[:, counted], -torch.inf)
        log_mean = torch.logsumexp(shifted, 0) - torch.log(known.sum(0)[counted])
        return self.options.suppress * (share[counted] * log_mean).sum()


class FedVLS(Method):
    name = "fedvls"
    summary = (
        "a client learns classes without local positives from the global model; penalty on logits of absent classes"
    )
    paper = "Guo et al., AAAI 2025"
    parts = (
        VacantDistillation,
        switch("prior_shift", PriorShiftedLoss, "add the log prior odds to the logits in BCE", otherwise=MaskedLoss),
        LogitSuppression,
    )
