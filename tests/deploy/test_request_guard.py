"""The guard in front of Flower's app, in this process: which requests are accepted, and how large they may be."""

from __future__ import annotations

import asyncio
import json
from base64 import b64encode
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.date import now
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.primitives.asymmetric import sign_message

from fedmll.core.errors import ConfigError
from fedmll.deploy import error_codes
from fedmll.deploy.flower import flower_internals, request_guard
from fedmll.deploy.flower.request_guard import (
    INSTANCE_HEADER,
    SIGNATURE_HEADER,
    ClientAuthenticator,
    RequestGuard,
    sign_request,
)
from fedmll.deploy.security import client_keys
from fedmll.deploy.security.private_keys import load_private_key

SERVER = "5e" * 32  # the fingerprint of a certificate
PULL, OBJECT = "/v1/fleet/pull-messages", "/v1/fleet/push-object"


class Caller:
    def __init__(self, folder: Path, name: str = "site-a") -> None:
        client_keys.create_client_key(folder, name)
        self.folder, self.name = folder, name
        self.key = load_private_key((folder / f"{name}.key").read_bytes())
        self.public = client_keys.load_public_keys(folder, [name])[name]
        self.said: list[str] = []
        self.authenticator = ClientAuthenticator(
            nodes={name: self.public},
            server=SERVER,
            notify=self.said.append,
            revoked_file=folder / client_keys.REVOKED_FILE,
        )
        self.reached: list[bytes] = []
        self.guard = RequestGuard(self.app, self.authenticator)

    async def app(self, scope: Any, receive: Any, send: Any) -> None:
        self.reached.append((await receive())["body"])
        await send({"type": "http.response.start", "status": 200, "headers": []})

    def headers(self, ahead: float = 0.0, instance: str = "1", **more: str) -> dict[str, str]:
        when = (now() + timedelta(seconds=ahead)).isoformat()
        found = {
            "flwr-public-key": b64encode(self.public.encode()).decode(),
            "flwr-timestamp": when,
            "flwr-signature": b64encode(sign_message(self.key, when.encode())).decode(),
            INSTANCE_HEADER: instance,
        }
        return found | {name.replace("_", "-"): value for name, value in more.items()}

    def signed(self, path: str, headers: dict[str, str], *pieces: bytes, server: str = SERVER) -> dict[str, str]:
        """The headers with a signature for this server, path and body."""
        return headers | sign_request(self.key, server, path, b"".join(pieces), headers["flwr-timestamp"])

    def call(
        self, path: str, headers: dict[str, str], *pieces: bytes, guarded: RequestGuard | None = None
    ) -> tuple[int, dict[str, Any], int]:
        """The status, the answer, and how many pieces of the body were read."""
        return asyncio.run(self.acall(path, headers, *pieces, guarded=guarded))

    async def acall(
        self, path: str, headers: dict[str, str], *pieces: bytes, guarded: RequestGuard | None = None
    ) -> tuple[int, dict[str, Any], int]:
        sent: list[dict[str, Any]] = []
        left = list(pieces) or [b""]
        if headers and SIGNATURE_HEADER not in headers:
            headers = self.signed(path, headers, *pieces)

        async def receive() -> dict[str, Any]:
            piece = left.pop(0)
            return {"type": "http.request", "body": piece, "more_body": bool(left)}

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "path": path, "headers": raw, "client": ("203.0.113.9", 1)}
        await (guarded or self.guard)(scope, receive, send)
        body = sent[1]["body"] if len(sent) > 1 else b""
        return sent[0]["status"], json.loads(body) if body else {}, max(1, len(pieces)) - len(left)


@pytest.fixture
def caller(tmp_path: Path) -> Caller:
    return Caller(tmp_path)


def test_a_request_of_a_member_is_passed_on_with_its_body(caller: Caller) -> None:
    assert caller.call(PULL, caller.headers(), b"on", b"e")[0] == 200
    assert caller.reached == [b"one"]
    assert caller.said == []


