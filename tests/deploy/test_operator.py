"""Operating a server: a kill at the end, two servers, an edited experiment, IPv6, free text of members."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

import httpx
from consortium import NAMES, Consortium
from fake_grid import FakeNode, RecordingCallback, consortium, drive, fast_polling, make_grid  # noqa: F401  (fixtures)
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage
from real_federation import World, world  # noqa: F401  (fixtures)
from typer.testing import CliRunner

from fedmll.cli.main import app
from fedmll.core.addresses import format_address
from fedmll.core.errors import CheckpointError, ConfigError, FedmllError
from fedmll.core.message import Message
from fedmll.deploy.flower import engine, superlink
from fedmll.deploy.flower.child_processes import SuperLinkSettings, find_free_port, open_listener, write_secret
from fedmll.deploy.flower.client_app import HELLO, MODEL, TRAIN
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.flower.superlink import run_superlink
from fedmll.deploy.server import serve, server_settings
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.runs.run_folder import RunFolder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def settings_of(out: Path) -> ServerSettings:
    settings = ServerSettings(clients=NAMES, host="127.0.0.1", port=find_free_port(), keys=None, run="run1")
    server_settings.write_server_settings(settings, out)
    return settings


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which SuperLinks were started; none of them runs."""
    found: list[str] = []

    @contextmanager
    def never(*_: Any) -> Any:
        found.append("started")
        raise FedmllError("no SuperLink in this test")
        yield

    monkeypatch.setattr(superlink, "run_superlink", never)
    return found


# ---- a kill between the summary and the delivery


def test_model_is_delivered_by_resume_if_the_server_was_killed_before(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    started: list[str],
) -> None:
    out, killed = tmp_path / "out", KeyboardInterrupt()

    def kill(*_: Any) -> None:
        raise killed

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(engine.FlowerEngine, "deliver_model", kill)
        drive(consortium, make_grid(consortium, tmp_path), out, training__rounds=2)
    assert RunFolder(out).is_finished
    before = {name: content for name, content in snapshot(out).items() if name in ("model.safetensors", "summary.json")}
    settings_of(out)
    with pytest.raises(FedmllError, match="no SuperLink in this test"):  # before: "The run is over"
        serve.resume_server(out)
    assert started == ["started"]
    grid = make_grid(consortium, tmp_path)
    result = drive(consortium, grid, out, training__rounds=2)
    assert {kind for kind, _ in grid.log if kind in (TRAIN, MODEL)} == {MODEL}  # nothing is trained again
    assert all((tmp_path / name / "model.safetensors").is_file() for name in NAMES)
    assert {name: content for name, content in snapshot(out).items() if name in before} == before
    assert len(result.rows) == 2
    assert result.summary["round"] == 2
    with pytest.raises(ConfigError, match="is over"):
        serve.resume_server(out)


# ---- two servers on one folder


def test_second_server_on_a_folder_changes_nothing(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    started: list[str],
) -> None:
    out = tmp_path / "out"
    RunFolder(out).create(consortium.server())
    settings_of(out)
    with serve.lock_server_folder(out):
        before = snapshot(out)
        for words in ([], ["--drop", "site-b"], ["--listen", "0.0.0.0:1"], ["--min-clients", "1"]):
            shown = CliRunner().invoke(app, ["resume", str(out), *words])
            assert isinstance(shown.exception, ConfigError), shown.output
            assert "A server is already running in" in str(shown.exception)
            assert "process" in str(shown.exception)
        assert snapshot(out) == before
    assert started == []
    assert isinstance(CliRunner().invoke(app, ["resume", str(out)]).exception, FedmllError)
    assert started == ["started"]  # the lock is free again


def test_edited_experiment_is_refused_before_the_server_listens(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    started: list[str],
) -> None:
    out, hear = tmp_path / "out", RecordingCallback()

    def stop() -> None:
        raise KeyboardInterrupt

    hear.at_round = {1: stop}
    with pytest.raises(KeyboardInterrupt):
        drive(consortium, make_grid(consortium, tmp_path), out, hear, training__rounds=2)
    settings_of(out)
    file = out / "experiment.toml"
    text = file.read_text()
    file.write_text(text.replace("seed = 3", "seed = 4"))
    assert file.read_text() != text
    with pytest.raises(CheckpointError, match="belongs to another experiment"):
        serve.resume_server(out)
    assert started == []


