"""Late joining: a run starts before all of its clients have joined, and accepts the others later."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import NAMES, Consortium, replayed
from fake_grid import FakeGrid, RecordingCallback, consortium, fast_polling, make_grid  # noqa: F401  (fixtures)

from fedmll.core.errors import ConfigError, FederationError, FedmllError
from fedmll.core.message import Tensors
from fedmll.data import federation
from fedmll.data.federation import Federation
from fedmll.deploy.flower.client_app import TRAIN
from fedmll.deploy.server import serve, server_settings
from fedmll.deploy.server.serve import check_can_start_with
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.runs.run_folder import RunFolder
from fedmll.training import round_loop

DRIFTING = {"method__name": "test-drifting-slowly", "training__rounds": 5}  # its clients remember
SCAFFOLD = {"method__name": "scaffold", "training__rounds": 4, "training__optimizer": "sgd", "training__lr": 0.05}


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "RETURN_SECONDS", 0.1)


def go(
    consortium: Consortium,  # noqa: F811
    grid: FakeGrid,
    out: Path,
    hear: RecordingCallback,
    server: ServerSettings,
    **changes: Any,
) -> round_loop.Result:
    experiment = consortium.server(**changes)
    if not out.exists():
        RunFolder(out).create(experiment)
        server_settings.write_server_settings(server, out)
    return serve.run_federation(grid, experiment, server, out, callback=hear)


def started_with(number: int, **more: Any) -> ServerSettings:
    usual: dict[str, Any] = {"min_clients": 2, "round_timeout": 5.0, "join_timeout": 2.0, "run": "run1"}
    return ServerSettings(clients=NAMES, start_with=number, **usual | more)


def without(grid: FakeGrid, place: int = 2) -> None:
    grid.nodes[place].status = "offline"


def coming(grid: FakeGrid, place: int = 2) -> None:
    grid.nodes[place].status, grid.nodes[place].last_activated_at = "online", "late"


def by_hand(consortium: Consortium, folder: Path, first: dict[str, int], **changes: Any) -> Tensors:  # noqa: F811
    return replayed(consortium, folder, lambda name, number: first[name] <= number, **changes)


def same(result: round_loop.Result, expected: Tensors) -> bool:
    return all(torch.allclose(result.weights[k].float(), v.float(), atol=1e-5) for k, v in expected.items())


@pytest.mark.parametrize("changes", [DRIFTING, SCAFFOLD], ids=lambda changes: changes["method__name"])
def test_a_client_that_joins_in_a_round_takes_part_from_the_next_on(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
) -> None:
    """SCAFFOLD divides by all clients: one that has not come is one that has not been drawn."""
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    without(grid)
    hear.at_round = {1: lambda: coming(grid)}  # it is greeted in round 2
    result = go(consortium, grid, tmp_path / "out", hear, started_with(2), **changes)
    rounds = changes["training__rounds"]
    assert [row["clients"] for row in result.rows] == [2, 2] + [3] * (rounds - 2)
    assert same(result, by_hand(consortium, tmp_path, {"site-a": 1, "site-b": 1, "site-c": 3}, **changes))
    assert hear.said.count("starts without site-c, which may join later") == 1
    assert hear.said.count("site-c has joined: 50 images, 7 annotated classes; it takes part from round 3 on") == 1
    assert not any("skipped" in text for text in hear.said)
    assert result.summary["samples"]["train"] == 210  # who came late counts in the end
    assert result.summary["annotating_clients"]["digit-0"] == 3


def test_a_restarted_server_knows_the_first_round_of_late_clients(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """Killed in the round in which site-c came: that round is done again without it, as it was."""
    grid, hear, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "out"
    without(grid)

    def end() -> None:
        raise KeyboardInterrupt

    hear.at_round = {2: lambda: coming(grid)}
    honest = grid.tamper

    def stop_when_it_came(node: Any, sent: Any, reply: Any) -> Any:
        if (out / "sites.json").exists() and "site-c" in (out / "sites.json").read_text():
            end()
        return honest(node, sent, reply)

    grid.tamper = stop_when_it_came
    with pytest.raises(KeyboardInterrupt):
        go(consortium, grid, out, hear, started_with(2), **DRIFTING)
    done = [json.loads(line)["round"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert json.loads((out / "sites.json").read_text())["site-c"]["first_round"] == done[-1] + 2
    again, hear = make_grid(consortium, tmp_path), RecordingCallback()
    result = go(consortium, again, out, hear, server_settings.read_server_settings(out), **DRIFTING)
    first = {"site-a": 1, "site-b": 1, "site-c": done[-1] + 2}
    assert same(result, by_hand(consortium, tmp_path, first, **DRIFTING))
    assert not any("starts without" in text for text in hear.said)


def test_missing_classes_are_reported_once_and_a_method_that_needs_them_does_not_start(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Only site-c is there, which does not annotate three classes."""
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    without(grid, 0)
    without(grid, 1)
    result = go(consortium, grid, tmp_path / "one", hear, started_with(1, min_clients=1), training__rounds=1)
    line = "starts without site-a, site-b, which may join later; no client annotates digit-2, digit-5, digit-7 so far"
    assert hear.said.count(line) == 1
    assert [row["clients"] for row in result.rows] == [1]
    assert result.summary["annotating_clients"]["digit-2"] == 0
    grid.join_again()  # another study
    with pytest.raises(ConfigError, match=r"FedMLP needs .* there is none for digit-2, digit-5, digit-7"):
        go(consortium, grid, tmp_path / "two", hear, started_with(1, min_clients=1), method__name="fedmlp")


