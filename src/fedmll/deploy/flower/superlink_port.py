"""The SuperLink's port: connections that send nothing are closed, a client can reply only for itself, and notices for
the operator are passed to the server's process."""

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

from fedmll.core import files
from fedmll.core.text import printable
from fedmll.deploy.flower.flower_internals import SUPERLINK_NODE_ID, stored_children

HANDSHAKE_SECONDS, HEADER_SECONDS = 10.0, 10.0
MAX_CONNECTIONS = 512  # when there are more, the one that has been silent longest is closed
MAX_OBJECTS, MAX_DEPTH = 50_000, 6  # of one reply: message, records, record, array, chunk
MAX_REPLY_BYTES = 2 * 1024**3  # of one reply of one client, whatever the server expects
OVERHEAD_BYTES = 8 * 1024**2  # for everything in a reply that is not a tensor
REPLY_LIMIT_FILE = "largest-reply"  # how many bytes of tensors the largest valid reply has
REPEAT_SECONDS = 60.0  # after which the same notice is written again
NOTICES_FILE = "notices.jsonl"


class TimeoutProtocol(H11Protocol):
    """Closes connections that do not send a request's headers within seconds, also after each response."""

    silent: ClassVar[dict[TimeoutProtocol, asyncio.TimerHandle]] = {}  # connections without a request, oldest first

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._start_timer()
        if len(self.connections) > MAX_CONNECTIONS:
            next(iter(self.silent)).abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        super().handle_events()
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_timer()

    def on_response_complete(self) -> None:
        if not self.transport.is_closing():
            self._start_timer()
        super().on_response_complete()

    def abort(self) -> None:
        self._stop_timer()
        self.transport.abort()

    def _start_timer(self) -> None:
        self._stop_timer()
        self.silent[self] = self.loop.call_later(HEADER_SECONDS, self.abort)

    def _stop_timer(self) -> None:
        timer = self.silent.pop(self, None)
        if timer is not None:
            timer.cancel()


def set_process_limits() -> None:
    """For this process: a timeout for TLS handshakes, and as many open files as the system allows."""
    asyncio.constants.SSL_HANDSHAKE_TIMEOUT = HANDSHAKE_SECONDS  # type: ignore[attr-defined]
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard_limit, hard_limit))


class NoticeWriter:
    """Passes notices from the SuperLink's process to the server's: one line each, the same one once per minute."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NOTICES_FILE
        self.path.unlink(missing_ok=True)
        os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600))
        self.written: dict[str, float] = {}  # text → when

    def write(self, text: str) -> None:
        now = time.monotonic()
        self.written = {known: when for known, when in self.written.items() if now - when < REPEAT_SECONDS}
        if text not in self.written:
            self.written[text] = now
            with self.path.open("a") as file:
                file.write(json.dumps(text) + "\n")


def read_notices(folder: Path, start: int) -> tuple[list[str], int]:
    """The notices from the byte `start` on, and the byte from which to read next time."""
    path = folder / NOTICES_FILE
    if not path.is_file():
        return [], start
    with path.open("rb") as file:
        file.seek(start)
        whole_lines = file.read().rpartition(b"\n")[0]
    end = start + len(whole_lines) + (1 if whole_lines else 0)
    return [printable(json.loads(line)) for line in whole_lines.splitlines()], end


def write_reply_limit(folder: Path, tensor_bytes: int) -> None:
    """In the server's process: replies may have so many bytes of tensors."""
    files.write_atomic(folder / REPLY_LIMIT_FILE, str(tensor_bytes))


def read_reply_limit(folder: Path) -> int:
    """In the SuperLink's process: how many bytes one reply may have. Before the first round it has no tensors."""
    path = folder / REPLY_LIMIT_FILE
    return min(MAX_REPLY_BYTES, OVERHEAD_BYTES + (int(path.read_text()) if path.is_file() else 0))


class ReplyPushGuard:
    """Checks replies before Flower stores them: sender, receiver and size.

    Flower checks the key of the sender, but stores whatever source the message claims.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.received: dict[int, int] = {}  # node → bytes since its last reply began

    def install(self, handlers: Any) -> None:
        """Wrap Flower's functions that receive messages and objects."""
        self.flower_push_messages, self.flower_push_object = handlers.push_messages, handlers.push_object
        handlers.push_messages, handlers.push_object = self.push_messages, self.push_object

    def push_messages(self, request: Any, state: Any) -> Any:
        problem = find_push_problem(request) or find_tree_problem(request.message_object_trees[0], state.object_store)
        if problem:
            raise HTTPException(403, problem)
        self.received[request.node.node_id] = 0
        return self.flower_push_messages(request=request, state=state)

    def push_object(self, request: Any, state: Any) -> Any:
        node = request.node.node_id
        self.received[node] = self.received.get(node, 0) + len(request.object_content)
        if self.received[node] > read_reply_limit(self.folder):
            raise HTTPException(413, "the reply is too large")
        return self.flower_push_object(request=request, state=state)


def find_push_problem(request: Any) -> str | None:
    """Why a request with a reply is rejected, or None."""
    if len(request.messages_list) != 1 or len(request.message_object_trees) != 1:
        return "a request may contain one reply only"
    metadata = request.messages_list[0].metadata
    if metadata.src_node_id != request.node.node_id:
        return "a reply must name its sender as its source"
    if metadata.dst_node_id != SUPERLINK_NODE_ID or not metadata.reply_to_message_id:
        return "nodes may reply to the server only"
    if request.message_object_trees[0].object_id != metadata.message_id:
        return "the objects do not belong to the message"
    return None


def find_tree_problem(tree: Any, store: Any) -> str | None:
    """Why a tree of objects is rejected, or None.

    An object must have the same children wherever it is named, in this tree and in the store, so that no tree can grow
    when it is assembled from several requests.
    """
    children_of: dict[str, list[str]] = {}
    for count, (node, depth) in enumerate(_walk(tree), 1):
        if count > MAX_OBJECTS or depth > MAX_DEPTH:
            return "too many objects"
        children = [child.object_id for child in node.children]
        stored = stored_children(node.object_id, store)
        if children_of.setdefault(node.object_id, children) != children or stored not in (None, children):
            return "an object has other parts than before"
    return None


def _walk(tree: Any) -> Iterator[tuple[Any, int]]:
    """All objects of a tree, with their depths."""
    waiting = [(tree, 1)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting += [(child, depth + 1) for child in node.children]
