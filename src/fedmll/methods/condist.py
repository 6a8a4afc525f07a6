"""ConDistFL — Wang et al., "ConDistFL: Conditional Distillation for Federated Learning from Partially Annotated Data",
MICCAI 2023 workshops (DeCaF), read for labels of an image instead of organs in it.

A client learns the classes that it annotates from its targets, and the others from the round-start global model, the
teacher g, which keeps what the other clients taught it:

    BCE over the known entries + λ(t) mean over the unknown ones of BCE(σ(z/T), σ(z_g/T))

λ(t) grows linearly over the rounds, 0.01 → 1: the global model is worth following when it knows something. T = 2. Both
are the released code's. The paper groups an image's voxels into what is annotated, what is not and the rest, whose
probabilities sum to one, and compares with a soft Dice; sigmoids need no groups, and BCE is their cross-entropy. What
is unknown is decided entry by entry, so a blank in an annotated class is distilled too. The teacher predicts once a
round, without augmentation. With both weights 0 it is FedAvg-PL.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.nn import functional as F

from fedmll.methods.base import Part, PartOptions, option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method
from fedmll.methods.parts.semi_supervised import tempered
from fedmll.methods.parts.target_losses import MaskedLoss


class TemperedTeacher(NamedTuple):
    says: Tensor  # (N, C), at the temperature
    weight: float  # λ(t)


class ConditionalDistillation(Part):
    """λ(t) · BCE to the round-start global model's p, at a temperature, where nothing is known."""

    name = "distillation"
    provides = frozenset({"unknown-targets"})

    class Options(PartOptions):
        temperature: float = option(2.0, "T, of the teacher and the student", gt=0)
        first_weight: float = option(0.01, "λ in round 1", ge=0)
        last_weight: float = option(1.0, "λ in the last round; linear between them", ge=0)

    def weight(self, round: int) -> float:
        """λ(t)."""
        first, last = self.options.first_weight, self.options.last_weight
        return float(first + (last - first) * (round - 1) / max(1, self.task.rounds - 1))

    def on_round_start(self, client_round: ClientRound) -> TemperedTeacher | None:
        weight = self.weight(client_round.number)
        if weight == 0:
            return None
        client_round.unknown_targets_taught = True
        return TemperedTeacher(tempered(client_round.outputs().probabilities, self.options.temperature), weight)

    def loss(self, step: TrainStep, round_state: TemperedTeacher | None) -> Tensor | None:
        if round_state is None:
            return None
        student = step.logits / self.options.temperature
        entries = F.binary_cross_entropy_with_logits(student, round_state.says[step.rows], reduction="none")
        return round_state.weight * masked_mean(entries, 1 - step.known)


class ConDist(Method):
    name = "condist"
    summary = "the round-start global model teaches each client the classes that it does not annotate"
    paper = "Wang et al., MICCAI workshops 2023"
    setting = ("partial annotation",)
    parts = (MaskedLoss, ConditionalDistillation)
