"""RSCFed — Liang, Lin, Fu, Zhu and Li, "RSCFed: Random Sampling Consensus Federated Semi-supervised Learning", CVPR
2022; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

Client   BCE over the known entries + λ · the mean over the missing ones of (p − p')². p' is what an EMA teacher says of
         a second view: w' ← 0.999 w' + 0.001 w after every step. The teacher is the client's own, starts as the first
         model that the client receives, and is never reset.
Server   M random groups of K of the round's clients, each without replacement. In a group, with w̄ the plain mean of its
         models and dist_i = Σ over the model's tensors of ‖w_i − w̄‖: weights ∝ n_i exp(−β dist_i / n_i). The weighted
         mean is the group's sub-consensus model; the global model is the mean of the M. A client in no group is not
         heard in the round.

Switches: `consistency` (off: the missing entries are left out), `sub_consensus` (off: the average by size). Both off is
FedAvg-PL. λ is 1 in the comparison, 0.02 in RSCFed's own code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmll.client import Peer, Step, Work
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Merger, PartOptions, Records, option
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.basic import Known, Mean, WeightedMean
from fedmll.methods.parts.semi_supervised import EmaTeacher, SecondView
from fedmll.methods.parts.spill import Spill
from fedmll.seeding import numpy_generator


class MeanTeacher(SecondView):
    """Where nothing is known: λ times the squared distance to the p of the client's own EMA teacher."""

    name = "mean-teacher"
    jobs = frozenset({"unknown"})

    class Options(SecondView.Options):
        decay: float = option(0.999, "of the EMA teacher: w' ← decay w' + (1 − decay) w", ge=0, lt=1)
        strength: float = option(1.0, "λ of the consistency", ge=0)

    def prepare(self, work: Work) -> EmaTeacher:
        work.claimed = True
        return EmaTeacher(work.client, work.memory(self.name).get("teacher"))

    def term(self, step: Step, teacher: EmaTeacher) -> Tensor:
        distance = (step.probabilities - self.taught(step, teacher)).square()
        return self.options.strength * masked_mean(distance, 1 - step.known)

    def stepped(self, work: Work, teacher: EmaTeacher) -> None:
        teacher.follow(self.options.decay)

    def finish(self, work: Work, teacher: EmaTeacher) -> Tensors:
        work.memory(self.name)["teacher"] = teacher.vector
        return {}


class SubConsensus(Mean):
    """The mean of the sub-consensus models of random groups: those far from a group's middle count less in it."""

    name = "sub-consensus"

    class Options(PartOptions):
        groups: int = option(3, "M: random groups a round", ge=1)
        group_size: Annotated[int, Field(ge=1)] | Literal["half"] = option(
            "half", "K: clients in a group; half: of those that replied, rounded up"
        )
        sharpness: float = option(0.01, "β of exp(−β dist/n)", ge=0)

    def begin(self, peers: Sequence[Peer]) -> None:
        size, participation = self.options.group_size, self.task.experiment.participation
        present = min(len(peers), participation.count or math.ceil(participation.fraction * len(peers)))
        if size != "half" and size > present:
            raise ConfigError(
                f"method.group_size = {size} is more than the {present} clients of a round; use at most as many, or "
                "'half'."
            )

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Gathering(self, round)


class Gathering(Merger):
    """The replies are on disk: a group's models are read twice, and all of them once more."""

    def __init__(self, part: SubConsensus, round: int) -> None:
        self.part, self.round, self.spill = part, round, Spill()

    def add(self, peer: Peer, reply: Message) -> None:
        self.spill.add(peer, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        options, present = self.part.options, len(self.spill)
        size = math.ceil(present / 2) if options.group_size == "half" else min(options.group_size, present)
        generator = numpy_generator(self.part.task.seed, self.round, "sub-consensus groups")
        share = torch.zeros(present, dtype=torch.float64)
        for _ in range(options.groups):
            members = generator.choice(present, size, replace=False).tolist()
            share[members] += self.weights(members) / options.groups
        mean = WeightedMean()
        for (_, reply), weight in zip(self.spill, share.tolist(), strict=True):
            mean.add(reply.tensors, weight)
        return mean.result(), {"clients": torch.tensor([peer.index for peer, _ in self.spill]), "share": share}

    def weights(self, members: list[int]) -> Tensor:
        """∝ n_i exp(−β dist_i / n_i) in a group; their sum is 1."""
        middle = WeightedMean()
        for place in members:
            middle.add({"weights": self.spill[place][1]["weights"]}, 1.0)
        centre, scores = middle.result()["weights"], []
        for place in members:
            _, reply = self.spill[place]
            samples = reply.numbers["samples"]
            scores.append(math.log(samples) - self.part.options.sharpness * self.distance(reply, centre) / samples)
        return torch.tensor(scores, dtype=torch.float64).softmax(0)

    def distance(self, reply: Message, centre: Tensor) -> float:
        """Σ over the model's tensors of the norm of the difference."""
        difference = reply["weights"].double() - centre
        return sum(float(difference[place.where].norm()) for place in self.part.weights.layout.values())


class RSCFed(Method):
    name = "rscfed"
    summary = "partial annotation: each client's EMA teacher on missing classes; consensus of random groups"
    paper = "Liang, Lin, Fu, Zhu and Li, CVPR 2022"
    setting = ("partial annotation",)
    remembers = "an EMA teacher: one model"
    parts = (Known, switch("consistency", MeanTeacher, "with the EMA teacher, on the missing entries"))
    average = switch("sub_consensus", SubConsensus, "the mean of random groups' weighted means", otherwise=Mean)
    symbols: ClassVar[dict[str, Any]] = {"M": "groups", "K": "group_size", "beta": "sharpness"}
