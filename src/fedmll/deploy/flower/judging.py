"""A round's updates beside each other. What a single reply may hold is bounded by what was sent; among others it can
stand out long before that. Only their lengths are compared: the replies themselves lie on the disk meanwhile, so that
the round can be merged again without one."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from fedmll.client import Peer, Reply
from fedmll.message import Message
from fedmll.methods.parts.spill import Spill

MOST_TIMES = 5.0  # the others' median. Honest ones stay below 1.4 times in updates, 2.1 in statistics (test_judging.py)
FEWEST = 3  # of two nobody can say which one it is


@dataclass(frozen=True)
class Moved:
    """How far a client went in its round, and how many images it has: who has more goes further."""

    samples: int
    update: float  # the norm of what it changed in the parameters
    statistics: float  # 1 + the norm of its running statistics: those start anywhere


class Round:
    """The replies of one round of training that were good by themselves, in the order in which they are merged."""

    def __init__(self, folder: Path, buffers: int) -> None:
        self.spill, self.buffers = Spill(folder), buffers  # the last so many of the weights are running statistics
        self.moved: dict[str, Moved] = {}

    def add(self, peer: Peer, sent: Tensor, reply: Message, samples: int) -> None:
        weights = reply["weights"]
        end = len(weights) - self.buffers
        update, running = float((weights[:end] - sent[:end]).norm()), float(weights[end:].norm())
        self.moved[peer.name] = Moved(samples, update, 1 + running)
        self.spill.add(peer, reply)

    def leave_out(self, names: Collection[str]) -> None:
        self.moved = {name: moved for name, moved in self.moved.items() if name not in names}

    def __iter__(self) -> Iterator[Reply]:
        """The replies once more, without those that were left out."""
        return (self.spill[place] for place, name in enumerate(self.spill.senders) if name in self.moved)

    def times(self, name: str) -> tuple[float, float]:
        """How many times the others' median its update is (as if they had as many images, where it has more), and its
        statistics. Of two middle ones the larger counts: an honest update is not made long by one that is nearly 0."""
        mine, others = self.moved[name], [moved for other, moved in self.moved.items() if other != name]
        update = statistics.median_high(other.update * max(1.0, mine.samples / other.samples) for other in others)
        running = statistics.median_high(other.statistics for other in others)
        return mine.update / update if update else 0.0, mine.statistics / running

    def standing_out(self) -> dict[str, str]:
        """Who does, and in what."""
        found: dict[str, str] = {}
        for name in self.moved if len(self.moved) >= FEWEST else ():
            for what, times in zip(("update is", "statistics are"), self.times(name), strict=True):
                if times > MOST_TIMES:
                    found[name] = (
                        f"its {what} {times:.3g} times as long as the others' median; {MOST_TIMES:g} is believed"
                    )
        return found

    def furthest(self) -> tuple[str, float] | None:
        """Who is furthest from the others, and how many times."""
        if len(self.moved) < FEWEST:
            return None
        name = max(self.moved, key=lambda name: max(self.times(name)))
        return name, max(self.times(name))
