"""The Flower engine without a network: a grid that runs the real ClientApp in this process, and can misbehave."""

from __future__ import annotations

import itertools
import json
import stat
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from cryptography import x509
from every import NOT_FEDERATED, names, settings_of
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, MetricRecord, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.supercore.task_identity import TaskIdentity
from sites import FUSION, NAMES, Consortium, write_consortium

from fedmll import run
from fedmll.deploy import keys, serving, site, site_worker
from fedmll.deploy.flower import engine, post, roster
from fedmll.deploy.flower.guard import Guard
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.flower.site_app import HELLO, TRAIN, app
from fedmll.deploy.serving import Server
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import remember_site
from fedmll.errors import ConfigError, DataError, FederationError, ReplyRefused
from fedmll.message import Message
from fedmll.running import loop
from fedmll.running.observers import Observer


@pytest.fixture(scope="module")
def consortium(tmp_path_factory: pytest.TempPathFactory) -> Consortium:
    return write_consortium(tmp_path_factory.mktemp("consortium"))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 7, 1, 1
    monkeypatch.setattr(engine, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(post, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(post, "ROSTER_SECONDS", 0.02)
    monkeypatch.setattr(engine, "BYE_SECONDS", 0.2)
    monkeypatch.setattr(roster, "ASK_AGAIN_SECONDS", 0.05)
    monkeypatch.setattr(site_worker, "SMALLEST_GROUP", 1)  # as a simulation, with which weights are compared


# ---- records


def test_a_message_survives_the_records() -> None:
    tensors = {
        "weights": torch.randn(7),
        "counters": torch.tensor([3, 2**40]),
        "mask": torch.tensor([True, False]),
        "tags": torch.tensor([[1, -1]], dtype=torch.int8),
        "scalar": torch.tensor(0.5, dtype=torch.float64),
        "empty": torch.zeros(0, 3),
    }
    message, about = from_records(to_records(Message(tensors, {"loss": 0.25, "samples": 12}), {"round": 3, "keep": []}))
    assert about == {"round": 3, "keep": []}
    assert message.numbers == {"loss": 0.25, "samples": 12.0}
    assert message.tensors.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert message[name].dtype == tensor.dtype
        assert torch.equal(message[name], tensor)


def records(array: Array | None = None, **more: Any) -> RecordDict:
    result = to_records(Message({"weights": torch.zeros(2)}), {})
    if array is not None:
        result["tensors"] = ArrayRecord({"weights": array})
    for name, record in more.items():
        result[name] = record
    return result


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        (records(Array("object", (1,), "numpy.ndarray", b"x")), "not plain numbers"),
        (records(Array("float32", (2,), "pickle", b"x")), "not plain numbers"),
        (records(Array("float32", (2,), "numpy.ndarray", b"\x80\x04N.")), "cannot be read"),
        (records(replace(Array(np.zeros(3, np.float32)), shape=(4,))), "says float32"),
        (records(code=ConfigRecord({"a": 1})), "unknown record code"),
        (records(numbers=MetricRecord({"loss": [1.0, 2.0]})), "loss is a list"),
        (records(about=ConfigRecord({"json": "[1]"})), "cannot be read"),
        (records(about=ConfigRecord({"json": "{"})), "cannot be read"),
    ],
)
def test_records_that_are_no_message_are_refused(wrong: RecordDict, reason: str) -> None:
    with pytest.raises(ReplyRefused, match=reason):
        from_records(wrong)


