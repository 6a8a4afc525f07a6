"""Losses of the targets that most methods use: `training.loss`, entry by entry, over the entries that count."""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmll.methods import losses
from fedmll.methods.base import TargetLoss, vectorized
from fedmll.methods.client_round import ClientRound, TrainStep


class EntrywiseLoss(TargetLoss):
    """The base of parts that use `training.loss`. Their round state is, or contains, the weights of the positives."""

    accepts: ClassVar[Literal["all", "known-targets", "none"]] = "all"

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        """The weights of the positives, if the loss needs them."""
        weighted = self.task.experiment.training.loss == "weighted"
        return losses.positive_weights(client_round.client.targets) if weighted else None

    def entries(self, step: TrainStep, logits: Tensor, weights: Tensor | None) -> Tensor:
        """The loss of every entry (batch, classes)."""
        loss = self.task.experiment.training.loss
        return losses.entrywise(loss, logits, step.targets, weights, step.client_round.number)

    def counted(self, step: TrainStep) -> Tensor:
        """1.0 where an entry counts: the known entries, and all entries if the loss is for missing labels."""
        everything = losses.is_for_missing_labels(self.task.experiment.training.loss)
        return torch.ones_like(step.known) if everything else step.known


class UnknownAsNegative(EntrywiseLoss):
    """The mean over all entries. An unknown target counts as negative, unless another part teaches it."""

    name = "unknown-as-negative"

    @vectorized
    def loss(self, step: TrainStep, positive_weights: Tensor | None) -> Tensor:
        entries = self.entries(step, step.logits, positive_weights)
        return (entries * step.known if step.client_round.unknown_targets_taught else entries).mean()


class MaskedLoss(EntrywiseLoss):
    """The mean over the entries whose target is known; over all entries if the loss is for missing labels."""

    name = "masked"

    @vectorized
    def loss(self, step: TrainStep, positive_weights: Tensor | None) -> Tensor:
        return losses.masked_mean(self.entries(step, step.logits, positive_weights), self.counted(step))