def test_a_late_client_that_the_method_cannot_work_with_is_rejected_and_the_run_goes_on(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    without(grid)

    def validate_clients(self: Any, peers: list[ClientInfo]) -> None:
        if any(int(peer.owned.sum()) < 10 for peer in peers):
            raise ConfigError("Everybody must annotate everything.")

    monkeypatch.setattr("fedmll.methods.framework.method.Method.validate_clients", validate_clients)
    hear.at_round = {1: lambda: coming(grid)}
    result = go(consortium, grid, tmp_path / "out", hear, started_with(2), training__rounds=4)
    assert [row["clients"] for row in result.rows] == [2, 2, 2, 2]
    refusal = "site-c is rejected: the method cannot work with it: Everybody must annotate everything."
    assert hear.said.count(refusal) == 1
    assert "site-c" not in json.loads((tmp_path / "out" / "sites.json").read_text())


def test_a_run_does_not_start_with_fewer_clients_than_start_with(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    grid, hear = make_grid(consortium, tmp_path), RecordingCallback()
    without(grid, 1)
    without(grid, 2)
    server = started_with(2, min_clients=1, join_timeout=0.5)
    with pytest.raises(FederationError, match=r"site-b, site-c did not join in 0\.5 s .* resume --start-with N"):
        go(consortium, grid, tmp_path / "out", hear, server)
    changed = server_settings.change_server_settings(tmp_path / "out", start_with=1)
    assert server_settings.read_server_settings(tmp_path / "out").start_with == 1
    result = go(consortium, grid, tmp_path / "out", hear, changed)
    assert [row["clients"] for row in result.rows] == [1, 1]


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        (
            {"method__name": "fed-ridge", "model__freeze": "backbone", "model__weights": "random"},
            r"'fed-ridge' asks .* \(ridge\)",
        ),
        (
            {
                "method__name": "fedavg-pl",
                "model__freeze": "backbone",
                "model__weights": "random",
                "method__start": "ridge",
            },
            r"'fedavg-pl' asks",
        ),
        ({"method__name": "fedrdn"}, r"'fedrdn' asks .* \(random-normalisation\)"),
    ],
    ids=lambda value: value.get("method__name") if isinstance(value, dict) else "",
)
def test_a_method_that_collects_statistics_needs_all_clients(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
    changes: dict[str, Any],
    part: str,
) -> None:
    with pytest.raises(ConfigError, match=part):
        serve.serve(consortium.server(**changes), started_with(2), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigError, match=part):  # nor by a change of the setting
        go(
            consortium,
            make_grid(consortium, tmp_path),
            tmp_path / "out",
            RecordingCallback(),
            started_with(2),
            **changes,
        )
    check_can_start_with(consortium.server(**changes), started_with(3))


def test_start_with_is_kept_and_bounded(tmp_path: Path) -> None:
    server = ServerSettings(clients=("a", "b", "c"), start_with=3)
    assert (server.clients_to_start, ServerSettings(clients=("a", "b", "c")).clients_to_start) == (3, 3)
    for wrong in (1, 4):  # a round needs two
        with pytest.raises(ConfigError, match=rf"--start-with {wrong} is not possible with 3 clients, .* needs 2"):
            ServerSettings(clients=("a", "b", "c"), start_with=wrong)
    server_settings.write_server_settings(server, tmp_path)
    (tmp_path / "sites.json").write_text('{"a": {}, "b": {}}')
    assert server_settings.change_server_settings(tmp_path, drop=["c"]).start_with == 2  # no more can come
    assert server_settings.read_server_settings(tmp_path).announced_clients == 3  # what the sites have approved stays
    assert server_settings.change_server_settings(tmp_path).clients == ("a", "b")


def test_a_started_run_keeps_a_place_for_clients_that_have_not_joined(tmp_path: Path) -> None:
    """Memories are known by places; the sites were told how many clients there are."""
    server_settings.write_server_settings(ServerSettings(clients=("a", "b", "c"), start_with=2), tmp_path)
    (tmp_path / "sites.json").write_text('{"b": {}, "c": {}}')
    (tmp_path / "checkpoint").mkdir()
    assert not server_settings.has_begun(tmp_path)
    (tmp_path / "checkpoint" / "000001.safetensors").write_text("")
    changed = server_settings.change_server_settings(tmp_path, drop=["a"])
    assert (changed.clients, changed.dropped, changed.start_with) == (("a", "b", "c"), ("a",), 2)
    assert changed.announced_clients == 3


