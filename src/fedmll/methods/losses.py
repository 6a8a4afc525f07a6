"""Multi-label losses by name (`training.loss`), and the parts that apply them to the targets.

A loss is computed for every entry, that is for every sample and class: (batch, classes) → (batch, classes). The part
decides which entries count. So an unknown target can be left out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.core.registry import register
from fedmll.methods.framework.base import TargetLoss, vectorized
from fedmll.methods.framework.client_round import ClientRound, TrainStep


@dataclass(frozen=True)
class ForMissing:
    """A loss with a rule for unknown targets: (logits, targets 1, 0 or -1, round) → (batch, classes). All its entries
    count."""

    of: Callable[[Tensor, Tensor, int], Tensor]


def is_for_missing_labels(name: str) -> bool:
    return isinstance(registry.find("loss", name), ForMissing)


def entrywise(
    name: str, logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None, round: int = 1
) -> Tensor:
    """The loss of every entry. `targets` are 1, 0 or -1 (unknown). A loss that is not for missing labels receives an
    unknown target as 0. `positive_weight` (C,) is for the loss `weighted`."""
    loss = registry.find("loss", name)
    if isinstance(loss, ForMissing):
        return loss.of(logits, targets, round)
    found: Tensor = loss(logits, (targets == 1).to(logits.dtype), positive_weight)
    return found


def check_loss(name: str) -> None:
    """Raise a ConfigError if a user's loss does not return one value per entry. A mean or sum over a batch would also
    teach unknown targets, because no entry could be left out."""
    if name not in registry.find_added("loss"):
        return
    with torch.inference_mode(False), torch.enable_grad():  # a finished model may be built without gradients
        logits, targets = torch.zeros(2, 3, requires_grad=True), torch.tensor([[1, 0, -1], [0, 1, 0]])
        try:
            found: object = entrywise(name, logits, targets, torch.ones(3))
        except Exception as error:
            found = error
    if isinstance(found, Tensor) and found.shape == logits.shape and found.is_floating_point() and found.requires_grad:
        return
    if isinstance(found, Exception):
        problem = f"fails with {type(found).__name__}: {found}".rstrip(".")
    elif not isinstance(found, Tensor):
        problem = f"returns {type(found).__name__}"
    elif found.shape == logits.shape:
        problem = "returns a tensor without a gradient"
    else:
        problem = f"returns a tensor of the shape {tuple(found.shape)} for logits of the shape {tuple(logits.shape)}"
    raise ConfigError(
        f"The loss '{name}' {problem}. It must be a function (logits, targets, positive_weight) that returns one value "
        "per sample and class: a differentiable tensor (batch, classes), as with reduction='none' in torch."
    )


@register("loss", "bce")
def cross_entropy(logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none")


@register("loss", "weighted")
def weighted(logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, targets, pos_weight=positive_weight, reduction="none")


@register("loss", "asl")
def asymmetric(
    logits: Tensor,
    targets: Tensor,
    positive_weight: Tensor | None = None,
    gamma_negative: float = 4,
    gamma_positive: float = 1,
    clip: float = 0.05,
) -> Tensor:
    """ASL (Ridnik et al., 2021): L+ = (1−p)^γ+ log p; L− = p_m^γ− log(1−p_m), p_m = max(p − clip, 0).
    The focusing factors carry gradient, as in the paper's formula."""
    p = torch.sigmoid(logits)
    shifted = (p - clip).clamp(min=0)
    positive = (1 - p).pow(gamma_positive) * F.logsigmoid(logits)
    negative = shifted.pow(gamma_negative) * torch.log((1 - shifted).clamp(min=1e-8))
    return -(targets * positive + (1 - targets) * negative)


# ---- for missing labels: a label that is not annotated may still be present


def focal(logits: Tensor, present: Tensor, gamma: float = 2) -> Tensor:
    """−(1 − p_t)^γ log p_t, where p_t is the predicted probability of the target's value."""
    signed = torch.where(present, logits, -logits)
    return -torch.sigmoid(-signed).pow(gamma) * F.logsigmoid(signed)