# ---- addresses


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("host", "reached"), [("::1", ["::1"]), ("::", ["::1", "127.0.0.1"]), ("127.0.0.1", ["127.0.0.1"])]
)
def test_superlink_listens_on_ipv6_and_ipv4(host: str, reached: list[str], tmp_path: Path) -> None:
    port = find_free_port()
    secret = str(write_secret(tmp_path))
    settings = SuperLinkSettings(host=host, port=port, folder=str(tmp_path), secret_file=secret, nodes={})
    with run_superlink(settings):  # it takes the run's task from the Runtime API, which only this machine may use
        for each in reached:
            with httpx.Client(trust_env=False) as client:
                assert client.get(f"http://{format_address(each, port)}/").status_code == 403
        with pytest.raises(ConfigError, match=r"Cannot listen on .*another port with --listen"):
            open_listener(host, port)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_federation_over_ipv6(world: World) -> None:  # noqa: F811
    server = world.serve("--listen", f"[::]:{world.port}", "--yes", training__rounds=1)
    world.until_said("server", f"listening on [::]:{world.port}")
    joined = [world.join(NAMES[0], None, None, server=f"[::1]:{world.port}")]
    joined += [world.join(NAMES[1], None, None, server=f"127.0.0.1:{world.port}"), world.join(NAMES[2])]
    assert world.ended(server) == 0, world.said("server")
    assert [world.ended(each) for each in joined] == [0, 0, 0]


# ---- free text of a member

MARK = "CALL-0800-EVIL"
Change = Callable[[RecordDict], RecordDict]


def with_info(**values: Any) -> Change:
    def change(content: RecordDict) -> RecordDict:
        message, info = from_records(content)
        return to_records(Message(message.tensors, message.numbers), info | values)

    return change


def with_record(name: str, record: Any) -> Change:
    def change(content: RecordDict) -> RecordDict:
        content[name] = record
        return content

    return change


def number_named(name: str) -> Change:
    def change(content: RecordDict) -> RecordDict:
        message, info = from_records(content)
        return to_records(Message(message.tensors, message.numbers | {name: 1.0}), info)

    return change


CHANGES = [
    with_info(name=MARK),
    with_info(error=MARK),
    with_info(classes=[MARK], labels={}),
    with_info(frozen={MARK: [1.0]}),
    with_info(digest=MARK),
    with_info(samples=MARK),
    with_info(labels={MARK: [1, 1, 1]}),
    with_record(MARK, ConfigRecord({"a": 1})),
    with_record("tensors", ArrayRecord({MARK: Array("float32", (1,), "numpy.ndarray", b"")})),
    with_record("tensors", ArrayRecord({"weights": Array(MARK, (1,), "numpy.ndarray", b"")})),
    with_record("tensors", ArrayRecord({"weights": Array("float32", (1,), MARK, b"")})),
    with_record("tensors", ArrayRecord({"weights": Array("float32", (1,), "numpy.ndarray", MARK.encode() * 9)})),
    with_record("info", ConfigRecord({"json": MARK})),
    number_named(MARK),
    None,  # an error of Flower's, with a reason
]


@pytest.mark.parametrize("kind", [HELLO, TRAIN])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("keyed", [True, False])
def test_free_text_of_a_member_does_not_reach_the_operators_log(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    kind: str,
    change: Change | None,
    keyed: bool,
) -> None:
    grid, hear, out = make_grid(consortium, tmp_path, keyed), RecordingCallback(), tmp_path / "out"

    def lie(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.site_file.stem != "site-b" or sent.metadata.message_type != kind:
            return reply
        if change is None:
            return FlowerMessage(Error(7, MARK), reply_to=sent)
        return FlowerMessage(change(reply.content), reply_to=sent)

    grid.tamper = lie
    try:
        drive(consortium, grid, out, hear, training__rounds=1, min_clients=2, join_timeout=0.3)
    except FedmllError as error:
        assert MARK not in str(error)
    shown = "".join(hear.said) + (out / "log.txt").read_text() + (out / "audit.jsonl").read_text()
    assert MARK not in shown
    assert "site-b" in shown or "node 2" in shown


def test_port_of_the_server_is_not_named_by_a_socket() -> None:
    """An address with brackets is one that a user can copy."""
    assert format_address("::1", 8000) == "[::1]:8000"
    assert format_address("fed.example.org", 8000) == "fed.example.org:8000"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="Cannot listen on 127"):
            open_listener("127.0.0.1", taken.getsockname()[1])
