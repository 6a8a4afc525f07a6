"""What the runner needs of an engine: whoever trains the round's clients, here or elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from torch import Tensor

from fedmll.data.federation import Federation
from fedmll.evaluation.pooled import Evaluation
from fedmll.message import Message, Tensors
from fedmll.methods.base import Method, Reply
from fedmll.models.flat import FlatWeights


class Memories(Protocol):
    """Where clients' memories are: the newest round of each client, and which of all must be kept (None: all)."""

    latest: dict[int, int]

    def keep_only(self, versions: set[tuple[int, int]] | None) -> None: ...


class Engine(Protocol):
    method: Method
    weights: FlatWeights  # of the global model
    bytes_up: int  # of the last round
    bytes_down: int

    @property
    def tries(self) -> int:
        """How often a round may be tried when it gets too few replies (TooFewReplies)."""

    @property
    def memory(self) -> Memories: ...

    def start(self) -> Tensors: ...

    def round(self, state: Tensors, number: int) -> Iterator[Reply]: ...

    def evaluate(self, message: Message) -> Evaluation: ...

    def audit(self) -> dict[str, float | Tensor]: ...

    def close(self) -> None: ...


MakeEngine = Callable[[Federation, Path], Engine]