@pytest.mark.parametrize(
    "spoilt",
    [
        lambda h: {},
        lambda h: h | {"fedmll-signature": b64encode(b"x").decode()},
        lambda h: h | {"fedmll-signature": "not base64!"},
        lambda h: h | {"fedmll-signature": h["flwr-signature"]},  # of the time only
        lambda h: h | {"fedmll-server": "0" * 64},
        lambda h: h | {"fedmll-body-sha256": "0" * 64},
        lambda h: {name: value for name, value in h.items() if name != "fedmll-server"},
        lambda h: h | {"flwr-timestamp": "yesterday"},
        lambda h: h | {"flwr-timestamp": h["flwr-timestamp"][:-1] + "9"},
        lambda h: h | {"flwr-public-key": b64encode(b"-----BEGIN").decode()},
    ],
)
def test_nothing_of_a_strangers_body_is_read(
    caller: Caller, spoilt: Callable[[dict[str, str]], dict[str, str]]
) -> None:
    status, told, read = caller.call(
        OBJECT, spoilt(caller.signed(OBJECT, caller.headers(), b"x" * 11)), b"x" * 10, b"x"
    )
    assert (status, read, caller.reached) == (401, 0, [])
    assert told["detail"] == "fedmll rejects: unknown"
    assert caller.said == []  # a stranger writes nothing into the operator's log


def test_signed_headers_are_valid_for_one_server_path_and_body(caller: Caller) -> None:
    """Before, the headers of any request could be used again: at another server, for another path and body."""
    assert caller.call(PULL, caller.signed(PULL, caller.headers(), b"one"), b"one")[0] == 200
    for path, body in ((OBJECT, b"one"), (request_guard.DEACTIVATE, b"one"), (PULL, b"two"), (PULL, b"")):
        status, told, _ = caller.call(path, caller.signed(PULL, caller.headers(), b"one"), body)
        assert (status, told["detail"]) == (401, "fedmll rejects: unknown"), (path, body)
    assert caller.said == []
    captured = caller.signed(PULL, caller.headers(), b"one", server="0e" * 32)  # what another server has received
    status, told, read = caller.call(PULL, captured, b"one")
    assert (status, told["detail"], read) == (401, "fedmll rejects: server", 0)
    assert caller.said == ["site-a is rejected: its request is for a server with another certificate"]
    assert caller.reached == [b"one"]


def test_the_signature_of_another_member_is_rejected(caller: Caller, tmp_path: Path) -> None:
    other = Caller(tmp_path / "other", "site-b")
    mixed = caller.headers() | {"flwr-public-key": other.headers()["flwr-public-key"]}
    assert caller.call(PULL, mixed)[0] == 401


@pytest.mark.parametrize("twice", ["flwr-public-key", "Flwr-Timestamp", INSTANCE_HEADER])
def test_a_header_that_identifies_a_client_is_sent_once(caller: Caller, tmp_path: Path, twice: str) -> None:
    """Flower reads the first of two headers. A member could add the Flower headers of another site, which a server that
    both know has received: Flower's signature is valid at any server."""
    other = Caller(tmp_path / "other", "site-b")
    for first in (False, True):
        signed = caller.signed(PULL, caller.headers())
        extra = (twice.encode(), other.headers()[twice.lower()].encode())
        raw = [(name.encode(), value.encode()) for name, value in signed.items()]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b""}

        async def send(message: dict[str, Any], sent: list[dict[str, Any]] = sent) -> None:
            sent.append(message)

        headers = [extra, *raw] if first else [*raw, extra]
        scope = {"type": "http", "path": PULL, "headers": headers, "client": ("203.0.113.9", 1)}
        asyncio.run(caller.guard(scope, receive, send))
        assert sent[0]["status"] == 400
    assert caller.reached == []


