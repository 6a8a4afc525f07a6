"""The status of a run: JSON, Prometheus, and the page."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium
from fake_grid import RecordingCallback, consortium, fast_polling, make_grid  # noqa: F401  (fixtures)

from fedmll.config.experiment import Experiment
from fedmll.core.addresses import is_loopback, parse_address
from fedmll.core.errors import ConfigError, FederationError
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.status import (
    RunStatus,
    format_duration,
    format_size,
    render_html,
    render_prometheus,
    serve_status_page,
)
from fedmll.runs.run_folder import RunFolder


@pytest.fixture
def status() -> RunStatus:
    experiment = Experiment.make({"training": {"rounds": 4}})
    found = RunStatus(experiment, ServerSettings(clients=("site-a", "site-b", "site-c")))
    found.clients['<b>"x"\\'] = found.clients.pop("site-c")  # a name that must not be believed
    found.record("joined", {"client": "site-a", "images": 90})
    found.record("sent", {"client": "site-a", "bytes": 1000, "round": 1})
    found.record("reply", {"client": "site-a", "bytes": 2_500_000, "round": 1, "late": False})
    found.record("joined", {"client": "site-b", "images": 70})
    found.record("skipped", {"client": "site-b", "text": "round 1: <script>alert(1)</script> & so on"})
    found.record("disconnected", {"client": "site-b", "text": "site-b is gone"})
    found.record("start", {"clients": ["site-a"]})
    found.on_run_start(experiment, None, 1)  # type: ignore[arg-type]
    found.on_client_end(2, 1, 3)
    found.on_round_end({"round": 1, "seconds": 30.0})
    return found


@pytest.fixture
def served(status: RunStatus) -> Iterator[int]:
    with serve_status_page("127.0.0.1:0", status) as port:
        assert port is not None
        yield port


def asked(port: int, path: str, method: str = "GET", host: str | None = None) -> tuple[int, str, dict[str, str]]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), dict(answer.getheaders())


def test_status_as_json(status: RunStatus, served: int) -> None:
    code, text, headers = asked(served, "/status.json")
    found = json.loads(text)
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert (found["state"], found["round"], found["rounds"], found["rounds_done"]) == ("running", 2, 4, 1)
    assert (found["seconds_per_round"], found["seconds_left"]) == (30.0, 90.0)
    assert (found["bytes_up"], found["bytes_down"]) == (2_500_000, 1000)
    a, b = found["clients"]["site-a"], found["clients"]["site-b"]
    assert (a["connected"], a["images"], a["last_round"], a["errors"]) == (True, 90, 1, 0)
    assert (b["connected"], b["errors"], b["last_error"]) == (False, 2, "site-b is gone")
    status.record("excluded", {"client": "site-a", "text": ""})
    assert status.to_json()["clients"]["site-a"]["excluded"]
    status.on_run_error(FederationError("too few"))
    assert (status.to_json()["state"], status.to_json()["reason"]) == ("stopped", "too few")


LINE = re.compile(r'fedmll_[a-z_]+(?:\{[a-z]+="(?:[^"\\\n]|\\.)*"(?:,[a-z]+="(?:[^"\\\n]|\\.)*")*\})? [0-9.e+]+')


def test_status_in_prometheus_format(served: int) -> None:
    code, text, headers = asked(served, "/metrics")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    lines = text.splitlines()
    assert text.endswith("\n")
    assert all(line.startswith(("# HELP fedmll_", "# TYPE fedmll_")) or LINE.fullmatch(line) for line in lines), text
    assert 'fedmll_client_connected{client="site-a"} 1' in lines
    assert 'fedmll_client_connected{client="<b>\\"x\\"\\\\"} 0' in lines
    assert 'fedmll_client_bytes_total{client="site-a",direction="up"} 2500000' in lines
    assert "fedmll_left_seconds 90" in lines
    assert 'fedmll_state{state="running"} 1' in lines
    named = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(named) == len(set(named))


def test_unknown_values_are_left_out() -> None:
    fresh = RunStatus(Experiment.make({"training": {"rounds": 4}}), ServerSettings(clients=("a", "b"))).to_json()
    assert "left_seconds" not in render_prometheus(fresh)
    assert "not joined yet" in render_html(fresh)


def test_page_shows_names_and_contains_no_script(served: int) -> None:
    code, text, headers = asked(served, "/")
    assert code == 200
    assert "<script" not in text
    assert "&lt;b&gt;&quot;x&quot;\\" in text
    assert "2 of 4" in text
    assert "about 2 min" in text
    assert "2.5 MB" in text
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert 'http-equiv="refresh"' in text
    assert not re.search(r"(src|href)=", text)  # nothing is loaded from anywhere


def test_only_get_requests_for_these_paths_and_this_host_are_answered(served: int) -> None:
    assert asked(served, "/etc/passwd")[0] == 404
    assert asked(served, "/", method="POST")[0] == 501
    assert asked(served, "/", host="evil.example.org")[0] == 403
    assert asked(served, "/", host="localhost:1")[0] == 200


def test_durations_and_sizes() -> None:
    assert [format_duration(s) for s in (None, 3.14, 90, 7200, 36060)] == [
        "–", "3.1 s", "2 min", "2 h 0 min", "10 h 1 min"
    ]  # fmt: skip
    assert [format_size(n) for n in (0, 999, 1500, 2_500_000, 3e12)] == [
        "0 B", "999 B", "1.5 kB", "2.5 MB", "3000.0 GB"
    ]  # fmt: skip


def test_warning_if_other_machines_can_reach_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    from fedmll.cli.server import warn_about_status_page

    assert parse_address("[::1]:80", "--status") == ("::1", 80)
    assert [is_loopback(host) for host in ("localhost", "127.0.0.2", "::1", "0.0.0.0", "10.0.0.1", "fed.org")] == [
        True, True, True, False, False, False
    ]  # fmt: skip
    for wrong in ("8080", "127.0.0.1", ":80", "a:b", "a:70000"):
        with pytest.raises(ConfigError, match="--status takes HOST:PORT"):
            parse_address(wrong, "--status", any_port=True)
    warn_about_status_page("127.0.0.1:80")
    assert capsys.readouterr().err == ""
    warn_about_status_page("0.0.0.0:80")
    assert "no password" in capsys.readouterr().err


def test_port_in_use_is_reported_before_the_run(status: RunStatus, served: int) -> None:
    with pytest.raises(ConfigError, match="cannot listen on"), serve_status_page(f"127.0.0.1:{served}", status):
        pass


def test_client_that_hangs_up_causes_no_traceback(
    status: RunStatus, served: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    hung_up, answered = threading.Event(), threading.Event()

    def slow(run_status: RunStatus) -> dict[str, Any]:
        hung_up.wait(10)
        return {"text": "x" * 10_000_000}  # more than the system buffers

    def finished(server: Any, request: Any) -> None:
        answered.set()

    monkeypatch.setattr(RunStatus, "to_json", slow)
    monkeypatch.setattr("fedmll.deploy.server.status.ThreadingHTTPServer.shutdown_request", finished)
    client = socket.create_connection(("127.0.0.1", served))
    client.sendall(b"GET /status.json HTTP/1.1\r\nHost: localhost\r\n\r\n")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # the close is a reset
    client.close()
    hung_up.set()
    assert answered.wait(10)
    assert capfd.readouterr() == ("", "")


def test_status_page_on_ipv6(status: RunStatus) -> None:
    with (
        serve_status_page("[::1]:0", status) as port,
        urllib.request.urlopen(f"http://[::1]:{port}/status.json") as page,
    ):
        assert page.status == 200


def test_page_of_a_running_federation(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear, out, seen = (
        make_grid(consortium, tmp_path),
        RecordingCallback(),
        tmp_path / "out",
        list[dict[str, Any]](),
    )
    experiment = consortium.server(training__rounds=2)
    server = ServerSettings(clients=NAMES, min_clients=2, join_timeout=2, run="run1", keys=None, status="127.0.0.1:0")
    RunFolder(out).create(experiment)
    with pytest.MonkeyPatch.context() as patch:
        ports: list[int] = []
        real = serve_status_page

        def noted(address: str | None, status: RunStatus) -> Any:
            held = real(address, status)

            class Held:
                def __enter__(self) -> int | None:
                    ports.append(held.__enter__())  # type: ignore[arg-type]
                    return ports[0]

                def __exit__(self, *error: Any) -> Any:
                    return held.__exit__(*error)

            return Held()

        patch.setattr("fedmll.deploy.server.console.serve_status_page", noted)
        hear.at_round = {1: lambda: seen.append(json.loads(asked(ports[0], "/status.json")[1]))}
        serve.run_federation(grid, experiment, server, out, callback=hear)
    assert [client["images"] for client in seen[0]["clients"].values()] == [90, 70, 50]
    assert (seen[0]["state"], seen[0]["round"]) == ("running", 1)
    assert seen[0]["bytes_up"] > 0
    with pytest.raises(OSError):
        asked(ports[0], "/")  # it ends with the run
    assert not [thread for thread in threading.enumerate() if "serve_forever" in thread.name]
