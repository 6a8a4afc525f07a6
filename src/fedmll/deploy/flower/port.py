"""The SuperLink's port: connections that send nothing are closed, replies are their sender's own, and what an operator
should know goes to the server's process."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from fastapi import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedmll import files
from fedmll.deploy.flower.internals import SUPERLINK_NODE_ID, parts_of
from fedmll.errors import printable

HANDSHAKE_SECONDS, HEADER_SECONDS = 10.0, 10.0
MOST_CONNECTIONS = 512  # beyond it, the one that has been silent longest goes
MOST_OBJECTS, DEEPEST = 50_000, 6  # of one reply: message, records, record, array, chunk
REPLY_BYTES = 2 * 1024**3  # that one client may send for one reply, whatever is asked for
BESIDE_BYTES = 8 * 1024**2  # words and Flower's own, beside the tensors that are asked for
LARGEST = "largest-reply"  # the file that says how many bytes of tensors the largest good reply has
AGAIN_SECONDS = 60.0  # the same notice
NOTICES = "notices.jsonl"


class ImpatientProtocol(H11Protocol):
    """Who connects sends a request's headers within seconds, the first time and after each answer."""

    silent: ClassVar[dict[ImpatientProtocol, asyncio.TimerHandle]] = {}  # who sends no request, longest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._expect_request()
        if len(self.connections) > MOST_CONNECTIONS:
            next(iter(self.silent)).hang_up()

    def connection_lost(self, exc: Exception | None) -> None:
        self._request_came()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._request_came()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._expect_request()
        super().on_response_complete()

    def hang_up(self) -> None:
        self._request_came()
        self.transport.abort()

    def _expect_request(self) -> None:
        self._request_came()
        self.silent[self] = self.loop.call_later(HEADER_SECONDS, self.hang_up)

    def _request_came(self) -> None:
        timer = self.silent.pop(self, None)
        if timer is not None:
            timer.cancel()


def be_impatient() -> None:
    """For this process: TLS handshakes that hang, and as many open files as the system allows."""
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_SECONDS  # type: ignore[attr-defined]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


class Notices:
    """From the SuperLink's process to the server's: a line each, the same one not more than once a minute."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOTICES
        self.path.unlink(missing_ok=True)
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600))
        self.told: dict[str, float] = {}

    def tell(self, text: str) -> None:
        now = time.monotonic()
        self.told = {known: when for known, when in self.told.items() if now - when < AGAIN_SECONDS}
        if text not in self.told:
            self.told[text] = now
            with self.path.open("a") as file:
                file.write(json.dumps(text) + "\n")


def new_notices(folder: Path, start: int) -> tuple[list[str], int]:
    """What was told since `start`, and where to go on."""
    path = folder / NOTICES
    if not path.is_file():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        whole = file.read().rpartition(b"\n")[0]
    return [printable(json.loads(line)) for line in whole.splitlines()], start + len(whole) + (1 if whole else 0)


def expect_replies(folder: Path, tensors: int) -> None:
    """From the server's process to the SuperLink's: replies may have so many bytes of tensors."""
    files.write(folder / LARGEST, str(tensors))


def most_bytes(folder: Path) -> int:
    """That one reply may have; before anybody was asked for tensors, words only."""
    path = folder / LARGEST
    return min(REPLY_BYTES, BESIDE_BYTES + (int(path.read_text()) if path.is_file() else 0))


class Pushes:
    """Wraps Flower's handlers: a reply is from who sends it, to the server, and of bounded size. Flower checks the key
    of the sender, and stores whatever source the message claims."""

    def __init__(self, handlers: Any, folder: Path) -> None:
        self.folder = folder
        self.push_messages, self.push_object = handlers.push_messages, handlers.push_object
        self.bytes: dict[int, int] = {}  # node → since its last reply began
        handlers.push_messages, handlers.push_object = self.messages, self.object

    def messages(self, request: Any, state: Any) -> Any:
        problem = wrong_push(request) or wrong_tree(request.message_object_trees[0], state.object_store)
        if problem:
            raise HTTPException(403, problem)
        self.bytes[request.node.node_id] = 0
        return self.push_messages(request=request, state=state)

    def object(self, request: Any, state: Any) -> Any:
        node = request.node.node_id
        self.bytes[node] = self.bytes.get(node, 0) + len(request.object_content)
        if self.bytes[node] > most_bytes(self.folder):
            raise HTTPException(413, "the reply is too large")
        return self.push_object(request=request, state=state)


def wrong_push(request: Any) -> str | None:
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "one reply at a time"
    about = request.messages_list[0].metadata
    if about.src_node_id != request.node.node_id:
        return "a reply must be from its sender"
    if about.dst_node_id != SUPERLINK_NODE_ID or not about.reply_to_message_id:
        return "nodes reply to the server, and to nobody else"
    if request.message_object_trees[0].object_id != about.message_id:
        return "the objects are not the message's"
    return None


def wrong_tree(tree: Any, store: Any) -> str | None:
    """An object has the same parts wherever it is named, here and in the store, and all of them are listed: so no tree
    grows when it is put together from several requests."""
    parts: dict[str, list[str]] = {}
    for count, (node, depth) in enumerate(_nodes(tree), 1):
        if count > MOST_OBJECTS or depth > DEEPEST:
            return "too many objects"
        children = [child.object_id for child in node.children]
        known = parts_of(node.object_id, store)
        if parts.setdefault(node.object_id, children) != children or known not in (None, children):
            return "an object has other parts than before"
    return None


def _nodes(tree: Any) -> Iterator[tuple[Any, int]]:
    waiting = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in node.children]
