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

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor
from torch import softmax as softmax_of
from torch.nn import functional as F

from fedmll.client import Peer, Step, Work
from fedmll.errors import ClientError, ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Merger, Part, PartOptions, Records, option
from fedmll.methods.heads import Linear, LinearByName
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Choice, Method, Recipe
from fedmll.methods.parts.basic import Absent, Known, Mean, Supervision
from fedmll.methods.parts.by_label import ByLabel
from fedmll.methods.parts.proximal import Proximal
from fedmll.methods.parts.tuning import Tuning

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


class Softmax(Supervision):
    """One label a sample: softmax over the outputs; samples without a known label are left out."""

    name = "softmax"
    losses = "own"

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        if experiment.data.composite:
            raise ConfigError(
                f"method.loss = 'softmax' (the part softmax) is for data with one label a sample, and "
                f"'{experiment.data.label}' has several; use method.loss = 'sigmoid' (compose: known or absent)."
            )

    def prepare(self, work: Work) -> None:
        several = int(((work.client.targets == 1).sum(1) > 1).sum())
        if several:
            raise ClientError(
                f"Client {work.client.name} has {several} samples with two or more labels, and method.loss = 'softmax' "
                "is for one label a sample; use method.loss = 'sigmoid'."
            )

    def term(self, step: Step, mine: None) -> Tensor:
        present = step.present
        return masked_mean(F.cross_entropy(step.logits, present.argmax(1), reduction="none"), present.sum(1))

    def probabilities(self, logits: Tensor) -> Tensor:
        return softmax_of(logits, 1)


class Coverage(Part):
    """Writes down how many clients of a round had each label."""

    name = "coverage"

    def begin(self, peers: Sequence[Peer]) -> None:
        empty = [peer.name for peer in peers if not bool(peer.owned.any())]
        if empty:
            raise ConfigError(
                f"{', '.join(empty[:5])}{f' and {len(empty) - 5} more' if len(empty) > 5 else ''} have no label of "
                "their own, so there is nothing they could train; leave them out."
            )

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Counting()


class Counting(Merger):
    count: Tensor | int = 0

    def add(self, peer: Peer, reply: Message) -> None:
        self.count = self.count + peer.owned.long()

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        assert isinstance(self.count, Tensor)
        return {}, {"coverage": self.count, "labels_absent": float((self.count == 0).sum())}


class PrivateFedAvg(Method):
    name = "private-fedavg"
    summary = "FedAvg by label: a client sees and sends only the classifier rows of its own label set"
    paper = "Breitholtz et al., 2025"
    setting = ("private labels",)
    up = "of the head only the rows of its labels"
    down = "of the head only the rows of its labels"
    head = LinearByName
    parts: ClassVar[tuple[type[Part] | Choice, ...]] = (
        Coverage,
        Choice("tuning", {"none": None, "mse": Tuning, "pairwise": Tuning}, "central tuning (Section 4.2)"),
    )
    average = Choice("labels", {"private": ByLabel, "public": Mean}, "whether clients know their own classes only")

    class Options(PartOptions):
        loss: Literal["softmax", "sigmoid"] = option("softmax", "one label a sample, or several")

    @classmethod
    def recipe(cls, options: Any) -> Recipe:
        """Sigmoids over the known entries if labels are private; as FedAvg if they are public."""
        private = options.labels == "private"
        supervision: type[Part] = Softmax if options.loss == "softmax" else Known if private else Absent
        *parts, average = cls.chosen(options)
        return Recipe.of(LinearByName if private else Linear, [supervision, *parts], average)


class PrivateFedProx(PrivateFedAvg):
    name = "private-fedprox"
    summary = "private-fedavg + μ/2‖w − w_g‖² over what the client received"
    paper = "Breitholtz et al., 2025"
    setting = ("private labels",)
    up = "of the head only the rows of its labels"
    down = "of the head only the rows of its labels"
    parts = (Proximal, *PrivateFedAvg.parts)
