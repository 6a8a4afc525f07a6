"""A hospital's proxy (HTTP_PROXY and its relatives): sites reach the server through it, and it never sees a connection
within a machine."""

from __future__ import annotations

import http.server
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass_environment

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import httpx
from consortium import NAMES, Consortium
from real_federation import World, consortium, world  # noqa: F401  (fixtures)
from what_leaves import SITE, experiment_of

from fedmll.core.errors import ConfigError, FederationError
from fedmll.deploy.flower import flower_internals
from fedmll.deploy.flower.child_processes import LOOPBACK, flower_environment, no_proxy_for_loopback
from fedmll.deploy.flower.executor import acquire_task, open_task_client
from fedmll.deploy.flower.flower_internals import TaskType, is_direct
from fedmll.deploy.security import certificates
from fedmll.deploy.server.serve import study_digest
from fedmll.deploy.site.server_access import ServerAccess, wait_for_server

VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")


class RecordingProxy:
    """Takes every connection, keeps the first bytes and closes it."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(5)
                    self.seen.append(connection.recv(1000))

    def variables(self) -> dict[str, str]:
        """As a careless environment has them: with exceptions that do not name loopback, and an empty one that hides
        the others."""
        names = [*VARIABLES, *(name.upper() for name in VARIABLES)]
        no = {"NO_PROXY": "intranet.example", "no_proxy": "", "no_grpc_proxy": "intranet.example"}
        return dict.fromkeys(names, self.url) | no


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingProxy]:
    recording = RecordingProxy()
    for name, value in recording.variables().items():
        monkeypatch.setenv(name, value)
    yield recording
    recording.socket.close()


def test_recording_proxy_forwards_and_records_requests(proxy: RecordingProxy) -> None:
    """Else they could not fail: httpx as Flower uses it goes through it, for loopback too."""
    with httpx.Client() as client, pytest.raises(httpx.HTTPError):
        client.get("http://127.0.0.1:9/")
    assert proxy.seen[0].startswith(b"GET http://127.0.0.1:9/")


@pytest.mark.parametrize(
    "environment",
    [
        {"HTTP_PROXY": "http://proxy:3128"},
        {"http_proxy": "http://proxy:3128", "NO_PROXY": "intranet.example", "no_proxy": ""},
        {"ALL_PROXY": "http://proxy:3128", "no_proxy": "intranet.example, 10.0.0.0/8"},
        {"grpc_proxy": "http://proxy:3128", "no_grpc_proxy": "intranet.example"},
    ],
)
def test_children_use_no_proxy_for_loopback(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    child = dict(os.environ) | flower_environment(tmp_path)
    for name in ("no_proxy", "NO_PROXY", *(["no_grpc_proxy"] if "no_grpc_proxy" in environment else [])):
        hosts = child[name].split(",")
        assert set(LOOPBACK) <= set(hosts)
        assert {host.strip() for host in environment.get(name, "").split(",") if host} <= set(hosts)
    assert {name: child[name] for name in environment if "no_" not in name.lower()} == {
        name: value for name, value in environment.items() if "no_" not in name.lower()
    }  # the way to the server stays as it was
    monkeypatch.setattr(os, "environ", child)
    proxies = getproxies_environment()
    assert all(proxy_bypass_environment(host, proxies) for host in ("127.0.0.1:8000", "localhost:8000", "localhost"))
    assert not proxy_bypass_environment("federation.example.org", proxies)


def test_environment_without_proxies_is_unchanged() -> None:
    assert no_proxy_for_loopback({"HOME": "/root"}) == {}
    assert no_proxy_for_loopback({"HTTP_PROXY": "x", "no_proxy": "*"})["no_proxy"] == "*"


def test_loopback_hosts_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "site.localhost", "::1", "::ffff:127.0.0.1"):
        assert is_direct(host), host
    for host in ("federation.example.org", "10.0.0.5", "localhost.example.org", "127.0.0.1.example.org", ""):
        assert not is_direct(host), host
    monkeypatch.setattr(flower_internals, "_this_machine", set())
    flower_internals.connect_directly("10.0.0.5")
    assert is_direct("10.0.0.5")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_our_clients_go_to_loopback_directly(host: str, proxy: RecordingProxy) -> None:
    asked = []

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append(self.path)
            self.rfile.read(int(self.headers["content-length"]))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = http.server.HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.handle_request, daemon=True).start()
    client = open_task_client(f"{host}:{server.server_port}", b"x" * 32)
    try:
        assert acquire_task(client, TaskType.CLIENT_APP) is None
    finally:
        client.close()
        server.server_close()
    assert len(asked) == 1
    assert proxy.seen == []


def test_other_hosts_still_go_through_the_proxy(proxy: RecordingProxy) -> None:
    client = open_task_client("federation.example.org:8000", b"x" * 32)
    with pytest.raises(httpx.HTTPError):
        acquire_task(client, TaskType.CLIENT_APP)
    client.close()
    assert proxy.seen[0].startswith(b"POST http://federation.example.org:8000/")


def test_child_process_goes_to_loopback_directly(proxy: RecordingProxy, tmp_path: Path) -> None:
    """Whatever it uses: here what Python brings, with the environment that children get."""
    code = "import urllib.request\ntry: urllib.request.urlopen('http://127.0.0.1:9/')\nexcept OSError: pass"
    subprocess.run([sys.executable, "-c", code], env=os.environ | flower_environment(tmp_path), check=True)
    assert proxy.seen == []
    subprocess.run([sys.executable, "-c", code], check=True)
    assert len(proxy.seen) == 1


class TunnelProxy:
    """An HTTP proxy that opens tunnels (CONNECT) to a port of this machine, whatever host is asked for."""

    def __init__(self, target: int, status: str = "200 OK") -> None:
        self.target, self.status, self.asked = target, status, list[bytes]()
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.socket.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                threading.Thread(target=self._tunnel, args=(connection,), daemon=True).start()

    def _tunnel(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            request = b""
            while b"\r\n\r\n" not in request:
                request += connection.recv(1000)
            self.asked.append(request.partition(b"\r\n")[0])
            connection.sendall(f"HTTP/1.1 {self.status}\r\n\r\n".encode())
            if self.status.startswith("200"):
                with socket.create_connection(("127.0.0.1", self.target)) as server:
                    threading.Thread(target=self._copy, args=(connection, server), daemon=True).start()
                    self._copy(server, connection)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


def access_through(proxy: TunnelProxy, folder: Path, monkeypatch: pytest.MonkeyPatch) -> ServerAccess:
    """Access to fed.example.org, which only the proxy can find."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@{proxy.address}")
    return ServerAccess(server="fed.example.org:8000", ca=folder / "ca.crt", key=None, patience=0)


