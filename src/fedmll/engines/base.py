"""What the training loop needs from an engine, which trains the clients of a round here or on other machines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from fedmll.core.message import Message, Tensors
from fedmll.data.federation import Federation
from fedmll.engines.client_state import StateVersions
from fedmll.engines.client_trainer import Trainer
from fedmll.evaluation.evaluate import Evaluation
from fedmll.methods.framework.base import Records


class ClientStates(Protocol):
    """The stored client states."""

    latest: dict[int, int]  # client → the round of its newest state

    def sync(self) -> None:
        """When this returns, everything that was written is on the disk."""

    def set_aside_if_damaged(self, client: int, round: int) -> str | None:
        """Why the state of a client cannot be used, if its file is damaged (it is renamed); None if it can be used."""

    def keep_only(self, versions: StateVersions | None) -> None:
        """Delete all other versions. None: keep all."""

    def checkpointed(self, kept: Callable[[], StateVersions | None]) -> None:
        """A checkpoint was saved. `kept` reads from the disk which versions it and the one before it refer to."""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """The result of one round."""

    state: Tensors  # the server's new state
    records: Records  # of the method's parts
    losses: list[tuple[float, float]]  # of each client: its loss and its number of samples
    bytes_up: int
    bytes_down: int


class Engine(Protocol):
    """Trains the clients of a round, and evaluates the global model."""

    trainer: Trainer  # with the global model

    @property
    def client_states(self) -> ClientStates: ...

    def initial_state(self) -> Tensors:
        """The state of the server before round 1."""

    def federation_in(self, number: int) -> Federation:
        """The federation in a round. Between machines, clients join and leave."""

    def run_round(self, state: Tensors, number: int, on_reply: Callable[[int], None]) -> RoundResult:
        """Send the state to the clients of a round and aggregate their valid replies.

        Args:
            state: the server's state.
            number: the round. In an opening (0) or closing (last + 1) exchange all clients take part.
            on_reply: is called with the number of replies so far; with 0 when a round, or a new attempt, begins.
        """

    def evaluate(self, message: Message) -> Evaluation: ...

    def audit_records(self) -> dict[str, float | Tensor]:
        """What a simulation logs about client states and true targets."""

    def close(self) -> None: ...
