"""Letters to clients and their replies: every wait has a deadline, a reply counts only from the connection that was
asked, and the good ones are given in an order that does not depend on who was faster."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from flwr.app import Message as FlowerMessage

from fedmll.client import Peer
from fedmll.deploy.audit import described
from fedmll.deploy.flower.hearing import Parcel, heard
from fedmll.deploy.flower.inflating import BOUNDS
from fedmll.deploy.flower.internals import ErrorCode
from fedmll.deploy.flower.records import to_records
from fedmll.deploy.flower.roster import Roster
from fedmll.errors import ReplyRefused, UpdateDiverged
from fedmll.message import Message
from fedmll.methods.contract import Like

POLL_SECONDS = 0.2
ROSTER_SECONDS = 2.0
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)

Answer = tuple[Peer, Message, dict[str, Any]]
Answers = dict[str, Answer | None]  # by name; None: will not come, or was given
Letter = Callable[[Peer], tuple[Message, dict[str, Any]]]


class Post:
    def __init__(
        self,
        roster: Roster,
        round_timeout: float,
        alive: Callable[[], None],
        expected: Callable[[str, Peer, Message], dict[str, Like]],
        expect_bytes: Callable[[int], None],
    ) -> None:
        self.roster, self.grid, self.round_timeout = roster, roster.grid, round_timeout
        self.alive = alive  # raises when the SuperLink is gone
        self.expected = expected  # what a good reply of a kind to a letter holds
        self.expect_bytes, self.most_bytes = expect_bytes, 0  # of the tensors of a good reply, told when it grows
        self.begin(-1)

    def begin(self, number: int) -> None:
        """A round, or another try of it."""
        self.number = number
        self.bytes_down = 0
        self.hung: set[str] = set()  # who let this round's deadline pass: one is enough
        self.diverged: dict[str, str] = {}  # whose reply is bad, perhaps because of what was sent; why

    def exchange(
        self,
        kind: str,
        peers: Sequence[Peer],
        letter: Letter,
        needed: int,
        seconds: float | None = None,
    ) -> Iterator[Answer]:
        """Send each peer its letter and give the good replies in the peers' order, until all answered or are gone, or
        the deadline (`seconds`, or the round's) is over. A node that came back meanwhile is asked again."""
        deadline = time.monotonic() + (seconds or self.round_timeout)
        answers: Answers = {peer.name: None for peer in peers if peer.name in self.hung}
        parcels: dict[str, Parcel] = {}
        next_look, turn = 0.0, 0
        while turn < len(peers):
            now = time.monotonic()
            if now >= next_look:
                self.alive()
                self.roster.update()
                self._send(kind, [p for p in peers if p.name not in answers], letter, parcels, deadline - now)
                next_look = now + ROSTER_SECONDS
            self._receive(kind, parcels, answers)
            while turn < len(peers) and peers[turn].name in answers:
                answer = answers[peers[turn].name]
                answers[peers[turn].name] = None  # merged: let it go
                turn += 1
                if answer is not None:
                    yield answer
                    needed -= 1
            missing = [p.name for p in peers if p.name not in answers]
            waiting = sum(answer is not None for answer in answers.values())
            nobody = all(name not in self.roster.members for name in missing) and needed - waiting <= 0
            coming = self.roster.greeting(missing, self.round_timeout)
            if missing and (time.monotonic() > deadline or (nobody and not coming)):
                self._leave_out(missing, answers, late=time.monotonic() > deadline)
            elif missing:
                time.sleep(POLL_SECONDS)

    def _leave_out(self, names: Sequence[str], answers: Answers, late: bool) -> None:
        for name in names:
            connected = name in self.roster.members
            reason = f"no answer in {self.round_timeout:g} s" if connected else self.roster.absence(name)
            text = f"round {self.number}: {name} is left out ({reason})"
            self.roster.notice(text, "left out", round=self.number, client=name)
            answers[name] = None
        if late:
            self.hung |= set(names)

    def _send(
        self,
        kind: str,
        peers: Sequence[Peer],
        letter: Letter,
        parcels: dict[str, Parcel],
        seconds: float,
    ) -> None:
        on_the_way = {(parcel.member.node, parcel.member.since) for parcel in parcels.values()}
        for peer in peers:
            member = self.roster.members.get(peer.name)
            if member is None or (member.node, member.since) in on_the_way or seconds <= 0:
                continue
            for message_id in [key for key, parcel in parcels.items() if parcel.peer is peer]:
                del parcels[message_id]  # its node came anew: that message is lost
            message, about = letter(peer)
            expected = self.expected(kind, peer, message)
            sizes = [like.most_bytes for like in expected.values()]
            BOUNDS.allow(max([message.nbytes, *sizes]))
            if sum(sizes) > self.most_bytes:
                self.most_bytes = sum(sizes)
                self.expect_bytes(self.most_bytes)
            content = to_records(message, about | {"setup": self.roster.setup})
            outgoing = FlowerMessage(content, member.node, kind, ttl=seconds, group_id=str(self.number))
            (message_id,) = self.grid.push_messages([outgoing])
            if message_id:
                self.bytes_down += message.nbytes
                self._record("sent", kind, peer, message)
                parcels[message_id] = Parcel(peer, member, expected)

    def _receive(self, kind: str, parcels: dict[str, Parcel], answers: Answers) -> None:
        replies = list(self.grid.pull_messages(list(parcels))) if parcels else []
        since = self.roster.connections() if replies else {}
        for reply in replies:
            parcel = parcels.pop(reply.metadata.reply_to_message_id, None)
            if parcel is None or (reply.has_error() and reply.error.code in LOST):
                continue  # it is sent again if its node is there
            peer, member = parcel.peer, parcel.member
            if since.get(member.node, member.since) != member.since:
                continue  # its node came anew: it is greeted before anything it says counts, and asked again
            try:
                message, about = heard(kind, reply, parcel, self.roster.introductions[peer.name])
                self._record("reply", kind, peer, message)
                answers[peer.name] = (peer, message, about)
            except UpdateDiverged as refusal:
                self.diverged[peer.name], answers[peer.name] = str(refusal), None
            except ReplyRefused as refusal:
                self.refuse(peer.name, str(refusal))
                answers[peer.name] = None

    def refuse(self, name: str, reason: str) -> None:
        text = f"round {self.number}: the reply of {name} is refused: {reason}"
        self.roster.notice(text, "refused", round=self.number, client=name)

    def _record(self, event: str, kind: str, peer: Peer, message: Message) -> None:
        self.roster.record(event, round=self.number, kind=kind, client=peer.name, **described(message))
