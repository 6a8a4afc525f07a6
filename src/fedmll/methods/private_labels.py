"""Private label sets — Breitholtz, Listo Zec and Johansson, "Federated Learning with Heterogeneous and Private Label
Sets", 2025: FedAvg and FedProx by label (Section 4.1), central tuning of the classifier (Section 4.2: parts/tuning.py).

`labels = private`: client k receives the encoder and the classifier rows of its own labels Y_k, as the weights of an
ordinary model with |Y_k| outputs, and returns the same. It never learns of another class: rows come in its own order
(its class names sorted), and a row's initial weights depend on the seed and the row's name, not on its place among the
others or on their number. The server averages the encoder over all, row y over {k : y ∈ Y_k}, both by size; a row that
nobody sent stays as it was.
`labels = public`: everybody knows all classes and sends all rows: FedAvg and FedProx themselves.

`loss = softmax` is for data with one label a sample, over the client's outputs; `sigmoid` for several.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor
from torch import softmax as softmax_of
from torch.nn import functional as F

from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.base import Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.heads import LinearHead, LinearHeadByName
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method, MethodRecipe, PartChoice
from fedmll.methods.parts.averaging import WeightedAverage
from fedmll.methods.parts.central_tuning import CentralTuning
from fedmll.methods.parts.per_label_average import PrivatePerLabelAverage
from fedmll.methods.parts.proximal_term import ProximalTerm
from fedmll.methods.parts.target_losses import EntrywiseLoss, MaskedLoss, UnknownAsNegative

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment


class SoftmaxLoss(EntrywiseLoss):
    """One label a sample: softmax over the outputs; samples without a known label are left out."""

    name = "softmax"
    accepts = "none"

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if experiment.data.composite:
            raise ConfigError(
                f"method.loss = 'softmax' (the part softmax) is for data with one label a sample, and "
                f"'{experiment.data.label}' has several; use method.loss = 'sigmoid' (compose: known or absent)."
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
    """Writes down how many clients of a round had each label."""

    name = "coverage"
    sums = ("coverage",)

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        empty = [client.name for client in clients if not bool(client.owned.any())]
        if empty:
            raise ConfigError(
                f"{', '.join(empty[:5])}{f' and {len(empty) - 5} more' if len(empty) > 5 else ''} have no label of "
                "their own, so there is nothing they could train; leave them out."
            )

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {}  # what it sums is known to the server

    def summands(self, client: ClientInfo, reply: Message) -> Tensors:
        return {"coverage": client.owned}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        coverage = sums["coverage"].long()
        return {}, {"coverage": coverage, "labels_absent": float((coverage == 0).sum())}


class PrivateFedAvg(Method):
    name = "private-fedavg"
    summary = "FedAvg by label: a client sees and sends only the classifier rows of its own label set"
    paper = "Breitholtz et al., 2025"
    setting = ("private labels",)
    up = "of the head only the rows of its labels"
    down = "of the head only the rows of its labels"
    head = LinearHeadByName
    parts: ClassVar[tuple[type[Part] | PartChoice, ...]] = (
        LabelCoverage,
        PartChoice("tuning", {"none": None, "mse": CentralTuning, "pairwise": CentralTuning}, "Section 4.2"),
    )
    average = PartChoice("labels", {"private": PrivatePerLabelAverage, "public": WeightedAverage}, "known classes")

    class Options(PartOptions):
        loss: Literal["softmax", "sigmoid"] = option("softmax", "one label a sample, or several")

    @classmethod
    def recipe(cls, options: Any) -> MethodRecipe:
        """Sigmoids over the known entries if labels are private; as FedAvg if they are public."""
        private = options.labels == "private"
        sigmoid = MaskedLoss if private else UnknownAsNegative
        loss: type[Part] = SoftmaxLoss if options.loss == "softmax" else sigmoid
        *parts, average = cls.selected_parts(options)
        return MethodRecipe.of(LinearHeadByName if private else LinearHead, [loss, *parts], average)


class PrivateFedProx(PrivateFedAvg):
    name = "private-fedprox"
    summary = "private-fedavg + μ/2‖w − w_g‖² over what the client received"
    paper = "Breitholtz et al., 2025"
    setting = ("private labels",)
    up = "of the head only the rows of its labels"
    down = "of the head only the rows of its labels"
    parts = (ProximalTerm, *PrivateFedAvg.parts)
