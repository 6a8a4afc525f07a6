"""Local-only: every client alone, with the loss of its known targets; nothing is exchanged. What a federation is worth.

A client goes on from its own weights, which it remembers. The metrics on the pooled test data are means over the
clients' own models, and so are those by class; a client's own metrics are its model's on what it holds out. There is no
common model in the run's folder. Another head or loss: `compose` with average = "local-models".
"""

from __future__ import annotations

from fedmll.core.message import Tensors
from fedmll.methods.base import Part
from fedmll.methods.client_round import ClientRound
from fedmll.methods.method import Method
from fedmll.methods.parts.target_losses import MaskedLoss
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Network


class LocalModels(Part):
    """No average: each client keeps its own weights."""

    name = "local-models"
    provides = frozenset({"aggregation", "local-models"})

    def bind(self, model: Network, weights: FlatWeights) -> None:
        super().bind(model, weights)
        self.initial = weights.dump()

    def initial_state(self) -> Tensors:
        return self.initial

    def on_round_start(self, client_round: ClientRound) -> None:
        client_round.weights.load(self.client_state(client_round) or self.initial)

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        self.client_state(client_round).update(client_round.weights.dump())
        return {}


class LocalOnly(Method):
    name = "local-only"
    summary = "every client alone, nothing is exchanged: what a federation is worth"
    setting = ("skew", "partial annotation", "private labels")
    up = "nothing, no weights either"
    down = "nothing, no weights either"
    remembers = "its own model"
    parts = (MaskedLoss,)
    average = LocalModels
