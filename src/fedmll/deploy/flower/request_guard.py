"""What the SuperLink's port accepts. All of it runs in the SuperLink's process, in front of Flower's HTTP app.

- TimeoutProtocol closes connections that send nothing.
- RequestGuard: Flower reads a whole request before it checks the sender, and its signature covers the time only. Here
  the headers must authenticate the client first, for this server, path, body and time (`sign_request`). No body may be
  larger than such a request can be, and a client has few requests and bytes in flight. Nodes reach the Fleet API, this
  machine the Runtime API, and nobody anything else.
- ReplyPushGuard: a client can reply only for itself, and with as many bytes as a valid reply has.
- NoticeWriter passes notices for the operator to the server's process.
"""

from __future__ import annotations

import asyncio
import binascii
import hashlib
import json
import os
import resource
import threading
import time
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

from fastapi import HTTPException
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedmll.core import files
from fedmll.core.errors import ConfigError
from fedmll.core.text import printable
from fedmll.deploy.error_codes import FLOWER_ERROR_CODE, RejectionCode, format_rejection
from fedmll.deploy.flower.flower_internals import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    SUPERLINK_NODE_ID,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    bytes_to_public_key,
    now,
    sign_message,
    stored_children,
    verify_signature,
)
from fedmll.deploy.security.client_keys import fingerprint, read_revoked_keys

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
ACTIVATE, DEACTIVATE = FLEET + "activate-node", FLEET + "deactivate-node"
LOOPBACK = ("127.0.0.1", "::1")
IPV4_MAPPED = "::ffff:"  # before the IPv4 address of a client of a server that listens on IPv6
INSTANCE_HEADER = "fedmll-instance"  # a different value for each start of a SuperNode
SERVER_HEADER = "fedmll-server"  # the fingerprint of the certificate of the server that a request is for
BODY_HEADER = "fedmll-body-sha256"
SIGNATURE_HEADER = "fedmll-signature"
AUTHENTICATION_HEADERS = ("flwr-", "fedmll-")  # how the names of all headers begin that identify a client

SMALL, LISTS, OBJECT = 64 * 1024, 4 * 1024**2, 32 * 1024**2  # Flower splits tensors into objects of 5 MB
MAX_BYTES = {
    FLEET + "push-object": OBJECT,
    FLEET + "push-messages": LISTS,
    RUNTIME + "push-object": OBJECT,
    RUNTIME + "push-messages": LISTS,
    RUNTIME + "push-task-output": OBJECT,
}
MAX_REQUESTS_IN_FLIGHT, MAX_BYTES_IN_FLIGHT = 8, 40 * 1024**2  # of one client at the same time
CHUNK_SECONDS, BODY_SECONDS = 20.0, 600.0  # between two chunks of a body, and for all of it
POLL_SECONDS = 2.0  # an idle node asks for messages several times in this time
SILENT_SECONDS = 35.0  # a node that works sends a heartbeat every 30 s
DOUBLE_USE_SECONDS = 120.0  # after two programs used one key, a further one is rejected for so long
LEAVE_SECONDS = 10.0  # a client that connects again within this time has not left
CLOCK_SECONDS = 60.0  # how often the operator is told of a wrong clock
HANDSHAKE_SECONDS, HEADER_SECONDS = 10.0, 10.0
MAX_CONNECTIONS = 512  # when there are more, the one that has been silent longest is closed
MAX_OBJECTS, MAX_DEPTH = 50_000, 6  # of one reply: message, records, record, array, chunk
MAX_REPLY_BYTES = 2 * 1024**3  # of one reply of one client, whatever the server expects
OVERHEAD_BYTES = 8 * 1024**2  # for everything in a reply that is not a tensor
REPLY_LIMIT_FILE = "largest-reply"  # how many bytes of tensors the largest valid reply has
REPEAT_SECONDS = 60.0  # after which the same notice is written again
NOTICES_FILE = "notices.jsonl"

App = Callable[..., Awaitable[None]]


def sign_request(key: Any, server: str, path: str, body: bytes, timestamp: str) -> dict[str, str]:
    """The headers that make a request valid at one server, for one path, one body and one time.

    Args:
        key: the client's private key.
        server: the fingerprint of the server's certificate (`certificates.certificate_fingerprint`).
        path: of the request.
        body: of the request.
        timestamp: as in Flower's own header.
    """
    digest = hashlib.sha256(body).hexdigest()
    signature = sign_message(key, _signed_text(server, path, digest, timestamp))
    return {SERVER_HEADER: server, BODY_HEADER: digest, SIGNATURE_HEADER: b64encode(signature).decode()}


