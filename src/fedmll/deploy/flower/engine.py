"""FlowerEngine: rounds between machines. Who takes part follows from the seed and the client's name; every wait has a
deadline; a reply is merged in an order that does not depend on who was faster; nothing that comes in is trusted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message as FlowerMessage
from flwr.common.constant import ErrorCode
from torch import Tensor

from fedmll.client import Peer, Reply, task_of
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, silent
from fedmll.deploy.flower import evaluating
from fedmll.deploy.flower.coming import check_newcomer, peers_of, with_sites
from fedmll.deploy.flower.hearing import Parcel, capped, heard
from fedmll.deploy.flower.inflating import BOUNDS
from fedmll.deploy.flower.records import to_records
from fedmll.deploy.flower.roster import Roster
from fedmll.deploy.flower.site_app import BYE, EVALUATE, TRAIN
from fedmll.engines.learner import Learner
from fedmll.engines.local import choose_device
from fedmll.errors import ReplyRefused, RoundSpoilt, TooFewReplies, printable
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import evaluate_counts
from fedmll.evaluation.pooled import POOLED, SITES, VALIDATED, Evaluation, evaluate_pooled
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like

POLL_SECONDS = 0.2
ROSTER_SECONDS = 2.0
BYE_SECONDS = 20
LOST = (ErrorCode.MESSAGE_UNAVAILABLE, ErrorCode.REPLY_MESSAGE_UNAVAILABLE, ErrorCode.NODE_UNAVAILABLE)

Answers = dict[str, tuple[Peer, Message, dict[str, Any]] | None]  # by name; None: will not come, or was merged


@dataclass
class SiteMemories:
    """Memories are on the clients' disks; the server knows which round's each one's is, and which must be kept."""

    latest: dict[int, int] = field(default_factory=dict)
    kept: set[tuple[int, int]] | None = field(default_factory=set)  # None: all

    def keep_only(self, versions: set[tuple[int, int]] | None) -> None:
        self.kept = versions

    def of(self, client: int) -> dict[str, Any]:
        keep = None if self.kept is None else sorted(round for index, round in self.kept if index == client)
        return {"base": self.latest.get(client), "keep": keep}