def test_a_pickled_array_is_never_loaded(tmp_path: Path) -> None:
    flag = tmp_path / "executed"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
            return (Path.touch, (flag,))  # type: ignore[return-value]

    import io

    buffer = io.BytesIO()
    np.save(buffer, np.array([Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(ReplyRefused, match="cannot be read"):
        from_records(records(Array("float32", (1,), "numpy.ndarray", buffer.getvalue())))
    assert not flag.exists()


# ---- keys


def test_keys_are_private_and_the_certificate_names_the_hosts(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    keys.init(folder, ["fed.example.org", "10.0.0.7"])
    private, public = keys.new_node(folder, "hospital-a")
    for path in (folder / "ca.key", folder / "server.key", private):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    certificate = x509.load_pem_x509_certificate((folder / "server.crt").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fed.example.org", "localhost"]
    assert [str(a) for a in names.get_values_for_type(x509.IPAddress)] == ["10.0.0.7", "127.0.0.1", "::1"]
    authority = x509.load_pem_x509_certificate((folder / "ca.crt").read_bytes())
    certificate.verify_directly_issued_by(authority)
    before = (folder / "ca.crt").read_bytes(), (folder / "server.crt").read_bytes()
    keys.init(folder, ["other.example.org"])  # another host: a new certificate of the same CA
    assert (folder / "ca.crt").read_bytes() == before[0]
    assert (folder / "server.crt").read_bytes() != before[1]
    with pytest.raises(ConfigError, match="exists already; nothing was changed"):
        keys.new_node(folder, "hospital-a")
    assert public.read_text().endswith(keys.registered(folder, ["hospital-a"])["hospital-a"])


def test_every_name_needs_a_key_of_its_own(tmp_path: Path) -> None:
    keys.new_node(tmp_path, "a")
    with pytest.raises(ConfigError, match=r"lacks the public key of b: put b\.pub there"):
        keys.registered(tmp_path, ["a", "b"])
    (tmp_path / "b.pub").write_bytes((tmp_path / "a.pub").read_bytes())
    with pytest.raises(ConfigError, match="a and b have the same public key"):
        keys.registered(tmp_path, ["a", "b"])
    (tmp_path / "b.pub").write_text("no key")
    with pytest.raises(ConfigError, match=r"b\.pub is not a public key"):
        keys.registered(tmp_path, ["a", "b"])
    with pytest.raises(ConfigError, match="cannot be a client's name"):
        keys.new_node(tmp_path, "../etc")


def test_the_guard_lets_nodes_in_and_nobody_else() -> None:
    def allowed(path: str, client: str, kind: str = "http") -> bool:
        return Guard.allowed({"type": kind, "path": path, "client": (client, 1)})

    assert allowed("/v1/fleet/pull-messages", "203.0.113.9")
    assert allowed("/v1/runtime/acquire-task", "127.0.0.1")
    assert not allowed("/v1/runtime/acquire-task", "203.0.113.9")
    here = {"type": "http", "path": "/v1/runtime/acquire-task", "server": ("10.0.0.5", 8000)}
    assert Guard.allowed(here | {"client": ("10.0.0.5", 1)})  # the server itself, where it listens on one address only
    assert not Guard.allowed(here | {"client": ("10.0.0.6", 1)})
    assert not allowed("/v1/control/start-run", "127.0.0.1")
    assert not allowed("/docs", "127.0.0.1")
    assert not allowed("/v1/fleet/x", "127.0.0.1", "websocket")


# ---- a site's data


def test_what_a_site_does_not_annotate_is_unknown(consortium: Consortium, tmp_path: Path) -> None:
    here = site_of(consortium, "site-c", tmp_path)
    summary = site.check(here)
    assert summary.images == 50
    assert len(summary.classes) == 7  # three columns are not there
    classes = [f"digit-{n}" for n in range(10)]
    data = site.load(here, classes, (1, 8, 8), seed=3, holdout=0.2)
    assert (len(data.train), len(data.held_out)) == (40, 10)
    assert np.flatnonzero(~data.annotated).tolist() == [2, 5, 7]
    assert (data.train.labels[:, [2, 5, 7]] == -1).all()
    private = site.load(here, None, (1, 8, 8), seed=3, holdout=0.0)
    assert private.train.classes == tuple(c for n, c in enumerate(classes) if n not in (2, 5, 7))
    assert site.load(here, classes, (3, 8, 8), 3, 0.0).train.samples(slice(0, 2)).shape == (2, 3, 8, 8)
    with pytest.raises(DataError, match="'digit-0', which this federation does not have"):
        site.load(here, classes[1:], (1, 8, 8), 3, 0.0)
    assert site.load(here, classes, (1, 9, 7), 3, 0.0).train.sample_shape == (1, 9, 7)


def test_a_list_of_labels_speaks_of_every_class_unless_told(consortium: Consortium, tmp_path: Path) -> None:
    (tmp_path / "labels.csv").write_text("image,labels\n00000.png,cat\n00001.png,cat|dog\n00002.png,none\n00003.png,\n")
    here = Site("s", tmp_path / "labels.csv", consortium.folder / "images", tmp_path)
    assert site.load(here, ["cow", "cat", "dog"], (1, 8, 8), 0, 0.0).train.labels.tolist() == [
        [0, 1, 0],
        [0, 1, 1],
        [0, 0, 0],
        [-1, -1, -1],
    ]
    only = replace(here, classes=("cat", "dog"))  # it does not look for cows
    assert site.load(only, ["cow", "cat", "dog"], (1, 8, 8), 0, 0.0).annotated.tolist() == [False, True, True]


def test_unreadable_images_are_named_before_anything_starts(consortium: Consortium, tmp_path: Path) -> None:
    (tmp_path / "bad.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    (tmp_path / "labels.csv").write_text("image,a\nbad.png,1\n")
    with pytest.raises(DataError, match=r"1 of 1 images cannot be read: .*bad\.png"):
        site.check(Site("s", tmp_path / "labels.csv", tmp_path, tmp_path / "memory"))


# ---- a grid in this process


def site_of(consortium: Consortium, name: str, memory: Path) -> Site:
    return Site(
        name, consortium.folder / name / "labels.csv", consortium.folder / "images", memory / name, device="cpu"
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

    def pull_messages(self, message_ids: list[str]) -> Iterator[FlowerMessage]:
        return iter([self.replies.pop(key) for key in message_ids if key in self.replies])


def make_grid(consortium: Consortium, folder: Path, keyed: bool = True) -> FakeGrid:
    nodes = []
    for number, name in enumerate(NAMES, 1):
        path = folder / "nodes" / f"{name}.json"
        remember_site(site_of(consortium, name, folder), path)
        nodes.append(FakeNode(number, path, name if keyed else ""))
    return FakeGrid(nodes)


class Hear(Observer):
    def __init__(self) -> None:
        self.said: list[str] = []
        self.rows: list[dict] = []
        self.at_round: dict[int, Callable[[], None]] = {}

    def warning(self, text: str) -> None:
        self.said.append(text)

    def round_done(self, row: dict) -> None:
        self.rows.append(row)
        self.at_round.get(row["round"], lambda: None)()


def drive(consortium: Consortium, grid: FakeGrid, out: Path, hear: Hear | None = None, **changes: Any) -> loop.Result:
    setting = {
        key: changes.pop(key) for key in ("min_clients", "round_timeout", "join_timeout", "tries") if key in changes
    }
    experiment = consortium.server(**changes)
    usual = {"min_clients": 3, "round_timeout": 5.0, "join_timeout": 2.0, "run": "run1", "keys": str(consortium.keys)}
    server = Server(NAMES, **usual | setting)
    if not out.exists():
        loop.create(out, experiment)
    return serving.drive(grid, experiment, server, out, hear or Hear())


def close(first: loop.Result, second: loop.Result) -> bool:
    return all(torch.allclose(first.weights[k].float(), v.float(), atol=1e-5) for k, v in second.weights.items())


METHODS = [
    {"method__name": "fedavg"},
    {"method__name": "fedmlp", "method__t1": 1, "method__T0": 0.2, "method__T1": 0.3, "training__rounds": 3},
    {"method__name": "private-fedavg", "method__loss": "sigmoid"},
    {"method__name": "private-fedavg"},
    {"method__name": "test-drifting-slowly", "training__rounds": 3},
    {"method__name": "test-surveyed", "training__rounds": 3},
    {"method__name": "fed-ridge", "model__freeze": "backbone"},
    {
        "method__name": "fed-ridge",
        "model__freeze": "backbone",
        "method__ridge_balanced": True,
        "method__lift": "relu",
        "method__lift_width": 6,
        "method__calibrate": "platt",
    },
    {"method__name": "fedavg-pl", "model__freeze": "backbone", "method__start": "ridge"},
    FUSION,
]
METHODS += [  # a width that every head can have
    settings_of(name) | {"model__channels": [4, 12]}
    for name in names()
    if name not in {*NOT_FEDERATED, *(changes.get("method__name") for changes in METHODS)}
]


@pytest.mark.parametrize("changes", METHODS, ids=lambda c: str(c.get("method__name", "fusion")))
def test_the_same_weights_as_the_local_engine(consortium: Consortium, tmp_path: Path, changes: dict[str, Any]) -> None:
    here = run(consortium.local(**changes))
    there = drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", **changes)
    assert close(there, here)
    assert there.metrics["macro_auc"] == pytest.approx(here.metrics["macro_auc"], abs=0.01)
    assert [row["bytes_up"] for row in there.rows] == [row["bytes_up"] for row in here.rows]
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        assert theirs.get("loss", 0) == pytest.approx(ours.get("loss", 0), abs=1e-5)  # none where nobody trains


def test_a_private_site_is_told_of_no_other_class(consortium: Consortium, tmp_path: Path) -> None:
    grid = make_grid(consortium, tmp_path)
    grid.tamper = lambda node, sent, reply: reply
    drive(consortium, grid, tmp_path / "out", method__name="private-fedavg", method__loss="sigmoid")
    for message in grid.sent:
        sent, about = from_records(message.content)
        assert "digit-" not in json.dumps(about)
        if message.metadata.dst_node_id == 3 and "model" in sent.tensors:
            held = sent["model"].numpy().tobytes()
            assert [n for n in range(10) if f"digit-{n}".encode() in held] == [0, 1, 3, 4, 6, 8, 9]
        if "weights" in sent.tensors and message.metadata.dst_node_id == 3:  # seven rows, not ten
            public = 8 + 1  # weights and bias of a row: channels + 1
            full = next(
                from_records(m.content)[0]
                for m in grid.sent
                if m.metadata.dst_node_id == 1 and from_records(m.content)[0].tensors
            )
            assert len(full["weights"]) - len(sent["weights"]) == 3 * public


def test_held_out_data_is_averaged_by_size(consortium: Consortium, tmp_path: Path) -> None:
    """The server without test data: the metrics are the clients' own."""
    grid = make_grid(consortium, tmp_path)
    told: dict[str, dict[str, float]] = {}

    def listen(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if sent.metadata.message_type == "evaluate":
            told[node.name] = from_records(reply.content)[0].numbers
        return reply

    grid.tamper = listen
    experiment = consortium.experiment("none", training__rounds=1).changed(
        {
            "data.size": 8,
            "sites.classes": [f"digit-{n}" for n in range(10)],
            "sites.channels": 1,
            "partition.holdout": 0.2,
        }
    )
    loop.create(tmp_path / "out", experiment)
    server = Server(NAMES, min_clients=3, round_timeout=5, join_timeout=2)
    result = serving.drive(grid, experiment, server, tmp_path / "out", Hear())
    sizes = {"site-a": 18, "site-b": 14, "site-c": 10}
    mean = sum(sizes[n] * told[n]["macro_auc"] for n in NAMES) / 42
    assert result.metrics["sites_macro_auc"] == pytest.approx(mean)
    assert "macro_auc" not in result.metrics  # a mean over sites is not the metric of all data together
    assert result.metrics["val_macro_auc"] == pytest.approx(mean)
    assert (tmp_path / "out" / "per_client.csv").read_text().splitlines()[1].startswith("site-a,18,")


# ---- faults


def test_a_silent_node_is_left_out_by_the_deadline_and_taken_back(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()
    hear.at_round = {
        1: lambda: setattr(grid.nodes[1], "answers", False),
        2: lambda: setattr(grid.nodes[1], "answers", True),
    }
    begin = time.monotonic()
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=3, min_clients=2, round_timeout=1.0)
    assert time.monotonic() - begin < 30
    assert [row["clients"] for row in hear.rows] == [3, 2, 3]
    assert "round 2: site-b is left out (no answer in 1 s)" in hear.said


def test_a_node_that_is_gone_costs_no_deadline(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()

    def back() -> None:
        grid.nodes[1].status, grid.nodes[1].last_activated_at = "online", "second"

    hear.at_round = {1: lambda: setattr(grid.nodes[1], "status", "offline"), 2: back}
    begin = time.monotonic()
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=3, min_clients=2, round_timeout=60.0)
    assert time.monotonic() - begin < 30
    assert [row["clients"] for row in hear.rows] == [3, 2, 3]
    assert "site-b is gone; the run goes on without it until it comes back" in hear.said
    assert "round 2: site-b is left out (it is not connected)" in hear.said


def test_a_node_that_comes_anew_in_the_round_is_asked_again(consortium: Consortium, tmp_path: Path) -> None:
    """It lost the message with its process; the same weights as if nothing had happened."""
    expected = run(consortium.local(training__rounds=2))
    grid, hear = make_grid(consortium, tmp_path), Hear()
    node = grid.nodes[2]
    node_pull = grid.pull_messages

    def pull(ids: list[str]) -> Iterator[FlowerMessage]:
        if not node.answers:  # the process was killed and is started anew
            node.answers, node.last_activated_at = True, "second"
        return node_pull(ids)

    def kill() -> None:
        node.answers = False
        grid.pull_messages = pull  # type: ignore[method-assign]

    hear.at_round = {1: kill}
    result = drive(consortium, grid, tmp_path / "out", hear, training__rounds=2, round_timeout=60.0)
    assert close(result, expected)
    assert [entry for entry in grid.log if entry == (TRAIN, "site-c")] == 3 * [(TRAIN, "site-c")]


def test_too_few_replies_stop_a_run_that_can_be_resumed(consortium: Consortium, tmp_path: Path) -> None:
    """Tried again, then stopped; a memory of the failed tries is not gone on from."""
    settings = {"method__name": "test-drifting-slowly", "training__rounds": 3}
    expected = run(consortium.local(**settings))
    grid, hear = make_grid(consortium, tmp_path), Hear()
    hear.at_round = {1: lambda: setattr(grid.nodes[1], "answers", False)}
    with pytest.raises(FederationError, match="round 2 got 2 good replies from 3 clients and needs 3"):
        drive(consortium, grid, tmp_path / "out", hear, **settings, tries=2, round_timeout=0.5)
    assert sum("Round 2 is tried again" in text for text in hear.said) == 1
    grid.nodes[1].answers = True
    result = drive(consortium, grid, tmp_path / "out", **settings)
    assert close(result, expected)
    assert [row["round"] for row in result.rows] == [1, 2, 3]


def test_bad_replies_are_refused_by_name_and_the_others_go_on(consortium: Consortium, tmp_path: Path) -> None:
    hear = Hear()
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", hear, method__name="test-evil", training__rounds=5, min_clients=2)
    assert [row["clients"] for row in hear.rows] == [2, 2, 2, 2, 3]
    reasons = ["NaN or infinite", "weights is torch.float32", "unknown key backdoor", "moved by the norm"]
    for number, reason in enumerate(reasons, 1):
        assert any(t.startswith(f"round {number}: the reply of site-b is refused") and reason in t for t in hear.said)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": "site-a"}, "site-b is refused: it calls itself 'site-a', and its key is that of 'site-b'"),
        ({"samples": -4}, "site-b is refused: it says that it has -4 images and holds 0 out, which is not believed"),
        (
            {"classes": ["unicorn"], "labels": {}},
            "site-b is refused: it has the class 'unicorn', which this federation does not have",
        ),
    ],
)
def test_an_introduction_that_is_wrong_is_refused(
    consortium: Consortium, tmp_path: Path, changed: dict[str, Any], reason: str
) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()

    def lie(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != HELLO:
            return reply
        _, about = from_records(reply.content)
        return FlowerMessage(to_records(Message(), about | changed), reply_to=sent)

    grid.tamper = lie
    with pytest.raises(FederationError, match=r"site-b did not come in 0\.5 s"):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.5)
    assert hear.said.count(reason) == 1  # once, not at every try


def test_without_keys_a_name_belongs_to_one_node(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path, keyed=False), Hear()
    grid.nodes.append(FakeNode(9, grid.nodes[0].site_file))
    experiment = consortium.server(training__rounds=1)
    loop.create(tmp_path / "out", experiment)
    server = Server(NAMES, keys=None, min_clients=3, round_timeout=5, join_timeout=5)
    serving.drive(grid, experiment, server, tmp_path / "out", hear)
    assert any(text.startswith("site-a is refused: another node is connected under this name") for text in hear.said)


def test_a_site_whose_data_changed_is_refused(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()
    with pytest.raises(FederationError):
        hear.at_round = {1: lambda: setattr(grid.nodes[1], "answers", False)}
        drive(consortium, grid, tmp_path / "out", hear, tries=1, round_timeout=0.3)
    shorter = tmp_path / "shorter.csv"
    shorter.write_text("\n".join((consortium.folder / "site-b" / "labels.csv").read_text().splitlines()[:-3]) + "\n")
    remember_site(replace(site_of(consortium, "site-b", tmp_path), csv=shorter), grid.nodes[1].site_file)
    grid.nodes[1].answers, grid.nodes[1].last_activated_at = True, "second"
    with pytest.raises(FederationError, match="only 2 clients are connected"):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.5)
    assert any("site-b is refused: its data changed since the run began (70 images" in text for text in hear.said)


def test_an_error_at_a_site_tells_the_server_nothing_of_its_files(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()
    secret = tmp_path / "patient-jane-doe.csv"
    secret.write_text("image,digit-1\nmissing-jane-doe.png,1\n")
    remember_site(replace(site_of(consortium, "site-b", tmp_path), csv=secret), grid.nodes[1].site_file)
    with pytest.raises(FederationError):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.3)
    assert any("site-b is refused: its data cannot be used" in text for text in hear.said)
    assert "jane" not in " ".join(hear.said)


def test_a_site_that_lost_its_memory_says_so(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()

    def lose() -> None:
        for path in (tmp_path / "site-a" / "run1").glob("*.safetensors"):
            path.unlink()

    hear.at_round = {1: lose}
    changes = {"method__name": "test-drifting-slowly", "training__rounds": 2, "min_clients": 2}
    drive(consortium, grid, tmp_path / "out", hear, **changes)
    assert any("reply of site-a is refused: it has lost its memory of the round" in text for text in hear.said)


def test_a_site_keeps_only_the_memories_that_a_checkpoint_needs(consortium: Consortium, tmp_path: Path) -> None:
    grid, hear = make_grid(consortium, tmp_path), Hear()
    folder, seen = tmp_path / "site-a" / "run1", []
    hear.at_round = {n: lambda: seen.append(len(list(folder.glob("*.safetensors")))) for n in range(1, 6)}
    drive(consortium, grid, tmp_path / "out", hear, method__name="test-drifting-slowly", training__rounds=5)
    assert max(seen) <= 3  # two checkpoints' and the newest
    assert not list(folder.glob("*.safetensors"))  # the run is over


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"clients": ()}, "names nobody"),
        ({"clients": ("a", "a")}, "somebody twice"),
        ({"clients": ("a",), "min_clients": 2}, "--min-clients 2 is not possible with 1 clients"),
        ({"clients": ("a/b",), "min_clients": 1}, "cannot be a client's name"),
        ({"clients": ("a",), "min_clients": 1, "round_timeout": 0}, "more than 0"),
    ],
)
def test_a_wrong_server_is_refused(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        Server(**wrong)


def test_what_cannot_be_federated_is_refused_before_anything_is_written(consortium: Consortium, tmp_path: Path) -> None:
    server = SimpleNamespace(keys=None)
    with pytest.raises(ConfigError, match="'centralized' trains on all data in one place"):
        serving.serve(consortium.server(method__name="centralized"), server, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
