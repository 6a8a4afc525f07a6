"""The Flower engine without a network: a grid that runs the real ClientApp in this process, and can misbehave."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from all_methods import NOT_FEDERATED, names, settings_of
from consortium import FUSION, NAMES, Consortium
from fake_grid import (  # noqa: F401 (fixtures)
    FakeGrid,
    FakeNode,
    RecordingCallback,
    close,
    consortium,
    drive,
    fast_polling,
    make_grid,
    make_site,
)
from flwr.app import Message as FlowerMessage

from fedmll import run
from fedmll.core.errors import ConfigError, FederationError
from fedmll.core.message import Message
from fedmll.deploy.flower import round as flower_round
from fedmll.deploy.flower.client_app import HELLO, TRAIN
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.server.status import RunStatus, render_html, render_prometheus
from fedmll.deploy.site.site_config import write_site_file
from fedmll.runs.run_folder import RunFolder
from fedmll.training.round_loop import return_to_round

METHODS = [
    {"method__name": "fedavg"},
    {"method__name": "fedmlp", "method__t1": 1, "method__T0": 0.2, "method__T1": 0.3, "training__rounds": 3},
    {"method__name": "private-fedavg", "method__loss": "sigmoid"},
    {"method__name": "private-fedavg"},
    {"method__name": "test-drifting-slowly", "training__rounds": 3},
    {"method__name": "test-surveyed", "training__rounds": 3},
    {"method__name": "fed-ridge", "model__freeze": "backbone", "model__weights": "random"},
    {
        "method__name": "fed-ridge",
        "model__freeze": "backbone",
        "model__weights": "random",
        "method__ridge_balanced": True,
        "method__lift": "relu",
        "method__lift_width": 6,
        "method__calibrate": "platt",
    },
    {"method__name": "fedavg-pl", "model__freeze": "backbone", "model__weights": "random", "method__start": "ridge"},
    {
        "method__name": "fedavg",
        "model__freeze": "backbone",
        "model__weights": "random",
        "method__start": "logistic",
        "method__refit": "logistic",
        "method__logistic": 0.1,
        "method__logistic_rounds": 2,
    },
    {"method__name": "fedprox", "method__refit": "ridge"},
    FUSION,
]
METHODS += [  # a width that every head can have
    settings_of(name) | {"model__channels": [4, 12]}
    for name in names()
    if name not in {*NOT_FEDERATED, *(changes.get("method__name") for changes in METHODS)}
]


@pytest.mark.parametrize("changes", METHODS, ids=lambda c: str(c.get("method__name", "fusion")))
def test_the_same_weights_as_the_local_engine(consortium: Consortium, tmp_path: Path, changes: dict[str, Any]) -> None:  # noqa: F811
    here = run(consortium.local(**changes))
    there = drive(consortium, make_grid(consortium, tmp_path), tmp_path / "out", **changes)
    assert close(there, here)
    assert there.metrics["macro_auc"] == pytest.approx(here.metrics["macro_auc"], abs=0.01)
    assert [row["bytes_up"] for row in there.rows] == [row["bytes_up"] for row in here.rows]
    for ours, theirs in zip(here.rows, there.rows, strict=True):
        assert theirs.get("loss", 0) == pytest.approx(ours.get("loss", 0), abs=1e-5)  # none where nobody trains


def test_a_site_with_private_labels_learns_no_other_class(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid = make_grid(consortium, tmp_path)
    grid.tamper = lambda node, sent, reply: reply
    drive(consortium, grid, tmp_path / "out", method__name="private-fedavg", method__loss="sigmoid")
    for message in grid.sent:
        sent, info = from_records(message.content)
        assert "digit-" not in json.dumps(info)
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


def test_held_out_data_is_averaged_by_size(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """The server without test data: the metrics are the clients' own."""
    grid = make_grid(consortium, tmp_path, min_count=1)
    told: dict[str, dict[str, float]] = {}

    def listen(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if sent.metadata.message_type == "evaluate":
            told[node.name] = from_records(reply.content)[0].numbers
        return reply

    grid.tamper = listen
    experiment = consortium.experiment("none", training__rounds=1).changed(
        {
            "data.size": 8,
            "study.classes": [f"digit-{n}" for n in range(10)],
            "study.channels": 1,
            "partition.holdout": 0.2,
        }
    )
    RunFolder(tmp_path / "out").create(experiment)
    server = ServerSettings(clients=NAMES, min_clients=3, round_timeout=5, join_timeout=2)
    result = serve.run_federation(grid, experiment, server, tmp_path / "out", callback=RecordingCallback())
    sizes = {"site-a": 18, "site-b": 14, "site-c": 10}
    mean = sum(sizes[n] * told[n]["macro_auc"] for n in NAMES) / 42
    assert result.metrics["sites_macro_auc"] == pytest.approx(mean)
    assert "macro_auc" not in result.metrics  # a mean over sites is not the metric of all data together
    assert result.metrics["val_macro_auc"] == pytest.approx(mean)
    assert (tmp_path / "out" / "per_client.csv").read_text().splitlines()[1].startswith("site-a,18,")


# ---- faults


def test_a_silent_node_is_skipped_at_the_deadline_and_accepted_again(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    hear.at_round = {
        1: lambda: setattr(grid.nodes[1], "answers", False),
        2: lambda: setattr(grid.nodes[1], "answers", True),
    }
    begin = time.monotonic()
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=3, min_clients=2, round_timeout=1.0)
    assert time.monotonic() - begin < 30
    assert [row["clients"] for row in hear.rows] == [3, 2, 3]
    assert "round 2: site-b is skipped (no reply in 1 s)" in hear.said


def test_a_disconnected_node_is_not_waited_for(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()

    def back() -> None:
        grid.nodes[1].status, grid.nodes[1].last_activated_at = "online", "second"

    hear.at_round = {1: lambda: setattr(grid.nodes[1], "status", "offline"), 2: back}
    begin = time.monotonic()
    drive(consortium, grid, tmp_path / "out", hear, training__rounds=3, min_clients=2, round_timeout=60.0)
    assert time.monotonic() - begin < 30
    assert [row["clients"] for row in hear.rows] == [3, 2, 3]
    assert "site-b is disconnected; the run continues without it until it comes back" in hear.said
    assert "round 2: site-b is skipped (it is not connected)" in hear.said


def test_a_node_that_reconnects_in_the_round_is_asked_again(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """It lost the message with its process; the same weights as if nothing had happened."""
    expected = run(consortium.local(training__rounds=2))
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
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


def test_too_few_replies_stop_a_run_that_can_be_resumed(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """Tried again, then stopped; a memory of the failed tries is not gone on from."""
    settings = {"method__name": "test-drifting-slowly", "training__rounds": 3}
    expected = run(consortium.local(**settings))
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    hear.at_round = {1: lambda: setattr(grid.nodes[1], "answers", False)}
    with pytest.raises(FederationError, match="round 2 has 2 valid replies from 3 clients and needs 3"):
        drive(consortium, grid, tmp_path / "out", hear, **settings, max_attempts=2, round_timeout=0.5)
    assert sum("round 2 is tried again" in text.lower() for text in hear.said) == 1
    grid.nodes[1].answers = True
    result = drive(consortium, grid, tmp_path / "out", **settings)
    assert close(result, expected)
    assert [row["round"] for row in result.rows] == [1, 2, 3]


def test_a_federation_repeated_from_a_round_gives_the_same_weights(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """Also the sites return to their earlier client states."""

    def stop() -> None:
        raise KeyboardInterrupt

    changes = {"method__name": "test-drifting-slowly", "training__rounds": 4}
    expected = drive(consortium, make_grid(consortium, tmp_path / "whole"), tmp_path / "expected", **changes)
    hear, grid = RecordingCallback(), make_grid(consortium, tmp_path)
    hear.at_round[3] = stop
    with pytest.raises(KeyboardInterrupt):
        drive(consortium, grid, tmp_path / "out", hear, **changes)
    return_to_round(tmp_path / "out", 3)
    grid.log.clear()
    found = drive(consortium, grid, tmp_path / "out", **changes)
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in expected.weights.items())
    assert [name for kind, name in grid.log if kind == TRAIN] == [*NAMES, *NAMES]  # rounds 3 and 4


def test_a_round_continues_without_invalid_replies(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    hear = RecordingCallback()
    grid = make_grid(consortium, tmp_path)
    drive(consortium, grid, tmp_path / "out", hear, method__name="test-evil", training__rounds=5, min_clients=2)
    assert [row["clients"] for row in hear.rows] == [2, 2, 2, 2, 3]
    reasons = ["NaN or infinite", "weights is torch.float32", "unknown key", "moved by the norm"]
    for number, reason in enumerate(reasons, 1):
        assert any(t.startswith(f"round {number}: the reply of site-b is rejected") and reason in t for t in hear.said)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"name": "site-a"}, "site-b is rejected: it calls itself by another name, and its key is that of 'site-b'"),
        (
            {"samples": -4},
            "site-b is rejected: it claims -4 training images and 0 held-out images, which is impossible",
        ),
        (
            {"classes": ["unicorn"], "labels": {}},
            "site-b is rejected: it has a class that this federation does not have",
        ),
    ],
)
def test_a_wrong_introduction_is_rejected(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    changed: dict[str, Any],
    reason: str,
) -> None:
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()

    def lie(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if node.name != "site-b" or sent.metadata.message_type != HELLO:
            return reply
        _, info = from_records(reply.content)
        return FlowerMessage(to_records(Message(), info | changed), reply_to=sent)

    grid.tamper = lie
    with pytest.raises(FederationError, match=r"site-b did not join in 0\.5 s"):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.5)
    assert hear.said.count(reason) == 1  # once, not at every try


def test_without_keys_a_name_belongs_to_one_node(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path, keyed=False), RecordingCallback()
    grid.nodes.append(FakeNode(9, grid.nodes[0].site_file))
    experiment = consortium.server(training__rounds=1)
    RunFolder(tmp_path / "out").create(experiment)
    server = ServerSettings(clients=NAMES, keys=None, min_clients=3, round_timeout=5, join_timeout=5)
    serve.run_federation(grid, experiment, server, tmp_path / "out", callback=hear)
    assert any(text.startswith("site-a is rejected: another node is connected under this name") for text in hear.said)


def test_a_site_whose_data_changed_is_rejected(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    with pytest.raises(FederationError):
        hear.at_round = {1: lambda: setattr(grid.nodes[1], "answers", False)}
        drive(consortium, grid, tmp_path / "out", hear, max_attempts=1, round_timeout=0.3)
    shorter = tmp_path / "shorter.csv"
    shorter.write_text("\n".join((consortium.folder / "site-b" / "labels.csv").read_text().splitlines()[:-3]) + "\n")
    write_site_file(replace(make_site(consortium, "site-b", tmp_path), csv=shorter), grid.nodes[1].site_file)
    grid.nodes[1].answers, grid.nodes[1].last_activated_at = True, "second"
    with pytest.raises(FederationError, match="only 2 clients are connected"):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.5)
    assert any("site-b is rejected: its data changed since the run began (70 images" in text for text in hear.said)


def test_an_error_at_a_site_tells_the_server_nothing_of_its_files(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    secret = tmp_path / "patient-jane-doe.csv"
    secret.write_text("image,digit-1\nmissing-jane-doe.png,1\n")
    write_site_file(replace(make_site(consortium, "site-b", tmp_path), csv=secret), grid.nodes[1].site_file)
    with pytest.raises(FederationError):
        drive(consortium, grid, tmp_path / "out", hear, join_timeout=0.3)
    assert any("site-b is rejected: it cannot use its data" in text for text in hear.said)
    assert "jane" not in " ".join(hear.said)


def test_a_site_that_lost_its_client_state_is_rejected_by_name(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()

    def lose() -> None:
        for path in (tmp_path / "site-a" / "run1").glob("*.safetensors"):
            path.unlink()

    hear.at_round = {1: lose}
    changes = {"method__name": "test-drifting-slowly", "training__rounds": 2, "min_clients": 2}
    drive(consortium, grid, tmp_path / "out", hear, **changes)
    assert any(
        "reply of site-a is rejected: the client state to continue from is missing" in text for text in hear.said
    )


def test_a_site_keeps_only_the_client_states_that_a_checkpoint_needs(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    folder, seen = tmp_path / "site-a" / "run1", []
    hear.at_round = {n: lambda: seen.append(len(list(folder.glob("*.safetensors")))) for n in range(1, 6)}
    drive(consortium, grid, tmp_path / "out", hear, method__name="test-drifting-slowly", training__rounds=5)
    assert max(seen) <= 3  # two checkpoints' and the newest
    assert not list(folder.glob("*.safetensors"))  # the run is over


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ({"clients": ()}, "is empty"),
        ({"clients": ("a", "a")}, "a name twice"),
        ({"clients": ("a",), "min_clients": 2}, "--min-clients 2 is not possible with 1 clients"),
        ({"clients": ("a/b",), "min_clients": 1}, "cannot be a client's name"),
        ({"clients": ("a",), "min_clients": 1, "round_timeout": 0}, "more than 0"),
    ],
)
def test_wrong_server_settings_are_rejected(wrong: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        ServerSettings(**wrong)


def test_an_experiment_that_cannot_be_federated_is_rejected_before_anything_is_written(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    server = SimpleNamespace(keys=None)
    with pytest.raises(ConfigError, match="'centralized' trains on all data in one place"):
        serve.serve(consortium.server(method__name="centralized"), server, tmp_path / "out")  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()


def test_a_client_that_always_answers_just_before_the_deadline_is_shown_on_the_status_page(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, clock = make_grid(consortium, tmp_path), flower_round.time
    sent_at: dict[str, float] = {}
    push, pull = grid.push_messages, grid.pull_messages

    def push_messages(messages: list[FlowerMessage]) -> list[str]:
        keys = push(messages)
        sent_at.update(dict.fromkeys(keys, clock.monotonic()))
        return keys

    def pull_messages(keys: list[str]) -> Iterator[FlowerMessage]:
        def is_held_back(key: str) -> bool:
            reply = grid.replies.get(key)
            late = reply is not None and reply.metadata.message_type == TRAIN and reply.metadata.src_node_id == 2
            return late and clock.monotonic() - sent_at[key] < 4.5

        return pull([key for key in keys if not is_held_back(key)])

    monkeypatch.setattr(grid, "push_messages", push_messages)
    monkeypatch.setattr(grid, "pull_messages", pull_messages)
    status: list[RunStatus] = []
    remember = RunStatus.__post_init__
    monkeypatch.setattr(RunStatus, "__post_init__", lambda self: (remember(self), status.append(self))[0])
    drive(consortium, grid, tmp_path / "out", training__rounds=4, round_timeout=5.0)
    clients = status[0].to_json()["clients"]
    assert (clients["site-a"]["late_replies"], clients["site-b"]["late_replies"]) == (0, 4)
    page = render_html(status[0].to_json())
    assert page.count("answers just before the deadline: 4 of ") == 1
    assert 'fedmll_client_late_replies_total{client="site-b"} 4' in render_prometheus(status[0].to_json())
