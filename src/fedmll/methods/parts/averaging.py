"""The weighted average of FedAvg, from which the other averages are derived."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Literal

import torch

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message, Tensors
from fedmll.methods.base import Aggregator, Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.client_round import ClientInfo, ClientRound

MOST_STEPS = 1e12  # the largest value of an integer buffer, such as BatchNorm's count of batches


class WeightedAverage(Part):
    """w ← Σ_k (N_k/ΣN) w_k over the replies, for parameters and float buffers; integers are the first reply's."""

    name = "mean"
    provides = frozenset({"aggregation"})

    class Options(PartOptions):
        weighting: Literal["size", "equal"] = option("size", "weight of a client in the average: its size N_k, or 1")

    def initial_state(self) -> Tensors:
        return self.weights.dump()

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        return dict(state)

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        specs = {"weights": TensorSpec.trained_weights(sent["weights"], flat=self.weights)}
        if "counters" in sent:
            specs["counters"] = TensorSpec(tuple(sent["counters"].shape), torch.int64, low=0, high=MOST_STEPS)
        return specs

    def weight(self, reply: Message) -> float:
        return reply.numbers["samples"] if self.options.weighting == "size" else 1.0

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return WeightedAverageAggregator(self.weight)

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        return client_round.weights.dump()


class WeightedAverageAggregator(Aggregator):
    """The mean of the replies, each weighted by a function of the reply."""

    def __init__(self, weight: Callable[[Message], float]) -> None:
        self.weight, self.mean = weight, WeightedMean()

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.mean.add(reply.tensors, self.weight(reply))

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return self.mean.result(), {}


class WeightedMean:
    """Σ w·x / Σ w of a stream of float tensors, summed in float64; integers are those of the first entry."""

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
            raise ReplyRejected("No client replied in this round, so there is nothing to average.")
        return {name: (s / self.total).float() for name, s in self.sums.items()} | self.first


class SoftmaxMean(WeightedMean):
    """Σ exp(s)·x / Σ exp(s) of a stream. The sums are relative to the largest score so far, so that small scores do not
    underflow."""

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
