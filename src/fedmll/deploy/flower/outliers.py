"""Comparison of the replies of a round with each other.

A single reply is bounded by what was sent (methods/framework/allowed_replies.py). Compared with the other replies it
can be an outlier long before it reaches that bound.

- Size: the update of the weights, the running statistics, and every other tensor. An outlier is rejected.
- Direction: an update that opposes the others' is shown to the operator, as are weights that were not trained and
  replies that repeat an earlier one. Honest clients can differ that much too, so nobody is rejected for it.
"""

from __future__ import annotations

import hashlib
import statistics
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fedmll.core.message import Message

UPDATE, RUNNING, FEATURES = "update", "running statistics", "mean square of the features"
# ratios to the others' median that are accepted; the largest ratios of honest clients are in test_outliers.py
LIMITS = {UPDATE: 5.0, RUNNING: 3.0, FEATURES: 5.0}  # honest: 1.4, 2.1 and 1.1
LIMIT_OF_TENSORS = 10.0  # of any other tensor; honest: 3.9
MIN_CLIENTS = 3  # with two clients nobody can tell which one is the outlier
MIN_COSINE = -0.2  # of the directions of an update and of the others' mean; honest: −0.6 where labels are very skewed
COORDINATES = 20_000  # of an update, from which its direction is estimated


class Deviation(NamedTuple):
    """How far a client is from the others in one respect."""

    client: str
    subject: str  # UPDATE, RUNNING, FEATURES, or the name of a tensor
    ratio: float  # to the others' median

    @property
    def limit(self) -> float:
        return LIMITS.get(self.subject, LIMIT_OF_TENSORS)

    def __str__(self) -> str:
        verb = "are" if self.subject == RUNNING else "is"
        return f"its {self.subject} {verb} {self.ratio:.3g} times the other clients' median"


class UnusualReply(NamedTuple):
    """A reply that the operator should know of."""

    client: str
    kind: str  # opposing, unchanged, repeated
    text: str


@dataclass(frozen=True, kw_only=True)
class ReplyStatistics:
    """What is compared of one reply. More images make a longer update and larger sums."""

    samples: int
    sizes: dict[str, float]  # by subject
    direction: Tensor | None  # of the update, at some coordinates; None: the reply has no weights
    digest: bytes  # of the weights


