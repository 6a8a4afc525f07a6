"""What the runner needs of an engine: whoever trains the round's clients, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedmll.client import Peer, Reply
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress
from fedmll.engines.learner import Learner
from fedmll.engines.memory import Versions
from fedmll.evaluation.pooled import Evaluation
from fedmll.message import Message, Tensors


class Memories(Protocol):
    """Where clients' memories are: the newest round of each client, and which of all must be kept (None: all)."""

    latest: dict[int, int]

    def sync(self) -> None:
        """What was written is on the disk when this returns."""

    def keep_only(self, versions: Versions | None) -> None: ...

    def checkpointed(self, kept: Callable[[], Versions | None]) -> None:
        """A checkpoint was saved; `kept` reads from the disk what it and the one before it refer to."""


class Engine(Protocol):
    learner: Learner  # of the global model
    bytes_up: int  # of the last round
    bytes_down: int

    @property
    def tries(self) -> int:
        """How often a round may be tried when it gets too few replies (TooFewReplies)."""

    @property
    def memory(self) -> Memories: ...

    def start(self) -> Tensors: ...

    def gathered(self, number: int) -> Federation:
        """The federation as it is in a round: between machines clients come and leave."""

    def round(self, state: Tensors, number: int) -> Iterator[Reply]:
        """The good replies of the round's clients; of all clients in an opening or closing exchange."""

    def fault(self, error: Exception, peer: Peer | None) -> None:
        """A reply, or (None) all of them together, cannot be merged. Raises `error` where clients are one's own; raises
        RoundSpoilt where the round is done again without the client; returns where the model stays as it was."""

    def evaluate(self, message: Message) -> Evaluation: ...

    def audit(self) -> dict[str, float | Tensor]: ...

    def close(self) -> None: ...


MakeEngine = Callable[[Federation, Path, Progress], Engine]
