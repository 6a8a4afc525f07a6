"""FlowerEngine: rounds between machines. Who takes part follows from the seed and the client's name; a reply is merged
in an order that does not depend on who was faster; nothing that comes in is trusted: not a reply by itself, not one
beside the others, and not the model that they made if nobody can go on from it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Message as FlowerMessage
from torch import Tensor

from fedmll.client import Peer, Reply
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, silent
from fedmll.deploy.flower import evaluating, processes
from fedmll.deploy.flower.coming import check_newcomer, peers_of, validating, with_sites
from fedmll.deploy.flower.giving import hand_over
from fedmll.deploy.flower.hearing import capped
from fedmll.deploy.flower.judging import FEWEST, Round
from fedmll.deploy.flower.port import expect_replies
from fedmll.deploy.flower.post import Post
from fedmll.deploy.flower.records import to_records
from fedmll.deploy.flower.roster import Roster
from fedmll.deploy.flower.site_app import BYE, EVALUATE, MODEL, TRAIN
from fedmll.deploy.handing import Own
from fedmll.engines.learner import Learner
from fedmll.engines.local import choose_device
from fedmll.engines.memory import Versions
from fedmll.errors import RoundSpoilt, TooFewReplies, printable
from fedmll.evaluation import metrics
from fedmll.evaluation.counted import Counted
from fedmll.evaluation.histograms import evaluate_counts
from fedmll.evaluation.pooled import POOLED, SITES, Evaluation, evaluate_pooled
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like
from fedmll.running.model import SavedModel
from fedmll.task import task_of

POLL_SECONDS = 0.2
BYE_SECONDS = 20


@dataclass
class SiteMemories:
    """Memories are on the clients' disks; the server knows which round's each one's is, and which must be kept."""

    latest: dict[int, int] = field(default_factory=dict)
    kept: Versions | None = field(default_factory=set)  # None: all

    def sync(self) -> None:
        """A site's memory is on its disk before it replies."""

    def keep_only(self, versions: Versions | None) -> None:
        self.kept = versions

    def checkpointed(self, kept: Callable[[], Versions | None]) -> None:
        self.kept = kept()

    def of(self, client: int) -> dict[str, Any]:
        keep = None if self.kept is None else sorted(round for index, round in self.kept if index == client)
        return {"base": self.latest.get(client), "keep": keep}


@dataclass(frozen=True)
class Before:
    """The round before this one: the model that it began with, and who was furthest from the others in it."""

    number: int
    state: Tensors
    furthest: tuple[str, float] | None


