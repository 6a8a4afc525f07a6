"""FedNova — Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020.

A client that takes more steps pulls the average further, and FedAvg ends at the optimum of another objective. With τ_i
steps of SGD and momentum ρ a client's move is lr · a_i times a mean gradient,

    a_i = [τ_i − ρ (1 − ρ^τ_i)/(1 − ρ)] / (1 − ρ),   d_i = (w_g − w_i)/a_i,   w ← w_g − (Σ p_i a_i) Σ p_i d_i.

That is the mean m of the models with weights p_i/a_i, and s = (Σ p_i a_i)(Σ p_i/a_i) ≥ 1 times the way to it: w = w_g
+ s (m − w_g). Where all clients take as many steps it is FedAvg, bit for bit. Buffers are averaged as FedAvg does:
beyond m a running variance may be negative. τ_i follows from N_k, so nobody can lie about it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.base import Aggregator, Records
from fedmll.methods.client_round import ClientInfo
from fedmll.methods.method import Method
from fedmll.methods.parts.averaging import WeightedAverage, WeightedMean

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment


class NormalizedAverage(WeightedAverage):
    """Updates are divided by what their steps weigh together, before they are averaged (FedNova)."""

    name = "normalised"

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        training = experiment.training
        if training.optimizer != "sgd":
            raise ConfigError(
                f"FedNova (the average '{cls.name}') counts the steps of SGD, and training.optimizer is "
                f"'{training.optimizer}', whose steps have no common length. Set training.optimizer = 'sgd' (and a "
                "larger training.lr), or use another average."
            )
        if training.momentum and training.optimizer_state == "kept":
            raise ConfigError(
                f"FedNova (the average '{cls.name}') knows the weight of a step if momentum starts at 0 in every "
                "round. Set training.optimizer_state = 'fresh', or training.momentum = 0."
            )

    def steps(self, samples: float) -> float:
        """a_i."""
        training = self.task.experiment.training
        return accumulated(training.local_epochs * training.batches(samples), training.momentum)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return NormalizedAggregator(self, state)


def accumulated(steps: int, momentum: float) -> float:
    """The sum of the weights with which SGD's gradients enter the move of so many steps."""
    left = 1 - momentum
    return (steps - momentum * (1 - momentum**steps) / left) / left


class NormalizedAggregator(Aggregator):
    """Everything relative to the first client's a: where all are the same, they are exactly 1."""

    def __init__(self, part: NormalizedAverage, state: Tensors) -> None:
        self.part, self.state, self.end = part, state, part.weights.parameter_end
        self.parameters, self.others = WeightedMean(), WeightedMean()
        self.first: float | None = None
        self.longer = self.shorter = self.total = 0.0

    def add(self, client: ClientInfo, reply: Message) -> None:
        weight, steps = self.part.weight(reply), self.part.steps(reply.numbers["samples"])
        self.first = steps if self.first is None else self.first
        ratio = steps / self.first
        self.total += weight
        self.longer += weight * ratio
        self.shorter += weight / ratio
        rest = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
        self.parameters.add({"parameters": reply["weights"][: self.end]}, weight / ratio)
        self.others.add({"buffers": reply["weights"][self.end :]} | rest, weight)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        mean, others = self.parameters.result()["parameters"], self.others.result()
        reach = (self.longer / self.total) * (self.shorter / self.total)
        start = self.state["weights"][: self.end]
        parameters = torch.lerp(start.double(), mean.double(), reach).float()  # exactly the mean where reach is 1
        return {"weights": torch.cat([parameters, others.pop("buffers")])} | others, {"reach": reach}


class FedNova(Method):
    name = "fednova"
    summary = "FedAvg of updates that are normalised by their number of local steps; SGD"
    paper = "Wang et al., NeurIPS 2020"
    setting = ("skew",)
    up = ""
    down = ""
    remembers = ""
    average = NormalizedAverage
    published: ClassVar[dict[str, Any]] = {"training.optimizer": "sgd"}
