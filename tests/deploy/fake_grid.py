"""A Flower grid in this process: it runs the real ClientApp of every site without a network, and can misbehave."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from consortium import NAMES, Consortium, write_consortium
from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity

from fedmll.deploy.flower import engine, membership
from fedmll.deploy.flower import round as flower_round
from fedmll.deploy.flower.client_app import app
from fedmll.deploy.security.private_keys import load_private_key
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site import approval, worker
from fedmll.deploy.site.site_config import Site, write_site_file
from fedmll.runs.run_folder import RunFolder
from fedmll.training.callbacks import Callback, Result


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


class SimulatedClock:
    """Stands for the module `time` on the server: only waiting takes time, so no deadline depends on the machine."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@pytest.fixture(autouse=True)
def fast_polling(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test waits. Nothing is withheld, as in the simulation that weights are compared with."""
    clock = SimulatedClock()
    for module in (engine, membership, flower_round, serve):
        monkeypatch.setattr(module, "time", clock)
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(engine, "BYE_SECONDS", 0.2)
    monkeypatch.setattr(flower_round, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(flower_round, "MEMBERSHIP_SECONDS", 0.02)
    monkeypatch.setattr(membership, "RETRY_SECONDS", 0.05)
    monkeypatch.setattr(worker, "MIN_GROUP_SIZE", 1)


def make_site(consortium: Consortium, name: str, folder: Path) -> Site:
    return Site(
        name=name,
        csv=consortium.folder / name / "labels.csv",
        images=consortium.folder / "images",
        state_dir=folder / name,
        device="cpu",
    )


@dataclass
class FakeNode:
    node_id: int
    site_file: Path
    name: str = ""  # as registered with its key
    status: str = "online"
    last_activated_at: str = "first"
    answers: bool = True


Tamper = Callable[["FakeNode", FlowerMessage, FlowerMessage], FlowerMessage]


@dataclass
class FakeGrid:
    """Flower's Grid with the ClientApp at its other end."""

    nodes: list[FakeNode]
    tamper: Tamper = lambda node, sent, reply: reply
    replies: dict[str, FlowerMessage] = field(default_factory=dict)
    log: list[tuple[str, str]] = field(default_factory=list)  # (kind, site)
    sent: list[FlowerMessage] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.numbers = itertools.count(1)

    def get_nodes(self) -> list[FakeNode]:
        return [node for node in self.nodes if node.status == "online"]

    def push_messages(self, messages: list[FlowerMessage]) -> list[str]:
        ids = []
        for message in messages:
            message_id = str(next(self.numbers))
            message.metadata.__dict__["_message_id"] = message_id
            node = next(n for n in self.nodes if n.node_id == message.metadata.dst_node_id)
            self.log.append((message.metadata.message_type, node.site_file.stem))
            self.sent.append(message)
            if node.answers:
                context = Context(7, node.node_id, {"site": str(node.site_file)}, RecordDict(), {})
                self.replies[message_id] = self.tamper(node, message, app(message, context))
            ids.append(message_id)
        return ids

    def join_again(self) -> None:
        """Every site ends its join and begins another."""
        for node in self.nodes:
            approval.delete_setup_record(node.site_file)

    def pull_messages(self, message_ids: list[str]) -> Iterator[FlowerMessage]:
        return iter([self.replies.pop(key) for key in message_ids if key in self.replies])


def make_grid(consortium: Consortium, folder: Path, keyed: bool = True, min_count: int = 10) -> FakeGrid:
    nodes = []
    for number, name in enumerate(NAMES, 1):
        path = folder / "nodes" / f"{name}.json"
        here = make_site(consortium, name, folder)
        write_site_file(replace(here, limits=replace(here.limits, min_count=min_count)), path)
        nodes.append(FakeNode(number, path, name if keyed else ""))
    return FakeGrid(nodes)


class RecordingCallback(Callback):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list[dict] = []
        self.at_round: dict[int, Callable[[], None]] = {}

    def on_warning(self, text: str) -> None:
        self.said.append(text)

    def on_round_end(self, row: dict) -> None:
        self.rows.append(row)
        self.at_round.get(row["round"], lambda: None)()


def drive(
    consortium: Consortium, grid: FakeGrid, out: Path, callback: RecordingCallback | None = None, **changes: Any
) -> Result:
    """Run a federation of the consortium's sites; `changes` are settings of the server and of the experiment."""
    names = ("min_clients", "round_timeout", "join_timeout", "max_attempts")
    defaults: dict[str, Any] = {"min_clients": 3, "round_timeout": 5.0, "join_timeout": 2.0, "run": "run1"}
    server = defaults | {name: changes.pop(name) for name in names if name in changes}
    settings = ServerSettings(clients=NAMES, keys=str(consortium.keys), **server)
    experiment = consortium.server(**changes)
    if not out.exists():
        RunFolder(out).create(experiment)
    key = load_private_key((consortium.keys / "server.key").read_bytes())
    return serve.run_federation(
        grid, experiment, settings, out, callback=callback or RecordingCallback(), signing_key=key
    )


def close(first: Result, second: Result) -> bool:
    return all(torch.allclose(first.weights[k].float(), v.float(), atol=1e-5) for k, v in second.weights.items())