def _signed_text(server: str, path: str, body_digest: str, timestamp: str) -> bytes:
    return json.dumps(["fedmll request", server, path, body_digest, timestamp]).encode()


class RequestRejected(Exception):
    """A request is answered with this HTTP status and text."""

    def __init__(self, status: int, text: str = "") -> None:
        super().__init__(text)
        self.status, self.text = status, text


@dataclass(frozen=True)
class ActiveProgram:
    """A SuperNode that uses a client's key."""

    instance: str
    last_request: float


@dataclass(kw_only=True)
class ClientAuthenticator:
    """Identifies the client of a request by the signature in its headers, before anything else is read."""

    nodes: Mapping[str, str]  # name → public key (PEM)
    server: str  # the fingerprint of this server's certificate
    notify: Callable[[str], None]  # passes a notice to the operator
    revoked_file: Path | None = None  # the list of revoked keys, which may grow while the server runs
    clock: Callable[[], datetime] = now
    active: dict[str, ActiveProgram] = field(default_factory=dict)  # name → the program that uses its key
    replaced: dict[str, ActiveProgram] = field(default_factory=dict)  # name → one that was silent when a newer came
    double_use: dict[str, float] = field(default_factory=dict)  # name → when two programs last used its key
    leaving: dict[str, asyncio.TimerHandle] = field(default_factory=dict)  # name → reports that it has left
    clock_notices: dict[str, float] = field(default_factory=dict)  # name → when its wrong clock was last reported

    def __post_init__(self) -> None:
        self.names = {key.encode(): name for name, key in self.nodes.items()}
        self._revoked_version: tuple[int, int] | None = None  # time and size of the list that was read last
        self._revoked: frozenset[str] = frozenset()

    def identify(self, headers: Mapping[str, str], path: str) -> str:
        """The name of the client; raises RequestRejected."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[SIGNATURE_HEADER], validate=True)
            server, timestamp = headers[SERVER_HEADER], headers[TIMESTAMP_HEADER]
            text = _signed_text(server, path, headers[BODY_HEADER], timestamp)
            name = self.names[key]  # before the signature, which is expensive to verify
            if not verify_signature(bytes_to_public_key(key), text, signature):
                raise ValueError("the signature is wrong")
            age = (self.clock() - datetime.fromisoformat(timestamp)).total_seconds()
        except (KeyError, ValueError, TypeError, UnicodeError, OverflowError, binascii.Error):
            raise RequestRejected(401, format_rejection(RejectionCode.UNKNOWN)) from None
        if fingerprint(key) in self._revoked_keys(name):
            self.notify(f"{name} is rejected: its key was revoked")
            raise RequestRejected(401, format_rejection(RejectionCode.REVOKED))
        if server != self.server:
            self.notify(f"{name} is rejected: its request is for a server with another certificate")
            raise RequestRejected(401, format_rejection(RejectionCode.SERVER))
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            direction = "ahead of" if age < 0 else "behind"
            if time.monotonic() - self.clock_notices.get(name, -CLOCK_SECONDS) >= CLOCK_SECONDS:
                self.clock_notices[name] = time.monotonic()
                self.notify(
                    f"{name} is rejected: its clock is {abs(age):.0f} s {direction} the server's; the client was told "
                    "to set it"
                )
            raise RequestRejected(401, format_rejection(RejectionCode.CLOCK, -age))
        return name

    def _revoked_keys(self, name: str) -> frozenset[str]:
        """The revoked keys at this moment; the list is read again when it has changed. A revoked key stays revoked."""
        if self.revoked_file is not None and os.path.lexists(self.revoked_file):
            try:
                status = self.revoked_file.stat()
                version = (status.st_mtime_ns, status.st_size)
                if version != self._revoked_version:
                    self._revoked |= read_revoked_keys(self.revoked_file).keys()
                    self._revoked_version = version
            except (ConfigError, OSError) as error:
                self.notify(f"{name} has to wait: {error}")
                raise RequestRejected(503) from None
        return self._revoked

    async def register_program(self, name: str, instance: str, path: str) -> None:
        """Allow one program per key.

        A newer program is rejected if the older one is still active. A program that was killed is not, so the one that
        replaces it is accepted at once.
        """
        program, current = ActiveProgram(instance, time.monotonic()), self.active.get(name)
        if current is None or current.instance == instance:
            self.active[name] = program
        elif path == ACTIVATE:
            last_double_use = self.double_use.get(name, -DOUBLE_USE_SECONDS)
            was_used_twice = program.last_request - last_double_use < DOUBLE_USE_SECONDS
            is_recent = program.last_request - current.last_request < SILENT_SECONDS
            if is_recent and (was_used_twice or await self._is_still_active(name, current)):
                raise self._used_twice(name)
            self.replaced[name], self.active[name] = current, ActiveProgram(instance, time.monotonic())
        elif name in self.replaced and self.replaced[name].instance == instance:
            del self.replaced[name]  # the older program was only busy: it stays, and the newer one is rejected
            self.active[name] = program
            self._used_twice(name)
        else:
            raise self._used_twice(name)
        if name in self.leaving:
            self.leaving.pop(name).cancel()
        if path == DEACTIVATE:
            del self.active[name]
            self.leaving[name] = asyncio.get_running_loop().call_later(LEAVE_SECONDS, self._report_leave, name)

    def _report_leave(self, name: str) -> None:
        del self.leaving[name]
        self.notify(f"{name} has left: its program was stopped there")

    async def _is_still_active(self, name: str, current: ActiveProgram) -> bool:
        until = time.monotonic() + POLL_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(0.1)
            latest = self.active.get(name)
            if latest is None:
                return False  # it has left
            if latest.last_request > current.last_request:
                return True
        return False

    def _used_twice(self, name: str) -> RequestRejected:
        self.double_use[name] = time.monotonic()
        self.notify(
            f"{name}: a second program uses its key while the first is connected; the newer program is rejected"
        )
        return RequestRejected(401, format_rejection(RejectionCode.TWICE))


class RequestGuard:
    """The ASGI app in front of Flower's. The authenticator is None with --insecure."""

    def __init__(self, app: App, authenticator: ClientAuthenticator | None = None) -> None:
        self.app, self.authenticator = app, authenticator
        self.in_flight: dict[str, list[int]] = {}  # client → the sizes of its requests that are not answered yet

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            headers = _read_headers(scope)
            client = self._authenticate(scope, headers)
            with self._admit(client, _body_size(scope["path"], headers)):
                if client is not None and self.authenticator is not None:  # it may wait, so it is counted already
                    instance = headers.get(INSTANCE_HEADER, "")[:64]
                    await self.authenticator.register_program(client, instance, scope["path"])
                body = await self._read_request(scope["path"], headers, receive)
                if body is not None:
                    await self.app(scope, _replay(body, receive), send)
        except RequestRejected as error:
            await _send_rejection(send, error)

    @staticmethod
    def is_allowed(scope: Any) -> bool:
        """Whether the path may be requested from the client's address."""
        path, client = scope.get("path", ""), (scope.get("client") or ("",))[0].removeprefix(IPV4_MAPPED)
        server = (scope.get("server") or ("",))[0]  # a client with the server's own address is on this machine
        local = path.startswith(RUNTIME) and client in (*LOOPBACK, server.removeprefix(IPV4_MAPPED))
        return scope["type"] == "http" and (local or path.startswith(FLEET))

    def _authenticate(self, scope: Any, headers: Mapping[str, str]) -> str | None:
        """The client of a request: its name, or without keys its address. None: this machine's server."""
        path = scope["path"]
        if not self.is_allowed(scope):
            raise RequestRejected(403)
        if not path.startswith(FLEET):
            return None
        if self.authenticator is None:
            return str((scope.get("client") or ("",))[0])
        return self.authenticator.identify(headers, path)

    @contextmanager
    def _admit(self, client: str | None, size: int) -> Iterator[None]:
        """Limit the requests of one client that are worked on at the same time, and their bytes.

        Bodies are in memory. A SuperNode sends two objects at a time, and repeats a request that is answered with 503.
        """
        if client is None:
            yield
            return
        sizes = self.in_flight.setdefault(client, [])
        if len(sizes) >= MAX_REQUESTS_IN_FLIGHT or sum(sizes) + size > MAX_BYTES_IN_FLIGHT:
            if self.authenticator is not None:
                self.authenticator.notify(
                    f"{client} sends more at the same time than a site needs; the rest is rejected"
                )
            raise RequestRejected(503)
        sizes.append(size)
        try:
            yield
        finally:
            sizes.remove(size)
            if not sizes:
                del self.in_flight[client]

    async def _read_request(self, path: str, headers: Mapping[str, str], receive: Any) -> bytes | None:
        """The body of an accepted request; None if the client has hung up. Raises RequestRejected."""
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await _read_body(receive, MAX_BYTES.get(path, SMALL))
        except TimeoutError:
            raise RequestRejected(408) from None
        is_signed = path.startswith(FLEET) and self.authenticator is not None
        if is_signed and body is not None and hashlib.sha256(body).hexdigest() != headers[BODY_HEADER]:
            raise RequestRejected(401, format_rejection(RejectionCode.UNKNOWN))
        return body


