"""Label correlations (FedHarmony): φ-style matrices from scores or labels, their leave-one-out consensus, blocks of
correlated labels, and the distance between two matrices within the blocks.

A matrix R is (C, C). Blocks are integers (C,): the number of the block of each label.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.core.message import Tensors

Consolidation = Literal["mean", "size-weighted", "median"]
STORED = ("clients", "matrices", "weights", "middle")  # the tensors of a LeaveOneOutConsensus

EPSILON = 1e-6  # Eq. 2: inside the root, so that the gradient of a saturated class is finite
NO_LINK = 1e-6  # smaller correlations count as 0
NEXT_BUCKET = 0.75  # a block joins a bucket if its size is at least this share of the largest block …
BUCKET_COST = 4096  # … or if the padding costs less than this many pairs


# Eq. 1–2: R from scores


def normalised(covariance: Tensor, rate: Tensor) -> Tensor:
    """Eq. 2: covariance (…, C, C) of labels that appear with probability `rate` (…, C)."""
    spread = rate * (1 - rate)
    return covariance / torch.sqrt(spread[..., :, None] * spread[..., None, :] + EPSILON)


def batch_correlation(scores: Tensor) -> Tensor:
    """R of the scores (N, C) in [0, 1]; differentiable. Centred: p_cc' − p_c p_c' would lose precision near p = 1."""
    rate = scores.mean(0)
    centred = scores - rate
    return normalised(centred.T @ centred / len(scores), rate)


class StreamedCorrelation:
    """R of scores that arrive in batches, in float64. It keeps Σ F and the centred Σ FᵀF, combined as in Chan et al.
    (1983), and not the scores."""

    def __init__(self, classes: int) -> None:
        self.count = 0
        self.rate = torch.zeros(classes, dtype=torch.float64)
        self.scatter = torch.zeros(classes, classes, dtype=torch.float64)

    def add(self, scores: Tensor) -> None:
        scores = scores.to("cpu", torch.float64)
        rate, total = scores.mean(0), self.count + len(scores)
        centred, shift = scores - rate, rate - self.rate
        self.scatter += centred.T @ centred
        self.scatter += torch.outer(shift, shift) * (self.count * len(scores) / total)
        self.rate += shift * (len(scores) / total)
        self.count = total

    def matrix(self) -> Tensor:
        """R in float32, exactly symmetric."""
        covariance = (self.scatter + self.scatter.T) / (2 * max(self.count, 1))
        return normalised(covariance, self.rate.clamp(0, 1)).float()


def label_correlation(labels: NDArray[np.int8]) -> NDArray[np.float64]:
    """R of true targets (1, 0, −1 unknown). Each pair of labels uses the samples in which both are known; NaN if there
    are none."""
    known, present = (labels >= 0).astype(np.float64), (labels == 1).astype(np.float64)
    both = known.T @ known
    with np.errstate(invalid="ignore", divide="ignore"):
        rate = (present.T @ known) / both  # (c, c'): the rate of c among the samples in which c' is known too
        spread = rate * (1 - rate)
        covariance = (present.T @ present) / both - rate * rate.T
        correlation: NDArray[np.float64] = covariance / np.sqrt(spread * spread.T + EPSILON)
    return correlation


# Eq. 3: the consensus


@dataclass(frozen=True)
class LeaveOneOutConsensus:
    """The matrices of a round, and sums or middle values that make leaving one out O(C²) instead of O(K C²)."""

    clients: Tensor  # int64 (K,)
    matrices: Tensor  # float32 (K, C, C)
    weights: Tensor  # float64 (K,): 1, or the sizes
    middle: Tensor  # float64 (1, C, C): Σ w R; median: the two or three entries around the median
    kind: Consolidation

    @classmethod
    def of(
        cls, kind: Consolidation, clients: Sequence[int], matrices: Sequence[Tensor], sizes: Sequence[float]
    ) -> LeaveOneOutConsensus:
        """The consensus of two or more clients."""
        stacked = torch.stack(list(matrices))
        weights = torch.tensor(sizes if kind == "size-weighted" else [1.0] * len(sizes), dtype=torch.float64)
        if kind == "median":
            middle = _around_median(stacked)
        else:
            middle = torch.zeros(1, *stacked.shape[1:], dtype=torch.float64)
            for weight, matrix in zip(weights.tolist(), stacked, strict=True):
                middle.add_(matrix, alpha=weight)
        return cls(torch.tensor(clients), stacked, weights, middle, kind)

    def everyone(self) -> Tensor:
        """The consensus of all."""
        if self.kind != "median":
            return (self.middle[0] / self.weights.sum()).float()
        return (self.middle.mean(0) if len(self.clients) % 2 == 0 else self.middle[1]).float()

    def without(self, client: int) -> Tensor | None:
        """The consensus of the other clients; None for a client that has no matrix here."""
        place = (self.clients == client).nonzero().flatten()
        if not len(place):
            return None
        own, weight = self.matrices[place[0]].double(), self.weights[place[0]]
        if self.kind != "median":
            return ((self.middle[0] - weight * own) / (self.weights.sum() - weight)).float()
        # Without an entry that is not larger than the middle one, the next entry takes the middle's place.
        return torch.where(own > self.middle[:-1], self.middle[:-1], self.middle[1:]).mean(0).float()

    def tensors(self) -> Tensors:
        return {name: getattr(self, name) for name in STORED}

    @classmethod
    def from_tensors(cls, tensors: Tensors, kind: Consolidation) -> LeaveOneOutConsensus:
        clients, matrices, weights, middle = (tensors[name] for name in STORED)
        return cls(clients, matrices, weights, middle, kind)


def _around_median(matrices: Tensor) -> Tensor:
    """The order statistics from which the median of all matrices, and of all but one, can be computed."""
    half = len(matrices) // 2
    places = [half - 1, half] if len(matrices) % 2 == 0 else [half - 1, half, half + 1]
    rows = [np.partition(matrices[:, row].numpy(), places, axis=0)[places] for row in range(matrices.shape[1])]
    return torch.from_numpy(np.stack(rows, axis=1)).double()


# Algorithm 1: the blocks


def spectral_blocks(correlation: Tensor, clusters: int, seed: int) -> Tensor:
    """Algorithm 1: G = `clusters` blocks, numbered in the order of their first labels.

    A label without any correlation is a connected component of its own, so it is one of the G blocks. The other labels
    form the remaining blocks, at least one. It runs in one thread, so that the result is always the same bit for bit.
    """
    from scipy.linalg import eigh
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    absolute = np.abs(correlation.to("cpu", torch.float64).numpy())
    affinity = (absolute + absolute.T) / 2
    np.fill_diagonal(affinity, 0)
    affinity[affinity < NO_LINK] = 0
    connected = np.flatnonzero(affinity.any(1))
    names = -1 - np.arange(len(affinity))  # each label is a block of its own
    clusters = max(1, clusters - (len(affinity) - len(connected)))
    if len(connected) <= clusters:
        return torch.arange(len(names))
    affinity = affinity[np.ix_(connected, connected)]
    root = 1 / np.sqrt(affinity.sum(1))
    laplacian = np.eye(len(connected)) - root[:, None] * affinity * root
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", ConvergenceWarning
        )  # if fewer rows than clusters differ, there are fewer blocks
        _, vectors = eigh(laplacian, subset_by_index=(0, clusters - 1))
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
        names[connected] = KMeans(clusters, n_init=10, random_state=seed % 2**32).fit_predict(vectors)
    return _renumbered(names)


def _renumbered(names: NDArray[np.int64]) -> Tensor:
    """The same blocks, numbered in the order of their first labels."""
    _, first, number = np.unique(names, return_index=True, return_inverse=True)
    return torch.from_numpy(np.argsort(np.argsort(first))[number])


def default_clusters(classes: int) -> int:
    return math.ceil(math.sqrt(classes))


# Eq. 4, 8, 9: distance within the blocks


def discrepancy(first: Tensor, second: Tensor, blocks: Tensor) -> float:
    """Σ_g Ψ: the mean squared difference over all pairs of different labels in the same block; 0 without a pair."""
    pairs = blocks[:, None] == blocks
    pairs.fill_diagonal_(False)
    count = int(pairs.sum())
    difference = first.double() - second.double()
    return float(difference.square().mul_(pairs).sum()) / count if count else 0.0


@dataclass(frozen=True)
class Bucket:
    """Blocks of similar size, padded to the size of the largest."""

    aim: Tensor  # (G, M, M): R* of the pairs
    share: Tensor  # (G, M, M): the weight of a pair; 0 on the diagonal and in the padding


class BlockAlignmentLoss:
    """Eq. 8 without λ: Ψ between a batch's R and R*, in O(Σ|S_g|²) instead of O(C²). It is built once per round. The
    blocks of a bucket are multiplied in one batched product; blocks of very different sizes are in different buckets,
    so that there is little padding."""

    def __init__(self, consensus: Tensor, blocks: Tensor) -> None:
        order = torch.argsort(blocks.cpu(), stable=True)
        sizes = torch.bincount(blocks.cpu())
        members = [block for block in order.split(sizes.tolist()) if len(block) > 1]
        members.sort(key=len, reverse=True)
        self.pairs = sum(len(block) * (len(block) - 1) for block in members)
        self.buckets: list[Bucket] = []
        places = []
        for bucket in _buckets(members):
            width = len(bucket[0])
            padded = torch.stack([torch.nn.functional.pad(block, (0, width - len(block))) for block in bucket])
            real = torch.arange(width) < torch.tensor([len(block) for block in bucket])[:, None]
            counts = (real[:, :, None] & real[:, None, :] & ~torch.eye(width, dtype=torch.bool)).to(consensus)
            padded = padded.to(consensus.device)
            self.buckets.append(Bucket(consensus[padded[:, :, None], padded[:, None, :]], counts / self.pairs))
            places.append(padded.flatten())
        self.places = torch.cat(places) if places else torch.empty(0, dtype=torch.int64)

    @property
    def padded(self) -> int:
        """The number of entries that a step computes, with padding."""
        return sum(bucket.share.numel() for bucket in self.buckets)

    def __call__(self, scores: Tensor) -> Tensor:
        rate = scores.mean(0)
        centred = (scores - rate).T / math.sqrt(len(scores))
        rows = centred.index_select(0, self.places)
        rates = rate.index_select(0, self.places)
        total, start = scores.new_zeros(()), 0
        for bucket in self.buckets:
            blocks, width, _ = bucket.share.shape
            end = start + blocks * width
            block_rows = rows[start:end].view(blocks, width, -1)
            correlation = normalised(torch.bmm(block_rows, block_rows.mT), rates[start:end].view(blocks, width))
            total = total + ((correlation - bucket.aim).square() * bucket.share).sum()
            start = end
        return total


def _buckets(members: list[Tensor]) -> list[list[Tensor]]:
    """The blocks, largest first, in few buckets with little padding."""
    buckets: list[list[Tensor]] = []
    for place, block in enumerate(members):
        if buckets:
            largest = len(buckets[-1][0])
            saved = (len(members) - place) * (largest**2 - len(block) ** 2)
            if len(block) > NEXT_BUCKET * largest or saved < BUCKET_COST:
                buckets[-1].append(block)
                continue
        buckets.append([block])
    return buckets