def hill(logits: Tensor, targets: Tensor, round: int, weight: float = 1.5, margin: float = 1) -> Tensor:
    """Hill (Zhang et al., 2021, "Simple and Robust Loss Design for Multi-Label Learning with Missing Labels"). For a
    positive: the focal loss of z − m (focal margin, γ = 2). For all other entries: (λ − p) p², whose gradient returns
    to 0 where the model is confident that the label is present."""
    present, p = targets == 1, torch.sigmoid(logits)
    return torch.where(present, focal(logits - margin, present), (weight - p) * p.square())


def self_paced(logits: Tensor, targets: Tensor, round: int, threshold: float = 0.6, margin: float = 1) -> Tensor:
    """SPLC (the same paper): the focal margin loss. After the first round an unknown target with p > τ is taught as
    present (without the margin, as in the released code). The comparison has no gradient. A known 0 stays 0."""
    present = targets == 1
    found = (targets < 0) & (torch.sigmoid(logits) > threshold) if round > 1 else torch.zeros_like(present)
    return focal(torch.where(present, logits - margin, logits), present | found)


def entropy_maximising(logits: Tensor, targets: Tensor, round: int, alpha: float = 0.1) -> Tensor:
    """EM (Zhou et al., 2022, "Acknowledging the Unknown"): BCE for known targets, −α H(p) for unknown ones. The
    gradient of the second term is 0 at p = ½ and small around it. α is the paper's value for COCO and NUS-WIDE (VOC
    0.2, CUB 0.01)."""
    p = torch.sigmoid(logits)
    entropy = -(p * F.logsigmoid(logits) + (1 - p) * F.logsigmoid(-logits))
    return torch.where(targets < 0, -alpha * entropy, cross_entropy(logits, (targets == 1).to(logits.dtype)))


register("loss", "hill")(ForMissing(hill))
register("loss", "splc")(ForMissing(self_paced))
register("loss", "em")(ForMissing(entropy_maximising))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """The mean over the entries where the mask is 1; 0 if there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def positive_weights(labels: Tensor, largest: float = 20.0) -> Tensor:
    """For each class the number of known negatives divided by that of positives, limited to [1, largest]."""
    positives = (labels == 1).sum(0).float()
    negatives = (labels == 0).sum(0).float()
    return (negatives / positives.clamp(min=1)).clamp(1, largest)


# ---- parts that apply training.loss to the targets


class EntrywiseLoss(TargetLoss):
    """The base of parts that use `training.loss`. Their round state is the weights of the positives, or contains
    them."""

    accepts: ClassVar[Literal["all", "known-targets", "none"]] = "all"

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        """The weights of the positives, if the loss needs them."""
        weighted = self.task.experiment.training.loss == "weighted"
        return positive_weights(client_round.client.targets) if weighted else None

    def entries(self, step: TrainStep, logits: Tensor, weights: Tensor | None) -> Tensor:
        """The loss of every entry (batch, classes)."""
        loss = self.task.experiment.training.loss
        return entrywise(loss, logits, step.targets, weights, step.client_round.number)

    def counted(self, step: TrainStep) -> Tensor:
        """1.0 where an entry counts: the known entries, and all entries if the loss is for missing labels."""
        everything = is_for_missing_labels(self.task.experiment.training.loss)
        return torch.ones_like(step.known) if everything else step.known


class UnknownAsNegative(EntrywiseLoss):
    """The mean of `training.loss` over all entries. An unknown target counts as absent, unless another part teaches
    it."""

    name = "unknown-as-negative"

    @vectorized
    def loss(self, step: TrainStep, positive_weights: Tensor | None) -> Tensor:
        entries = self.entries(step, step.logits, positive_weights)
        return (entries * step.known if step.client_round.unknown_targets_taught else entries).mean()


class MaskedLoss(EntrywiseLoss):
    """The mean of `training.loss` over the entries with a known target, or over all entries if the loss is for missing
    labels."""

    name = "masked"

    @vectorized
    def loss(self, step: TrainStep, positive_weights: Tensor | None) -> Tensor:
        return masked_mean(self.entries(step, step.logits, positive_weights), self.counted(step))
