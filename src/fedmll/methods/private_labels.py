"""Private label sets — Breitholtz, Listo Zec and Johansson, "Federated Learning with Heterogeneous and Private Label
Sets", 2025: FedAvg and FedProx per label (Section 4.1), central tuning of the classifier (Section 4.2:
parts/central_tuning.py).

`labels = private`: client k receives the encoder and the classifier rows of its own labels Y_k, as the weights of an
ordinary model with |Y_k| outputs, and returns the same. It learns nothing about other classes: its rows are sorted by
the names of its classes, and the initial weights of a row depend only on the seed and the name of its class. The server
averages the encoder over all clients, and row y over {k : y ∈ Y_k}, both weighted by size. A row that no client sent
does not change.
`labels = public`: all clients know all classes and send all rows. This is FedAvg or FedProx.
`loss = softmax`, over the client's outputs, is for data with one label per sample; `sigmoid` is for several labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Literal

from torch import Tensor
from torch import softmax as softmax_of
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method, MethodRecipe, PartChoice
from fedmll.methods.heads import LinearHead, LinearHeadByName
from fedmll.methods.losses import EntrywiseLoss, MaskedLoss, UnknownAsNegative, masked_mean
from fedmll.methods.parts.averaging import WeightedAverage
from fedmll.methods.parts.central_tuning import CentralTuning
from fedmll.methods.parts.per_label_average import PrivatePerLabelAverage
from fedmll.methods.parts.proximal_term import ProximalTerm


class SoftmaxLoss(EntrywiseLoss):
    """For one label per sample: softmax over the outputs. Samples without a known label are left out."""

    name = "softmax"
    accepts = "none"

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if experiment.data.composite:
            raise ConfigError(
                f"method.loss = 'softmax' (the part softmax) is for data with one label per sample, and "
                f"'{experiment.data.label}' has several. Use method.loss = 'sigmoid' (in `compose` the part masked)."
            )

    def on_round_start(self, client_round: ClientRound) -> None:
        several = int(((client_round.client.targets == 1).sum(1) > 1).sum())
        if several:
            raise ClientError(
                f"Client {client_round.client.name} has {several} samples with two or more labels, and method.loss = "
                "'softmax' is for one label per sample; use method.loss = 'sigmoid'."
            )

    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        present = step.present
        return masked_mean(F.cross_entropy(step.logits, present.argmax(1), reduction="none"), present.sum(1))

    def probabilities(self, logits: Tensor) -> Tensor:
        return softmax_of(logits, 1)


class LabelCoverage(Part):
    """Logs how many clients of a round have each label."""

    name = "coverage"
    sums = ("coverage",)

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        empty = [client.name for client in clients if not bool(client.owned.any())]
        if empty:
            more = f" and {len(empty) - 5} more" if len(empty) > 5 else ""
            raise ConfigError(f"Clients without any label cannot train: {', '.join(empty[:5])}{more}. Leave them out.")

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {}  # the server knows which client has which label

    def summands(self, client: ClientInfo, reply: Message) -> Tensors:
        return {"coverage": client.owned}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        coverage = sums["coverage"].long()
        return {}, {"coverage": coverage, "labels_absent": float((coverage == 0).sum())}


class PrivateFedAvg(Method):
    name = "private-fedavg"
    summary = "FedAvg per label: a client receives and sends only the classifier rows of its own labels"
    paper = "Breitholtz et al., 2025"
    setting = ("private labels",)
    up = "nothing; of the classifier only the rows of its own labels"
    down = "nothing; of the classifier only the rows of its own labels"
    head = LinearHeadByName
    parts: ClassVar[tuple[type[Part] | PartChoice, ...]] = (
        LabelCoverage,
        PartChoice("tuning", {"none": None, "mse": CentralTuning, "pairwise": CentralTuning}, "loss of the tuning"),
    )
    average = PartChoice(
        "labels",
        {"private": PrivatePerLabelAverage, "public": WeightedAverage},
        "clients know only their own labels, or all",
    )

    class Options(PartOptions):
        loss: Literal["softmax", "sigmoid"] = option("softmax", "for one label per sample, or for several")

    @classmethod
    def recipe(cls, options: Any) -> MethodRecipe:
        """loss = "sigmoid" is the loss of fedavg-pl if labels are private, and that of fedavg if they are public."""
        private = options.labels == "private"
        sigmoid = MaskedLoss if private else UnknownAsNegative
        loss: type[Part] = SoftmaxLoss if options.loss == "softmax" else sigmoid
        *parts, average = cls.selected_parts(options)
        return MethodRecipe.of(LinearHeadByName if private else LinearHead, [loss, *parts], average)


class PrivateFedProx(PrivateFedAvg):
    name = "private-fedprox"
    summary = "private-fedavg with the penalty μ/2 ‖w − w_g‖² on the distance to the received weights"
    parts = (ProximalTerm, *PrivateFedAvg.parts)