def test_a_client_that_never_joined_can_be_dropped(consortium: Consortium, tmp_path: Path) -> None:  # noqa: F811
    """site-a, the first of the list, never came: site-b and site-c keep their places and their memories."""
    grid, hear, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "out"
    without(grid, 0)

    def end() -> None:
        raise KeyboardInterrupt

    hear.at_round = {2: end}
    with pytest.raises(KeyboardInterrupt):
        go(consortium, grid, out, hear, started_with(2), **DRIFTING)
    hear.at_round = {}
    result = go(consortium, grid, out, hear, server_settings.change_server_settings(out, drop=["site-a"]), **DRIFTING)
    assert same(result, by_hand(consortium, tmp_path, {"site-a": 9, "site-b": 1, "site-c": 1}, **DRIFTING))
    assert hear.said.count("starts without site-a, which may join later") == 1  # not after it was dropped


@pytest.mark.parametrize(
    ("came", "here", "begun", "seconds"),
    [
        ("abc", "abc", False, 0),
        ("ab", "ab", False, 60),  # a minute for those who start at the same time
        ("ab", "ab", True, 0),  # a client that never joined is not waited for again
        ("abc", "ab", True, 60),  # c may come back
        ("abc", "a", True, None),  # too few for a round
        ("a", "a", False, None),
    ],
)
def test_start_waits_until_the_join_timeout(
    monkeypatch: pytest.MonkeyPatch, came: str, here: str, begun: bool, seconds: float | None
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda step: now.__setitem__(0, now[0] + step))
    monkeypatch.setattr(serve, "time", clock)
    monkeypatch.setattr(serve, "RETURN_SECONDS", 60)
    membership: Any = SimpleNamespace(
        update=lambda: None, introductions=dict.fromkeys(came), members=dict.fromkeys(here)
    )
    server = ServerSettings(clients=tuple("abc"), start_with=2, min_clients=2, join_timeout=100)
    if seconds is None:
        with pytest.raises(FederationError, match=r"in 100 s \(--join-timeout\)"):
            serve._wait_for_clients(membership, server, lambda: None, begun)
        return
    serve._wait_for_clients(membership, server, lambda: None, begun)
    assert now[0] == pytest.approx(seconds, abs=0.5)
    now[0] = 0.0
    serve._wait_for_clients(membership, replace(server, join_timeout=20), lambda: None, begun)  # at the latest
    assert now[0] == pytest.approx(min(seconds, 20), abs=0.5)


def divided(sizes: list[int], **changes: Any) -> Federation:
    from fedmll.testing import experiment

    data = federation.build(experiment(**changes))
    samples = tuple(np.zeros(size, np.int64) for size in sizes)
    return data.__class__(**data.__dict__ | {"samples": samples, "names": tuple("abcdef"[: len(sizes)])})


def test_a_client_that_has_not_joined_is_not_drawn() -> None:
    """The draw is that of a federation of those who are there; by seed and round alone."""
    for changes in ({"participation__fraction": 0.5}, {"participation__count": 2, "participation__sampling": "size"}):
        some, fewer = divided([4, 0, 9, 0, 3, 5], **changes), divided([4, 9, 3, 5], **changes)
        places = np.array([0, 2, 4, 5])
        for number in range(1, 9):
            assert some.participants(number).tolist() == places[fewer.participants(number)].tolist()
            assert len(some.participants(number)) == 2
    assert divided([4, 0, 0, 0, 0, 0], participation__count=2).participants(1).tolist() == [0]
    with pytest.raises(FedmllError, match="count = 4 is not possible"):
        divided([4, 0, 0], participation__count=4).participants(1)


def test_clients_that_joined_late_fill_up_the_minimum_of_a_round(
    consortium: Consortium,  # noqa: F811
    tmp_path: Path,
) -> None:
    """site-c came in a round that was lost, and the others were dropped since."""
    grid, hear, out = make_grid(consortium, tmp_path), RecordingCallback(), tmp_path / "out"
    RunFolder(out).create(consortium.server(training__rounds=2))
    go(consortium, grid, tmp_path / "first", hear, started_with(3), training__rounds=1)
    known = json.loads((tmp_path / "first" / "sites.json").read_text())
    assert [each["first_round"] for each in known.values()] == [1, 1, 1]
    known["site-c"]["first_round"] = 2
    (out / "sites.json").write_text(json.dumps(known))
    (out / "labels.csv").write_text("site\n")  # somebody has confirmed what site-c does not annotate
    server = started_with(1, min_clients=1, dropped=("site-a", "site-b"))
    grid.join_again()
    result = go(consortium, grid, out, hear, server, training__rounds=2)
    assert [row["clients"] for row in result.rows] == [1, 1]
    assert [name for kind, name in grid.log if kind == TRAIN][-2:] == ["site-c", "site-c"]