def _read_headers(scope: Any) -> dict[str, str]:
    """The headers by name. Flower reads the first header of a name: a second one could name another client."""
    names = [name.decode("latin-1").lower() for name, _ in scope["headers"]]
    identifying = [name for name in names if name.startswith(AUTHENTICATION_HEADERS)]
    if len(set(identifying)) < len(identifying):
        raise RequestRejected(400)
    return dict(zip(names, (value.decode("latin-1") for _, value in scope["headers"]), strict=True))


def _body_size(path: str, headers: Mapping[str, str]) -> int:
    """How many bytes the body may have: as declared, or as many as such a request can have."""
    max_bytes, declared = MAX_BYTES.get(path, SMALL), headers.get("content-length")
    if declared is None:
        return max_bytes
    if not declared.isdigit() or int(declared) > max_bytes:
        raise RequestRejected(413)
    return int(declared)


async def _read_body(receive: Any, max_bytes: int) -> bytes | None:
    body = bytearray()
    while True:
        chunk = await asyncio.wait_for(receive(), CHUNK_SECONDS)
        if chunk["type"] != "http.request":
            return None
        body += chunk.get("body", b"")
        if len(body) > max_bytes:
            raise RequestRejected(413)
        if not chunk.get("more_body", False):
            return bytes(body)