class ReplyComparison:
    """The statistics of all replies of a round.

    The last `buffer_count` weights are running statistics, except the last `server_count` of these, which the server
    sets. `earlier_medians` has the largest median of each part's
    tensor in earlier rounds: the first reply of a client that joins late can be as large as all first replies were.
    """

    def __init__(
        self,
        buffer_count: int,
        earlier_medians: Mapping[str, float] = MappingProxyType({}),
        server_count: int = 0,
    ) -> None:
        self.buffer_count, self.server_count, self.earlier_medians = buffer_count, server_count, earlier_medians
        self.statistics: dict[str, ReplyStatistics] = {}

    def add(self, name: str, *, samples: int, sent: Message, reply: Message, by_class: Collection[str] = ()) -> None:
        """Add a client's reply. Tensors in `by_class` depend on which labels a client has, and are not compared."""
        sizes: dict[str, float] = {}
        direction, digest = None, b""
        for key, tensor in reply.tensors.items():
            if key == "weights":
                end = len(tensor) - self.buffer_count
                update = tensor[:end] - sent["weights"][:end]
                sizes[UPDATE] = float(update.norm())
                running = tensor[end : len(tensor) - self.server_count]
                sizes[RUNNING] = 1 + float(running.norm())  # they start from 0 and 1 for any data
                places = torch.randint(end, (COORDINATES,), generator=torch.Generator().manual_seed(0))
                direction = update if end <= COORDINATES else update[places]
                digest = hashlib.blake2b(tensor.contiguous().numpy().data, digest_size=16).digest()
            elif key.endswith("/gram"):  # tr G / n; the last row and column of G belong to the constant 1
                counts = tensor[:, -1, -1].sum()
                sizes[FEATURES] = float(tensor.diagonal(dim1=1, dim2=2)[:, :-1].sum() / counts) if counts else 0.0
            elif tensor.is_floating_point() and key not in by_class:
                sizes[key] = float(tensor.norm())
        self.statistics[name] = ReplyStatistics(samples=samples, sizes=sizes, direction=direction, digest=digest)

    def remove(self, names: Collection[str]) -> None:
        self.statistics = {name: each for name, each in self.statistics.items() if name not in names}

    def deviations(self, name: str) -> list[Deviation]:
        """How far a client is from the median of the other clients, in each respect.

        The others' sizes are scaled up to the client's number of images where it has more. If there are two medians,
        the larger one counts: an update of nearly 0 must not make an honest one an outlier.
        """
        own, found = self.statistics[name], []
        for subject, size in own.sizes.items():
            others = [
                other.sizes[subject]
                * (1.0 if subject in (RUNNING, FEATURES) else max(1.0, own.samples / other.samples))
                for client, other in self.statistics.items()
                if client != name and subject in other.sizes
            ]
            median = max(statistics.median_high(others) if others else 0.0, self.earlier_medians.get(subject, 0.0))
            found.append(Deviation(name, subject, size / median if median else 0.0))
        return found

    def medians(self) -> dict[str, float]:
        """By name of a part's tensor: the median of its size, or the largest one of earlier rounds."""
        sizes: dict[str, list[float]] = {}
        for each in self.statistics.values():
            for subject, size in each.sizes.items():
                if subject not in LIMITS:
                    sizes.setdefault(subject, []).append(size)
        found = {subject: statistics.median_low(values) for subject, values in sizes.items()}
        return {**self.earlier_medians} | {
            subject: max(median, self.earlier_medians.get(subject, 0.0)) for subject, median in found.items()
        }

    def find_outliers(self) -> dict[str, str]:
        """The outliers by name, with the reason for people."""
        found: dict[str, str] = {}
        for name in self.statistics if len(self.statistics) >= MIN_CLIENTS else ():
            for each in self.deviations(name):
                if each.ratio > each.limit:
                    found[name] = f"{each}; the limit is {each.limit:g}"
        return found

    def most_distant(self) -> Deviation | None:
        """The client that is furthest from the others, in any respect; None with too few clients."""
        if len(self.statistics) < MIN_CLIENTS:
            return None
        every = [each for name in self.statistics for each in self.deviations(name)]
        return max(every, key=lambda each: each.ratio / each.limit, default=None)

    def cosines(self) -> dict[str, float]:
        """The cosine between each client's update and the mean direction of the others' updates.

        With private labels the clients have different rows, and nothing is compared.
        """
        units = {
            name: each.direction / each.direction.norm()
            for name, each in self.statistics.items()
            if each.direction is not None and bool(each.direction.norm())
        }
        if len(units) < MIN_CLIENTS or len({len(unit) for unit in units.values()}) > 1:
            return {}
        total = torch.stack(list(units.values())).sum(0)
        return {
            name: float(unit @ (total - unit) / (total - unit).norm().clamp_min(1e-12)) for name, unit in units.items()
        }

    def find_unusual(self, earlier: dict[bytes, tuple[str, int]], round: int) -> list[UnusualReply]:
        """Replies that are unusual although nobody is rejected for them.

        `earlier` maps the digests of earlier replies to their client and round; this round's are added to it.
        """
        found = [
            UnusualReply(name, "opposing", f"its update opposes the other clients' updates (cosine {cosine:.2f})")
            for name, cosine in self.cosines().items()
            if cosine < MIN_COSINE
        ]
        trained = any(each.sizes.get(UPDATE) for each in self.statistics.values())
        for name, each in self.statistics.items():
            if each.direction is None:
                continue
            if not each.sizes[UPDATE]:
                if trained:
                    text = "it returned the weights that it was sent, unchanged"
                    found.append(UnusualReply(name, "unchanged", text))
                continue
            client, number = earlier.setdefault(each.digest, (name, round))
            if (client, number) != (name, round):
                text = f"its weights are those that {client} sent in round {number}"
                found.append(UnusualReply(name, "repeated", text))
        return found
