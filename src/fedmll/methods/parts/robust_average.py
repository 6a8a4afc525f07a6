"""Averages that tolerate a faulty client. Δ_k = w_k − w the update of client k of K:

  clipped-mean   w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k, m the median ‖Δ_j‖ (of two middle ones the lower), p_k ∝ N_k.
                 Bounding norms: Sun et al., "Can You Really Backdoor Federated Learning?", 2019; at the median of the
                 round: Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021.
  trimmed-mean   in every coordinate the mean of the w_k without the ⌊βK⌋ smallest and as many largest, with equal
                 weights: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018.
                 With three or more replies, at least one is left out at each end.

Parameters and running statistics have different norms: each has its own median and clipping. Both averages read the
replies twice, from the disk (`core.message.DiskBuffer`): one model in memory for any number of clients.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fedmll.core.message import DiskBuffer, Message, Tensors
from fedmll.methods.base import Aggregator, PartOptions, Records, option
from fedmll.methods.client_round import ClientInfo
from fedmll.methods.parts.averaging import WeightedAverage
from fedmll.methods.recipe import PartChoice

BLOCK = 1 << 22  # numbers that are sorted at once


class ClippedMean(WeightedAverage):
    """w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k: no update is longer than the median one."""

    name = "clipped-mean"

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return ClippedMeanAggregator(self, state["weights"])


class TrimmedMean(WeightedAverage):
    """In every coordinate the mean without the smallest and the largest; all clients have equal weights."""

    name = "trimmed-mean"

    class Options(PartOptions):
        trim: float = option(0.2, "β: share of the clients left out at each end; one at least, of three", ge=0, lt=0.5)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return TrimmedMeanAggregator(self)


class ClippedMeanAggregator(Aggregator):
    """Keeps the replies on disk until the median norm is known."""

    def __init__(self, part: ClippedMean, start: Tensor) -> None:
        self.part, self.start, self.buffer = part, start, DiskBuffer[ClientInfo]()
        self.parts = (slice(0, part.weights.parameter_end), slice(part.weights.parameter_end, len(start)))
        self.norms: list[list[float]] = []  # of each update: parameters, statistics

    def add(self, client: ClientInfo, reply: Message) -> None:
        update = reply["weights"].double() - self.start
        self.norms.append([float(update[place].norm()) for place in self.parts])
        self.buffer.add(client, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        limits = [statistics.median_low(norms) for norms in zip(*self.norms, strict=True)]
        total, moved = 0.0, torch.zeros_like(self.start, dtype=torch.float64)
        for (_, reply), norms in zip(self.buffer, self.norms, strict=True):
            weight = self.part.weight(reply)
            total += weight
            for place, norm, limit in zip(self.parts, norms, limits, strict=True):
                kept = 1.0 if norm <= limit else limit / norm
                moved[place].add_(reply["weights"][place].double() - self.start[place], alpha=weight * kept)
        new = (self.start + moved / total).float()
        clipped = sum(norms[0] > limits[0] for norms in self.norms)
        return {"weights": new} | self.buffer.integers, {"update_norm": limits[0], "clipped": float(clipped)}


class TrimmedMeanAggregator(Aggregator):
    """Keeps the replies on disk and sorts them coordinate by coordinate."""

    def __init__(self, part: TrimmedMean) -> None:
        self.part, self.buffer = part, DiskBuffer[ClientInfo]()

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.buffer.add(client, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        count = len(self.buffer)
        cut = max(int(self.part.options.trim * count), 1 if self.part.options.trim and count >= 3 else 0)
        means = [
            block.sort(0).values[cut : count - cut].mean(0, dtype=torch.float64) for block in self.buffer.columns(BLOCK)
        ]
        return {"weights": torch.cat(means).float()} | self.buffer.integers, {"trimmed": float(2 * cut)}


AVERAGES = PartChoice(
    "average",
    {"mean": WeightedAverage, "clipped-mean": ClippedMean, "trimmed-mean": TrimmedMean},
    "how the server averages; the last two tolerate a faulty client",
)