def _replay(body: bytes, receive: Any) -> Any:
    """A `receive` for the app behind the guard: first the body, then further events of the connection."""
    events = [{"type": "http.request", "body": body, "more_body": False}]

    async def next_event() -> Any:
        return events.pop() if events else await receive()

    return next_event


async def _send_rejection(send: Any, error: RequestRejected) -> None:
    """Answer and close the connection; the rest of the request is not read."""
    body = json.dumps({"code": FLOWER_ERROR_CODE, "detail": error.text}).encode() if error.text else b""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [(b"content-type", b"application/json")] if body else []
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


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
        self.received: dict[int, int] = {}  # node → bytes that were stored since its last reply began
        self.lock = threading.Lock()  # Flower's functions run in several threads
        self.replies: set[str] = set()  # that were begun: to announce one again does not start a new count

    def install(self, handlers: Any) -> None:
        """Wrap Flower's functions that receive messages and objects."""
        self.flower_push_messages, self.flower_push_object = handlers.push_messages, handlers.push_object
        handlers.push_messages, handlers.push_object = self.push_messages, self.push_object

    def push_messages(self, request: Any, state: Any) -> Any:
        problem = find_push_problem(request) or find_tree_problem(request.message_object_trees[0], state.object_store)
        if problem:
            raise HTTPException(403, problem)
        response = self.flower_push_messages(request=request, state=state)
        reply = request.messages_list[0].metadata.message_id
        if response.objects_to_push and reply not in self.replies:  # Flower accepts one reply to each message
            self.replies.add(reply)
            with self.lock:
                self.received[request.node.node_id] = 0
        return response

    def push_object(self, request: Any, state: Any) -> Any:
        node = request.node.node_id
        size, most = len(request.object_content), read_reply_limit(self.folder)
        with self.lock:
            if self.received.get(node, 0) + size > most:
                raise HTTPException(413, "the reply is too large")
            self.received[node] = self.received.get(node, 0) + size
        response = self.flower_push_object(request=request, state=state)
        if not response.stored:  # for example because it was stored before
            with self.lock:
                self.received[node] = max(0, self.received[node] - size)
        return response


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
