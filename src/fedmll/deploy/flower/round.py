"""A round on Flower: send → collect until the deadline → check → judge → aggregate.

`Transport` sends messages and collects replies. Every wait has a deadline; a client that misses it is skipped for the
rest of the round. A reply counts only if it comes from the connection that was asked. Valid replies are returned in an
order that does not depend on which client was faster.

`FlowerRound` is one attempt of a round of training.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from flwr.app import Message as FlowerMessage

from fedmll.core.errors import ReplyRejected, TooFewReplies, UpdateDiverged
from fedmll.core.message import DiskBuffer, Message, Tensors
from fedmll.core.text import printable
from fedmll.deploy.flower.client_app import TRAIN
from fedmll.deploy.flower.flower_internals import ErrorCode
from fedmll.deploy.flower.membership import CheckNewcomer, Membership
from fedmll.deploy.flower.outliers import ReplyComparison
from fedmll.deploy.flower.records import ARRAY_LIMIT, Info, to_records
from fedmll.deploy.flower.reply_checks import PendingMessage, check_reply
from fedmll.deploy.security.audit_log import describe_message
from fedmll.engines.base import RoundResult
from fedmll.engines.client_state import StateVersions
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import TRAINED_SAMPLES, ClientInfo, Reply

POLL_SECONDS = 0.2
LATE_SHARE = 0.2  # of the time before the deadline: a reply that arrives in it is late
MEMBERSHIP_SECONDS = 2.0  # how often the membership is updated during an exchange
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)


class CheckedReply(NamedTuple):
    """A valid reply."""

    client: ClientInfo
    message: Message
    info: Info


Replies = dict[str, CheckedReply | None]  # by name; None: there will be no reply, or it was returned already
MessageFor = Callable[[ClientInfo], tuple[Message, Info]]


class Transport:
    """Sends messages to the members and collects their replies.

    Args:
        check_alive: raises when the SuperLink has ended.
        reply_specs: (kind, client, message) → the specifications of the tensors in a valid reply.
        set_reply_limit: is told how many bytes of tensors the largest valid reply has, whenever that grows.
        check_newcomer: raises JoinRejected if the method cannot work with a client that joins late.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        round_timeout: float,
        check_alive: Callable[[], None],
        reply_specs: Callable[[str, ClientInfo, Message], dict[str, TensorSpec]],
        set_reply_limit: Callable[[int], None],
        check_newcomer: CheckNewcomer,
    ) -> None:
        self.membership, self.grid, self.round_timeout = membership, membership.grid, round_timeout
        self.check_alive, self.reply_specs, self.check_newcomer = check_alive, reply_specs, check_newcomer
        self.set_reply_limit, self.reply_limit = set_reply_limit, 0
        self.start_round(-1)

    def start_round(self, number: int) -> None:
        """Begin a round, or another attempt of it."""
        self.number = number
        self.bytes_down = 0
        self.timed_out: set[str] = set()  # clients that missed a deadline in this round are not asked again in it
        self.diverged: dict[str, str] = {}  # clients whose training diverged, perhaps because of the model; the reason

    def update_membership(self) -> None:
        self.membership.update(self.check_newcomer)

    def exchange(
        self,
        kind: str,
        clients: Sequence[ClientInfo],
        message_for: MessageFor,
        min_replies: int,
        timeout: float | None = None,
    ) -> Iterator[CheckedReply]:
        """Send each client its message and return the valid replies in the order of `clients`.

        The exchange ends when all clients have replied or are gone, or at the deadline. A client whose node connected
        again meanwhile is sent its message again. While there are fewer than `min_replies` replies, clients that are
        not connected are waited for. `timeout` is in seconds; None: `round_timeout`.
        """
        seconds = timeout or self.round_timeout
        deadline = time.monotonic() + seconds
        replies: Replies = {client.name: None for client in clients if client.name in self.timed_out}
        pending: dict[str, PendingMessage] = {}
        next_update, position = 0.0, 0
        while position < len(clients):
            now = time.monotonic()
            if now >= next_update:
                self.check_alive()
                self.update_membership()
                open_clients = [client for client in clients if client.name not in replies]
                self._send(kind, open_clients, message_for, pending, deadline - now)
                next_update = now + MEMBERSHIP_SECONDS
            is_late = deadline - time.monotonic() < LATE_SHARE * seconds
            self._receive(kind, pending, replies, is_late)
            while position < len(clients) and clients[position].name in replies:
                reply = replies[clients[position].name]
                replies[clients[position].name] = None  # returned: its memory is freed
                position += 1
                if reply is not None:
                    yield reply
                    min_replies -= 1
            missing = [client.name for client in clients if client.name not in replies]
            waiting = sum(reply is not None for reply in replies.values())
            all_gone = all(name not in self.membership.members for name in missing) and min_replies <= waiting
            joining = self.membership.is_joining(missing, self.round_timeout)
            if missing and (time.monotonic() > deadline or (all_gone and not joining)):
                self._skip(missing, replies, timed_out=time.monotonic() > deadline)
            elif missing:
                time.sleep(POLL_SECONDS)

    def _skip(self, names: Sequence[str], replies: Replies, timed_out: bool) -> None:
        for name in names:
            connected = name in self.membership.members
            reason = f"no reply in {self.round_timeout:g} s" if connected else self.membership.reason_for_absence(name)
            text = f"round {self.number}: {name} is skipped ({reason})"
            self.membership.notify(text, "skipped", round=self.number, client=name)
            replies[name] = None
        if timed_out:
            self.timed_out |= set(names)

    def _send(
        self,
        kind: str,
        clients: Sequence[ClientInfo],
        message_for: MessageFor,
        pending: dict[str, PendingMessage],
        seconds: float,
    ) -> None:
        asked = {(each.member.node, each.member.since) for each in pending.values()}
        for client in clients:
            member = self.membership.members.get(client.name)
            if member is None or (member.node, member.since) in asked or seconds <= 0:
                continue
            for message_id in [key for key, each in pending.items() if each.client is client]:
                del pending[message_id]  # its node connected again: that message is lost
            message, info = message_for(client)
            specs = self.reply_specs(kind, client, message)
            reply_bytes = sum(spec.most_bytes for spec in specs.values())
            ARRAY_LIMIT.allow(max(message.nbytes, reply_bytes))
            if reply_bytes > self.reply_limit:
                self.reply_limit = reply_bytes
                self.set_reply_limit(self.reply_limit)
            content = to_records(message, info | self.membership.info)
            outgoing = FlowerMessage(content, member.node, kind, ttl=seconds, group_id=str(self.number))
            (message_id,) = self.grid.push_messages([outgoing])
            if message_id:
                self.bytes_down += message.nbytes
                self._record("sent", kind, client, message)
                pending[message_id] = PendingMessage(client=client, member=member, specs=specs)

    def _receive(self, kind: str, pending: dict[str, PendingMessage], replies: Replies, is_late: bool) -> None:
        received = list(self.grid.pull_messages(list(pending))) if pending else []
        connected_since = self.membership.connection_times() if received else {}
        for reply in received:
            answered = pending.pop(reply.metadata.reply_to_message_id, None)
            if answered is None or (reply.has_error() and reply.error.code in LOST):
                continue  # it is sent again if its node is connected
            client, member = answered.client, answered.member
            if connected_since.get(member.node, member.since) != member.since:
                continue  # its node connected again: it must introduce itself first, and is asked again
            try:
                message, info = check_reply(kind, reply, answered, self.membership.introductions[client.name])
                self._record("reply", kind, client, message, late=is_late)
                replies[client.name] = CheckedReply(client, message, info)
            except UpdateDiverged as error:
                self.diverged[client.name], replies[client.name] = str(error), None
            except ReplyRejected as error:
                self.reject(client.name, str(error))
                replies[client.name] = None

    def reject(self, name: str, reason: str) -> None:
        """Tell the operator that a client's reply of this round is not used."""
        text = f"round {self.number}: the reply of {name} is rejected: {reason}"
        self.membership.notify(text, "rejected", round=self.number, client=name)

    def _record(self, event: str, kind: str, client: ClientInfo, message: Message, **more: bool) -> None:
        facts = describe_message(message) | more
        self.membership.record(event, round=self.number, kind=kind, client=client.name, **facts)


