"""Local-only: every client alone, with the loss of its known targets; nothing is exchanged. What a federation is worth.

A client goes on from its own weights, which it remembers. The metrics on the pooled test data are means over the
clients' own models, and so are those by class; a client's own metrics are its model's on what it holds out. There is no
common model in the run's folder. Another head or loss: `compose` with average = "alone".
"""

from __future__ import annotations

from fedmll.client import Work
from fedmll.message import Tensors
from fedmll.methods.contract import Part
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Known
from fedmll.models.flat import FlatWeights
from fedmll.models.network import Network


class Alone(Part):
    """No average: each client keeps its own weights."""

    name = "alone"
    jobs = frozenset({"average"})
    alone = True

    def bind(self, model: Network, weights: FlatWeights) -> None:
        super().bind(model, weights)
        self.initial = weights.dump()

    def start(self) -> Tensors:
        return self.initial

    def prepare(self, work: Work) -> None:
        work.client.weights.load(work.memory(self.name) or self.initial)

    def finish(self, work: Work, mine: None) -> Tensors:
        work.memories[self.name] = work.client.weights.dump()
        return {}


class LocalOnly(Method):
    name = "local-only"
    summary = "every client alone, nothing is exchanged: what a federation is worth"
    setting = ("skew", "partial annotation", "private labels")
    up = "nothing, no weights either"
    down = "nothing, no weights either"
    remembers = "its own model"
    parts = (Known,)
    average = Alone
