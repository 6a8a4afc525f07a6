"""One round on the server: every reply goes to the aggregators of all parts, one reply at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll.core.errors import AggregationError
from fedmll.core.message import Message, Tensors
from fedmll.methods.allowed_replies import all_finite, has_negative_variance
from fedmll.methods.base import Aggregator, Records
from fedmll.methods.client_round import ClientInfo

if TYPE_CHECKING:
    from fedmll.methods.method import Method


class MethodAggregator:
    """Aggregates the replies of one round for all parts of a method."""

    def __init__(self, method: Method, state: Tensors, round: int) -> None:
        self.method, self.state = method, state
        self.aggregators: dict[str, Aggregator] = {}
        self.parts = method.replying_parts(round)
        for part in self.parts:
            aggregator = part.aggregator(method.tensors_of(part, state), round, self.aggregators)
            if aggregator is not None:
                self.aggregators[part.name] = aggregator

    def add(self, client: ClientInfo, reply: Message) -> None:
        weights = self.method.tensors_of(self.method.average_part, reply.tensors)
        for part in self.parts:
            if part.name in self.aggregators:
                own = weights | self.method.tensors_of(part, reply.tensors)
                self.aggregators[part.name].add(client, Message(own, reply.numbers))

    def result(self) -> tuple[Tensors, Records]:
        """The next state and the records of the round. The weights come first, because other parts may replace them."""
        method, records = self.method, Records()
        average = method.average_part
        merged = method.tensors_of(average, self.state)
        states = {part: method.tensors_of(part, self.state) for part in method.active_parts}
        for part in sorted(self.parts, key=lambda part: part is not average):
            if part.name in self.aggregators:
                own, logged = self.aggregators[part.name].result(merged)
                records |= logged
                if part is average:
                    merged |= own
                else:
                    states[part] = own
        self._check(merged)
        return method.join(states | {average: merged}), records

    def _check(self, merged: Tensors) -> None:
        """An unusable model is never stored: clients that train from it would be blamed in the next round."""
        weights, average = merged.get("weights"), self.method.average_part
        if weights is None:
            return
        reason = None if all_finite(weights) else "the aggregated weights hold NaN or infinite values"
        if reason is None and hasattr(average, "weights") and has_negative_variance(weights, average.weights):
            reason = "the aggregated model holds a negative variance"
        if reason is not None:
            raise AggregationError(f"{reason}, so that no round can follow from it.")