@dataclass
class SiteStates:
    """Client states on the sites' own disks: the round of each client's newest one, and which ones must be kept."""

    latest: dict[int, int] = field(default_factory=dict)
    kept: StateVersions | None = field(default_factory=set)  # None: all

    def sync(self) -> None:
        """Nothing to do: a site writes its state to disk before it replies."""

    def set_aside_if_damaged(self, client: int, round: int) -> str | None:
        return None  # only the site can read its state, and it reports a damaged one

    def keep_only(self, versions: StateVersions | None) -> None:
        self.kept = versions

    def checkpointed(self, kept: Callable[[], StateVersions | None]) -> None:
        self.kept = kept()

    def info_for(self, client: int) -> dict[str, Any]:
        """For a client's message: the round of the state to continue from, and the rounds of the states to keep."""
        keep = None if self.kept is None else sorted(round for index, round in self.kept if index == client)
        return {"state_round": self.latest.get(client), "keep_rounds": keep}


@dataclass(kw_only=True)
class FlowerRound:
    """One attempt of a round. Call `collect`, `reject_outliers`, `check_enough_replies` and `aggregate` in this order.

    The replies are buffered on disk until all have arrived, so that they can be compared with each other, and so that
    the round can be aggregated without some of them. No client trains again for that.
    """

    number: int
    state: Tensors  # of the server
    clients: list[ClientInfo]  # in the order of aggregation
    skipped: Collection[str]  # clients that are not asked, because an earlier reply of theirs could not be used
    samples: Mapping[str, int]  # by client: the number of its images, as it said when it joined
    shares: Mapping[str, float]  # by client: its weight in an average by size
    min_replies: int
    trainer: Trainer
    transport: Transport
    site_states: SiteStates
    folder: Path  # where the replies are buffered
    earlier_medians: Mapping[str, float]  # of the sizes of tensors, see ReplyComparison

    def __post_init__(self) -> None:
        self.states_before = dict(self.site_states.latest)
        self.messages: dict[int, Message] = {}
        self.replies = DiskBuffer[ClientInfo](self.folder)
        self.comparison = ReplyComparison(
            self.trainer.weights.buffer_count, self.earlier_medians, self.trainer.weights.server_count
        )
        self.by_class: set[str] | None = None  # names of tensors that depend on a client's classes
        self.rejected: set[str] = set()  # clients whose replies are not aggregated
        self.unusable: set[str] = set()  # of those: the aggregation of the reply failed
        self.bytes_up = 0

    def collect(self, on_reply: Callable[[int], None]) -> None:
        """Send the clients their messages and buffer the valid replies; each is checked as soon as it arrives."""
        self.transport.start_round(self.number)
        on_reply(0)
        asked = [client for client in self.clients if client.name not in self.skipped]
        for client, reply, info in self.transport.exchange(TRAIN, asked, self._message_for, self.min_replies):
            self.bytes_up += reply.nbytes
            if info.get("has_state") is True:
                self.site_states.latest[client.index] = self.number
            sent, samples = self.messages[client.index], self.samples[client.name]
            reply.numbers["samples"] = self.shares[client.name]  # as the operator saw it, not as the reply says
            reply.numbers[TRAINED_SAMPLES] = float(samples)
            if self.by_class is None:
                specs = self.trainer.method.reply_spec(sent, self.number)
                self.by_class = {name for name, spec in specs.items() if spec.by_class is not None}
            self.comparison.add(client.name, samples=samples, sent=sent, reply=reply, by_class=self.by_class)
            self.replies.add(client, reply)
            on_reply(len(self.replies))

    def _message_for(self, client: ClientInfo) -> tuple[Message, Info]:
        if client.index not in self.messages:
            self.messages[client.index] = self.trainer.method.send(self.state, client, self.number)
        return self.messages[client.index], {"round": self.number, **self.site_states.info_for(client.index)}

    @property
    def most_diverged(self) -> bool:
        """Whether the training of most clients diverged: then the model that they were sent is the likely cause."""
        return 2 * len(self.transport.diverged) > len(self.clients)

    def reject_outliers(self) -> None:
        """Reject replies that diverged, and replies that are outliers among the others."""
        outliers = self.comparison.find_outliers()
        for name, reason in (self.transport.diverged | outliers).items():
            self.transport.reject(name, reason)
        self._leave_out(outliers)

    def _leave_out(self, names: Collection[str]) -> None:
        """Aggregate without these clients; they continue from the client states that they had before the round."""
        self.rejected |= set(names)
        self.comparison.remove(names)
        for client in self.clients:
            if client.name in names:
                self.site_states.latest.pop(client.index, None)
                if client.index in self.states_before:
                    self.site_states.latest[client.index] = self.states_before[client.index]

    def check_enough_replies(self) -> None:
        """Raise TooFewReplies if the round has fewer valid replies than it needs."""
        valid = len(self.replies) - len(self.rejected)
        if valid < self.min_replies:
            raise TooFewReplies(
                f"round {self.number} has {valid} valid replies from {len(self.clients)} clients and needs "
                f"{self.min_replies} (--min-clients). Connected: "
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
            aggregator = self.trainer.method.aggregator(self.state, self.number)
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
            state, records = self.state, {}
            self.transport.membership.notify(
                f"round {self.number} changes nothing: its replies do not result in a valid model ({_describe(error)})"
            )
        return RoundResult(
            state=state,
            records=records,
            losses=losses,
            bytes_up=self.bytes_up,
            bytes_down=self.transport.bytes_down,
        )

    def _accepted(self) -> Iterator[Reply]:
        names = [client.name for client in self.replies.senders]
        return (self.replies[place] for place, name in enumerate(names) if name not in self.rejected)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {printable(error)}"
