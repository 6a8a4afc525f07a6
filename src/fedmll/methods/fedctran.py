"""FedC-Tran — C-Tran (Lanchantin et al., 2021) trained by FedAvg: the baseline of FedLGT (Liu et al., AAAI 2024).

Label mask training: for each sample the model is given the states of n ~ UniformInt[0, ⌊0.75 C⌋] random labels. The
other labels are unknown to the model (Eq. 2), and the loss is their binary cross-entropy, summed (Eq. 5 with both of
its terms). A target that is not annotated is never given to the model and is not part of the loss. In prediction all
states are unknown, except labels that the user knows.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmll.methods.framework.base import PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.heads import CTranHead
from fedmll.methods.losses import EntrywiseLoss


class LabelMask(EntrywiseLoss):
    """Label mask training: the network is given the states of some labels; the loss is the sum over the others."""

    name = "label-mask"
    requires = frozenset({"label-states"})

    class Options(PartOptions):
        known: float = option(0.75, "the largest share of labels whose states are given (Eq. 2)", ge=0, le=1)

    def on_round_start(self, client_round: ClientRound) -> Any:
        """The generator that chooses the given labels, and the weights of the positives."""
        return client_round.client.generator("label-mask"), super().on_round_start(client_round)

    def transform_batch(self, step: TrainStep, round_state: tuple[torch.Generator, Tensor | None]) -> None:
        """The states that the model is given: 1 positive, 0 negative, -1 unknown."""
        samples, classes = step.targets.shape
        given = random_known(samples, classes, self.options.known, round_state[0])
        step.states = step.targets.masked_fill(~given.to(step.targets.device), -1)

    def loss(self, step: TrainStep, round_state: tuple[torch.Generator, Tensor | None]) -> Tensor:
        """Eq. 5."""
        assert step.states is not None
        return (self.entries(step, step.logits, round_state[1]) * ((step.states < 0) * self.counted(step))).sum()


class FedCTran(Method):
    name = "fedctran"
    summary = "C-Tran: image and label tokens in a transformer, trained with masked labels; average by size"
    paper = "Lanchantin et al., CVPR 2021"
    head = CTranHead
    parts = (LabelMask,)
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18", "training.rounds": 50, "training.local_epochs": 5, "training.batch_size": 16,
        "training.optimizer": "adam", "training.lr": 1e-4, "training.weight_decay": 0.0, "training.clip": 10.0,
        "partition.clients": 50, "participation.count": 50, "participation.sampling": "size",
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format",
    }


def random_known(samples: int, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """bool (samples, classes). In each row n ~ UniformInt[0, ⌊share·C⌋] random entries are true."""
    counts = torch.randint(math.floor(share * classes + 1e-9) + 1, (samples, 1), generator=generator)
    places = torch.rand(samples, classes, generator=generator).argsort(1)
    return torch.empty(samples, classes, dtype=torch.bool).scatter_(1, places, torch.arange(classes) < counts)
