"""Who is connected, by name. With keys, the SuperLink knows each node's name by its key, and the client must claim the
same; without them (insecure) it is what the client claims, one node a name. A client is asked once what data it has,
and must have the same when it comes back."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict

from fedmll import files
from fedmll.deploy import labels
from fedmll.deploy.barring import EXCLUDED, REVOKED, Bars
from fedmll.deploy.flower.inflating import BOUNDS
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.flower.site_app import HELLO
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.setting import unreadable_sites
from fedmll.deploy.turned_away import short_name
from fedmll.errors import ReplyRefused, printable
from fedmll.message import Message
from fedmll.models.flat import Sketch, sketches_differ

ASK_AGAIN_SECONDS = 10  # a node that was refused may have been put right
FIRST_ROUND = "first_round"  # beside what a client said, in sites.json
HELLO_SECONDS = 600  # the first look at a site's images may take long

Notice = Callable[..., None]  # a text; for the audit an event and its facts


def not_recorded(event: str, **facts: Any) -> None:
    pass


class Grid(Protocol):
    """What we use of Flower's Grid."""

    def get_nodes(self) -> Any: ...

    def push_messages(self, messages: Any) -> Any: ...

    def pull_messages(self, message_ids: Any) -> Any: ...


@dataclass(frozen=True)
class Member:
    """A client that is connected and was accepted."""

    name: str
    node: int
    since: str  # when its node came: a node that came anew has lost what it was doing


@dataclass(frozen=True)
class Greeting:
    """One that was not answered yet."""

    node: int
    since: str
    name: str  # as registered with its key
    sent: float


@dataclass(frozen=True)
class Refusal:
    name: str
    reason: str
    again: float  # when it may be asked again


