"""The port against strangers and against members who lie: a real SuperLink with TLS, on loopback."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import time
from base64 import b64encode
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeRequest, ActivateNodeResponse, PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import Message as MessageProto
from flwr.proto.message_pb2 import Metadata, ObjectTree
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.supercore.primitives.asymmetric import sign_message
from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

from fedmll.deploy.flower import request_guard
from fedmll.deploy.flower.child_processes import SuperLinkSettings, find_free_port, write_secret
from fedmll.deploy.flower.request_guard import INSTANCE_HEADER, sign_request
from fedmll.deploy.flower.superlink import SuperLinkConnection, run_superlink
from fedmll.deploy.security import certificates, client_keys
from fedmll.deploy.security.private_keys import load_private_key

pytestmark = [pytest.mark.slow, pytest.mark.timeout(90)]


NAMES = ("site-a", "site-b", "site-c")


class Member:
    """Speaks to the port as a SuperNode does, with a real key, and as it likes."""

    def __init__(self, link: SuperLinkSettings, folder: Path, name: str, instance: str = "1") -> None:
        self.key = load_private_key((folder / f"{name}.key").read_bytes())
        self.public = client_keys.load_public_keys(folder, [name])[name].encode()
        self.instance = instance
        assert link.certificate is not None
        self.server = certificates.certificate_fingerprint(Path(link.certificate).read_bytes())
        trust = ssl.create_default_context(cafile=link.ca)
        self.http = httpx.Client(verify=trust, base_url=f"https://127.0.0.1:{link.port}", timeout=20)

    def headers(self, path: str, body: bytes, ahead: float = 0.0) -> dict[str, str]:
        when = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat()
        return {
            "content-type": PROTOBUF_MEDIA_TYPE,
            "flwr-public-key": b64encode(self.public).decode(),
            "flwr-timestamp": when,
            "flwr-signature": b64encode(sign_message(self.key, when.encode())).decode(),
            INSTANCE_HEADER: self.instance,
        } | sign_request(self.key, self.server, path, body, when)

    def post(self, what: str, request: Any, ahead: float = 0.0) -> httpx.Response:
        path, body = f"/v1/fleet/{what}", request.SerializeToString()
        return self.http.post(path, content=body, headers=self.headers(path, body, ahead))

    def activate(self, ahead: float = 0.0) -> httpx.Response:
        return self.post("activate-node", ActivateNodeRequest(public_key=self.public, heartbeat_interval=30.0), ahead)


class World:
    def __init__(self, folder: Path) -> None:
        self.keys = folder / "keys"
        certificates.create_server_certificate(self.keys, [])
        for name in NAMES:
            client_keys.create_client_key(self.keys, name)
        certificate, key, ca = map(str, certificates.find_tls_files(self.keys))
        nodes = client_keys.load_public_keys(self.keys, NAMES)
        secret = str(write_secret(folder / "flower"))
        self.link = SuperLinkSettings(
            host="127.0.0.1",
            port=find_free_port(),
            folder=str(folder / "flower"),
            secret_file=secret,
            nodes=nodes,
            certificate=certificate,
            key=key,
            ca=ca,
            revoked=str(self.keys / client_keys.REVOKED_FILE),
        )
        self.said: list[str] = []

    def member(self, name: str, instance: str = "1") -> Member:
        return Member(self.link, self.keys, name, instance)

    def heard(self, own: SuperLinkConnection) -> str:
        own.check_alive()
        return " | ".join(self.said)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("port"))


@pytest.fixture(scope="module")
def own(world: World) -> Iterator[SuperLinkConnection]:
    with run_superlink(world.link, world.said.append) as connected:
        yield connected


def memory_of(process: int) -> int:
    lines = (Path("/proc") / str(process) / "status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) // 1024


def test_a_body_without_a_key_is_not_read(world: World, own: SuperLinkConnection) -> None:
    before, sent = memory_of(own.child.process.pid), 0
    context = ssl.create_default_context(cafile=world.link.ca)
    plain = socket.create_connection(("127.0.0.1", world.link.port), 10)
    with plain, context.wrap_socket(plain, server_hostname="localhost") as stream:
        stream.sendall(b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: x\r\ncontent-length: 1500000000\r\n\r\n")
        with pytest.raises(OSError):  # reset, or a broken pipe: the server has hung up
            while sent < 300_000_000:
                stream.sendall(b"x" * 65536)
                sent += 65536
    assert sent < 20_000_000
    assert memory_of(own.child.process.pid) - before < 30


def test_request_sizes_of_members_are_limited(world: World, own: SuperLinkConnection) -> None:
    member = world.member("site-a")
    long = [b"x" * 2**20] * 40  # chunked: nothing is declared
    try:
        answer = member.http.post(
            "/v1/fleet/push-object", content=iter(long), headers=member.headers("/v1/fleet/push-object", b"".join(long))
        )
    except httpx.TransportError:
        return  # it hung up while we were sending
    assert answer.status_code == 413


def test_a_member_with_forty_connections_occupies_little_memory(world: World, own: SuperLinkConnection) -> None:
    """Forty connections that send 32 MB each: 1.6 GB, if all of it were read."""
    member, honest = world.member("site-a"), world.member("site-c")
    assert member.activate().status_code == 200
    assert honest.activate().status_code == 200
    before, path, body = memory_of(own.child.process.pid), "/v1/fleet/push-object", b"x" * (32 * 2**20 - 100)
    headers = {name: str(value) for name, value in member.headers(path, body).items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    request = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n{lines}\r\n".encode()
    context, streams, largest = ssl.create_default_context(cafile=world.link.ca), [], 0
    for _ in range(40):
        plain = socket.create_connection(("127.0.0.1", world.link.port), 10)
        streams.append(context.wrap_socket(plain, server_hostname="localhost"))
    for stream in streams:
        with contextlib.suppress(OSError):  # the server has hung up
            stream.sendall(request + body[:-1])  # the last byte never comes
        largest = max(largest, memory_of(own.child.process.pid))
    node = NodeProto(node_id=node_of(honest))
    assert honest.post("pull-messages", PullMessagesRequest(node=node)).status_code == 200
    assert largest - before < 200
    assert "site-a sends more at the same time than a site needs; the rest is rejected" in world.heard(own)
    for stream in streams:
        stream.close()
    time.sleep(0.5)
    assert member.activate().status_code == 200  # when its connections are closed, it is served again


def test_half_open_connections_are_closed(world: World, own: SuperLinkConnection) -> None:
    context = ssl.create_default_context(cafile=world.link.ca)
    silent = [socket.create_connection(("127.0.0.1", world.link.port), 30) for _ in range(40)]
    half = context.wrap_socket(silent[0], server_hostname="localhost")
    half.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nhost: x\r\n")  # and no more
    begin = time.monotonic()
    for stream in (half, *silent[1:]):
        stream.settimeout(request_guard.HANDSHAKE_SECONDS + 10)
        try:
            assert stream.recv(100) == b""
        except OSError as error:
            assert not isinstance(error, TimeoutError)
        stream.close()
    assert time.monotonic() - begin < request_guard.HANDSHAKE_SECONDS + 10
    assert world.member("site-a").activate().status_code == 200  # members are served meanwhile and after


def test_a_clock_that_is_wrong_is_named_at_both_ends(world: World, own: SuperLinkConnection) -> None:
    answer = world.member("site-b").activate(ahead=20)
    assert answer.status_code == 401
    assert answer.json()["detail"] == "fedmll rejects: clock 20"
    assert "site-b is rejected: its clock is 20 s ahead of the server's" in world.heard(own)


def test_captured_headers_open_no_other_server_and_no_other_path(
    world: World, own: SuperLinkConnection, tmp_path: Path
) -> None:
    """An operator of another federation, whom the same site joins with the same key, uses its headers here."""
    certificates.create_server_certificate(tmp_path, [])
    member, elsewhere = world.member("site-b", "3"), world.member("site-b", "3")
    elsewhere.server = certificates.certificate_fingerprint((tmp_path / "server.crt").read_bytes())
    answer = elsewhere.activate()
    assert (answer.status_code, answer.json()["detail"]) == (401, "fedmll rejects: server")
    assert "site-b is rejected: its request is for a server with another certificate" in world.heard(own)
    path, body = "/v1/fleet/pull-messages", PullMessagesRequest(node=NodeProto(node_id=1)).SerializeToString()
    captured = member.headers(path, body)
    assert member.http.post("/v1/fleet/deactivate-node", content=body, headers=captured).status_code == 401
    assert member.http.post(path, content=body + body, headers=captured).status_code == 401
    only_flowers = {name: value for name, value in captured.items() if name != "fedmll-signature"}
    assert member.http.post(path, content=body, headers=only_flowers).status_code == 401


def test_a_client_cannot_reply_for_another(world: World, own: SuperLinkConnection) -> None:
    """What ended another site's join: a message to it that says it is from the server."""
    member, victim = world.member("site-a"), world.member("site-b")
    node, other = node_of(member), node_of(victim)
    tree = ObjectTree(object_id=hashlib.sha256(b"bye").hexdigest())

    def push(**info: Any) -> httpx.Response:
        metadata = Metadata(message_id=tree.object_id, ttl=60, message_type="query.bye", run_id=1) if info else None
        for name, value in info.items():
            setattr(metadata, name, value)
        request = PushMessagesRequest(
            node=NodeProto(node_id=node), messages_list=[MessageProto(metadata=metadata)], message_object_trees=[tree]
        )
        return member.post("push-messages", request)

    for forged in (
        {"src_node_id": 1, "dst_node_id": other},  # as the server, to a client
        {"src_node_id": node, "dst_node_id": other},  # to a client
        {"src_node_id": other, "dst_node_id": 1, "reply_to_message_id": "x"},  # as another client
        {"src_node_id": node, "dst_node_id": 1},  # no reply
    ):
        assert push(**forged).status_code == 403, forged
    pulled = victim.post("pull-messages", PullMessagesRequest(node=NodeProto(node_id=other)))
    assert pulled.content == b""
    stolen = victim.post("pull-messages", PullMessagesRequest(node=NodeProto(node_id=node)))
    assert stolen.status_code == 401


