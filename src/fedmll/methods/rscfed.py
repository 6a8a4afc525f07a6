"""RSCFed — Liang, Lin, Fu, Zhu and Li, "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning", CVPR
2022; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

Client   BCE over the known entries + λ · the mean over the missing entries of (p − p')². p' is an EMA teacher's output
         for a second view: w' ← 0.999 w' + 0.001 w after every step. Each client has its own teacher. It starts as the
         first model that the client receives, and is never reset.
Server   M random groups of K clients of the round, each drawn without replacement. w̄ is the plain mean of a group's
         models and dist_i = Σ over the model's tensors of ‖w_i − w̄‖. The mean with weights ∝ n_i exp(−β dist_i / n_i)
         is the group's sub-consensus model. The global model is the mean of the M sub-consensus models.

Switches: `consistency` (off: missing entries are left out), `sub_consensus` (off: average by size). Both off is
FedAvg-PL. λ is 1 in the comparison and 0.02 in RSCFed's released code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmll.core.errors import ConfigError
from fedmll.core.message import DiskBuffer, Message, Tensors
from fedmll.core.seeding import numpy_generator
from fedmll.methods.framework.base import Aggregator, PartOptions, Records, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import MaskedLoss, masked_mean
from fedmll.methods.parts.averaging import WeightedAverage, WeightedMean
from fedmll.methods.parts.semi_supervised import EmaTeacher, SecondView


class MeanTeacher(SecondView):
    """For unknown targets: λ times the squared distance to the predictions of the client's own EMA teacher."""

    name = "mean-teacher"
    provides = frozenset({"unknown-targets"})

    class Options(SecondView.Options):
        decay: float = option(0.999, "decay of the EMA teacher: w' ← decay w' + (1 − decay) w", ge=0, lt=1)
        strength: float = option(1.0, "λ: weight of the consistency", ge=0)

    def on_round_start(self, client_round: ClientRound) -> EmaTeacher:
        client_round.unknown_targets_taught = True
        return EmaTeacher(client_round.client, self.client_state(client_round).get("teacher"))

    def loss(self, step: TrainStep, teacher: EmaTeacher) -> Tensor:
        distance = (step.probabilities - self.teacher_probabilities(step, teacher)).square()
        return self.options.strength * masked_mean(distance, 1 - step.known)

    def on_step_end(self, client_round: ClientRound, teacher: EmaTeacher) -> None:
        teacher.follow(self.options.decay)

    def on_round_end(self, client_round: ClientRound, teacher: EmaTeacher) -> Tensors:
        self.client_state(client_round)["teacher"] = teacher.vector
        return {}


class SubConsensus(WeightedAverage):
    """The mean of the sub-consensus models of random groups. In a group, models far from its mean have less weight."""

    name = "sub-consensus"

    class Options(PartOptions):
        groups: int = option(3, "M: number of random groups per round", ge=1)
        group_size: Annotated[int, Field(ge=1)] | Literal["half"] = option(
            "half", "K: number of clients in a group; half: half of the clients that replied, rounded up"
        )
        sharpness: float = option(0.01, "β in exp(−β dist/n)", ge=0)

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        size, participation = self.options.group_size, self.task.experiment.participation
        present = min(len(clients), participation.count or math.ceil(participation.fraction * len(clients)))
        if size != "half" and size > present:
            raise ConfigError(
                f"method.group_size = {size} is more than the {present} clients of a round. Use at most {present}, or "
                "'half'."
            )

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return SubConsensusAggregator(self, round)


class SubConsensusAggregator(Aggregator):
    """Keeps the replies on disk: the models of a group are read twice, and all of them once more."""

    def __init__(self, part: SubConsensus, round: int) -> None:
        self.part, self.round, self.buffer = part, round, DiskBuffer[ClientInfo]()

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.buffer.add(client, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        options, present = self.part.options, len(self.buffer)
        size = math.ceil(present / 2) if options.group_size == "half" else min(options.group_size, present)
        generator = numpy_generator(self.part.task.seed, self.round, "sub-consensus groups")
        share = torch.zeros(present, dtype=torch.float64)
        for _ in range(options.groups):
            members = generator.choice(present, size, replace=False).tolist()
            share[members] += self.weights(members) / options.groups
        mean = WeightedMean()
        for (_, reply), weight in zip(self.buffer, share.tolist(), strict=True):
            mean.add(reply.tensors, weight)
        return mean.result(), {"clients": torch.tensor([client.index for client, _ in self.buffer]), "share": share}

    def weights(self, members: list[int]) -> Tensor:
        """The weights in a group, ∝ n_i exp(−β dist_i / n_i), with the sum 1."""
        middle = WeightedMean()
        for place in members:
            middle.add({"weights": self.buffer[place][1]["weights"]}, 1.0)
        centre, scores = middle.result()["weights"], []
        for place in members:
            reply = self.buffer[place][1]
            samples, sharpness = reply.numbers["samples"], self.part.options.sharpness
            scores.append(math.log(samples) - sharpness * self.distance(reply, centre) / samples)
        return torch.tensor(scores, dtype=torch.float64).softmax(0)

    def distance(self, reply: Message, centre: Tensor) -> float:
        """Σ over the model's tensors of the norm of the difference."""
        difference = reply["weights"].double() - centre
        return sum(float(difference[place.where].norm()) for place in self.part.weights.layout.values())


class RSCFed(Method):
    name = "rscfed"
    summary = "consistency with an EMA teacher for unknown targets; average over random groups of clients"
    paper = "Liang, Lin, Fu, Zhu and Li, CVPR 2022"
    setting = ("partial annotation",)
    remembers = "an EMA teacher (as large as the model)"
    parts = (MaskedLoss, switch("consistency", MeanTeacher, "learn unknown targets from the EMA teacher"))
    average = switch("sub_consensus", SubConsensus, "average over random groups", otherwise=WeightedAverage)
    symbols: ClassVar[dict[str, Any]] = {"M": "groups", "K": "group_size", "beta": "sharpness"}
