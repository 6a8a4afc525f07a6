"""The status of a run, for its operator.

It is collected while the run goes on, and shown by a small web server in a thread of its own, which only reads. Neither
waits for the other.
"""

from __future__ import annotations

import ipaddress
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import median
from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.core.addresses import parse_address
from fedmll.core.errors import ConfigError
from fedmll.data.federation import Federation
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.runs.run_folder import MetricsRow
from fedmll.training.callbacks import INTERRUPTED, Callback, Result

RECENT_ROUNDS = 10  # from which the remaining time is estimated
MIN_LATE = 3  # replies just before the deadline, from which on the page says so
REQUEST_SECONDS = 5
REFRESH_SECONDS = 5
STATES = ("waiting", "running", "finished", "stopped")

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --soft: #5b6875; --line: #dfe4ea; --paper: #fff; --back: #f4f6f8;
  --good: #137a4b; --bad: #b3261e; --bar: #2563c9; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6eaef; --soft: #9aa7b4; --line: #323c47; --paper: #1b222a;
  --back: #12171d; --good: #56c596; --bad: #ff8a80; --bar: #7aa7ff; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--back); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 28px 20px; }
h1 { font-size: 22px; margin: 0; } h1 small { color: var(--soft); font-weight: 400; font-size: 15px; }
section { background: var(--paper); border: 1px solid var(--line); border-radius: 10px; padding: 18px 20px;
  margin-top: 18px; overflow-x: auto; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(125px, 1fr)); gap: 14px; margin: 0; }
