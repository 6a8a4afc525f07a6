"""FedNova — Wang, Liu, Liang, Joshi and Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020.

A client that takes more steps has more influence on FedAvg's average, which so converges to the optimum of another
objective. With τ_i steps of SGD and momentum ρ, a client's update is lr · a_i times a mean gradient,

    a_i = [τ_i − ρ (1 − ρ^τ_i)/(1 − ρ)] / (1 − ρ),   d_i = (w_g − w_i)/a_i,   w ← w_g − (Σ p_i a_i) Σ p_i d_i.

With m the mean of the models with weights p_i/a_i, and s = (Σ p_i a_i)(Σ p_i/a_i) ≥ 1, this is w = w_g + s (m − w_g).
If all clients take the same number of steps it is FedAvg, bit for bit. Buffers are averaged as in FedAvg, because with
s > 1 a running variance could become negative. The server computes τ_i from N_k; clients do not report it.
A limit on a client's share (`--max-share`) changes p_i and not τ_i.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Aggregator, Records
from fedmll.methods.framework.client_round import TRAINED_SAMPLES, ClientInfo
from fedmll.methods.framework.method import Method
from fedmll.methods.parts.averaging import WeightedAverage, WeightedMean


class NormalizedAverage(WeightedAverage):
    """Before they are averaged, updates are divided by a_i, the total weight of their local steps (FedNova)."""

    name = "normalised"

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        training = experiment.training
        if training.optimizer != "sgd":
            raise ConfigError(
                f"FedNova (the average '{cls.name}') normalises updates by the number of SGD steps, and "
                f"training.optimizer is '{training.optimizer}'. Set training.optimizer = 'sgd' (and a larger "
                "training.lr), or use another average."
            )
        if training.momentum and training.optimizer_state == "kept":
            raise ConfigError(
                f"FedNova (the average '{cls.name}') needs a momentum that starts at 0 in every round. Set "
                "training.optimizer_state = 'fresh', or training.momentum = 0."
            )

    def steps(self, samples: float) -> float:
        """a_i."""
        training = self.task.experiment.training
        return accumulated(training.local_epochs * training.batches(samples), training.momentum)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return NormalizedAggregator(self, state)


def accumulated(steps: int, momentum: float) -> float:
    """The total weight of the gradients in the update of this many SGD steps."""
    left = 1 - momentum
    return (steps - momentum * (1 - momentum**steps) / left) / left


class NormalizedAggregator(Aggregator):
    """All a_i are divided by the first client's, so that they are exactly 1 if all are the same."""

    def __init__(self, part: NormalizedAverage, state: Tensors) -> None:
        self.part, self.state, self.end = part, state, part.weights.parameter_end
        self.parameters, self.others = WeightedMean(), WeightedMean()
        self.first: float | None = None
        self.longer = self.shorter = self.total = 0.0

    def add(self, client: ClientInfo, reply: Message) -> None:
        samples = reply.numbers.get(TRAINED_SAMPLES, reply.numbers["samples"])
        weight, steps = self.part.weight(reply), self.part.steps(samples)
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
        parameters = torch.lerp(start.double(), mean.double(), reach).float()  # exactly the mean if reach is 1
        return {"weights": torch.cat([parameters, others.pop("buffers")])} | others, {"reach": reach}


class FedNova(Method):
    name = "fednova"
    summary = "FedAvg with updates that are normalised by their number of local steps; only for SGD"
    paper = "Wang et al., NeurIPS 2020"
    average = NormalizedAverage
    published: ClassVar[dict[str, Any]] = {"training.optimizer": "sgd"}
