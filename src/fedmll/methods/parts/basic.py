"""What FedAvg is made of, and everything else starts from: the loss of what is known, and an average."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedmll.client import Peer, Step, Work
from fedmll.errors import ReplyRefused
from fedmll.message import Message, Tensors
from fedmll.methods import losses
from fedmll.methods.contract import Like, Merger, Part, PartOptions, Records, option, together

MOST_STEPS = 1e12  # what an integer of a model may count


class Supervision(Part):
    """How targets are taught: `training.loss` by entry, and which entries count."""

    jobs = frozenset({"targets"})
    losses: ClassVar[Literal["all", "known", "own"]] = "all"

    def prepare(self, work: Work) -> Tensor | None:
        """The weights of positives, where the loss wants them."""
        weighted = self.task.experiment.training.loss == "weighted"
        return losses.positive_weights(work.client.targets) if weighted else None

    def entries(self, step: Step, logits: Tensor, weights: Tensor | None) -> Tensor:
        loss = self.task.experiment.training.loss
        return losses.entrywise(loss, logits, step.targets, weights, step.work.round)

    def counted(self, step: Step) -> Tensor:
        """1.0 where an entry teaches something: what is known, and all if the loss is for missing labels."""
        return torch.ones_like(step.known) if losses.for_missing(self.task.experiment.training.loss) else step.known


class Absent(Supervision):
    """The mean over all entries; an unknown target is taken for absent, unless another part teaches it."""

    name = "absent"

    @together
    def term(self, step: Step, mine: Tensor | None) -> Tensor:
        entries = self.entries(step, step.logits, mine)
        return (entries * step.known if step.work.claimed else entries).mean()


class Known(Supervision):
    """The mean over the entries whose target is known; over all with a loss for missing labels."""

    name = "known"

    @together
    def term(self, step: Step, mine: Tensor | None) -> Tensor:
        return losses.masked_mean(self.entries(step, step.logits, mine), self.counted(step))


class Mean(Part):
    """w ← Σ_k (N_k/ΣN) w_k over what replied, parameters and float buffers; integers are the first reply's."""

    name = "mean"
    jobs = frozenset({"average"})

    class Options(PartOptions):
        weights: Literal["size", "equal"] = option("size", "how much a client counts in the average: N_k, or 1")

    def start(self) -> Tensors:
        return self.weights.dump()

    def send(self, state: Tensors, peer: Peer, round: int) -> Tensors:
        return dict(state)

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        expected = {"weights": Like.sent(sent["weights"], flat=self.weights)}
        if "counters" in sent:
            expected["counters"] = Like(tuple(sent["counters"].shape), torch.int64, low=0, high=MOST_STEPS)
        return expected

    def weight(self, reply: Message) -> float:
        return reply.numbers["samples"] if self.options.weights == "size" else 1.0

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Averaging(self)

    def finish(self, work: Work, mine: None) -> Tensors:
        return work.client.weights.dump()


class Averaging(Merger):
    def __init__(self, part: Mean) -> None:
        self.part, self.mean = part, WeightedMean()

    def add(self, peer: Peer, reply: Message) -> None:
        self.mean.add(reply.tensors, self.part.weight(reply))

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return self.mean.result(), {}


class WeightedMean:
    """Streamed Σ w·x / Σ w over float tensors, summed in float64; integers are the first reply's."""

    def __init__(self) -> None:
        self.total = 0.0
        self.sums: Tensors = {}
        self.first: Tensors = {}

    def add(self, tensors: Tensors, weight: float) -> None:
        self.total += weight
        for name, tensor in tensors.items():
            if tensor.is_floating_point():
                if name not in self.sums:
                    self.sums[name] = torch.zeros_like(tensor, dtype=torch.float64)
                self.sums[name].add_(tensor, alpha=weight)
            else:
                self.first.setdefault(name, tensor)

    def result(self) -> Tensors:
        if self.total <= 0:
            raise ReplyRefused("No client replied in this round, so there is nothing to average.")
        return {name: (s / self.total).float() for name, s in self.sums.items()} | self.first


class SoftmaxMean(WeightedMean):
    """Streamed Σ exp(s)·x / Σ exp(s). The sums are kept relative to the largest score so far: no score is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = -math.inf

    def add(self, tensors: Tensors, score: float) -> None:
        if score > self.largest:
            shrink = math.exp(self.largest - score)
            self.total *= shrink
            for running in self.sums.values():
                running.mul_(shrink)
            self.largest = score
        super().add(tensors, math.exp(score - self.largest))