def node_of(member: Member) -> int:
    return int(ActivateNodeResponse.FromString(member.activate().content).node_id)


def test_a_second_program_with_the_key_is_rejected(world: World, own: SuperLinkConnection) -> None:
    first, second = world.member("site-b"), world.member("site-b", "2")
    node = node_of(first)
    pull = PullMessagesRequest(node=NodeProto(node_id=node))
    assert second.activate().status_code == 200  # the first is silent: it may have been killed
    assert first.post("pull-messages", pull).status_code == 200  # it was not
    answer = second.post("pull-messages", pull)
    assert answer.status_code == 401
    assert answer.json()["detail"] == "fedmll rejects: twice"
    assert "site-b: a second program uses its key" in world.heard(own)


def test_a_key_that_is_revoked_is_rejected_at_once(world: World, own: SuperLinkConnection) -> None:
    member = world.member("site-a")
    assert member.activate().status_code == 200
    client_keys.revoke_client_key(world.keys, "site-a")
    time.sleep(2.1)
    assert member.activate().json()["detail"] == "fedmll rejects: revoked"
    assert "site-a is rejected: its key was revoked" in world.heard(own)


def test_only_the_owner_can_read_flowers_files(world: World, own: SuperLinkConnection) -> None:
    folder = Path(world.link.folder)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        assert file.stat().st_mode & 0o077 == 0, file
    assert (folder / "superlink.log").exists()