@dataclass
class Roster:
    grid: Grid
    names: Sequence[str]
    keyed: bool
    setup: str
    file: Path  # where introductions are kept over a restart of the server
    notice: Notice
    classes: Sequence[str] = ()  # that exist; empty: any
    frozen: Mapping[str, Sketch] = field(default_factory=dict)  # tensors that every site must have as the server has
    label_sets: labels.Registered | None = None  # of clients that know their own classes only
    validators: Sequence[str] = ()  # who only tests: has a key like everybody, and no images to train on
    members: dict[str, Member] = field(default_factory=dict)
    introductions: dict[str, Introduction] = field(default_factory=dict)
    first_round: dict[str, int] = field(default_factory=dict)  # of each who came: it takes part from then on
    round: int = 0  # that is under way
    record: Notice = not_recorded  # what is in the audit, and needs no words
    bars: Bars = field(default_factory=Bars)  # who is kept out while the run goes on
    excluded: frozenset[str] = frozenset()  # as of this round
    fits: Callable[[str, Introduction], None] = lambda name, introduction: None  # refuses who cannot be taken in late

    def __post_init__(self) -> None:
        BOUNDS.install()
        self.waiting: dict[str, Greeting] = {}  # by hello's id
        self.refused: dict[tuple[int, str], Refusal] = {}  # by node and since
        if self.file.exists():
            try:
                known = json.loads(self.file.read_text())
                self.introductions |= {name: Introduction.of(told) for name, told in known.items()}
                self.first_round |= {name: int(told.get(FIRST_ROUND, 1)) for name, told in known.items()}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, ReplyRefused):
                raise unreadable_sites(self.file) from None

    @property
    def everybody(self) -> tuple[str, ...]:
        return (*self.names, *self.validators)

    def taking_part(self, number: int, least: int) -> dict[str, Introduction]:
        """Who has come and takes part in a round; where that is fewer than `least`, also who would begin later."""
        self._follow_operator()
        here = [name for name in self.names if name in self.introductions and name not in self.excluded]
        came = {name: self.introductions[name] for name in here}
        begun = {name: told for name, told in came.items() if self.first_round[name] <= number}
        return begun if len(begun) >= least else came

    def _follow_operator(self) -> None:
        """Who is excluded or readmitted is so from the next round on, and named."""
        wanted = self.bars.excluded()
        if wanted and not self.introductions.keys() - wanted:
            self.notice("nobody would be left, so nobody else is excluded")
            return
        for name in sorted(wanted - self.excluded):
            self.notice(f"{name} is excluded by the operator", "excluded", client=name)
            self._turn_away(name, EXCLUDED)
        for name in sorted(self.excluded - wanted):
            self.notice(f"{name} is readmitted by the operator", "readmitted", client=name)
        self.excluded = wanted

    def _turn_away(self, name: str, reason: str) -> None:
        """It hears why with the next greeting."""
        member = self.members.pop(name, None)
        if member is not None:
            self.refused[member.node, member.since] = Refusal(name, reason, time.monotonic())

    def to_part_from(self) -> list[int]:
        """The nodes that are told when the run is over: also of who was taken out of it, and waits."""
        out = [node for (node, _), refusal in self.refused.items() if refusal.reason == EXCLUDED]
        return [*(member.node for member in self.members.values()), *out]

    def absence(self, name: str) -> str:
        """Why somebody is not among the members."""
        reasons = [refusal.reason for refusal in self.refused.values() if refusal.name == name]
        return f"it is refused: {reasons[-1]}" if reasons else "it is not connected"

    def greeting(self, names: Sequence[str], seconds: float) -> bool:
        """Whether one of these has just come. Who has not answered its greeting for so long is not waited for."""
        fresh = [greeting for greeting in self.waiting.values() if time.monotonic() - greeting.sent <= seconds]
        return any(not self.keyed or greeting.name in names for greeting in fresh)

    def connections(self) -> dict[int, str]:
        """Since when each node is connected, as it is now."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def update(self) -> None:
        """See who is there, greet who is new, hear the answers."""
        online = {node.node_id: node for node in self.grid.get_nodes() if node.status in ("", "online")}
        for name, member in list(self.members.items()):
            node = online.get(member.node)
            if node is None or node.last_activated_at != member.since:
                del self.members[name]
                if node is None:
                    self.notice(f"{name} is gone; the run goes on without it until it comes back", "gone", client=name)
        revoked = self.bars.revoked()
        for name in sorted(revoked & self.members.keys()):
            self.notice(f"{name} is refused: {REVOKED}", "refused", client=name)
            self._turn_away(name, REVOKED)
        here = {(node_id, node.last_activated_at) for node_id, node in online.items()}
        self.refused = {key: refusal for key, refusal in self.refused.items() if key in here}
        now = time.monotonic()
        greeted = {(member.node, member.since) for member in self.members.values()}
        greeted |= {(greeting.node, greeting.since) for greeting in self.waiting.values()}
        for key in sorted(here - greeted):
            if online[key[0]].name in revoked:
                continue  # the port lets nothing of it through
            if key not in self.refused or now >= self.refused[key].again:
                self._greet(*key, online[key[0]].name, now)
        self._hear(now)

    def _greet(self, node: int, since: str, registered: str, now: float) -> None:
        content = to_records(Message(), {"setup": self.setup} | self._why_refused(node, since))
        (message_id,) = self.grid.push_messages([FlowerMessage(content, node, HELLO, ttl=HELLO_SECONDS)])
        if message_id:
            self.waiting[message_id] = Greeting(node, since, registered, now)

    def _why_refused(self, node: int, since: str) -> dict[str, str]:
        """A client that was refused is told why with the next greeting."""
        before = self.refused.get((node, since))
        return {} if before is None else {"refused": short_name(before.reason)}

    def _hear(self, now: float) -> None:
        self.waiting = {key: each for key, each in self.waiting.items() if now <= each.sent + HELLO_SECONDS}
        if not self.waiting:
            return
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        for reply in self.grid.pull_messages(list(self.waiting)):
            greeting = self.waiting.pop(reply.metadata.reply_to_message_id, None)
            if greeting is None or reply.metadata.src_node_id != greeting.node or reply.has_error():
                continue
            self._consider(greeting.node, greeting.since, names.get(greeting.node, ""), reply.content, now)

    def _consider(self, node: int, since: str, registered: str, content: RecordDict, now: float) -> None:
        told: dict[str, Any] = {}
        try:
            _, told = from_records(content, expected={}, numbers=())
            introduction = self._accept(node, registered, told)
        except Exception as error:  # what a client says may confuse a check, but not end the run
            known = isinstance(error, ReplyRefused)
            reason = printable(error) if known else f"it cannot be checked ({type(error).__name__})"
            name = registered or printable(told.get("name") or f"node {node}", 80)
            before = self.refused.get((node, since))
            if before is None or before.reason != reason:
                self.notice(f"{name} is refused: {reason}", "refused", client=name)
            self.refused[node, since] = Refusal(name, reason, now + ASK_AGAIN_SECONDS)
            return
        name = told["name"]
        again = name in self.introductions
        self.members[name] = Member(name, node, since)
        self.refused.pop((node, since), None)
        since = ""
        if not again or self.introductions[name].min_count != introduction.min_count:
            self.introductions[name] = introduction
            self.first_round.setdefault(name, self.round + 1)
            kept = {n: asdict(each) | {FIRST_ROUND: self.first_round[n]} for n, each in self.introductions.items()}
            files.write(self.file, json.dumps(kept))
            since = f"; it takes part from round {self.round + 1} on" if self.round and not again else ""
        images = f"{introduction.samples or introduction.held_out} images"
        what = f"{images}{'' if introduction.samples else ' to test on'}, {len(introduction.classes)} classes annotated"
        facts = {"images": introduction.samples, "held_out": introduction.held_out, "digest": introduction.digest}
        facts |= {"classes": len(introduction.classes), "first_round": self.first_round[name]}
        self.notice(f"{name} is here: {what}{since}", "joined", client=name, **facts)

    def _accept(self, node: int, registered: str, told: Mapping[str, Any]) -> Introduction:
        name = told.get("name")
        if "error" in told:
            raise ReplyRefused(str(told["error"]))
        if self.keyed and name != registered:
            raise ReplyRefused(f"it calls itself '{name}', and its key is that of '{registered}'")
        if name not in self.everybody:
            raise ReplyRefused(f"'{name}' is not among the clients of this run ({', '.join(self.names)})")
        if name in self.excluded:
            raise ReplyRefused(EXCLUDED)
        other = self.members.get(str(name))
        if other is not None and other.node != node:
            raise ReplyRefused(
                "another node is connected under this name; a restart is taken back when that one is gone"
            )
        introduction = Introduction.of(told)
        if (introduction.samples == 0) != (name in self.validators):
            what = "trains" if introduction.samples else "only validates"
            raise ReplyRefused(f"it {what}, and is {'no' if introduction.samples else 'a'} client of this run")
        if self.label_sets is not None:
            labels.check(self.label_sets, str(name), introduction.classes)
        strange = [label for label in introduction.classes if self.classes and label not in self.classes]
        if strange:
            raise ReplyRefused(f"it has the class '{strange[0]}', which this federation does not have")
        different = sketches_differ(self.frozen, told.get("frozen", {}))
        if different:
            raise ReplyRefused(
                f"what is frozen in its model is not what the server has ({', '.join(different[:5])}): it must use the "
                "same text encoder, pretrained weights and library versions"
            )
        if name not in self.introductions and name not in self.validators:
            self.fits(str(name), introduction)
        before = self.introductions.get(str(name), introduction)
        if before != introduction:
            raise ReplyRefused(
                f"its data changed since the run began ({before.samples} images and {len(before.classes)} classes "
                f"then, {introduction.samples} and {len(introduction.classes)} now"
                + (")" if replace(before, digest=introduction.digest) != introduction else "; other labels or images)")
            )
        return introduction
