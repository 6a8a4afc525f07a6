"""Private label sets (Breitholtz et al., 2025, Section 4.1): clients see and send the rows of their own labels."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from fedmll.client import Client, Peer
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like, Merger, Records
from fedmll.methods.parts.basic import Mean, WeightedMean
from fedmll.methods.parts.rows import HeadRows, own_rows
from fedmll.models.flat import FlatWeights
from fedmll.models.network import Classifier


class ByOwner(Mean):
    """The encoder is averaged over all, row y over {k : y ∈ Y_k}, both by size; a row that nobody owns stays."""

    needs = frozenset({"rows"})

    def own(self, weights: Tensor, peer: Peer) -> tuple[Tensor, Tensor, Tensor]:
        """A client's weights: before the head, the rows of its own classes (`own_rows`), after the head."""
        front, rows, back = HeadRows.of(self.weights).split(weights, len(self.task.classes))
        return front, rows[own_rows(self.task.classes, peer.owned)], back

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return AveragingRows(self, state)


class ByLabel(ByOwner):
    """The encoder is averaged over all, row y over its owners; a client receives and sends no row but its own."""

    name = "by-label"
    private = True

    _small: tuple[Classifier, FlatWeights] | None = None  # a worker's model for clients, kept for the next one

    def narrow(self, client: Client) -> Client:
        """The client as if its own classes were all there are, with a model of as many outputs."""
        rows = own_rows(client.data.classes, client.owned)
        data = client.data.only(rows.numpy())
        everything = torch.ones(len(rows), dtype=torch.bool)
        if self._small is None or self._small[0].head.out_features != len(rows):
            model = Classifier(copy.deepcopy(client.model.backbone), len(rows)).to(client.task.device)
            self._small = model, FlatWeights(model)
        task = replace(client.task, classes=data.classes, server_data=None)
        model, weights = self._small
        return replace(
            client, task=task, data=data, annotated=everything, owned=everything, model=model, weights=weights
        )

    def own(self, weights: Tensor, peer: Peer) -> tuple[Tensor, Tensor, Tensor]:
        return HeadRows.of(self.weights).split(weights, int(peer.owned.sum()))

    def send(self, state: Tensors, peer: Peer, round: int) -> Tensors:
        head = HeadRows.of(self.weights)
        front, rows, back = head.split(state["weights"], len(self.task.classes))
        return state | {"weights": head.join(front, rows[own_rows(self.task.classes, peer.owned)], back)}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        why = "its classifier has a row for each label of its own set, no more and no fewer"
        return super().expects(sent, round) | {"weights": Like.sent(sent["weights"], why, self.weights)}


class AveragingRows(Merger):
    def __init__(self, part: ByOwner, state: Tensors) -> None:
        self.part, self.head = part, HeadRows.of(part.weights)
        _, self.old, _ = self.head.split(state["weights"], len(part.task.classes))
        self.mean, self.sums = WeightedMean(), torch.zeros_like(self.old, dtype=torch.float64)
        self.totals = torch.zeros(len(self.old), 1, dtype=torch.float64)

    def add(self, peer: Peer, reply: Message) -> None:
        rows, weight = own_rows(self.part.task.classes, peer.owned), self.part.weight(reply)
        front, own, back = self.part.own(reply["weights"], peer)
        counters = {name: tensor for name, tensor in reply.tensors.items() if name != "weights"}
        self.mean.add({"front": front, "back": back} | counters, weight)
        self.sums[rows] = self.sums[rows].add_(own, alpha=weight)
        self.totals[rows] += weight

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """Encoder by size; row y over its owners by size, or as it was."""
        mean = self.mean.result()
        rows = torch.where(self.totals > 0, (self.sums / self.totals).float(), self.old)
        return {"weights": self.head.join(mean.pop("front"), rows, mean.pop("back"))} | mean, {}
