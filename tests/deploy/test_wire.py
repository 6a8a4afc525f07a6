"""What leaves a site, on the wire: a proxy between a real site and a real server records every byte that the site
sends. It is what what_leaves.py records of the ClientApp, and what docs/reference/what-leaves-a-site.md says."""

from __future__ import annotations

import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import Consortium
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_id, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from google.protobuf.message import DecodeError
from real_federation import World, consortium, world  # noqa: F401  (fixtures)
from what_leaves import DOCUMENT, EVERY, SITE, Recorder, documented, experiment_of, in_rows

from fedmll.core.message import Message
from fedmll.deploy.flower.child_processes import find_free_port
from fedmll.deploy.flower.records import from_records
from fedmll.deploy.server.serve import study_digest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
METHOD = "fedcurv"  # it sends more than weights
WHEN = {"query.hello": "joining", "train": "a round", "evaluate": "a test"}


class Proxy:
    """Passes everything on, and keeps what clients send and what they are sent, a connection a stream each."""

    def __init__(self, server: int) -> None:
        self.server, self.sent, self.got = server, list[bytearray](), list[bytearray]()
        self.door = socket.create_server(("127.0.0.1", 0))
        self.port = self.door.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self.door.accept()
                link = socket.create_connection(("127.0.0.1", self.server))
            except OSError:  # closed, or the server is not there yet: the site tries again
                if self.door.fileno() < 0:
                    return
                client.close()
                continue
            self.sent.append(bytearray())
            self.got.append(bytearray())
            for source, sink, kept in ((client, link, self.sent[-1]), (link, client, self.got[-1])):
                threading.Thread(target=_pass_on, args=(source, sink, kept), daemon=True).start()

    def objects_of_the_server(self) -> dict[str, bytes]:
        """What the server has already is not sent to it again, only named: a record without numbers, perhaps."""
        found = {}
        for _, body in parsed(self.got):
            with suppress(DecodeError):
                content = PullObjectResponse.FromString(body).object_content
                found[get_object_id(content)] = content
        return found


def parsed(streams: list[bytearray]) -> Iterator[tuple[str, bytes]]:
    """The second word of the first line (of a request: the path) and the body. Every byte is looked at."""
    for stream in streams:
        rest = bytes(stream)
        while b"\r\n\r\n" in rest:
            head, _, rest = rest.partition(b"\r\n\r\n")
            first, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            assert "transfer-encoding" not in headers
            size = int(headers.get("content-length", 0))
            yield first.split()[1], rest[:size]
            rest = rest[size:]
        assert not rest


def _pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
    try:
        while piece := source.recv(1 << 16):
            kept += piece
            sink.sendall(piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_what_leaves_on_the_wire_is_what_the_document_says(
    consortium: Consortium,  # noqa: F811
    world: World,  # noqa: F811
    tmp_path: Path,
) -> None:
    server, file = find_free_port(), tmp_path / "experiment.toml"
    proxy, world.port = (recording := Proxy(server)), recording.port
    experiment = experiment_of(consortium, METHOD)
    file.write_text(experiment.to_toml())
    world.digest = study_digest(experiment, 1)
    options = ["--listen", f"127.0.0.1:{server}", "--insecure", "--min-clients", "1", "--yes", "--out", world.out]
    running = world.start("server", "server", file, "--clients", SITE, *options)
    world.until_said("server", "listening on")
    joined = world.join(SITE, None, None, "--insecure")
    assert world.ended(running) == 0
    assert world.ended(joined) == 0

    found: dict[str, list[tuple[Message, dict[str, Any]]]] = defaultdict(list)
    contents: dict[str, bytes] = {}
    replies, named, others = [], set(), set()
    for path, body in parsed(proxy.sent):
        if path == "/v1/fleet/push-messages":
            request = PushMessagesRequest.FromString(body)
            replies += list(request.messages_list)
            named |= {part.object_id for tree in request.message_object_trees for part in iterate_object_tree(tree)}
        elif path == "/v1/fleet/push-object":
            pushed = PushObjectRequest.FromString(body)
            contents[pushed.object_id] = pushed.object_content
        elif path == "/":
            assert not body  # the answer's date is compared with this clock
        else:
            others.add(path)
            assert len(body) < 2000, path  # who experiment_options, for which message
    assert contents.keys() <= named  # nothing that is not of a reply
    assert others <= {"/v1/fleet/" + name for name in OTHERS}, others
    known = proxy.objects_of_the_server() | contents
    for reply in replies:
        message: Any = inflate_object_from_contents(reply.metadata.message_id, known, keep_object_contents=True)
        said, told = from_records(message.content)
        kind = reply.metadata.message_type
        if kind in ("query.bye", "query.model"):
            assert (said.tensors, said.numbers, told) == ({}, {}, {"name": SITE})
        else:
            found[WHEN[kind]].append((said, told))

    recorder = Recorder(consortium, tmp_path, METHOD)
    rows = in_rows(METHOD, found, recorder.symbols())
    assert sorted(rows) == sorted(row for row in documented(DOCUMENT.read_text()) if row[0] in (EVERY, METHOD))
    assert len(found["a round"]) == 3
    last, model = found["a round"][-1][0], load_file(world.out / "model.safetensors")
    for name, tensor in recorder.trainer.weights.named(last.tensors).items():  # the mean of one is the one
        assert torch.equal(model[name], tensor), name


OTHERS = (
    "activate-node", "deactivate-node", "pull-messages", "pull-object", "confirm-message-received", "get-run",
    "get-fab", "send-node-heartbeat", "register-node", "unregister-node", "",
)  # fmt: skip