def test_bodies_are_bounded_as_declared_and_as_sent(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caller.call(PULL, caller.headers(content_length=str(request_guard.SMALL + 1)), b"x")[::2] == (413, 0)
    assert caller.call(PULL, caller.headers(content_length="-1"), b"x")[::2] == (413, 0)
    assert caller.call(PULL, caller.headers(), b"x" * request_guard.SMALL)[0] == 200
    assert caller.call(PULL, caller.headers(), b"x" * request_guard.SMALL, b"x", b"x")[::2] == (413, 2)
    monkeypatch.setitem(request_guard.MAX_BYTES, OBJECT, request_guard.SMALL + 2)
    assert caller.call(OBJECT, caller.headers(), b"x" * request_guard.SMALL, b"x", b"x")[0] == 200
    insecure = RequestGuard(caller.app)  # nobody is known, and still nobody sends more
    assert caller.call(PULL, {}, b"x" * (request_guard.SMALL + 1), guarded=insecure)[0] == 413
    assert caller.call(PULL, {}, b"x", guarded=insecure)[0] == 200
    assert caller.call("/v1/runtime/acquire-task", caller.headers())[0] == 403


def test_requests_and_bytes_of_one_client_at_the_same_time_are_limited(
    caller: Caller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member opens forty connections and sends 32 MB over each."""
    monkeypatch.setattr(request_guard, "MAX_BYTES_IN_FLIGHT", 100)
    other, other_key = "site-b", Caller(tmp_path / "other", "site-b")
    caller.authenticator.nodes = {**caller.authenticator.nodes, other: other_key.public}
    caller.authenticator.__post_init__()
    other_key.guard = caller.guard
    release = []

    async def slow_app(scope: Any, receive: Any, send: Any) -> None:
        caller.reached.append((await receive())["body"])
        await release[-1].wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})

    caller.guard.app = slow_app

    async def attack(sizes: list[int]) -> list[int]:
        release.append(asyncio.Event())
        requests = [
            asyncio.create_task(caller.acall(OBJECT, caller.headers(content_length=str(size)), b"x" * size))
            for size in sizes
        ]
        await asyncio.sleep(0.1)
        rejected = [task for task in requests if task.done()]
        honest = asyncio.create_task(other_key.acall(OBJECT, other_key.headers(content_length="50"), b"y" * 50))
        await asyncio.sleep(0.05)
        release[-1].set()
        assert (await honest)[0] == 200  # the others are not affected
        statuses = [(await task)[0] for task in requests]
        assert [statuses[requests.index(task)] for task in rejected] == [503] * len(rejected)
        return statuses

    assert sorted(asyncio.run(attack([60] * 40))) == [200] + [503] * 39
    assert sorted(asyncio.run(attack([1] * 40))) == [200] * 8 + [503] * 32
    assert caller.guard.in_flight == {}  # and afterwards it is served again
    assert asyncio.run(attack([60])) == [200]
    assert set(caller.said) == {"site-a sends more at the same time than a site needs; the rest is rejected"}
    assert len(caller.reached) == 1 + 8 + 1 + 3


def test_a_body_that_does_not_arrive_times_out(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "CHUNK_SECONDS", 0.05)
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        await asyncio.sleep(60)
        return {}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    raw = [(name.encode(), value.encode()) for name, value in caller.signed(PULL, caller.headers()).items()]
    asyncio.run(caller.guard({"type": "http", "path": PULL, "headers": raw}, receive, send))
    assert sent[0]["status"] == 408
    assert (b"connection", b"close") in sent[0]["headers"]


@pytest.mark.parametrize(
    ("ahead", "told", "words"),
    [
        (20, "clock 20", "The clock of this machine is 20 s ahead of the server's"),
        (-400, "clock -400", "The clock of this machine is 400 s behind the server's"),
    ],
)
def test_a_wrong_clock_is_reported_at_both_ends(caller: Caller, ahead: float, told: str, words: str) -> None:
    status, answer, read = caller.call(PULL, caller.headers(ahead), b"x")
    assert (status, answer["detail"], read) == (401, f"fedmll rejects: {told}", 0)
    way = "ahead of" if ahead > 0 else "behind"
    assert caller.said == [
        f"site-a is rejected: its clock is {abs(ahead)} s {way} the server's; the client was told to set it"
    ]
    line = f"noise\n[code: {answer['code']}] {answer['detail']}\nnoise"
    assert words in str(error_codes.explain_rejection(line, "fed:8000", "site-a", "k"))
    for good in (4, -290):
        assert caller.call(PULL, caller.headers(good))[0] == 200


def test_a_clock_that_changes_all_the_time_does_not_fill_the_log(caller: Caller) -> None:
    for ahead in range(100, 120):
        assert caller.call(PULL, caller.headers(ahead))[0] == 401
    assert len(caller.said) == 1
    caller.authenticator.clock_notices["site-a"] -= request_guard.CLOCK_SECONDS
    assert caller.call(PULL, caller.headers(200))[0] == 401
    assert [text for text in caller.said if "200 s ahead" in text] == caller.said[1:]


def test_a_revoked_key_is_rejected_from_the_next_request_on(caller: Caller) -> None:
    assert caller.call(PULL, caller.headers())[0] == 200
    client_keys.revoke_client_key(caller.folder, "site-a")
    status, answer, _ = caller.call(PULL, caller.headers())
    assert (status, answer["detail"]) == (401, "fedmll rejects: revoked")
    assert caller.said == ["site-a is rejected: its key was revoked"]


def test_damaged_list_of_revoked_keys_admits_nobody_until_it_is_repaired(caller: Caller) -> None:
    path = caller.folder / client_keys.REVOKED_FILE
    client_keys.create_client_key(caller.folder, "site-z")
    client_keys.revoke_client_key(caller.folder, "site-z")
    good = path.read_bytes()
    for damage in (b"", b"garbage\n", good[:-1]):
        path.write_bytes(damage)
        assert caller.call(PULL, caller.headers())[0] == 503
    assert "revoked keys, is damaged" in caller.said[0]
    path.write_bytes(good)
    assert caller.call(PULL, caller.headers())[0] == 200


def test_revoked_key_stays_revoked_when_the_list_is_shortened(caller: Caller) -> None:
    path = caller.folder / client_keys.REVOKED_FILE
    client_keys.revoke_client_key(caller.folder, caller.name)
    assert caller.call(PULL, caller.headers())[0] == 401
    path.unlink()
    client_keys.create_client_key(caller.folder, "site-z")
    client_keys.revoke_client_key(caller.folder, "site-z")
    assert caller.call(PULL, caller.headers())[0] == 401


def test_the_newer_of_two_programs_is_rejected(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_guard, "POLL_SECONDS", 0.3)

    async def both() -> tuple[int, str]:
        await caller.acall(request_guard.ACTIVATE, caller.headers())
        coming = asyncio.create_task(caller.acall(request_guard.ACTIVATE, caller.headers(instance="2")))
        await asyncio.sleep(0.05)
        assert (await caller.acall(PULL, caller.headers()))[0] == 200  # the first one asks for messages, as ever
        status, answer, _ = await coming
        return status, answer["detail"]

    assert asyncio.run(both()) == (401, "fedmll rejects: twice")
    assert len(caller.said) == 1
    assert caller.said[0].startswith("site-a: a second program uses its key")
    assert caller.call(PULL, caller.headers())[0] == 200
    assert caller.call(PULL, caller.headers(instance="2"))[0] == 401


def test_a_restarted_program_is_accepted_unless_the_first_is_still_active(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_guard, "POLL_SECONDS", 0.0)
    assert caller.call(request_guard.ACTIVATE, caller.headers())[0] == 200
    assert caller.call(request_guard.ACTIVATE, caller.headers(instance="2"))[0] == 200  # the first one was silent
    assert caller.call(PULL, caller.headers(instance="2"))[0] == 200
    assert caller.said == []
    assert caller.call(PULL, caller.headers())[0] == 200  # it only worked
    assert caller.call(PULL, caller.headers(instance="2"))[0] == 401
    assert (
        caller.call(request_guard.ACTIVATE, caller.headers(instance="3"))[0] == 401
    )  # two programs used the key just now
    assert caller.call(request_guard.DEACTIVATE, caller.headers())[0] == 200
    assert caller.call(request_guard.ACTIVATE, caller.headers(instance="4"))[0] == 200  # it said goodbye


def test_programs_that_wait_to_replace_another_count_as_requests(caller: Caller) -> None:
    """A member names another program in each of many requests. Each of them waits, and keeps its connection."""

    async def attack() -> list[int]:
        assert (await caller.acall(request_guard.ACTIVATE, caller.headers()))[0] == 200
        requests = [
            asyncio.create_task(caller.acall(request_guard.ACTIVATE, caller.headers(instance=f"p{number}")))
            for number in range(20)
        ]
        await asyncio.sleep(0.3)
        waiting = sum(not task.done() for task in requests)
        assert waiting == request_guard.MAX_REQUESTS_IN_FLIGHT
        return [(await task)[0] for task in requests]

    assert asyncio.run(attack()).count(503) == 12


def test_a_link_to_a_missing_list_of_revoked_keys_admits_nobody(caller: Caller, tmp_path: Path) -> None:
    (caller.folder / client_keys.REVOKED_FILE).symlink_to(tmp_path / "not mounted")
    assert caller.call(PULL, caller.headers())[0] == 503
    with pytest.raises(ConfigError, match="no client is accepted"):
        client_keys.load_public_keys(caller.folder, [caller.name])


def test_only_a_client_that_does_not_come_back_has_left(caller: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    """`join` restarts its SuperNode when a connection is lost: the old one signs off, and a new one comes."""
    monkeypatch.setattr(request_guard, "LEAVE_SECONDS", 0.2)

    async def leave(come_back: bool) -> None:
        await caller.acall(request_guard.ACTIVATE, caller.headers())
        await caller.acall(request_guard.DEACTIVATE, caller.headers())
        if come_back:
            await caller.acall(request_guard.ACTIVATE, caller.headers(instance="2"))
            await caller.acall(PULL, caller.headers(instance="2"))
        await asyncio.sleep(0.4)
        caller.authenticator.active.clear()

    asyncio.run(leave(come_back=True))
    assert caller.said == []
    asyncio.run(leave(come_back=False))
    assert caller.said == ["site-a has left: its program was stopped there"]


def push(tree: ObjectTree, **info: Any) -> PushMessagesRequest:
    values = {"src_node_id": 5, "dst_node_id": 1, "reply_to_message_id": "x", "message_id": tree.object_id} | info
    message = MessageProto(metadata=Metadata(**values))
    return PushMessagesRequest(node=NodeProto(node_id=5), messages_list=[message], message_object_trees=[tree])


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({}, None),
        ({"src_node_id": 1}, "its sender"),
        ({"src_node_id": 6}, "its sender"),
        ({"dst_node_id": 6}, "to the server only"),
        ({"reply_to_message_id": ""}, "to the server only"),
        ({"message_id": "y"}, "do not belong"),
    ],
)
def test_a_client_can_reply_only_for_itself(info: dict[str, Any], problem: str | None) -> None:
    found = request_guard.find_push_problem(push(ObjectTree(object_id="t"), **info))
    assert found is None if problem is None else problem in str(found)
    assert (
        request_guard.find_push_problem(PushMessagesRequest(node=NodeProto(node_id=5)))
        == "a request may contain one reply only"
    )


def name(letter: str) -> str:
    return letter * 64


def tree_of(letter: str, *children: ObjectTree) -> ObjectTree:
    return ObjectTree(object_id=name(letter), children=children)


def test_trees_of_objects_cannot_grow_over_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    store = InMemoryObjectStore()
    first = tree_of("c", tree_of("d"), tree_of("d"))
    assert request_guard.find_tree_problem(first, store) is None  # the same part twice: two tensors of zeros
    store.preregister(1, first)
    growing = tree_of("b", tree_of("c"), tree_of("c"))  # without c's parts, which the store would put in
    assert request_guard.find_tree_problem(growing, store) == "an object has other parts than before"
    assert request_guard.find_tree_problem(tree_of("b", first, first), store) is None  # in full
    assert request_guard.find_tree_problem(tree_of("a", tree_of("b"), tree_of("b", tree_of("e"))), store) is not None
    monkeypatch.setattr(request_guard, "MAX_OBJECTS", 3)
    assert request_guard.find_tree_problem(first, store) is None
    assert request_guard.find_tree_problem(tree_of("b", first), store) == "too many objects"
    deep = tree_of("0")
    monkeypatch.setattr(request_guard, "MAX_OBJECTS", 100)
    for letter in "123456":
        assert request_guard.find_tree_problem(deep, store) is None
        deep = tree_of(letter, deep)
    assert request_guard.find_tree_problem(deep, store) == "too many objects"


@pytest.mark.parametrize("asked", [True, False])
def test_the_size_of_a_reply_is_limited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: bool) -> None:
    """As much as what was asked for and a little beside it, and never more than a bound."""
    monkeypatch.setattr(request_guard, "MAX_REPLY_BYTES", 10 if asked else 1000)
    monkeypatch.setattr(request_guard, "OVERHEAD_BYTES", 1 if asked else 9)
    if asked:
        request_guard.write_reply_limit(tmp_path, 9)
        assert request_guard.read_reply_limit(tmp_path) == 10
        request_guard.write_reply_limit(tmp_path, 500)
    assert request_guard.read_reply_limit(tmp_path) == (10 if asked else 9)
    done: list[str] = []
    to_push, stored = ["t"], True

    def push_messages(request: Any, state: Any) -> Any:
        done.append("message")
        return SimpleNamespace(objects_to_push=to_push)

    def push_object(request: Any, state: Any) -> Any:
        done.append("object")
        return SimpleNamespace(stored=stored)

    handlers = SimpleNamespace(push_messages=push_messages, push_object=push_object)
    request_guard.ReplyPushGuard(tmp_path).install(handlers)
    state = SimpleNamespace(object_store=InMemoryObjectStore())
    piece = SimpleNamespace(node=NodeProto(node_id=5), object_content=b"x" * 6)

    def announce(reply: str) -> None:
        handlers.push_messages(request=push(ObjectTree(object_id=reply)), state=state)

    def send() -> None:
        handlers.push_object(request=piece, state=state)

    announce("t")
    stored = False
    send()  # Flower did not store it, so it does not count
    stored = True
    send()
    for again in ("the same reply", "a reply that Flower does not accept"):
        if again != "the same reply":
            to_push = []
        announce("t" if again == "the same reply" else "u")
        with pytest.raises(Exception, match="too large"):
            send()
    to_push = ["v"]
    announce("v")
    send()
    with pytest.raises(Exception, match="must name its sender"):
        handlers.push_messages(request=push(ObjectTree(object_id="t"), src_node_id=1), state=state)
    assert done == ["message", "object", "object", "message", "message", "message", "object"]


def test_a_reply_is_delivered_when_it_is_complete() -> None:
    import threading

    store, asked = InMemoryObjectStore(verify=False), []
    tree = tree_of("a", tree_of("b"), tree_of("c"))
    store.preregister(1, tree)
    state = SimpleNamespace(
        lock=threading.RLock(),
        object_store=store,
        message_ins_id_to_message_res_id={"question": name("a")},
        get_message_res=lambda message_ids, run_id: asked.append(message_ids),
    )
    flower_internals.deliver_complete_replies_only(state)
    for letter in "abc":
        state.get_message_res({"question", "unanswered"}, 1)
        assert asked[-1] == {"unanswered"}
        store.put(name(letter), b"x")
    state.get_message_res({"question", "unanswered"}, 1)
    assert asked[-1] == {"question", "unanswered"}


def test_notices_reach_the_server_once_per_minute_without_control_characters(tmp_path: Path) -> None:
    notices = request_guard.NoticeWriter(tmp_path)
    assert (tmp_path / request_guard.NOTICES_FILE).stat().st_mode & 0o777 == 0o600
    assert request_guard.read_notices(tmp_path, 0) == ([], 0)
    for text in ("one", "one", "two\x1b[31m\n", "one"):
        notices.write(text)
    found, place = request_guard.read_notices(tmp_path, 0)
    assert found == ["one", "two"]
    assert request_guard.read_notices(tmp_path, place) == ([], place)
    notices.write("three")
    with (tmp_path / request_guard.NOTICES_FILE).open("a") as file:
        file.write('"half')  # it is being written
    assert request_guard.read_notices(tmp_path, place)[0] == ["three"]


def test_nodes_reach_the_fleet_api_and_nobody_anything_else() -> None:
    def allowed(path: str, client: str, kind: str = "http") -> bool:
        return RequestGuard.is_allowed({"type": kind, "path": path, "client": (client, 1)})

    assert allowed("/v1/fleet/pull-messages", "203.0.113.9")
    assert allowed("/v1/runtime/acquire-task", "127.0.0.1")
    assert not allowed("/v1/runtime/acquire-task", "203.0.113.9")
    here = {"type": "http", "path": "/v1/runtime/acquire-task", "server": ("10.0.0.5", 8000)}
    assert RequestGuard.is_allowed(
        here | {"client": ("10.0.0.5", 1)}
    )  # the server itself, where it listens on one address only
    assert not RequestGuard.is_allowed(here | {"client": ("10.0.0.6", 1)})
    assert not allowed("/v1/control/start-run", "127.0.0.1")
    assert not allowed("/docs", "127.0.0.1")
    assert not allowed("/v1/fleet/x", "127.0.0.1", "websocket")
