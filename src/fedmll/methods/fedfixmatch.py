"""FedFixMatch — FixMatch (Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and
Confidence", NeurIPS 2020) with FedAvg, adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

A missing entry (sample and class) gets a pseudo label from the network's p for the weak view: 1 where p ≥ τ, 0 where
p ≤ 1 − τ, τ = 0.8. A sample is used if all its missing entries have a pseudo label (`select = "entry"`: every entry
with one is used). The loss is BCE over the known entries of the weak view + λ · the mean BCE of the strong view over
the used entries. training.augment is the weak view. Both views are one batch. Pseudo labels have no gradient.

`pseudo_labels = false` is FedAvg-PL.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.framework.base import option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import MaskedLoss, masked_mean
from fedmll.methods.parts.semi_supervised import SecondView, pseudo_targets


class FixMatch(SecondView):
    """For missing entries: confident predictions for the weak view are the targets of the strong view."""

    name = "fixmatch"
    provides = frozenset({"unknown-targets", "views"})
    needs_images = True

    class Options(SecondView.Options):
        view: str = option("strong", "the augmentation of the strong view; training.augment is the weak one")
        confidence: float = option(0.8, "τ: p ≥ τ becomes the label 1, p ≤ 1 − τ the label 0", ge=0.5, lt=1)
        select: Literal["sample", "entry"] = option("sample", "use fully pseudo-labelled samples only, or any entry")
        strength: float = option(1.0, "λ: weight of the pseudo labels' loss", ge=0)

    def on_round_start(self, client_round: ClientRound) -> None:
        client_round.unknown_targets_taught = True

    def transform_batch(self, step: TrainStep, round_state: None) -> None:
        """Known targets are taught with the weak view only."""
        step.set_views([step.batch.images, step.batch.view(self.options.view)])
        step.targets[len(step.batch) :] = -1

    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        weak, strong = len(step.batch), step.logits[len(step.batch) :]
        labels, used = self.labels(step.probabilities[:weak].detach(), step.targets[:weak] < 0)
        entries = F.binary_cross_entropy_with_logits(strong, (labels == 1).float(), reduction="none")
        return self.options.strength * masked_mean(entries, used.float())

    def labels(self, p: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Pseudo labels of the missing entries, and which of them are used."""
        labels = pseudo_targets(p, 1 - self.options.confidence, self.options.confidence)
        sure = labels >= 0
        if self.options.select == "entry":
            return labels, missing & sure
        return labels, missing & (sure | ~missing).all(1, keepdim=True)


class FedFixMatch(Method):
    name = "fedfixmatch"
    summary = "confident predictions for a weakly augmented view become the targets of a strongly augmented view"
    paper = "Sohn et al., NeurIPS 2020"
    setting = ("partial annotation",)
    parts = (MaskedLoss, switch("pseudo_labels", FixMatch, "teach pseudo labels of missing entries"))
