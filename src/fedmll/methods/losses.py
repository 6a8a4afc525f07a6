"""Multi-label losses by entry, (batch, classes) → (batch, classes). Methods choose which entries count and how."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll import registry
from fedmll.registry import register


def entrywise(name: str, logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    """`targets` are 0 or 1 as floats; `positive_weight` (C,) is for `weighted`."""
    found: Tensor = registry.find("loss", name)(logits, targets, positive_weight)
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


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Mean over the entries where the mask is 1; 0 where there are none."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def positive_weights(labels: Tensor, largest: float = 20.0) -> Tensor:
    """Negatives over positives of each class among the known entries, within [1, largest]."""
    positives = (labels == 1).sum(0).float()
    negatives = (labels == 0).sum(0).float()
    return (negatives / positives.clamp(min=1)).clamp(1, largest)
