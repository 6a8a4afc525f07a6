"""The status of a run, for its operator.

It is collected while the run goes on, and shown by a small web server in a thread of its own, which only reads. Neither
waits for the other.
"""

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

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.network import parse_address
from fedmll.data.federation import Federation
from fedmll.deploy.server import status_page
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import INTERRUPTED, Callback, Result

RECENT_ROUNDS = 10  # from which the remaining time is estimated
REQUEST_SECONDS = 5


@dataclass
class ClientStatus:
    """The status of one client."""

    connected: bool = False
    excluded: bool = False
    images: int | None = None  # None: it has not joined yet
    last_round: int | None = None  # in which it sent a valid reply
    last_error: str = ""
    last_error_at: float | None = None
    errors: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


@dataclass
class RunStatus(Callback):
    """The status of a run: it follows the run as a callback, and its clients by the events that are recorded."""

    experiment: Experiment
    settings: ServerSettings
    state: str = "waiting"
    reason: str = ""
    round: int = 0  # the current one
    replies: tuple[int, int] = (0, 0)  # in this round: received, expected
    seconds: list[float] = field(default_factory=list)  # of each round since the server was started
    rounds_done: int = 0
    start: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.lock = threading.Lock()
        self.clients = {name: ClientStatus() for name in self.settings.invited}

    def record(self, event: str, facts: dict[str, Any]) -> None:
        """Follow an event of the audit log."""
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
            elif event in ("rejected", "skipped", "disconnected"):
                client.connected = client.connected and event != "disconnected"
                client.last_error, client.last_error_at = facts["text"], time.time()
                client.errors += 1

    def on_run_start(self, experiment: Experiment, federation: Federation, first_round: int) -> None:
        with self.lock:
            self.state, self.rounds_done = "running", first_round - 1

    def on_client_end(self, round: int, done: int, total: int) -> None:
        with self.lock:
            self.round, self.replies = round, (done, total)

    def on_round_end(self, row: MetricsRow) -> None:
        with self.lock:
            self.rounds_done = row["round"]
            self.seconds.append(row["seconds"])

    def on_run_end(self, result: Result) -> None:
        with self.lock:
            self.state = "finished"

    def on_run_error(self, error: BaseException) -> None:
        with self.lock:
            self.state, self.reason = "stopped", str(error) or INTERRUPTED

    def to_json(self) -> dict[str, Any]:
        """The content of /status.json."""
        with self.lock:
            rounds = self.experiment.training.rounds
            left = median(self.seconds[-RECENT_ROUNDS:]) * (rounds - self.rounds_done) if self.seconds else None
            return {
                "run": self.settings.run,
                "method": self.experiment.method.name,
                "state": self.state,
                "reason": self.reason,
                "round": self.round,
                "rounds": rounds,
                "rounds_done": self.rounds_done,
                "replies": self.replies[0],
                "expected_replies": self.replies[1],
                "seconds_running": round(time.time() - self.start, 1),
                "seconds_per_round": self.seconds[-1] if self.seconds else None,
                "seconds_left": None if left is None else round(left, 1),
                "bytes_up": sum(client.bytes_up for client in self.clients.values()),
                "bytes_down": sum(client.bytes_down for client in self.clients.values()),
                "clients": {name: asdict(client) for name, client in self.clients.items()},
            }


@contextmanager
def serve_status_page(address: str | None, run_status: RunStatus) -> Iterator[int | None]:
    """Serve the status page at HOST:PORT for the time of the block; returns the port. None: there is no page."""
    if address is None:
        yield None
        return
    host_and_port = parse_address(address, "--status", any_port=True)

    class Handler(StatusRequestHandler):
        status = run_status
        host = host_and_port[0]

    try:
        server = ThreadingHTTPServer(host_and_port, Handler)
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


class StatusRequestHandler(BaseHTTPRequestHandler):
    """Answers GET requests for three paths, and nothing else."""

    timeout = REQUEST_SECONDS
    status: RunStatus
    host = ""
    server_version, sys_version = "fedmll", ""

    def do_GET(self) -> None:
        pages = {
            "/": ("text/html; charset=utf-8", status_page.render_html),
            "/status.json": ("application/json", lambda status: json.dumps(status, indent=2) + "\n"),
            "/metrics": ("text/plain; version=0.0.4; charset=utf-8", status_page.render_prometheus),
        }
        path = self.path.partition("?")[0]
        if not self._has_own_host():
            self.send_error(403, "there is no page under this host name")
        elif path not in pages:
            self.send_error(404)
        else:
            content_type, render = pages[path]
            self._send(content_type, render(self.status.to_json()).encode())

    def _has_own_host(self) -> bool:
        """Whether the request names this host: a foreign web page could point a name of its own to this address."""
        name = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        try:
            ipaddress.ip_address(name.strip("[]"))
            return True
        except ValueError:
            return name in ("localhost", self.host)

    def _send(self, content_type: str, content: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass
