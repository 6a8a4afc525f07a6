"""Membership: which clients are connected and accepted, by name.

With keys, the SuperLink knows the name of each node from its key, and the client must use the same name. Without keys
(insecure) the name is what the client claims, and one node may use it. When a client joins, it describes its data once
(its introduction); when it comes back, it must have the same data.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from flwr.app import Message as FlowerMessage
from flwr.app import RecordDict

from fedmll.core import files
from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message
from fedmll.core.text import printable
from fedmll.deploy.error_codes import JoinRejected, RejectionCode, describe_error
from fedmll.deploy.flower.client_app import HELLO
from fedmll.deploy.flower.records import ARRAY_LIMIT, Info, from_records, to_records
from fedmll.deploy.introduction import Introduction
from fedmll.deploy.security.client_keys import LabelSets, check_label_set
from fedmll.deploy.server.exclusions import Exclusions
from fedmll.deploy.server.server_settings import unreadable_introductions
from fedmll.models.flat_weights import Sketch, find_sketch_differences

RETRY_SECONDS = 10  # after which a rejected node is asked again: it may have been corrected
FIRST_ROUND = "first_round"  # stored with an introduction in sites.json
HELLO_SECONDS = 600  # a site may need long to read its images for the first time
EXCLUDED_REASON = "it is excluded by the operator"
REVOKED_REASON = "its key was revoked"

Notify = Callable[..., None]  # a text for the operator; for the audit log an event and its facts
CheckNewcomer = Callable[[Mapping[str, Introduction]], None]
"""Raises JoinRejected if the method cannot work with these clients, of which one joins during the run."""


def no_record(event: str, **facts: Any) -> None:
    """Record nothing."""


class Grid(Protocol):
    """What fedmll uses of Flower's Grid."""

    def get_nodes(self) -> Any: ...

    def push_messages(self, messages: Any) -> Any: ...

    def pull_messages(self, message_ids: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """A client that is connected and accepted."""

    name: str
    node: int
    since: str  # when its node connected; a node that connected again has lost its work


@dataclass(frozen=True, kw_only=True)
class PendingHello:
    """A request for an introduction that is not answered yet."""

    node: int
    since: str
    registered_name: str  # of its key
    sent: float


@dataclass(frozen=True, kw_only=True)
class RejectedNode:
    """A connected node whose client may not take part."""

    name: str
    code: RejectionCode
    reason: str
    retry_at: float  # when it is asked again


@dataclass(kw_only=True)
class Membership:
    """The clients of a run."""

    grid: Grid
    clients: Sequence[str]  # the names of those that may train
    has_keys: bool  # nodes are authenticated by keys
    setup: str  # the study's setup as JSON, which every message contains
    introductions_file: Path  # so that a restarted server knows the introductions
    notify: Notify  # shows a text to the operator and writes it to the log and the audit log
    classes: Sequence[str] = ()  # of the federation; empty: any
    frozen: Mapping[str, Sketch] = field(default_factory=dict)  # of frozen tensors, which are the same at every site
    label_sets: LabelSets | None = None  # the registered label sets of clients with private labels
    validators: Sequence[str] = ()  # the names of those that only evaluate the model
    record: Notify = no_record  # writes to the audit log only
    audit_head: Callable[[], Info] = dict  # the head of the audit log, which sites keep; empty before round 1 has ended
    exclusions: Exclusions = field(default_factory=Exclusions)

    def __post_init__(self) -> None:
        ARRAY_LIMIT.install()
        self.members: dict[str, Member] = {}
        self.introductions: dict[str, Introduction] = {}
        self.first_round: dict[str, int] = {}  # from which each client takes part
        self.round = 0  # the current one
        self.excluded: frozenset[str] = frozenset()  # in this round
        self.pending: dict[str, PendingHello] = {}  # by the id of the message
        self.rejected: dict[tuple[int, str], RejectedNode] = {}  # by node and since
        if self.introductions_file.exists():
            try:
                stored = json.loads(self.introductions_file.read_text())
                self.introductions |= {name: Introduction.from_json(values) for name, values in stored.items()}
                self.first_round |= {name: int(values.get(FIRST_ROUND, 1)) for name, values in stored.items()}
            except (ValueError, TypeError, KeyError, AttributeError, OverflowError, ReplyRejected):
                raise unreadable_introductions(self.introductions_file) from None

    @property
    def info(self) -> Info:
        """What every message contains."""
        head = self.audit_head()
        return {"setup": self.setup} | ({"audit_head": head} if head else {})

    @property
    def names(self) -> tuple[str, ...]:
        """All clients and validators."""
        return (*self.clients, *self.validators)

    def participants(self, round: int, min_clients: int) -> dict[str, Introduction]:
        """The clients that take part in a round.

        If they are fewer than `min_clients`, also those that joined during the previous round.
        """
        self._apply_exclusions()
        joined = {
            name: self.introductions[name]
            for name in self.clients
            if name in self.introductions and name not in self.excluded
        }
        begun = {name: each for name, each in joined.items() if self.first_round[name] <= round}
        return begun if len(begun) >= min_clients else joined

    def _apply_exclusions(self) -> None:
        """Exclude and readmit clients as the operator says, from this round on."""
        wanted = self.exclusions.excluded()
        if wanted and not self.introductions.keys() - wanted:
            self.notify("no client would be left, so no further client is excluded")
            return
        for name in sorted(wanted - self.excluded):
            self.notify(f"{name} is excluded by the operator", "excluded", client=name)
            self._remove_member(name, RejectionCode.EXCLUDED, EXCLUDED_REASON)
        for name in sorted(self.excluded - wanted):
            self.notify(f"{name} is readmitted by the operator", "readmitted", client=name)
        self.excluded = wanted

    def _remove_member(self, name: str, code: RejectionCode, reason: str) -> None:
        """The client receives the code with the next hello."""
        member = self.members.pop(name, None)
        if member is not None:
            self.rejected[member.node, member.since] = RejectedNode(
                name=name, code=code, reason=reason, retry_at=time.monotonic()
            )

    def nodes_to_notify(self) -> list[int]:
        """The nodes that are told when the run ends: the members', and those of excluded clients, which wait."""
        excluded = [node for (node, _), each in self.rejected.items() if each.code is RejectionCode.EXCLUDED]
        return [*(member.node for member in self.members.values()), *excluded]

    def reason_for_absence(self, name: str) -> str:
        """Why a client is not among the members."""
        reasons = [each.reason for each in self.rejected.values() if each.name == name]
        return f"it is rejected: {reasons[-1]}" if reasons else "it is not connected"

    def is_joining(self, names: Sequence[str], seconds: float) -> bool:
        """Whether one of these clients was asked for its introduction less than so many seconds ago."""
        recent = [each for each in self.pending.values() if time.monotonic() - each.sent <= seconds]
        return any(not self.has_keys or each.registered_name in names for each in recent)

    def connection_times(self) -> dict[int, str]:
        """Since when each node is connected."""
        return {node.node_id: node.last_activated_at for node in self.grid.get_nodes()}

    def update(self, check_newcomer: CheckNewcomer | None = None) -> None:
        """Look which nodes are connected, ask new ones for their introduction, and read the answers.

        Args:
            check_newcomer: during a run, checks whether the method can work with a client that joins late. Before the
                run starts (None) all clients are checked together.
        """
        online = {node.node_id: node for node in self.grid.get_nodes() if node.status in ("", "online")}
        for name, member in list(self.members.items()):
            node = online.get(member.node)
            if node is None or node.last_activated_at != member.since:
                del self.members[name]
                if node is None:
                    text = f"{name} is disconnected; the run continues without it until it comes back"
                    self.notify(text, "disconnected", client=name)
        revoked = self.exclusions.revoked()
        for name in sorted(revoked & self.members.keys()):
            self.notify(f"{name} is rejected: {REVOKED_REASON}", "rejected", client=name)
            self._remove_member(name, RejectionCode.REVOKED, REVOKED_REASON)
        connections = {(node_id, node.last_activated_at) for node_id, node in online.items()}
        self.rejected = {key: each for key, each in self.rejected.items() if key in connections}
        now = time.monotonic()
        known = {(member.node, member.since) for member in self.members.values()}
        known |= {(hello.node, hello.since) for hello in self.pending.values()}
        for node_id, since in sorted(connections - known):
            if online[node_id].name in revoked:
                continue  # the port rejects all its requests
            rejected = self.rejected.get((node_id, since))
            if rejected is None or now >= rejected.retry_at:
                self._send_hello(node_id, since, online[node_id].name, now)
        self._read_introductions(now, check_newcomer)

    def _send_hello(self, node: int, since: str, registered_name: str, now: float) -> None:
        rejected = self.rejected.get((node, since))
        code = {} if rejected is None else {"rejected": rejected.code}
        content = to_records(Message(), self.info | code)
        (message_id,) = self.grid.push_messages([FlowerMessage(content, node, HELLO, ttl=HELLO_SECONDS)])
        if message_id:
            self.pending[message_id] = PendingHello(node=node, since=since, registered_name=registered_name, sent=now)

    def _read_introductions(self, now: float, check_newcomer: CheckNewcomer | None) -> None:
        self.pending = {key: hello for key, hello in self.pending.items() if now <= hello.sent + HELLO_SECONDS}
        if not self.pending:
            return
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        for reply in self.grid.pull_messages(list(self.pending)):
            hello = self.pending.pop(reply.metadata.reply_to_message_id, None)
            if hello is None or reply.metadata.src_node_id != hello.node or reply.has_error():
                continue
            hello = replace(hello, registered_name=names.get(hello.node, ""))
            self._accept_or_reject(hello, reply.content, now, check_newcomer)

    def _accept_or_reject(
        self, hello: PendingHello, content: RecordDict, now: float, check_newcomer: CheckNewcomer | None
    ) -> None:
        info: Info = {}
        try:
            _, info = from_records(content, specs={}, numbers=())
            introduction = self._check_introduction(hello, info, check_newcomer)
        except Exception as error:  # an introduction may make a check fail, but must not end the run
            code = error.code if isinstance(error, JoinRejected) else RejectionCode.OTHER
            known = isinstance(error, ReplyRejected)
            reason = printable(error) if known else f"it cannot be checked ({type(error).__name__})"
            claimed = info.get("name") if info.get("name") in self.names else None  # no free text of a client
            name = hello.registered_name or claimed or f"node {hello.node}"
            before = self.rejected.get((hello.node, hello.since))
            if before is None or before.reason != reason:
                self.notify(f"{name} is rejected: {reason}", "rejected", client=name)
            self.rejected[hello.node, hello.since] = RejectedNode(
                name=name, code=code, reason=reason, retry_at=now + RETRY_SECONDS
            )
            return
        self._accept(hello, info["name"], introduction)

    def _accept(self, hello: PendingHello, name: str, introduction: Introduction) -> None:
        is_new = name not in self.introductions
        self.members[name] = Member(name=name, node=hello.node, since=hello.since)
        self.rejected.pop((hello.node, hello.since), None)
        if is_new or self.introductions[name].min_count != introduction.min_count:
            self.introductions[name] = introduction
            self.first_round.setdefault(name, self.round + 1)
            self._store_introductions()
        start = f"; it takes part from round {self.round + 1} on" if self.round and is_new else ""
        images = f"{introduction.samples or introduction.held_out} images"
        held_out = f", {introduction.held_out} more held out" if introduction.held_out else ""
        purpose = held_out if introduction.samples else " for evaluation"
        text = f"{name} has joined: {images}{purpose}, {len(introduction.classes)} annotated classes{start}"
        facts = {"images": introduction.samples, "held_out": introduction.held_out, "digest": introduction.digest}
        facts |= {"classes": len(introduction.classes), "first_round": self.first_round[name]}
        self.notify(text, "joined", client=name, **facts)

    def _store_introductions(self) -> None:
        values = {
            name: asdict(each) | {FIRST_ROUND: self.first_round[name]} for name, each in self.introductions.items()
        }
        files.write_atomic(self.introductions_file, json.dumps(values))

    def _check_introduction(
        self, hello: PendingHello, info: Info, check_newcomer: CheckNewcomer | None
    ) -> Introduction:
        """Validate an introduction; JoinRejected says why the client may not take part."""
        name = info.get("name")
        if "error" in info:
            raise JoinRejected(RejectionCode.OTHER, describe_error(info["error"]))
        if self.has_keys and name != hello.registered_name:
            text = f"it calls itself by another name, and its key is that of '{hello.registered_name}'"
            raise JoinRejected(RejectionCode.NAME, text)
        if name not in self.names:
            text = f"its name is not among the clients of this run ({', '.join(self.clients)})"
            raise JoinRejected(RejectionCode.UNINVITED, text)
        if name in self.excluded:
            raise JoinRejected(RejectionCode.EXCLUDED, EXCLUDED_REASON)
        other = self.members.get(str(name))
        if other is not None and other.node != hello.node:
            raise JoinRejected(
                RejectionCode.TAKEN,
                "another node is connected under this name; a restarted client is accepted when that one is gone",
            )
        introduction = Introduction.from_json(info)
        if introduction.samples and name in self.validators:
            raise JoinRejected(RejectionCode.TRAINING, "it has training images, and is only a validator in this run")
        if not introduction.samples and name not in self.validators:
            raise JoinRejected(RejectionCode.VALIDATING, "it only validates, and is a client in this run")
        if self.label_sets is not None:
            check_label_set(self.label_sets, str(name), introduction.classes)
        unknown = [label for label in introduction.classes if self.classes and label not in self.classes]
        if unknown:
            count = "a class" if len(unknown) == 1 else f"{len(unknown)} classes"
            text = f"it has {count} that this federation does not have"
            raise JoinRejected(RejectionCode.CLASSES, text)
        different = find_sketch_differences(self.frozen, info.get("frozen", {}))
        if different:
            own = [name for name in different if name in self.frozen]
            listed = f" ({', '.join(own[:5])})" if own else ""
            raise JoinRejected(
                RejectionCode.FROZEN,
                f"the frozen part of its model differs from the server's{listed}: it must use the "
                "same text encoder, pretrained weights and library versions",
            )
        if check_newcomer is not None and name not in self.introductions and name not in self.validators:
            check_newcomer(self.introductions | {str(name): introduction})
        before = self.introductions.get(str(name), introduction)
        if before != introduction:
            same_size = replace(before, digest=introduction.digest) == introduction
            raise JoinRejected(
                RejectionCode.CHANGED,
                f"its data changed since the run began ({before.samples} images and {len(before.classes)} classes "
                f"then, {introduction.samples} and {len(introduction.classes)} now"
                + ("; the labels or images differ)" if same_size else ")"),
            )
        return introduction