class FlowerEngine:
    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        *,
        min_clients: int,
        round_timeout: float,
        tries: int,
        alive: Callable[[], None],
        progress: Progress = silent,
        max_share: float = 1.0,
    ) -> None:
        self.roster, self.grid, self.max_share = roster, roster.grid, max_share
        self.min_clients, self.round_timeout, self.tries = min_clients, round_timeout, tries
        self.alive = alive  # raises when the SuperLink is gone
        self.learner = Learner(task_of(federation, choose_device(federation.experiment.engine.device)))
        self.method = self.learner.method
        self.federation = self.learner.federation(federation, progress)
        self.gathered(federation.experiment.training.rounds + 1)
        self.method.begin(self.peers)
        roster.fits = lambda name, told: check_newcomer(
            self.learner, self.federation, roster.introductions | {name: told}
        )
        self.memory = SiteMemories()
        self.bytes_up = self.bytes_down = 0
        self.number = -1
        self.remembered: dict[int, int] = {}  # the memories before the round
        self.spoilers: set[str] = set()  # whose replies of this round could not be merged
        self.silent: dict[str, str] = {}  # who sends no counts of which classes, as it was said
        self.hung: set[str] = set()  # who let this round's deadline pass: one is enough

    def start(self) -> Tensors:
        return self.method.start()

    def gathered(self, number: int) -> Federation:
        here = self.roster.taking_part(number, self.min_clients)
        self.federation = with_sites(self.federation, here)
        self.peers = peers_of(self.learner, self.federation, here)
        return self.federation

    def audit(self) -> dict[str, float | Tensor]:
        return {}  # only a simulation knows the truth

    def close(self) -> None:
        pass

    # ---- a round

    def round(self, state: Tensors, number: int) -> Iterator[Reply]:
        chosen = self.learner.participants(self.gathered(number), number)
        asked = [peer for client in chosen for peer in self.peers if peer.index == client]
        needed = min(self.min_clients, len(asked))
        sizes = capped([self.roster.introductions[peer.name].samples for peer in asked], self.max_share)
        weights = {peer.name: size for peer, size in zip(asked, sizes, strict=True)}
        if number != self.number:
            self.number, self.roster.round, self.spoilers = number, number, set()
        self.hung, self.remembered = set(), dict(self.memory.latest)
        self.bytes_down = self.bytes_up = 0
        messages: dict[int, Message] = {}

        def letter(peer: Peer) -> tuple[Message, dict[str, Any]]:
            messages.setdefault(peer.index, self.method.send(state, peer, number))
            return messages[peer.index], {"round": number, **self.memory.of(peer.index)}

        good = 0
        peers = [peer for peer in asked if peer.name not in self.spoilers]
        for peer, reply, about in self._exchange(TRAIN, peers, letter, needed):
            good += 1
            self.bytes_up += reply.nbytes
            if about.get("memory") is True:
                self.memory.latest[peer.index] = number
            reply.numbers["samples"] = weights[peer.name]  # what the operator saw, not what is said now
            yield peer, reply
        if good < needed:
            self.memory.latest = self.remembered  # who trained starts again from what it remembered before
            raise TooFewReplies(
                f"round {number} got {good} good replies from {len(asked)} clients and needs {needed} (--min-clients). "
                f"Connected: {', '.join(sorted(self.roster.members)) or 'nobody'}."
            )

    def fault(self, error: Exception, peer: Peer | None) -> None:
        reason = f"{type(error).__name__}: {printable(error)}"
        if peer is None:
            self.roster.notice(f"round {self.number} changes nothing: its replies make no model together ({reason})")
            return
        self.spoilers.add(peer.name)
        self.memory.latest = dict(self.remembered)
        raise RoundSpoilt(f"the reply of {peer.name} is refused: it cannot be merged ({reason}).")

    def _exchange(
        self,
        kind: str,
        peers: Sequence[Peer],
        letter: Callable[[Peer], tuple[Message, dict[str, Any]]],
        needed: int,
    ) -> Iterator[tuple[Peer, Message, dict[str, Any]]]:
        """Send each peer its letter and give the good replies in the peers' order, until all answered or are gone, or
        the deadline is over. A node that came back meanwhile is asked again."""
        deadline = time.monotonic() + self.round_timeout
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
            if missing and (time.monotonic() > deadline or (nobody and not self._expected(missing))):
                self._leave_out(missing, answers, late=time.monotonic() > deadline)
            elif missing:
                time.sleep(POLL_SECONDS)

    def _leave_out(self, names: Sequence[str], answers: Answers, late: bool) -> None:
        for name in names:
            connected = name in self.roster.members
            reason = f"no answer in {self.round_timeout:g} s" if connected else self.roster.absence(name)
            self.roster.notice(f"round {self.number}: {name} is left out ({reason})")
            answers[name] = None
        if late:
            self.hung |= set(names)

    def _expected(self, names: Sequence[str]) -> bool:
        """Whether one of these is just being greeted."""
        return bool(self.roster.waiting) and bool(names)

    def _send(
        self,
        kind: str,
        peers: Sequence[Peer],
        letter: Callable[[Peer], tuple[Message, dict[str, Any]]],
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
            expected = self._expected_reply(kind, peer, message)
            BOUNDS.allow(max([message.nbytes, *(like.most_bytes for like in expected.values())]))
            content = to_records(message, about | {"setup": self.roster.setup})
            outgoing = FlowerMessage(content, member.node, kind, ttl=seconds, group_id=str(self.number))
            (message_id,) = self.grid.push_messages([outgoing])
            if message_id:
                self.bytes_down += message.nbytes
                parcels[message_id] = Parcel(peer, member, expected)

    def _expected_reply(self, kind: str, peer: Peer, message: Message) -> dict[str, Like]:
        if kind == TRAIN:
            return self.method.expects(message, self.number)
        return evaluating.expected_of(peer, self.roster.introductions[peer.name].held_out, self.method.private)

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
                answers[peer.name] = (peer, message, about)
            except ReplyRefused as refusal:
                self.roster.notice(f"round {self.number}: the reply of {peer.name} is refused: {refusal}")
                answers[peer.name] = None

    # ---- evaluation

    def evaluate(self, message: Message) -> Evaluation:
        """On the server's test data, if it has any; and on the clients' own: of all of it together, from counts, and
        the clients' metrics, averaged by size and called that."""
        report, values, found = metrics.Report({}, {}, {}), {}, {}
        if len(self.federation.test):
            self.learner.receive(message)
            data = self.federation.test
            scores = self.learner.predict(data, 0, len(data)).numpy()
            found = {"test": scores}
            pooled = evaluate_pooled(self.federation, found)
            report, values = pooled.report, pooled.values
        said = self._ask_sites(message)
        if not said:
            return Evaluation(values, report, None, found)
        clients = evaluating.averaged(said, self.roster.introductions, self.max_share)
        means, together = clients.values, self._together(said)
        values = values | {SITES + name: mean for name, mean in means.items()}
        values |= {f"val_{k}": means[k] for k in VALIDATED if k in means}
        values |= {POOLED + name: value for name, value in together.values.items()}
        return Evaluation(values, report if found else together, clients, found)

    def _ask_sites(self, message: Message) -> list[Reply]:
        peers = [peer for peer in self.peers if self.roster.introductions[peer.name].held_out]

        def letter(peer: Peer) -> tuple[Message, dict[str, Any]]:
            # a private client may only see its own rows
            return (self.method.send(message.tensors, peer, self.number) if self.method.private else message), {}

        return [(peer, reply) for peer, reply, _ in self._exchange(EVALUATE, peers, letter, 1)] if peers else []

    def _together(self, said: Sequence[Reply]) -> metrics.Report:
        """Of all sites' held-out data, as if it lay here."""
        classes = self.learner.task.classes
        counts, silent = evaluating.summed(said, classes, self.method.private)
        for name, missing in silent.items():
            if self.silent.get(name) != missing:
                self.roster.notice(evaluating.no_counts(name, missing))
        self.silent |= silent
        return evaluate_counts(counts, classes)

    # ---- the end

    def farewell(self) -> None:
        """Tell everybody that the run is over; who does not hear it notices that the server is gone."""
        self.roster.update()
        content = {"setup": self.roster.setup}
        letters = [
            FlowerMessage(to_records(Message(), content), member.node, BYE, ttl=BYE_SECONDS)
            for member in self.roster.members.values()
        ]
        waiting = [message_id for message_id in self.grid.push_messages(letters) if message_id] if letters else []
        deadline = time.monotonic() + BYE_SECONDS
        while waiting and time.monotonic() < deadline:
            answered = {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)}
            waiting = [message_id for message_id in waiting if message_id not in answered]
            time.sleep(POLL_SECONDS)
