"""Averages in which each classifier row is averaged over the clients that have its label (its owners): surgical
aggregation, and private label sets (Breitholtz et al., 2025, Section 4.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Aggregator, Records, TensorSpec
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.methods.parts.averaging import WeightedAverage, WeightedMean
from fedmll.methods.parts.classifier_rows import HeadRows, own_rows


class PerLabelAverage(WeightedAverage):
    """The encoder is averaged over all clients, row y over {k : y ∈ Y_k}, both weighted by size."""

    requires = frozenset({"class-rows"})

    def own(self, weights: Tensor, client: ClientInfo) -> tuple[Tensor, Tensor, Tensor]:
        """A client's weights: before the head, the rows of its own classes, after the head."""
        front, rows, back = HeadRows.of(self.weights).split(weights, len(self.task.classes))
        return front, rows[own_rows(self.task.classes, client.owned)], back

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return PerLabelAggregator(self, state)


class PrivatePerLabelAverage(PerLabelAverage):
    """The encoder is averaged over all clients, row y over its owners. Clients receive and send only their rows."""

    name = "by-label"
    provides = frozenset({"aggregation", "private-labels"})

    def own(self, weights: Tensor, client: ClientInfo) -> tuple[Tensor, Tensor, Tensor]:
        return HeadRows.of(self.weights).split(weights, int(client.owned.sum()))

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        head = HeadRows.of(self.weights)
        front, rows, back = head.split(state["weights"], len(self.task.classes))
        return state | {"weights": head.join(front, rows[own_rows(self.task.classes, client.owned)], back)}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        why = "its classifier must have exactly one row for each of its own labels"
        return super().reply_spec(sent, round) | {
            "weights": TensorSpec.trained_weights(sent["weights"], why, self.weights)
        }


class PerLabelAggregator(Aggregator):
    """Averages the encoder over all clients and each classifier row over its owners."""

    def __init__(self, part: PerLabelAverage, state: Tensors) -> None:
        self.part, self.head = part, HeadRows.of(part.weights)
        _, self.old, _ = self.head.split(state["weights"], len(part.task.classes))
        self.mean, self.sums = WeightedMean(), torch.zeros_like(self.old, dtype=torch.float64)
        self.totals = torch.zeros(len(self.old), 1, dtype=torch.float64)

    def add(self, client: ClientInfo, reply: Message) -> None:
        rows, weight = own_rows(self.part.task.classes, client.owned), self.part.weight(reply)
        front, own, back = self.part.own(reply["weights"], client)
        counters = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
        self.mean.add({"front": front, "back": back} | counters, weight)
        self.sums[rows] = self.sums[rows].add_(own, alpha=weight)
        self.totals[rows] += weight

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """A row without an owner in the round does not change."""
        mean = self.mean.result()
        rows = torch.where(self.totals > 0, (self.sums / self.totals).float(), self.old)
        return {"weights": self.head.join(mean.pop("front"), rows, mean.pop("back"))} | mean, {}