dt { color: var(--soft); font-size: 13px; } dd { margin: 0; font-size: 20px; font-variant-numeric: tabular-nums; }
.bar { height: 8px; border-radius: 4px; background: var(--line); margin-top: 16px; overflow: hidden; }
.bar div { height: 100%; background: var(--bar); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; color: var(--soft); font-weight: 500; font-size: 13px; white-space: nowrap; }
th, td { padding: 8px 20px 8px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } td:nth-child(-n+2) { white-space: nowrap; }
.number { text-align: right; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .soft { color: var(--soft); }
.error { min-width: 220px; overflow-wrap: anywhere; font-size: 14px; }
footer { color: var(--soft); font-size: 13px; margin-top: 14px; }
"""


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
    replies: int = 0  # valid ones
    late_replies: int = 0  # of those: that arrived just before the deadline
    unusual_replies: int = 0  # of those: named in the log (flower/outliers.py)
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
                client.replies += 1
                client.late_replies += facts["late"]
            elif event == "unusual":
                client.unusual_replies += 1
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
        server = StatusServer(host_and_port, Handler)
    except OSError as error:
        raise ConfigError(f"The status page cannot listen on {address} ({error}); choose another --status.") from None
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.2}, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


class StatusServer(ThreadingHTTPServer):
    daemon_threads, block_on_close = True, False

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that hangs up is no error; any other one is shown."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class StatusRequestHandler(BaseHTTPRequestHandler):
    """Answers GET requests for three paths, and nothing else."""

    timeout = REQUEST_SECONDS
    status: RunStatus
    host = ""
    server_version, sys_version = "fedmll", ""

    def do_GET(self) -> None:
        pages = {
            "/": ("text/html; charset=utf-8", render_html),
            "/status.json": ("application/json", lambda status: json.dumps(status, indent=2) + "\n"),
            "/metrics": ("text/plain; version=0.0.4; charset=utf-8", render_prometheus),
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


def render_html(status: Mapping[str, Any]) -> str:
    """The page for the content of /status.json."""
    done, rounds = status["rounds_done"], status["rounds"]
    facts = [
        ("state", status["state"]),
        ("round", f"{status['round']} of {rounds}"),
        ("replies in it", f"{status['replies']} of {status['expected_replies']}"),
        ("time of last round", format_duration(status["seconds_per_round"])),
        (
            "time left",
            "about " + format_duration(status["seconds_left"]) if status["seconds_left"] is not None else "–",
        ),
        ("received", format_size(status["bytes_up"])),
        ("sent", format_size(status["bytes_down"])),
    ]
    cells = "".join(f"<div><dt>{name}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    reason = f'<p class="bad">{escape(status["reason"])}</p>' if status["reason"] else ""
    rows = "".join(_row(name, client) for name, client in status["clients"].items())
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>'
        f"{done} of {rounds} rounds · fedmll</title>"
        f'<meta http-equiv="refresh" content="{REFRESH_SECONDS}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>"
        f"<h1>Federation with {escape(status['method'])} <small>run {escape(status['run'])}</small></h1>"
        f'<section><dl>{cells}</dl><div class="bar"><div style="width: {100 * done / max(1, rounds):.1f}%"></div></div>'
        f"{reason}</section><section><table><thead><tr><th>client</th><th>connection</th>"
        '<th class="number">images</th><th class="number">last reply in round</th><th class="number">received</th>'
        '<th class="number">sent</th><th>notes and last error</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></section>"
        f"<footer>{time.strftime('%Y-%m-%d %H:%M:%S')} · this page reloads every {REFRESH_SECONDS} s · "
        "/status.json · /metrics</footer></main></body></html>"
    )


def _row(name: str, client: Mapping[str, Any]) -> str:
    kind, word = ("good", "connected") if client["connected"] else ("bad", "disconnected")
    if client["images"] is None:
        kind, word = "soft", "not joined yet"
    if client["excluded"]:
        kind, word = "bad", "excluded"
    numbers = [
        "–" if client["images"] is None else str(client["images"]),
        "–" if client["last_round"] is None else str(client["last_round"]),
        format_size(client["bytes_up"]),
        format_size(client["bytes_down"]),
    ]
    late, replies, unusual = client["late_replies"], client["replies"], client["unusual_replies"]
    notes = []
    if late >= MIN_LATE and 2 * late > replies:
        notes.append(f"answers just before the deadline: {late} of {replies} replies")
    if unusual:
        notes.append(f"{unusual} unusual replies (see the log)")
    at = client["last_error_at"]
    when = "" if at is None else f'<span class="soft">{time.strftime("%H:%M:%S", time.localtime(at))}</span> '
    return (
        f'<tr><td>{escape(name)}</td><td class="{kind}">{word}</td>'
        + "".join(f'<td class="number">{value}</td>' for value in numbers)
        + f'<td class="error">{"".join(f"{note}<br>" for note in notes)}{when}{escape(client["last_error"])}</td></tr>'
    )


def format_duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60} min"


def format_size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def render_prometheus(status: Mapping[str, Any]) -> str:
    """Prometheus' text format, version 0.0.4. Values that are not known yet are left out."""
    clients = status["clients"]
    up, down = {"direction": "up"}, {"direction": "down"}
    metrics: list[tuple[str, str, str, list[tuple[dict[str, str], float | None]]]] = [
        ("state", "gauge", "1 for the current state of the run.",
         [({"state": state}, int(status["state"] == state)) for state in STATES]),
        ("round", "gauge", "The current round.", [({}, status["round"])]),
        ("rounds", "gauge", "The number of rounds.", [({}, status["rounds"])]),
        ("rounds_done", "gauge", "Rounds that are done.", [({}, status["rounds_done"])]),
        ("round_seconds", "gauge", "Seconds of the last round.", [({}, status["seconds_per_round"])]),
        ("left_seconds", "gauge", "Seconds left, estimated.", [({}, status["seconds_left"])]),
        ("client_connected", "gauge", "1: the client is connected.",
         [({"client": name}, int(client["connected"])) for name, client in clients.items()]),
        ("client_excluded", "gauge", "1: the operator has excluded the client.",
         [({"client": name}, int(client["excluded"])) for name, client in clients.items()]),
        ("client_errors_total", "counter", "Rejected replies, and rounds without the client.",
         [({"client": name}, client["errors"]) for name, client in clients.items()]),
        ("client_late_replies_total", "counter", "Replies that arrived just before the deadline.",
         [({"client": name}, client["late_replies"]) for name, client in clients.items()]),
        ("client_unusual_replies_total", "counter", "Replies that are named in the log as unusual.",
         [({"client": name}, client["unusual_replies"]) for name, client in clients.items()]),
        ("client_bytes_total", "counter", "Bytes of tensors and numbers.",
         [({"client": name, **way}, client[f"bytes_{way['direction']}"])
          for name, client in clients.items() for way in (up, down)]),
    ]  # fmt: skip
    lines = []
    for name, kind, text, values in metrics:
        known = [(labels, value) for labels, value in values if value is not None]
        if known:
            lines += [f"# HELP fedmll_{name} {text}", f"# TYPE fedmll_{name} {kind}"]
            lines += [f"fedmll_{name}{_labels(labels)} {value:.15g}" for labels, value in known]
    return "\n".join(lines) + "\n"


def _labels(labels: Mapping[str, str]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')

    return "{" + ",".join(f'{name}="{quoted(value)}"' for name, value in labels.items()) + "}" if labels else ""
