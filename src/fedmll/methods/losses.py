"""Multi-label losses by entry, (batch, classes) → (batch, classes). Methods choose which entries count and how."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.core import registry
from fedmll.core.registry import register


@dataclass(frozen=True)
class ForMissing:
    """A loss that also says what an unknown target teaches: (logits, targets 1, 0 or -1, round) → entries, all of which
    count."""

    of: Callable[[Tensor, Tensor, int], Tensor]


def is_for_missing_labels(name: str) -> bool:
    return isinstance(registry.find("loss", name), ForMissing)


def entrywise(
    name: str, logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None, round: int = 1
) -> Tensor:
    """`targets` are 1, 0 or -1, unknown, which is as 0 to a loss that is not for missing labels; `positive_weight` (C,)
    is for `weighted`."""
    loss = registry.find("loss", name)
    if isinstance(loss, ForMissing):
        return loss.of(logits, targets, round)
    found: Tensor = loss(logits, (targets == 1).to(logits.dtype), positive_weight)
    return found


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


# ---- for missing labels: an absent label may be one that nobody wrote down


def focal(logits: Tensor, present: Tensor, gamma: float = 2) -> Tensor:
    """−(1 − p_t)^γ log p_t, p_t the probability of what the target is."""
    signed = torch.where(present, logits, -logits)
    return -torch.sigmoid(-signed).pow(gamma) * F.logsigmoid(signed)


def hill(logits: Tensor, targets: Tensor, round: int, weight: float = 1.5, margin: float = 1) -> Tensor:
    """Hill (Zhang et al., 2021, "Simple and Robust Loss Design for Multi-Label Learning with Missing Labels"): of what
    is not known to be present, (λ − p) p², whose gradient falls back to 0 where the model is sure of the label; of a
    positive the focal loss of z − m (focal margin, γ = 2)."""
    present, p = targets == 1, torch.sigmoid(logits)
    return torch.where(present, focal(logits - margin, present), (weight - p) * p.square())


def self_paced(logits: Tensor, targets: Tensor, round: int, threshold: float = 0.6, margin: float = 1) -> Tensor:
    """SPLC (the same paper): the focal margin loss, and after the first round an unknown target with p > τ is taught as
    present (without the margin, as in the released code). The choice carries no gradient. A known 0 stays 0."""
    present = targets == 1
    found = (targets < 0) & (torch.sigmoid(logits) > threshold) if round > 1 else torch.zeros_like(present)
    return focal(torch.where(present, logits - margin, logits), present | found)


def entropy_maximising(logits: Tensor, targets: Tensor, round: int, alpha: float = 0.1) -> Tensor:
    """EM (Zhou et al., 2022, "Acknowledging the Unknown"): BCE of what is known, −α H(p) of what is unknown, so that
    its gradient is 0 at ½ and small around it. α is the paper's of COCO and NUS-WIDE (VOC 0.2, CUB 0.01)."""
    p = torch.sigmoid(logits)
    entropy = -(p * F.logsigmoid(logits) + (1 - p) * F.logsigmoid(-logits))
    return torch.where(targets < 0, -alpha * entropy, cross_entropy(logits, (targets == 1).to(logits.dtype)))


register("loss", "hill")(ForMissing(hill))
register("loss", "splc")(ForMissing(self_paced))
register("loss", "em")(ForMissing(entropy_maximising))


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries where the mask is 1; 0 where there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def positive_weights(labels: Tensor, largest: float = 20.0) -> Tensor:
    """Negatives over positives of each class among the known entries, within [1, largest]."""
    positives = (labels == 1).sum(0).float()
    negatives = (labels == 0).sum(0).float()
    return (negatives / positives.clamp(min=1)).clamp(1, largest)
