"""A round at the server: every reply goes to the mergers of all parts, one at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll.client import Peer
from fedmll.errors import MergeRefused
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Merger, Records
from fedmll.methods.expected import all_finite, refuse_variances

if TYPE_CHECKING:
    from fedmll.methods.method import Method


class Merging:
    def __init__(self, method: Method, state: Tensors, round: int) -> None:
        self.method, self.state = method, state
        self.mergers: dict[str, Merger] = {}
        self.parts = method.replying(round)
        for part in self.parts:
            merger = part.merger(method.own(part, state), round, self.mergers)
            if merger is not None:
                self.mergers[part.name] = merger

    def add(self, peer: Peer, reply: Message) -> None:
        weights = self.method.own(self.method.mean, reply.tensors)
        for part in self.parts:
            if part.name in self.mergers:
                own = weights | self.method.own(part, reply.tensors)
                self.mergers[part.name].add(peer, Message(own, reply.numbers))

    def result(self) -> tuple[Tensors, Records]:
        """The next state, and the round's records. The weights come first: other parts may improve on them."""
        method, records = self.method, Records()
        merged = method.own(method.mean, self.state)
        states = {part: method.own(part, self.state) for part in method.list}
        for part in sorted(self.parts, key=lambda part: part is not method.mean):
            if part.name in self.mergers:
                own, written = self.mergers[part.name].result(merged)
                records |= written
                if part is method.mean:
                    merged |= own
                else:
                    states[part] = own
        self._check(merged)
        return method.joined(states | {method.mean: merged}), records

    def _check(self, merged: Tensors) -> None:
        """A model that nobody can go on from is never stored: the next round would blame who trains with it."""
        weights = merged.get("weights")
        if weights is None:
            return
        reason = None if all_finite(weights) else "the merged weights hold NaN or infinite values"
        if hasattr(self.method.mean, "weights"):  # bound to a model
            reason = reason or refuse_variances("the merged model", weights, self.method.mean.weights)
        if reason is not None:
            raise MergeRefused(f"{reason}, so that no round can follow from it.")
