"""Local-only: every client trains alone on its known targets, and nothing is exchanged. It is the baseline that shows
what clients gain from a federation.

A client continues from its own weights of its last round. The metrics on the pooled test data, also those per class,
are means over the clients' models. A client's own metrics are those of its model on its own held-out data. The run
folder has no model. For another head or loss use `compose` with average = "local-models".
"""

from __future__ import annotations

from fedmll.core.message import Tensors
from fedmll.methods.framework.base import Part
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Network


class LocalModels(Part):
    """No aggregation: each client keeps its own weights."""

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
    summary = "every client trains alone and nothing is exchanged: the baseline without a federation"
    setting = ("skew", "partial annotation", "private labels")
    up = "nothing, not even weights"
    down = "nothing, not even weights"
    remembers = "its own model"
    parts = (MaskedLoss,)
    average = LocalModels
