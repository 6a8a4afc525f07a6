"""FedFixMatch — FixMatch (Sohn et al., "FixMatch: Simplifying Semi-Supervised Learning with Consistency and
Confidence", NeurIPS 2020) with FedAvg, adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

The network's p of the weak view makes a label of a missing entry: 1 where p ≥ τ, 0 where p ≤ 1 − τ, τ = 0.8. A sample
is used if all its missing entries have one (`select = "entry"`: every entry that has one is used). The loss is BCE over
the known entries of the weak view + λ · the mean BCE of the strong view over the selected entries. The weak view is
training.augment's. Both views go through the network together; labels carry no gradient.

`pseudo_labels = false` is FedAvg-PL.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.base import option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.semi_supervised import SecondView, pseudo_targets
from fedmll.methods.parts.target_losses import MaskedLoss


class FixMatch(SecondView):
    """Where nothing is known: what the network is sure of in the weak view is taught in the strong one."""

    name = "fixmatch"
    provides = frozenset({"unknown-targets", "views"})
    needs_images = True

    class Options(SecondView.Options):
        view: str = option("strong", "the augmentation of the strong view; the weak one is training.augment's")
        confidence: float = option(0.8, "τ: p above it makes a 1, below 1 − τ a 0", ge=0.5, lt=1)
        select: Literal["sample", "entry"] = option("sample", "samples whose missing entries are all sure; each entry")
        strength: float = option(1.0, "λ of the pseudo labels' loss", ge=0)

    def on_round_start(self, client_round: ClientRound) -> None:
        client_round.unknown_targets_taught = True

    def transform_batch(self, step: TrainStep, round_state: None) -> None:
        """Nothing is known of the strong view: what is known is taught in the weak one."""
        step.set_views([step.batch.images, step.batch.view(self.options.view)])
        step.targets[len(step.batch) :] = -1

    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        weak, strong = len(step.batch), step.logits[len(step.batch) :]
        labels, used = self.labels(step.probabilities[:weak].detach(), step.targets[:weak] < 0)
        entries = F.binary_cross_entropy_with_logits(strong, (labels == 1).float(), reduction="none")
        return self.options.strength * masked_mean(entries, used.float())

    def labels(self, p: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        """Of missing entries: labels, and which of them are used."""
        labels = pseudo_targets(p, 1 - self.options.confidence, self.options.confidence)
        sure = labels >= 0
        if self.options.select == "entry":
            return labels, missing & sure
        return labels, missing & (sure | ~missing).all(1, keepdim=True)


class FedFixMatch(Method):
    name = "fedfixmatch"
    summary = "partial annotation: confident predictions on the weak view are taught in the strong one"
    paper = "Sohn et al., NeurIPS 2020"
    setting = ("partial annotation",)
    parts = (MaskedLoss, switch("pseudo_labels", FixMatch, "of the weak view, for the strong one"))
