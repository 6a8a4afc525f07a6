"""Messages to clients and their replies.

Every wait has a deadline. A reply counts only if it comes from the connection that was asked. Valid replies are
returned in an order that does not depend on which client was faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from flwr.app import Message as FlowerMessage

from fedmll.core.errors import ReplyRejected, UpdateDiverged
from fedmll.core.message import Message
from fedmll.deploy.flower.flower_internals import ErrorCode
from fedmll.deploy.flower.membership import CheckNewcomer, Membership
from fedmll.deploy.flower.message_limits import ARRAY_LIMIT
from fedmll.deploy.flower.records import Info, to_records
from fedmll.deploy.flower.reply_checks import PendingMessage, check_reply
from fedmll.deploy.security.audit_log import describe_message
from fedmll.methods.base import TensorSpec
from fedmll.methods.client_round import ClientInfo

POLL_SECONDS = 0.2
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
        membership: the clients and their connections.
        round_timeout: seconds that an exchange may take.
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
        not connected are waited for.

        Args:
            kind: the type of the message: train, evaluate, …
            clients: who is asked.
            message_for: creates a client's message.
            min_replies: how many replies are needed.
            timeout: seconds until the deadline; None: `round_timeout`.
        """
        deadline = time.monotonic() + (timeout or self.round_timeout)
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
            self._receive(kind, pending, replies)
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
            sizes = [spec.most_bytes for spec in specs.values()]
            ARRAY_LIMIT.allow(max([message.nbytes, *sizes]))
            if sum(sizes) > self.reply_limit:
                self.reply_limit = sum(sizes)
                self.set_reply_limit(self.reply_limit)
            content = to_records(message, info | {"setup": self.membership.setup})
            outgoing = FlowerMessage(content, member.node, kind, ttl=seconds, group_id=str(self.number))
            (message_id,) = self.grid.push_messages([outgoing])
            if message_id:
                self.bytes_down += message.nbytes
                self._record("sent", kind, client, message)
                pending[message_id] = PendingMessage(client=client, member=member, specs=specs)

    def _receive(self, kind: str, pending: dict[str, PendingMessage], replies: Replies) -> None:
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
                self._record("reply", kind, client, message)
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

    def _record(self, event: str, kind: str, client: ClientInfo, message: Message) -> None:
        facts = describe_message(message)
        self.membership.record(event, round=self.number, kind=kind, client=client.name, **facts)
