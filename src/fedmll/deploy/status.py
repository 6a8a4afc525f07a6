"""How a run stands, for its operator: collected while it runs, and shown by a small web server of its own thread, which
reads and never waits for the run, nor the run for it."""

from __future__ import annotations

import ipaddress
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any

from fedmll.data.federation import Federation
from fedmll.deploy import status_page
from fedmll.deploy.setting import Server
from fedmll.errors import ConfigError
from fedmll.experiment import Experiment
from fedmll.running.folder import Row
from fedmll.running.observers import Observer, Result

LATEST = 10  # rounds that the time left is estimated from
REQUEST_SECONDS = 5


@dataclass
class Client:
    connected: bool = False
    excluded: bool = False
    images: int | None = None  # None: it has not come yet
    last_round: int | None = None  # that it sent a good reply in
    last_error: str = ""
    last_error_at: float | None = None
    errors: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class Status(Observer):
    """What the run tells (an Observer), and what is recorded of its clients."""

    experiment: Experiment
    server: Server
    state: str = "waiting"
    reason: str = ""
    round: int = 0  # that is under way
    replies: tuple[int, int] = (0, 0)  # of it, of how many
    seconds: list[float] = field(default_factory=list)  # of the rounds since the server was started
    done: int = 0
    begin: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.clients = {name: Client() for name in self.server.invited}

    def record(self, event: str, facts: dict[str, Any]) -> None:
        with self.lock:
            client = self.clients.get(facts.get("client", ""))
            if client is None:
                return
            if event == "joined":
                client.connected, client.images = True, facts["images"]
            elif event == "reply":
                client.bytes_up += facts["bytes"]
                client.last_round = facts["round"]
            elif event == "sent":
                client.bytes_down += facts["bytes"]
            elif event in ("excluded", "readmitted"):
                client.excluded = event == "excluded"
                client.connected = client.connected and not client.excluded
            elif event in ("refused", "left out", "gone"):
                client.connected = client.connected and event != "gone"
                client.last_error, client.last_error_at = facts["text"], time.time()
                client.errors += 1

    def started(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        with self.lock:
            self.state, self.done = "running", first_round - 1

    def client_done(self, round: int, done: int, total: int) -> None:
        with self.lock:
            self.round, self.replies = round, (done, total)

    def round_done(self, row: Row) -> None:
        with self.lock:
            self.done = row["round"]
            self.seconds.append(row["seconds"])

    def finished(self, result: Result) -> None:
        with self.lock:
            self.state = "finished"

    def stopped(self, reason: str) -> None:
        with self.lock:
            self.state, self.reason = "stopped", reason

    def shown(self) -> dict[str, Any]:
        """Everything, as /status.json has it."""
        with self.lock:
            rounds = self.experiment.training.rounds
            left = median(self.seconds[-LATEST:]) * (rounds - self.done) if self.seconds else None
            return {
                "run": self.server.run,
                "method": self.experiment.method.name,
                "state": self.state,
                "reason": self.reason,
                "round": self.round,
                "rounds": rounds,
                "rounds_done": self.done,
                "replies": self.replies[0],
                "asked": self.replies[1],
                "seconds_running": round(time.time() - self.begin, 1),
                "seconds_a_round": self.seconds[-1] if self.seconds else None,
                "seconds_left": None if left is None else round(left, 1),
                "bytes_up": sum(client.bytes_up for client in self.clients.values()),
                "bytes_down": sum(client.bytes_down for client in self.clients.values()),
                "clients": {name: asdict(client) for name, client in self.clients.items()},
            }


def address_in(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"--status takes HOST:PORT, for example 127.0.0.1:8080; it got '{text}'.")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@contextmanager
def page(address: str | None, status: Status) -> Iterator[int | None]:
    """Serve it at an address (None: nowhere) for the time of the block; the port."""
    if address is None:
        yield None
        return
    place = address_in(address)

    class Handler(Answering):
        shown = staticmethod(status.shown)
        host = place[0]

    try:
        server = ThreadingHTTPServer(place, Handler)
    except OSError as error:
        raise ConfigError(f"The status page cannot listen on {address} ({error}); choose another --status.") from None
    server.daemon_threads = True
    server.block_on_close = False
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class Answering(BaseHTTPRequestHandler):
    """GET of three paths, and nothing else."""

    timeout = REQUEST_SECONDS
    shown: Any
    host = ""
    server_version, sys_version = "fedmll", ""

    def do_GET(self) -> None:
        makes = {
            "/": ("text/html; charset=utf-8", status_page.html),
            "/status.json": ("application/json", lambda shown: json.dumps(shown, indent=2) + "\n"),
            "/metrics": ("text/plain; version=0.0.4; charset=utf-8", status_page.prometheus),
        }
        path = self.path.partition("?")[0]
        if not self._addressed():
            self.send_error(403, "under this name there is no page")  # a stranger's name that points here
        elif path not in makes:
            self.send_error(404)
        else:
            kind, make = makes[path]
            self._send(kind, make(self.shown()).encode())

    def _addressed(self) -> bool:
        """Whether the browser was sent to this address, and not by a web page to a name of its own that leads here."""
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name in ("localhost", self.host)

    def _send(self, kind: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