class FlowerEngine:
    def __init__(
        self,
        federation: Federation,
        roster: Roster,
        folder: Path,
        *,
        min_clients: int,
        round_timeout: float,
        tries: int,
        alive: Callable[[], None],
        progress: Progress = silent,
        max_share: float = 1.0,
        goal: str = "f1",
        calibrate: str = "none",
    ) -> None:
        self.roster, self.grid, self.max_share = roster, roster.grid, max_share
        self.min_clients, self.tries = min_clients, tries
        self.goal, self.calibrate = goal, calibrate
        self.folder = folder  # where replies may lie for the time of a round
        self.post = Post(
            roster, round_timeout, alive, self._expected_reply, partial(expect_replies, folder / processes.FOLDER)
        )
        task = task_of(federation, choose_device(federation.experiment.engine.device))
        self.learner = Learner(replace(task, clients=len(federation.names) - len(roster.validators)))
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
        self.left_out: set[str] = set()  # who spoilt a model, until the server is started again
        self.before: Before | None = None
        self.again: Iterator[Reply] | None = None  # the round's replies, without those that stood out
        self.silent: set[str] = set()  # who sends no counts of which classes, as it was said

    def start(self) -> Tensors:
        return self.method.start()

    def gathered(self, number: int) -> Federation:
        here = self.roster.taking_part(number, self.min_clients)
        self.federation = with_sites(self.federation, here)
        self.peers = peers_of(self.learner, self.federation, here)
        return self.federation

    @property
    def validators(self) -> list[Peer]:
        return validating(self.federation, self.roster)

    def audit(self) -> dict[str, float | Tensor]:
        return {}  # only a simulation knows the truth

    def close(self) -> None:
        pass

    # ---- a round

    def round(self, state: Tensors, number: int) -> Iterator[Reply]:
        if self.again is not None:
            replies, self.again = self.again, None
            yield from replies
            return
        chosen = self.learner.participants(self.gathered(number), number)
        asked = [peer for client in chosen for peer in self.peers if peer.index == client]
        needed = min(self.min_clients, len(asked))
        samples = {peer.name: self.roster.introductions[peer.name].samples for peer in asked}
        weights = dict(zip(samples, capped(list(samples.values()), self.max_share), strict=True))
        if number != self.number:
            self.number, self.roster.round, self.spoilers = number, number, set()
        self.post.begin(number)
        self.remembered, self.bytes_up = dict(self.memory.latest), 0
        messages: dict[int, Message] = {}

        def letter(peer: Peer) -> tuple[Message, dict[str, Any]]:
            messages.setdefault(peer.index, self.method.send(state, peer, number))
            return messages[peer.index], {"round": number, **self.memory.of(peer.index)}

        good, beside = 0, Round(self.folder, self.learner.weights.buffer_count)
        peers = [peer for peer in asked if peer.name not in self.spoilers | self.left_out]
        for peer, reply, about in self.post.exchange(TRAIN, peers, letter, needed):
            good += 1
            self.bytes_up += reply.nbytes
            if about.get("memory") is True:
                self.memory.latest[peer.index] = number
            reply.numbers["samples"] = weights[peer.name]  # what the operator saw, not what is said now
            if "weights" in reply.tensors and len(peers) >= FEWEST:
                beside.add(peer, messages[peer.index]["weights"], reply, samples[peer.name])
            yield peer, reply
        self.bytes_down = self.post.bytes_down
        self._take_back(asked)
        out = beside.standing_out()
        self._refuse(self.post.diverged | out)
        if good - len(out) < needed:
            self.memory.latest = self.remembered  # who trained starts again from what it remembered before
            raise TooFewReplies(
                f"round {number} got {good - len(out)} good replies from {len(asked)} clients and needs {needed} "
                f"(--min-clients). Connected: {', '.join(sorted(self.roster.members)) or 'nobody'}."
            )
        beside.leave_out(out)
        self.before = Before(number, state, beside.furthest())
        if out:
            self._merge_again(beside, [peer for peer in asked if peer.name in out])

    def _refuse(self, reasons: dict[str, str]) -> None:
        for name, reason in reasons.items():
            self.post.refuse(name, reason)

    def _merge_again(self, beside: Round, out: Sequence[Peer]) -> None:
        """The same replies, without some: nobody trains again."""
        for peer in out:
            self.memory.latest.pop(peer.index, None)
            self.memory.latest |= {k: v for k, v in self.remembered.items() if k == peer.index}
        self.again = iter(beside)
        raise RoundSpoilt(f"its replies are merged without {', '.join(peer.name for peer in out)}.")

    def _take_back(self, asked: Sequence[Peer]) -> None:
        """Where the training of most clients runs away, what is wrong is what they were sent. The model before the
        last round is taken instead, without who was furthest from the others then."""
        before = self.before
        if 2 * len(self.post.diverged) <= len(asked) or before is None or before.furthest is None:
            return
        (name, times), self.memory.latest = before.furthest, dict(self.remembered)
        self.before = None  # once a round
        self.left_out.add(name)
        raise RoundSpoilt(
            f"from the model of round {before.number} the training of most clients runs away "
            f"({', '.join(self.post.diverged)}), and nobody is refused for it. The model before that round is taken "
            f"instead, and {name}, whose update was furthest from the others' there ({times:.3g} times their median), "
            "is left out until the server is started again (for good: `fedmll resume --drop`).",
            before.state,
        )

    def fault(self, error: Exception, peer: Peer | None) -> None:
        reason = f"{type(error).__name__}: {printable(error)}"
        if peer is None:
            self.roster.notice(f"round {self.number} changes nothing: its replies make no model together ({reason})")
            return
        self.spoilers.add(peer.name)
        self.memory.latest = dict(self.remembered)
        raise RoundSpoilt(f"the reply of {peer.name} is refused: it cannot be merged ({reason}).")

    def _expected_reply(self, kind: str, peer: Peer, message: Message) -> dict[str, Like]:
        if kind == TRAIN:
            return self.method.expects(message, self.number)
        if kind == MODEL:
            return {}
        return evaluating.expected_of(peer, self.roster.introductions[peer.name], self.method.private)

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
        counted = self._counted(said)
        together = evaluate_counts(counted.test, counted.classes)
        for name, mean in clients.values.items():
            values[name if name.startswith("val_") else SITES + name] = mean
        values |= {POOLED + name: value for name, value in together.values.items()}
        return Evaluation(values, report if found else together, clients, found, counted)

    def _ask_sites(self, message: Message) -> list[Reply]:
        asked = [peer for peer in (*self.peers, *self.validators) if peer.name not in self.left_out]
        peers = [peer for peer in asked if self.roster.introductions[peer.name].held_out]

        def letter(peer: Peer) -> tuple[Message, dict[str, Any]]:
            # a private client may only see its own rows
            return (self.method.send(message.tensors, peer, self.number) if self.method.private else message), {}

        return [(peer, reply) for peer, reply, _ in self.post.exchange(EVALUATE, peers, letter, 1)] if peers else []

    def _counted(self, said: Sequence[Reply]) -> Counted:
        classes = self.learner.task.classes
        sites = evaluating.counted(said, self.roster.introductions, classes, self.method.private)
        for text in (text for name, site in sites.items() for text in evaluating.not_sent(name, site)):
            if text not in self.silent:
                self.roster.notice(text)
            self.silent.add(text)
        return Counted(tuple(classes), sites, self.goal, self.calibrate)

    # ---- the end

    def hand_over(self, model: SavedModel, own: Own) -> None:
        """Give everybody the model, with what `own` has for a site."""
        hand_over(self.post, self.learner, [*self.peers, *self.validators], model, own)

    def farewell(self, audit: str = "") -> None:
        """Tell everybody that the run is over, and how the audit ends; who does not hear it notices that the server
        is gone."""
        self.roster.update()
        content = {"setup": self.roster.setup, "audit": audit}
        letters = [
            FlowerMessage(to_records(Message(), content), node, BYE, ttl=BYE_SECONDS)
            for node in self.roster.to_part_from()
        ]
        waiting = [message_id for message_id in self.grid.push_messages(letters) if message_id] if letters else []
        deadline = time.monotonic() + BYE_SECONDS
        while waiting and time.monotonic() < deadline:
            answered = {reply.metadata.reply_to_message_id for reply in self.grid.pull_messages(waiting)}
            waiting = [message_id for message_id in waiting if message_id not in answered]
            time.sleep(POLL_SECONDS)
