"""Multi-label losses by name (`training.loss`), and the parts that apply them to the targets.

A loss is computed for every entry, that is for every sample and class: (batch, classes) → (batch, classes). The part
decides which entries count. So an unknown target can be left out.

Numbers of a loss can be set after its name: `training.loss = "asl:gamma_negative=2:clip=0"`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Literal

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

    of: Callable[..., Tensor]


GIVEN_ARGUMENTS = ("logits", "targets", "positive_weight", "round")  # every other argument of a loss is an option


@lru_cache
def split_options(setting: str) -> tuple[str, dict[str, float]]:
    """`asl:gamma_negative=2:clip=0` → the loss `asl` and its options."""
    name, *pairs = setting.split(":")
    options = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        try:
            options[key] = float(value)
        except ValueError:
            raise ConfigError(
                f"training.loss = '{setting}': options of a loss are numbers, written as NAME:option=1:other=0.5."
            ) from None
    return name, options


def find_loss(setting: str) -> tuple[Any, dict[str, float]]:
    """The registered loss and the options that a value of `training.loss` names."""
    name, options = split_options(setting)
    if name.startswith(registry.OBJECT_PREFIX) and name not in registry.all_of("loss"):
        # an object of another process: a finished model predicts without its loss, and only training needs it
        return lambda *arguments: registry.find("loss", name), options
    return registry.find("loss", name), options


def is_for_missing_labels(setting: str) -> bool:
    return isinstance(find_loss(setting)[0], ForMissing)


def entrywise(
    name: str, logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None, round: int = 1
) -> Tensor:
    """The loss of every entry. `targets` are 1, 0 or -1 (unknown). A loss that is not for missing labels receives an
    unknown target as 0. `positive_weight` (C,) is for the loss `weighted`."""
    loss, options = find_loss(name)
    if isinstance(loss, ForMissing):
        return loss.of(logits, targets, round, **options)
    found: Tensor = loss(logits, (targets == 1).to(logits.dtype), positive_weight, **options)
    return found


def check_options(setting: str) -> None:
    """Raise a ConfigError if `training.loss` sets an option that the loss does not have."""
    loss, options = find_loss(setting)
    if not options:
        return
    function = loss.of if isinstance(loss, ForMissing) else loss
    known = [name for name in inspect.signature(function).parameters if name not in GIVEN_ARGUMENTS]
    for name in options:
        if name not in known:
            has = f"Its options are {', '.join(known)}." if known else "It has no options."
            raise ConfigError(f"training.loss = '{setting}': the loss has no option '{name}'. {has}")


def register_loss(loss: Callable[[Tensor, Tensor], Tensor]) -> str:
    """Register a function (logits, targets) → (batch, classes) as a loss; returns its name for `training.loss`."""
    if not callable(loss):
        raise ConfigError(
            f"loss is a {type(loss).__name__}; it must be a function (logits, targets) that returns one value per "
            "sample and class, or the name of a loss."
        )

    def without_weights(logits: Tensor, targets: Tensor, positive_weight: Tensor | None) -> Tensor:
        return loss(logits, targets)

    without_weights.__module__ = "the user"  # not built in, so what it returns is checked
    name = registry.OBJECT_PREFIX + str(getattr(loss, "__name__", type(loss).__name__))
    register("loss", name)(without_weights)
    return name


def check_loss(name: str) -> None:
    """Raise a ConfigError if a user's loss does not return one value per entry. A mean or sum over a batch would also
    teach unknown targets, because no entry could be left out."""
    check_options(name)
    if split_options(name)[0] not in registry.find_added("loss"):
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
    gamma_positive: float = 0,
    clip: float = 0.05,
    focusing_gradient: float = 0,
) -> Tensor:
    """ASL (Ridnik et al., 2021): L+ = (1−p)^γ+ log p; L− = p_m^γ− log(1−p_m), p_m = max(p − clip, 0).

    The defaults are those of the authors' training program: γ+ = 0, and no gradient through the focusing factors
    (1−p)^γ+ and p_m^γ−. `focusing_gradient=1` is the gradient of the whole formula; the authors' class has γ+ = 1."""
    p = torch.sigmoid(logits)
    shifted = (p - clip).clamp(min=0)
    focus_positive, focus_negative = (1 - p).pow(gamma_positive), shifted.pow(gamma_negative)
    if not focusing_gradient:
        focus_positive, focus_negative = focus_positive.detach(), focus_negative.detach()
    positive = focus_positive * F.logsigmoid(logits)
    negative = focus_negative * torch.log((1 - shifted).clamp(min=1e-8))
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


def positive_weights(labels: Tensor) -> Tensor:
    """N/n⁺ of each class: the number of known targets divided by that of positives, as in FedMLP's comparison."""
    positives, known = (labels == 1).sum(0).float(), (labels >= 0).sum(0).float()
    return (known / positives.clamp(min=1)).clamp(min=1)


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
