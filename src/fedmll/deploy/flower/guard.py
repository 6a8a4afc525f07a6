"""In front of Flower's HTTP app. Flower reads a whole request before it asks who sends it; here the headers must prove
it first, and no body is larger than such a request can be. Nodes reach the Fleet API, this machine the Runtime API,
nobody anything else. What an operator should know is told to the server's own process."""

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

from fedmll.deploy import turned_away
from fedmll.deploy.flower.internals import (
    FLEET_HTTP_PUBLIC_KEY_HEADER,
    FLEET_HTTP_SIGNATURE_HEADER,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    bytes_to_public_key,
    now,
    verify_signature,
)
from fedmll.deploy.keys import fingerprint, revoked_in

FLEET, RUNTIME = "/v1/fleet/", "/v1/runtime/"
ACTIVATE, DEACTIVATE = FLEET + "activate-node", FLEET + "deactivate-node"
LOOPBACK = ("127.0.0.1", "::1")
INSTANCE_HEADER = "fedmll-instance"  # another one for each start of a SuperNode

SMALL, LISTS, OBJECT = 64 * 1024, 4 * 1024**2, 32 * 1024**2  # Flower cuts tensors into objects of 5 MB
MOST_BYTES = {
    FLEET + "push-object": OBJECT,
    FLEET + "push-messages": LISTS,
    RUNTIME + "push-object": OBJECT,
    RUNTIME + "push-messages": LISTS,
    RUNTIME + "push-task-output": OBJECT,
}
IDLE_SECONDS, BODY_SECONDS = 20.0, 600.0  # between two pieces of a body, and all of it
SECOND_SECONDS = 2.0  # a node that is idle asks for messages twice a second
SILENT_SECONDS = 35.0  # a node that works is heard every 30 s
WARY_SECONDS = 120.0  # after two programs were seen with one key
CLOCK_SECONDS = 60.0  # how often a wrong clock is told of: each request may name another time

App = Callable[..., Awaitable[None]]
Tell = Callable[[str], None]


class Refused(Exception):
    """Status, and what the client is told."""

    def __init__(self, status: int, told: str = "") -> None:
        super().__init__(told)
        self.status, self.told = status, told


@dataclass
class Heard:
    instance: str
    when: float


@dataclass
class Door:
    """Who comes: by the signature in the headers, before anything else is read."""

    nodes: Mapping[str, str]  # name → public key (PEM)
    tell: Tell
    revoked: Path | None = None  # the list of revoked keys; it may grow while the server runs
    clock: Callable[[], datetime] = now
    heard: dict[str, Heard] = field(default_factory=dict)  # name → who serves under it
    before: dict[str, Heard] = field(default_factory=dict)  # who did, until somebody else came while it was silent
    pairs: dict[str, float] = field(default_factory=dict)  # name → when two programs were last seen under it
    clocks: dict[str, float] = field(default_factory=dict)  # name → when its wrong clock was last told of
    _looked: tuple[int, int] | None = None  # when the list was written that was read last, and how long it is
    _revoked: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        self.names = {key.encode(): name for name, key in self.nodes.items()}

    def name_of(self, headers: Mapping[str, str]) -> str:
        """The client's name, or Refused."""
        try:
            key = b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER], validate=True)
            signature = b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER], validate=True)
            said = headers[TIMESTAMP_HEADER]
            name = self.names[key]  # a stranger's signature is not worth the arithmetic
            if not verify_signature(bytes_to_public_key(key), said.encode("ascii"), signature):
                raise ValueError("not its signature")
            age = (self.clock() - datetime.fromisoformat(said)).total_seconds()
        except (KeyError, ValueError, TypeError, UnicodeError, OverflowError, binascii.Error):
            raise Refused(401, turned_away.announced(turned_away.UNKNOWN)) from None
        if fingerprint(key) in self._revoked_now():
            self.tell(f"{name} is refused: its key was revoked")
            raise Refused(401, turned_away.announced(turned_away.REVOKED))
        if not -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            way = "ahead of" if age < 0 else "behind"
            if time.monotonic() - self.clocks.get(name, -CLOCK_SECONDS) >= CLOCK_SECONDS:
                self.clocks[name] = time.monotonic()
                self.tell(f"{name} is refused: its clock is {abs(age):.0f} s {way} the server's; it was told to set it")
            raise Refused(401, turned_away.announced(turned_away.CLOCK, -age))
        return name

    def _revoked_now(self) -> frozenset[str]:
        """As the list is at this request: it is read again when it was written."""
        if self.revoked is not None and self.revoked.is_file():
            file = self.revoked.stat()
            if (file.st_mtime_ns, file.st_size) != self._looked:
                self._looked, self._revoked = (file.st_mtime_ns, file.st_size), frozenset(revoked_in(self.revoked))
        return self._revoked

    async def enter(self, name: str, instance: str, path: str) -> None:
        """One program a key. A newer one is refused when the older one is heard of again; a program that was killed is
        not, so its successor may come at once."""
        here, current = Heard(instance, time.monotonic()), self.heard.get(name)
        if current is None or current.instance == instance:
            self.heard[name] = here
        elif path == ACTIVATE:
            wary = here.when - self.pairs.get(name, -WARY_SECONDS) < WARY_SECONDS
            if here.when - current.when < SILENT_SECONDS and (wary or await self._still_there(name, current)):
                raise self._twice(name)
            self.before[name], self.heard[name] = current, Heard(instance, time.monotonic())
        elif name in self.before and self.before[name].instance == instance:
            del self.before[name]  # the older one only worked: it stays, and the newer one goes
            self.heard[name] = here
            self._twice(name)
        else:
            raise self._twice(name)
        if path == DEACTIVATE:
            del self.heard[name]
            self.tell(f"{name} has left: its program was ended there")

    async def _still_there(self, name: str, current: Heard) -> bool:
        until = time.monotonic() + SECOND_SECONDS
        while time.monotonic() < until:
            await asyncio.sleep(0.1)
            latest = self.heard.get(name)
            if latest is None:
                return False  # it said goodbye
            if latest.when > current.when:
                return True
        return False

    def _twice(self, name: str) -> Refused:
        self.pairs[name] = time.monotonic()
        self.tell(f"{name}: a second program came with its key while the first is connected; the newer one is refused")
        return Refused(401, turned_away.announced(turned_away.TWICE))


