"""ConDistFL — Wang et al., "ConDistFL: Conditional Distillation for Federated Learning from Partially Annotated Data",
MICCAI 2023 workshops (DeCaF), adapted from the segmentation of organs to the classification of whole images.

A client learns the classes that it annotates from its targets. It learns the other classes from a teacher g, the global
model at the start of the round, which has learned them from other clients:

    BCE over the known entries + λ(t) · mean over the unknown entries of BCE(σ(z/T), σ(z_g/T))

λ(t) grows linearly over the rounds from 0.01 to 1, because the first global models know little. T = 2. Both are the
values of the released code. The paper uses a softmax over groups of voxels and a soft Dice loss; a multi-label
classifier has one sigmoid per class, so BCE takes their place. Unknown is decided per entry (sample and class): a blank
in an annotated class is distilled too. The teacher predicts once per round, without augmentation. With both weights 0
it is FedAvg-PL.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss, masked_mean
from fedmll.methods.parts.semi_supervised import tempered


class ConditionalDistillation(Part):
    """λ(t) · BCE between the client's model and the global model at the start of the round, at a temperature, for
    unknown targets."""

    name = "distillation"
    provides = frozenset({"unknown-targets"})

    class Options(PartOptions):
        temperature: float = option(2.0, "T: temperature of both models' outputs", gt=0)
        first_weight: float = option(0.01, "λ in round 1", ge=0)
        last_weight: float = option(1.0, "λ in the last round; linear in between", ge=0)

    def weight(self, round: int) -> float:
        """λ(t)."""
        first, last = self.options.first_weight, self.options.last_weight
        return float(first + (last - first) * (round - 1) / max(1, self.task.rounds - 1))

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        """The teacher's probabilities (N, C)."""
        if self.weight(client_round.number) == 0:
            return None
        client_round.unknown_targets_taught = True
        return tempered(client_round.outputs().probabilities, self.options.temperature)

    def loss(self, step: TrainStep, teacher: Tensor | None) -> Tensor | None:
        if teacher is None:
            return None
        student = step.logits / self.options.temperature
        entries = F.binary_cross_entropy_with_logits(student, teacher[step.rows], reduction="none")
        return self.weight(step.client_round.number) * masked_mean(entries, 1 - step.known)


class ConDist(Method):
    name = "condist"
    summary = "the global model at the start of the round teaches each client the classes that it does not annotate"
    paper = "Wang et al., MICCAI workshops 2023"
    setting = ("partial annotation",)
    parts = (MaskedLoss, ConditionalDistillation)
