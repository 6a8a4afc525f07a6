"""`fedmll weights get` with a local server that continues, interrupts, falsifies or refuses downloads."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.download import download_file
from fedmll.core.errors import DataError
from fedmll.models import pretrained_weights

CONTENT = bytes(range(256)) * 4000
DIGEST = hashlib.sha256(CONTENT).hexdigest()[:8]


class Server(ThreadingHTTPServer):
    """Serves CONTENT under every path but /missing."""

    ranges = True  # can go on in the middle
    cut_after: int | None = None  # bytes of an answer after which the connection ends

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str | None] = []  # the Range of every request

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/net-{DIGEST}.pth"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        wanted = self.headers.get("Range")
        self.server.asked.append(wanted)
        if self.path == "/missing":
            self.send_error(404)
            return
        start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and self.server.ranges else 0
        if start >= len(CONTENT):
            self.send_response(416)
            self.send_header("Content-Range", f"bytes */{len(CONTENT)}")
            self.end_headers()
            return
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(CONTENT) - 1}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(CONTENT) - start))
        self.end_headers()
        self.wfile.write(CONTENT[start:][: self.server.cut_after])

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,))
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def get(server: Server, target: Path) -> list[tuple[int, int | None]]:
    seen: list[tuple[int, int | None]] = []
    assert download_file(server.url, target, DIGEST, lambda done, total: seen.append((done, total)))
    assert target.read_bytes() == CONTENT
    assert not part(target).exists()
    return seen


def part(target: Path) -> Path:
    return target.with_name(f"{target.name}.part")


def test_download_writes_the_whole_file(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "new" / "net.pth"
    seen = get(server, target)
    assert seen[0] == (0, len(CONTENT)) and seen[-1] == (len(CONTENT), len(CONTENT)) and seen == sorted(seen)
    assert not download_file(server.url, target, DIGEST, lambda done, total: None)  # it is there: nobody is asked
    assert server.asked == [None]


def test_interrupted_download_continues(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "net.pth"
    server.cut_after = 300_000
    with pytest.raises(DataError, match=r"ended after 300,000 of 1,024,000 bytes.*The first 300,000 bytes are kept"):
        get(server, target)
    assert part(target).read_bytes() == CONTENT[:300_000] and not target.exists()
    server.cut_after = None
    assert get(server, target)[0] == (300_000, len(CONTENT))
    assert server.asked == [None, "bytes=300000-"]


def test_server_without_range_support_sends_the_whole_file(server: Server, tmp_path: Path) -> None:
    server.ranges = False
    part(tmp_path / "net.pth").write_bytes(CONTENT[:5000])
    assert get(server, tmp_path / "net.pth")[0] == (0, len(CONTENT))


def test_partial_file_that_is_complete_or_too_long(server: Server, tmp_path: Path) -> None:
    part(tmp_path / "net.pth").write_bytes(CONTENT)
    get(server, tmp_path / "net.pth")
    part(tmp_path / "other.pth").write_bytes(CONTENT + b"more")
    get(server, tmp_path / "other.pth")
    assert server.asked == [f"bytes={len(CONTENT)}-", f"bytes={len(CONTENT) + 4}-", None]


def test_wrong_hash_is_refused_and_the_next_download_starts_again(server: Server, tmp_path: Path) -> None:
    target = tmp_path / "net.pth"
    part(target).write_bytes(b"x" * 1000)  # of another file
    with pytest.raises(DataError, match=f"not the published file.*and not with {DIGEST}"):
        get(server, target)
    assert not target.exists() and not part(target).exists()
    get(server, target)
    target.write_bytes(CONTENT[:-1])  # put there by hand, but not whole
    with pytest.raises(DataError, match=f"not the published file.*Remove {target}"):
        get(server, target)
    assert target.exists()  # what a person put there stays


def test_error_names_the_status_404(server: Server, tmp_path: Path) -> None:
    url = server.url.rpartition("/")[0] + "/missing"
    with pytest.raises(DataError, match=r"/missing cannot be downloaded \(the server says 404 Not Found"):
        download_file(url, tmp_path / "net.pth", DIGEST, lambda done, total: None)
    assert not part(tmp_path / "net.pth").exists()


def test_error_without_a_network_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with Server() as closed:
        url = closed.url
    with pytest.raises(DataError) as caught:
        download_file(url, tmp_path / "net.pth", DIGEST, lambda done, total: None)
    said = str(caught.value)
    assert url in said and "refused" in said and f"put it at {tmp_path / 'net.pth'}" in said and "kept" not in said


def test_weights_commands_download_and_list(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDMLL_CACHE", str(tmp_path))
    monkeypatch.setattr(pretrained_weights, "TORCHVISION", server.url.rpartition("/")[0] + "/")
    known = pretrained_weights.PublishedWeights("resnet18-imagenet1k-v1", "resnet18", f"net-{DIGEST}.pth", 1)
    monkeypatch.setattr(pretrained_weights, "PUBLISHED", {known.name: known})
    tell = CliRunner().invoke
    assert " no " in tell(app, ["weights", "list"]).stdout
    said = tell(app, ["weights", "get", known.name])
    assert said.exit_code == 0 and "was downloaded" in said.stdout and "model.weights=resnet18-imagenet" in said.stdout
    assert (tmp_path / "weights" / f"net-{DIGEST}.pth").read_bytes() == CONTENT
    assert " yes " in tell(app, ["weights", "list"]).stdout
    assert "exists already" in tell(app, ["weights", "get", known.name]).stdout
    assert "did you mean 'resnet18-imagenet1k-v1'" in str(tell(app, ["weights", "get", "resnet18"]).exception)
