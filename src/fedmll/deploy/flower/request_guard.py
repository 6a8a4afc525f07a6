"""A guard in front of Flower's HTTP app.

Flower reads a whole request before it checks the sender. Here the headers must authenticate the client first, and no
body may be larger than such a request can be. Nodes reach the Fleet API, this machine the Runtime API, and nobody
anything else. Notices for the operator are passed to the server's process.
"""

from __future__ import annotations

import asyncio
import binascii
import json
import time
from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from fedmll.deploy.error_codes import FLOWER_ERROR_CODE, RejectionCode, format_rejection
from fedmll.deploy.flower.flower_internals import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    bytes_to_public_key,
    now,
    verify_signature,
)
from fedmll.deploy.security.client_keys import fingerprint, read_revoked_keys

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
ACTIVATE, DEACTIVATE = FLEET + "activate-node", FLEET + "deactivate-node"
LOOPBACK = ("127.0.0.1", "::1")
INSTANCE_HEADER = "fedmll-instance"  # a different value for each start of a SuperNode

SMALL, LISTS, OBJECT = 64 * 1024, 4 * 1024**2, 32 * 1024**2  # Flower splits tensors into objects of 5 MB
MAX_BYTES = {
    FLEET + "push-object": OBJECT,
    FLEET + "push-messages": LISTS,
    RUNTIME + "push-object": OBJECT,
    RUNTIME + "push-messages": LISTS,
    RUNTIME + "push-task-output": OBJECT,
}
CHUNK_SECONDS, BODY_SECONDS = 20.0, 600.0  # between two chunks of a body, and for all of it
POLL_SECONDS = 2.0  # an idle node asks for messages several times in this time
SILENT_SECONDS = 35.0  # a node that works sends a heartbeat every 30 s
DOUBLE_USE_SECONDS = 120.0  # after two programs used one key, a further one is rejected for so long
CLOCK_SECONDS = 60.0  # how often the operator is told of a wrong clock

App = Callable[..., Awaitable[None]]


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
    """Identifies the client of a request by the signature in its headers, before anything else is read.

    Args:
        nodes: name → public key (PEM).
        notify: passes a notice to the operator.
        revoked_file: the list of revoked keys, which may grow while the server runs.
        clock: the current time.
    """

    nodes: Mapping[str, str]
    notify: Callable[[str], None]
    revoked_file: Path | None = None
    clock: Callable[[], datetime] = now
    active: dict[str, ActiveProgram] = field(default_factory=dict)  # name → the program that uses its key
    replaced: dict[str, ActiveProgram] = field(default_factory=dict)  # name → one that was silent when a newer came
    double_use: dict[str, float] = field(default_factory=dict)  # name → when two programs last used its key
    clock_notices: dict[str, float] = field(default_factory=dict)  # name → when its wrong clock was last reported

    def __post_init__(self) -> None:
        self.names = {key.encode(): name for name, key in self.nodes.items()}
        self._revoked_version: tuple[int, int] | None = None  # time and size of the list that was read last
        self._revoked: frozenset[str] = frozenset()

    def identify(self, headers: Mapping[str, str]) -> str:
        """The name of the client; raises RequestRejected."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            timestamp = headers[TIMESTAMP_HEADER]
            name = self.names[key]  # before the signature, which is expensive to verify
            if not verify_signature(bytes_to_public_key(key), timestamp.encode("ascii"), signature):
                raise ValueError("the signature is wrong")
            age = (self.clock() - datetime.fromisoformat(timestamp)).total_seconds()
        except (KeyError, ValueError, TypeError, UnicodeError, OverflowError, binascii.Error):
            raise RequestRejected(401, format_rejection(RejectionCode.UNKNOWN)) from None
        if fingerprint(key) in self._revoked_keys():
            self.notify(f"{name} is rejected: its key was revoked")
            raise RequestRejected(401, format_rejection(RejectionCode.REVOKED))
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

    def _revoked_keys(self) -> frozenset[str]:
        """The revoked keys at this moment; the list is read again when it has changed."""
        if self.revoked_file is not None and self.revoked_file.is_file():
            status = self.revoked_file.stat()
            version = (status.st_mtime_ns, status.st_size)
            if version != self._revoked_version:
                self._revoked_version, self._revoked = version, frozenset(read_revoked_keys(self.revoked_file))
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
        if path == DEACTIVATE:
            del self.active[name]
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
    """The ASGI app in front of Flower's.

    Args:
        app: Flower's.
        authenticator: identifies clients; None with --insecure.
    """

    def __init__(self, app: App, authenticator: ClientAuthenticator | None = None) -> None:
        self.app, self.authenticator = app, authenticator

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            body = await self._read_request(scope, receive)
        except RequestRejected as error:
            await _send_rejection(send, error)
            return
        except TimeoutError:
            await _send_rejection(send, RequestRejected(408))
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    @staticmethod
    def is_allowed(scope: Any) -> bool:
        """Whether the path may be requested from the client's address."""
        path, client = scope.get("path", ""), (scope.get("client") or ("",))[0]
        server = (scope.get("server") or ("",))[0]  # a client with the server's own address is on this machine
        local = path.startswith(RUNTIME) and client in (*LOOPBACK, server)
        return scope["type"] == "http" and (local or path.startswith(FLEET))

    async def _read_request(self, scope: Any, receive: Any) -> bytes | None:
        """The body of an accepted request; None if the client has hung up. Raises RequestRejected."""
        path = scope["path"]
        if not self.is_allowed(scope):
            raise RequestRejected(403)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path.startswith(FLEET) and self.authenticator is not None:
            name = self.authenticator.identify(headers)
            await self.authenticator.register_program(name, headers.get(INSTANCE_HEADER, "")[:64], path)
        max_bytes, declared = MAX_BYTES.get(path, SMALL), headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > max_bytes:
            raise RequestRejected(413)
        async with asyncio.timeout(BODY_SECONDS):
            return await _read_body(receive, max_bytes)


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
