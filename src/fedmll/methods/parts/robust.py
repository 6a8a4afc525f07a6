"""Averages that one bad client cannot steer, Δ_k = w_k − w the update of client k of K:

  clipped-mean   w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k, m the median ‖Δ_j‖ (of two middle ones the lower), p_k ∝ N_k.
                 Bounding norms: Sun et al., "Can You Really Backdoor Federated Learning?", 2019; at the median of the
                 round: Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021.
  trimmed-mean   in every coordinate the mean of the w_k without the ⌊βK⌋ smallest and as many largest, each counting
                 alike: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018.
                 Where three or more reply, at least one is left out at each end.

Parameters and running statistics are of other sizes: each has a median and a clipping of its own. Both averages look at
the replies twice, from the disk (parts/spill.py): one model in memory, however many clients reply.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping

import torch
from torch import Tensor

from fedmll.client import Peer
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Merger, PartOptions, Records, option
from fedmll.methods.parts.basic import Mean
from fedmll.methods.parts.spill import Spill
from fedmll.methods.recipe import Choice

BLOCK = 1 << 22  # numbers that are sorted at a time


class ClippedMean(Mean):
    """w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k: no update is longer than the median one."""

    name = "clipped-mean"

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Clipping(self, state["weights"])


class TrimmedMean(Mean):
    """In every coordinate the mean without the smallest and the largest; each client counts alike."""

    name = "trimmed-mean"

    class Options(PartOptions):
        trim: float = option(0.2, "β: share of the clients left out at each end; one at least, of three", ge=0, lt=0.5)

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Trimming(self)


class Clipping(Merger):
    def __init__(self, part: ClippedMean, start: Tensor) -> None:
        self.part, self.start, self.spill = part, start, Spill()
        self.parts = (slice(0, part.weights.parameter_end), slice(part.weights.parameter_end, len(start)))
        self.norms: list[list[float]] = []  # of each update: parameters, statistics

    def add(self, peer: Peer, reply: Message) -> None:
        update = reply["weights"].double() - self.start
        self.norms.append([float(update[place].norm()) for place in self.parts])
        self.spill.add(peer, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        limits = [statistics.median_low(norms) for norms in zip(*self.norms, strict=True)]
        total, moved = 0.0, torch.zeros_like(self.start, dtype=torch.float64)
        for (_, reply), norms in zip(self.spill, self.norms, strict=True):
            weight = self.part.weight(reply)
            total += weight
            for place, norm, limit in zip(self.parts, norms, limits, strict=True):
                kept = 1.0 if norm <= limit else limit / norm
                moved[place].add_(reply["weights"][place].double() - self.start[place], alpha=weight * kept)
        new = (self.start + moved / total).float()
        clipped = sum(norms[0] > limits[0] for norms in self.norms)
        return {"weights": new} | self.spill.integers, {"update_norm": limits[0], "clipped": float(clipped)}


class Trimming(Merger):
    def __init__(self, part: TrimmedMean) -> None:
        self.part, self.spill = part, Spill()

    def add(self, peer: Peer, reply: Message) -> None:
        self.spill.add(peer, reply)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        count = len(self.spill)
        cut = max(int(self.part.options.trim * count), 1 if self.part.options.trim and count >= 3 else 0)
        means = [
            block.sort(0).values[cut : count - cut].mean(0, dtype=torch.float64) for block in self.spill.columns(BLOCK)
        ]
        return {"weights": torch.cat(means).float()} | self.spill.integers, {"trimmed": float(2 * cut)}


AVERAGES = Choice(
    "average",
    {"mean": Mean, "clipped-mean": ClippedMean, "trimmed-mean": TrimmedMean},
    "how the server averages; the last two bear a bad client",
)