class Guard:
    def __init__(self, app: App, door: Door | None = None) -> None:
        self.app, self.door = app, door  # no door: --insecure

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        if scope["type"] != "http":
            return
        try:
            body = await self._let_in(scope, receive)
        except Refused as refusal:
            await _answer(send, refusal)
            return
        except TimeoutError:
            await _answer(send, Refused(408))
            return
        if body is not None:
            await self.app(scope, _again(body, receive), send)

    @staticmethod
    def allowed(scope: Any) -> bool:
        """Whether anybody may ask for it from there."""
        path, client = scope.get("path", ""), (scope.get("client") or ("",))[0]
        own = (scope.get("server") or ("",))[0]  # who comes from the address that it comes to is on this machine
        here = path.startswith(RUNTIME) and client in (*LOOPBACK, own)
        return scope["type"] == "http" and (here or path.startswith(FLEET))

    async def _let_in(self, scope: Any, receive: Any) -> bytes | None:
        """The request's body, or Refused; None: the sender hung up."""
        path = scope["path"]
        if not self.allowed(scope):
            raise Refused(403)
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if path.startswith(FLEET) and self.door is not None:
            name = self.door.name_of(headers)
            await self.door.enter(name, headers.get(INSTANCE_HEADER, "")[:64], path)
        most, declared = MOST_BYTES.get(path, SMALL), headers.get("content-length", "0")
        if not declared.isdigit() or int(declared) > most:
            raise Refused(413)
        async with asyncio.timeout(BODY_SECONDS):
            return await _read(receive, most)


async def _read(receive: Any, most: int) -> bytes | None:
    body = bytearray()
    while True:
        piece = await asyncio.wait_for(receive(), IDLE_SECONDS)
        if piece["type"] != "http.request":
            return None
        body += piece.get("body", b"")
        if len(body) > most:
            raise Refused(413)
        if not piece.get("more_body", False):
            return bytes(body)


def _again(body: bytes, receive: Any) -> Any:
    """A body that was read, for who reads it next; after it, what the connection says."""
    pieces = [{"type": "http.request", "body": body, "more_body": False}]

    async def give() -> Any:
        return pieces.pop() if pieces else await receive()

    return give


async def _answer(send: Any, refusal: Refused) -> None:
    """And hang up: what is still on its way is not read."""
    body = json.dumps({"code": turned_away.CODE, "detail": refusal.told}).encode() if refusal.told else b""
    headers = [(b"content-length", str(len(body)).encode()), (b"connection", b"close")]
    headers += [(b"content-type", b"application/json")] if body else []
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
