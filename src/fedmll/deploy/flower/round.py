"""One attempt of a round on Flower: collect → check → judge → aggregate.

The replies are buffered on disk until all have arrived, so that they can be compared with each other, and so that the
round can be aggregated without some of them. No client trains again for that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fedmll.core.errors import TooFewReplies
from fedmll.core.message import Message, Tensors
from fedmll.core.text import printable
from fedmll.deploy.flower.client_app import TRAIN
from fedmll.deploy.flower.outliers import UpdateComparison
from fedmll.deploy.flower.records import Info
from fedmll.deploy.flower.site_states import SiteStates
from fedmll.deploy.flower.transport import Transport
from fedmll.engines.base import RoundResult
from fedmll.engines.trainer import Trainer
from fedmll.methods.client_round import ClientInfo, Reply
from fedmll.methods.parts.disk_buffer import DiskBuffer


@dataclass(frozen=True, kw_only=True)
class RoundPlan:
    """What a round starts from.

    Args:
        number: the round.
        state: the server's state.
        clients: the clients of the round, in the order of aggregation.
        skipped: clients that are not asked, because an earlier reply of theirs could not be used.
        samples: by client, the number of its images, as it said when it joined.
        weights: by client, its weight in an average by size.
        min_replies: how many valid replies the round needs.
    """

    number: int
    state: Tensors
    clients: list[ClientInfo]
    skipped: Collection[str]
    samples: Mapping[str, int]
    weights: Mapping[str, float]
    min_replies: int


class FlowerRound:
    """One attempt of a round. Call `collect`, `reject_outliers`, `check_enough_replies` and `aggregate` in this order.

    Args:
        plan: what the round starts from.
        trainer: with the method.
        transport: sends the messages and checks the replies.
        site_states: which client states the sites have.
        folder: where the replies are buffered.
    """

    def __init__(
        self, plan: RoundPlan, *, trainer: Trainer, transport: Transport, site_states: SiteStates, folder: Path
    ) -> None:
        self.plan, self.method, self.transport, self.site_states = plan, trainer.method, transport, site_states
        self.states_before = dict(site_states.latest)
        self.messages: dict[int, Message] = {}
        self.replies = DiskBuffer(folder)
        self.updates = UpdateComparison(trainer.weights.buffer_count)
        self.rejected: set[str] = set()  # clients whose replies are not aggregated
        self.unusable: set[str] = set()  # of those: the aggregation of the reply failed
        self.bytes_up = 0

    def collect(self, on_reply: Callable[[int], None]) -> None:
        """Send the clients their messages and buffer the valid replies; each is checked as soon as it arrives."""
        plan = self.plan
        self.transport.start_round(plan.number)
        on_reply(0)
        asked = [client for client in plan.clients if client.name not in plan.skipped]
        for client, reply, info in self.transport.exchange(TRAIN, asked, self._message_for, plan.min_replies):
            self.bytes_up += reply.nbytes
            if info.get("has_state") is True:
                self.site_states.latest[client.index] = plan.number
            reply.numbers["samples"] = plan.weights[client.name]  # as the operator saw it, not as the reply says
            if "weights" in reply.tensors:
                sent, samples = self.messages[client.index]["weights"], plan.samples[client.name]
                self.updates.add(client.name, samples=samples, sent=sent, returned=reply["weights"])
            self.replies.add(client, reply)
            on_reply(len(self.replies))

    def _message_for(self, client: ClientInfo) -> tuple[Message, Info]:
        if client.index not in self.messages:
            self.messages[client.index] = self.method.send(self.plan.state, client, self.plan.number)
        return self.messages[client.index], {"round": self.plan.number, **self.site_states.info_for(client.index)}

    @property
    def most_diverged(self) -> bool:
        """Whether the training of most clients diverged: then the model that they were sent is the likely cause."""
        return 2 * len(self.transport.diverged) > len(self.plan.clients)

    def reject_outliers(self) -> None:
        """Reject replies that diverged, and updates that are outliers among the others."""
        outliers = self.updates.find_outliers()
        for name, reason in (self.transport.diverged | outliers).items():
            self.transport.reject(name, reason)
        self._leave_out(outliers)

    def _leave_out(self, names: Collection[str]) -> None:
        """Aggregate without these clients; they continue from the client states that they had before the round."""
        self.rejected |= set(names)
        self.updates.remove(names)
        for client in self.plan.clients:
            if client.name in names:
                self.site_states.latest.pop(client.index, None)
                if client.index in self.states_before:
                    self.site_states.latest[client.index] = self.states_before[client.index]

    def check_enough_replies(self) -> None:
        """Raise TooFewReplies if the round has fewer valid replies than it needs."""
        plan, valid = self.plan, len(self.replies) - len(self.rejected)
        if valid < plan.min_replies:
            raise TooFewReplies(
                f"round {plan.number} has {valid} valid replies from {len(plan.clients)} clients and needs "
                f"{plan.min_replies} (--min-clients). Connected: "
                f"{', '.join(sorted(self.transport.membership.members)) or 'no client'}."
            )

    def restore_site_states(self) -> None:
        """All clients continue from the client states that they had before the round."""
        self.site_states.latest = dict(self.states_before)

    def aggregate(self) -> RoundResult:
        """Aggregate the replies in the order of the clients.

        If the aggregation of a single reply fails, that reply is rejected and the others are aggregated again from the
        start. If the replies do not result in a valid model, the state stays as it was.

        Raises:
            TooFewReplies: without the rejected replies there are too few.
        """
        while True:
            aggregator = self.method.aggregator(self.plan.state, self.plan.number)
            losses: list[tuple[float, float]] = []
            for client, reply in self._accepted():
                try:
                    aggregator.add(client, reply)
                except Exception as error:  # a part of the reply may be in the sums already
                    self.transport.reject(client.name, f"it cannot be aggregated ({_describe(error)})")
                    self.unusable.add(client.name)
                    self._leave_out({client.name})
                    self.check_enough_replies()
                    break
                losses.append((reply.numbers["loss"], reply.numbers["samples"]))
            else:
                break
        try:
            state, records = aggregator.result()
        except Exception as error:  # no single reply is the cause
            state, records = self.plan.state, {}
            self.transport.membership.notify(
                f"round {self.plan.number} changes nothing: its replies do not result in a valid model "
                f"({_describe(error)})"
            )
        return RoundResult(
            state=state,
            records=records,
            losses=losses,
            bytes_up=self.bytes_up,
            bytes_down=self.transport.bytes_down,
        )

    def _accepted(self) -> Iterator[Reply]:
        names = self.replies.senders
        return (self.replies[place] for place, name in enumerate(names) if name not in self.rejected)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(error)}"
