"""FedC-Tran — C-Tran (Lanchantin et al., 2021) trained by FedAvg: the baseline of FedLGT (Liu et al., AAAI 2024).

Label mask training: a sample shows the model the states of n ~ UniformInt[0, ⌊0.75 C⌋] labels; the others are unknown
(Eq. 2), and the loss is the binary cross-entropy of those, summed (Eq. 5 with both of its terms). A target that nobody
annotated is unknown to the model and in no loss. Prediction: all states unknown, or the labels that the user knows.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor, nn

from fedmll.message import Message, Tensors
from fedmll.methods.base import Local, Method
from fedmll.models.backbones import Backbone
from fedmll.models.ctran import CTran, LabelEmbeddings

if TYPE_CHECKING:
    from fedmll.client import Batch, Client


class FedCTran(Method):
    name = "fedctran"
    summary = "C-Tran: image and label tokens in a transformer, label mask training; average by size"
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18",
        "training.rounds": 50,
        "training.local_epochs": 5,
        "training.batch_size": 16,
        "training.optimizer": "adam",
        "training.lr": 1e-4,
        "training.weight_decay": 0.0,
        "training.clip": 10.0,
        "partition.clients": 50,
        "participation.count": 50,
        "participation.sampling": "size",
    }
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format",
    }

    class Options(Method.Options):
        known: Annotated[float, Field(ge=0, le=1)] = 0.75  # largest share of labels that a training sample shows
        layers: Annotated[int, Field(ge=1)] = 3
        heads: Annotated[int, Field(ge=1)] = 4
        dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1

    options: Options

    def network(self, backbone: Backbone) -> nn.Module:
        option = self.options
        embeddings = self.embeddings(backbone.width)
        return CTran(backbone, len(self.task.classes), embeddings, option.layers, option.heads, option.dropout)

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        """Fixed embeddings of labels and states, or None: they are learned."""
        return None

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        return super().prepare(client, message, memory) | {"mask": client.generator("label-mask")}

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        states = self.states(batch, local)
        losses = self.entries(model(batch.images, states), batch, local)
        return (losses * ((states < 0) & (batch.targets >= 0))).sum()

    def states(self, batch: Batch, local: Local) -> Tensor:
        """What the model is told (batch, C): 1 positive, 0 negative, -1 unknown. Here by label mask training."""
        samples, classes = batch.targets.shape
        told = random_known(samples, classes, self.options.known, local["mask"])
        return batch.targets.masked_fill(~told.to(batch.targets.device), -1)

    def predict(self, model: nn.Module, images: Tensor, known: Tensor | None = None) -> Tensor:
        """Without `known` all states are unknown; a known label is its own probability."""
        scores = torch.sigmoid(model(images, known))
        return scores if known is None else torch.where(known < 0, scores, known.to(scores.dtype))


def random_known(samples: int, classes: int, share: float, generator: torch.Generator) -> Tensor:
    """Label mask training: bool (samples, classes); in each row n ~ UniformInt[0, ⌊share·C⌋] random places are true."""
    counts = torch.randint(math.floor(share * classes + 1e-9) + 1, (samples, 1), generator=generator)
    places = torch.rand(samples, classes, generator=generator).argsort(1)
    return torch.empty(samples, classes, dtype=torch.bool).scatter_(1, places, torch.arange(classes) < counts)