def test_proxy_that_refuses_is_named_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.create_server_certificate(tmp_path, ["fed.example.org"])
    proxy = TunnelProxy(1, "403 Forbidden")
    access = replace(access_through(proxy, tmp_path, monkeypatch), patience=3600)
    with pytest.raises(
        FederationError, match=rf"The proxy {proxy.address} .* refuses .*fed.example.org:8000: 403"
    ) as no:
        wait_for_server(access, lambda text: None)
    assert "NO_PROXY=fed.example.org" in str(no.value)
    assert "secret" not in str(no.value)
    assert proxy.asked == [b"CONNECT fed.example.org:8000 HTTP/1.1"]


def test_proxy_that_replaces_certificates_is_suspected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.create_server_certificate(tmp_path / "ours", ["fed.example.org"])
    certificates.create_server_certificate(tmp_path / "proxys", ["fed.example.org"])
    with https_server(tmp_path / "proxys") as port:
        access = access_through(TunnelProxy(port), tmp_path / "ours", monkeypatch)
        with pytest.raises(FederationError, match="may replace certificates"):
            wait_for_server(access, lambda text: None)
    with https_server(tmp_path / "ours") as port:
        access = access_through(TunnelProxy(port), tmp_path / "ours", monkeypatch)
        answer = wait_for_server(access, lambda text: None)
    own = certificates.certificate_fingerprint((tmp_path / "ours" / "server.crt").read_bytes())
    assert answer.fingerprint == own
    assert answer.clock_offset is not None
    assert abs(answer.clock_offset) < 60


@contextmanager
def https_server(folder: Path) -> Iterator[int]:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()


def test_unusable_proxies_are_reported_before_connecting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    access = access_through(TunnelProxy(1), tmp_path, monkeypatch)
    assert access.proxy is not None
    assert replace(access, server="localhost:8000").proxy is None
    monkeypatch.setenv("HTTPS_PROXY", "socks5://proxy:1080")
    with pytest.raises(ConfigError, match="socks5://proxy is not an HTTP proxy"):
        wait_for_server(access, lambda text: None)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    with pytest.raises(ConfigError, match="--insecure does not go through a proxy"):
        wait_for_server(replace(access, ca=None), lambda text: None)
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert access.proxy is None


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_site_behind_a_proxy_takes_part(
    world: World,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The site cannot reach fed.example.org itself; everything goes through the proxy, with TLS end to end."""
    certificates.create_server_certificate(world.consortium.keys, ["fed.example.org"])
    server = world.serve("--yes", training__rounds=1)
    world.until_said("server", "listening on")
    for name in NAMES[1:]:
        world.join(name)
    proxy = TunnelProxy(world.port)
    monkeypatch.setenv("HTTPS_PROXY", f"http://{proxy.address}")
    joined = world.join(NAMES[0], None, None, server="fed.example.org:8000")
    assert world.ended(server) == 0, world.said("server")
    assert world.ended(joined) == 0, world.said(NAMES[0])
    assert f"is reached through the proxy {proxy.address}" in world.said(NAMES[0]).replace("\n", " ")
    assert set(proxy.asked) == {b"CONNECT fed.example.org:8000 HTTP/1.1"}
    assert (world.folder / f"memory-{NAMES[0]}" / "model.safetensors").is_file()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_federation_on_loopback_does_not_use_the_proxy(
    consortium: Consortium,  # noqa: F811
    world: World,  # noqa: F811
    proxy: RecordingProxy,
    tmp_path: Path,
) -> None:
    """The whole loop: server, SuperLink, SuperNode and join, all with the proxy in their environment."""
    file, experiment = tmp_path / "experiment.toml", experiment_of(consortium, "fedavg")
    file.write_text(experiment.to_toml())
    world.digest = study_digest(experiment, 1)
    options = ["--listen", f"127.0.0.1:{world.port}", "--insecure", "--min-clients", "1", "--yes", "--out", world.out]
    running = world.start("server", "server", file, "--clients", SITE, *options)
    world.until_said("server", "listening on")
    joined = world.join(SITE, None, None, "--insecure")
    assert world.ended(running) == 0, world.said("server")
    assert world.ended(joined) == 0, world.said(SITE)
    assert (world.out / "model.safetensors").is_file()
    assert proxy.seen == []
