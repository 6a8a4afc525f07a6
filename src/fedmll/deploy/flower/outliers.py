"""Outliers among the updates of a round.

A single reply is bounded by what was sent. Compared with the other replies, an update can be an outlier long before it
reaches that bound. Only the norms are compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from dataclasses import dataclass

from torch import Tensor

# to the others' median; honest clients stay below 1.4 in updates and 2.1 in statistics (test_outliers.py)
MAX_RATIO = 5.0
MIN_CLIENTS = 3  # with two clients nobody can tell which one is the outlier


@dataclass(frozen=True, kw_only=True)
class UpdateStatistics:
    """How far a client moved the weights, and how many images it has: more images make a longer update."""

    samples: int
    update: float  # the norm of the change of the parameters
    running: float  # 1 + the norm of the running statistics, which start from 0 and 1 for any data


class UpdateComparison:
    """The statistics of all clients of a round.

    Args:
        buffer_count: how many of the last weights are running statistics.
    """

    def __init__(self, buffer_count: int) -> None:
        self.buffer_count = buffer_count
        self.statistics: dict[str, UpdateStatistics] = {}

    def add(self, name: str, *, samples: int, sent: Tensor, returned: Tensor) -> None:
        """Add a client: the weights that it was sent, and those that it returned."""
        end = len(returned) - self.buffer_count
        update, running = float((returned[:end] - sent[:end]).norm()), float(returned[end:].norm())
        self.statistics[name] = UpdateStatistics(samples=samples, update=update, running=1 + running)

    def remove(self, names: Collection[str]) -> None:
        self.statistics = {name: each for name, each in self.statistics.items() if name not in names}

    def ratios(self, name: str) -> tuple[float, float]:
        """The ratio of a client's update, and of its running statistics, to the median of the other clients.

        The others' updates are scaled up to the client's number of images where it has more. If there are two medians,
        the larger one counts: an update of nearly 0 must not make an honest one an outlier.
        """
        own, others = self.statistics[name], [each for other, each in self.statistics.items() if other != name]
        update = statistics.median_high(other.update * max(1.0, own.samples / other.samples) for other in others)
        running = statistics.median_high(other.running for other in others)
        return own.update / update if update else 0.0, own.running / running

    def find_outliers(self) -> dict[str, str]:
        """The outliers by name, with the reason for people."""
        found: dict[str, str] = {}
        for name in self.statistics if len(self.statistics) >= MIN_CLIENTS else ():
            for subject, ratio in zip(("update is", "running statistics are"), self.ratios(name), strict=True):
                if ratio > MAX_RATIO:
                    limit = f"the limit is {MAX_RATIO:g}"
                    found[name] = f"its {subject} {ratio:.3g} times the other clients' median; {limit}"
        return found

    def most_distant(self) -> tuple[str, float] | None:
        """The client that is furthest from the others, and its ratio; None with too few clients."""
        if len(self.statistics) < MIN_CLIENTS:
            return None
        name = max(self.statistics, key=lambda name: max(self.ratios(name)))
        return name, max(self.ratios(name))
