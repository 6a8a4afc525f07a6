"""Averages of the clients' weights: FedAvg's weighted mean, and three averages that tolerate a faulty client. With
Δ_k = w_k − w the update of client k of K:

  mean           w ← Σ_k p_k w_k, p_k ∝ N_k (McMahan et al., 2017)
  clipped-mean   w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k, m the median of all ‖Δ_j‖ (the lower one of two middle values).
                 Bounded norms: Sun et al., "Can You Really Backdoor Federated Learning?", 2019. The round's median as
                 the bound: Andrew et al., "Differentially Private Learning with Adaptive Clipping", 2021.
  trimmed-mean   in every coordinate the mean of the w_k without the ⌊βK⌋ smallest and the ⌊βK⌋ largest, with equal
                 weights: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", 2018.
                 With three or more replies, at least one is left out at each end.
  centered-clipping   w ← w + v, where v = 0 at first, and then five times
                      v ← v + Σ_k p_k min(1, τ/‖Δ_k − v‖) (Δ_k − v), τ the median of all ‖Δ_j − v‖ (the lower one).
                 Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust Optimization", ICML 2021,
                 Algorithm 2. There τ is chosen by hand; here it is the radius that contains half of the updates. The
                 first of the five steps is clipped-mean, the others undo the shift that a faulty client caused in it.

Parameters and running statistics have different norms, so each has its own median and clipping. A median counts every
client once, because a client states its number of samples itself; the sums are weighted by it (`weighting`). Every
result lies between w and the w_k, so a running variance stays positive.

The last three averages read the replies twice, from the disk (`core.message.DiskBuffer`): one model is in memory for
any number of clients. Centered clipping needs only the scalar products of the updates for its five steps.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import DiskBuffer, Message, Tensors
from fedmll.core.processes import single_thread
from fedmll.methods.framework.base import Aggregator, Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.framework.recipe import PartChoice

MOST_STEPS = 1e12  # the largest value of an integer buffer, such as BatchNorm's count of batches
BLOCK = 1 << 22  # how many numbers are sorted at once
PRODUCT_BLOCK = 1 << 18  # how many numbers are multiplied at once: they stay in the cache
CLIPPING_STEPS = 5  # of centered clipping


class WeightedAverage(Part):
    """w ← Σ_k (N_k/ΣN) w_k over the replies, for parameters and float buffers. Integer buffers are taken from the first
    reply."""

    name = "mean"
    provides = frozenset({"aggregation"})

    class Options(PartOptions):
        weighting: Literal["size", "equal"] = option("size", "weight of a client: its number of samples N_k, or 1")

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
    """Σ w·x / Σ w of a stream of float tensors, summed in float64. Integer tensors are taken from the first entry."""

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


class ClippedMean(WeightedAverage):
    """w ← w + Σ_k p_k min(1, m/‖Δ_k‖) Δ_k: updates with a norm above the median m are scaled down to it."""

    name = "clipped-mean"

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return ClippedMeanAggregator(self, state["weights"])


class TrimmedMean(WeightedAverage):
    """The mean in every coordinate, without the smallest and the largest values. All clients have equal weights."""

    name = "trimmed-mean"

    class Options(PartOptions):
        trim: float = option(0.2, "β: share of the clients that is left out at each end (at least one)", ge=0, lt=0.5)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return TrimmedMeanAggregator(self)


class CenteredClipping(WeightedAverage):
    """w ← w + v. Five times, v moves to the mean of the updates, each clipped to the median distance from v."""

    name = "centered-clipping"

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return CenteredClippingAggregator(self, state["weights"])


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


class CenteredClippingAggregator(Aggregator):
    """Keeps the replies on disk until all scalar products of their updates are known."""

    def __init__(self, part: CenteredClipping, start: Tensor) -> None:
        self.part, self.start, self.buffer = part, start, DiskBuffer[ClientInfo]()
        self.weights: list[float] = []

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.weights.append(self.part.weight(reply))
        self.buffer.add(client, reply)

    @single_thread()  # the last bits of a product depend on the number of threads
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        shares = torch.tensor(self.weights, dtype=torch.float64)
        shares /= shares.sum()
        (parameters, radius, clipped), (buffers, _, _) = (clipped_center(each, shares) for each in self._products())
        end, new = self.part.weights.parameter_end, self.start.double()
        for first, updates in self._updates():
            cut = min(max(end - first, 0), updates.shape[1])
            new[first : first + cut] += parameters @ updates[:, :cut]
            new[first + cut : first + updates.shape[1]] += buffers @ updates[:, cut:]
        return {"weights": new.float()} | self.buffer.integers, {"update_radius": radius, "clipped": clipped}

    def _updates(self) -> Iterator[tuple[int, Tensor]]:
        """Some columns of all updates (K, columns) at a time, with the position of the first one."""
        first = 0
        for block in self.buffer.columns(PRODUCT_BLOCK):
            yield first, block.double() - self.start[first : first + block.shape[1]]
            first += block.shape[1]

    def _products(self) -> tuple[Tensor, Tensor]:
        """The scalar products (K, K) of the updates: of the parameters, and of the running statistics."""
        found = torch.zeros(2, len(self.buffer), len(self.buffer), dtype=torch.float64)
        for first, updates in self._updates():
            cut = min(max(self.part.weights.parameter_end - first, 0), updates.shape[1])
            for products, columns in zip(found, (updates[:, :cut], updates[:, cut:]), strict=True):
                products.add_(columns @ columns.T)
        return found[0], found[1]


def clipped_center(products: Tensor, shares: Tensor) -> tuple[Tensor, float, float]:
    """Centered clipping of vectors Δ_k that are known by their scalar products (K, K).

    Returns:
        The coefficients c (K,) of the center v = Σ_k c_k Δ_k, the radius τ of the last step, and how many vectors were
        clipped in it.
    """
    center = torch.zeros_like(shares)
    for _ in range(CLIPPING_STEPS):
        along = products @ center
        distances = (products.diagonal() - 2 * along + center @ along).clamp_min(0).sqrt()
        radius = distances.median()  # the lower one of two middle values
        outside = distances > radius
        kept = shares * torch.where(outside, radius / distances, 1.0)
        center = center * (1 - kept.sum()) + kept
    return center, float(radius), float(outside.sum())


AVERAGES = PartChoice(
    "average",
    {
        "mean": WeightedAverage,
        "clipped-mean": ClippedMean,
        "trimmed-mean": TrimmedMean,
        "centered-clipping": CenteredClipping,
    },
    "how the server averages; all but the mean tolerate a faulty client",
)
