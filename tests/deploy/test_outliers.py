"""Outliers among the updates of a round are rejected by name; a damaged model is replaced, and the run goes on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from consortium import CLASSES, SETTINGS, write_csv
from fake_grid import FakeGrid, FakeNode, RecordingCallback, fast_polling  # noqa: F401  (a fixture)
from flwr.app import Message as FlowerMessage
from PIL import Image
from sklearn.datasets import load_digits

from fedmll.config.experiment import Experiment
from fedmll.core.errors import FederationError
from fedmll.core.message import Message
from fedmll.data.federation import build
from fedmll.deploy.flower import outliers
from fedmll.deploy.flower.client_app import EVALUATE, TRAIN
from fedmll.deploy.flower.outliers import UpdateComparison
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.server import serve
from fedmll.deploy.server.server_settings import ServerSettings
from fedmll.deploy.site import worker
from fedmll.deploy.site.site_config import Site, write_site_file
from fedmll.engines.local import LocalEngine
from fedmll.runs.run_folder import RunFolder
from fedmll.training import round_loop

FIVE = tuple(f"site-{letter}" for letter in "abcde")
BAD = "site-b"
ROUNDS = 5
Weights = Callable[[str, torch.Tensor, torch.Tensor], torch.Tensor]  # whose, trained, sent → what is replied


@pytest.fixture(scope="module")
def five(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five sites with 40 digits each, and the server's test data."""
    folder, digits = tmp_path_factory.mktemp("five"), load_digits()
    (folder / "images").mkdir()
    for number, name in enumerate((*FIVE, "test")):
        rows = []
        for place in range(40 * number, 40 * number + 40):
            Image.fromarray((digits.images[place] * 15.9).astype("uint8")).save(folder / "images" / f"{place}.png")
            rows.append([f"{place}.png", *("1" if digits.target[place] == c else "0" for c in range(10))])
        write_csv(folder / name / "labels.csv", [["image", *CLASSES], *rows])
    return folder


def federation(
    five: Path, out: Path, change: Weights | None = None, without: tuple[str, ...] = (), **changes: Any
) -> tuple[round_loop.Result, RecordingCallback, FakeGrid]:
    """A run in which sites reply other weights than they trained."""
    names = tuple(name for name in FIVE if name not in without)
    nodes, hear = [], RecordingCallback()
    for number, name in enumerate(names, 1):
        here = Site(
            name=name,
            csv=five / name / "labels.csv",
            images=five / "images",
            state_dir=out / "memory" / name,
            device="cpu",
        )
        write_site_file(here, out / "nodes" / f"{name}.json")
        nodes.append(FakeNode(number, out / "nodes" / f"{name}.json"))
    grid = FakeGrid(nodes)

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if change is None or sent.metadata.message_type != TRAIN:
            return reply
        (got, _), (said, info) = from_records(sent.content), from_records(reply.content)
        weights = change(node.site_file.stem, said["weights"], got["weights"])
        return FlowerMessage(
            to_records(Message(said.tensors | {"weights": weights}, said.numbers), info), reply_to=sent
        )

    grid.tamper = tamper
    values = SETTINGS | {"data": {"name": f"folder:{five / 'test' / 'labels.csv'}", "root": str(five / "images")}}
    settings = {"training__rounds": ROUNDS, "training__lr": 0.02} | changes
    experiment = Experiment.make(values).changed({key.replace("__", "."): value for key, value in settings.items()})
    RunFolder(out / "out").create(experiment)
    server = ServerSettings(clients=names, min_clients=2, round_timeout=5.0, join_timeout=2.0, run="run1", keys=None)
    return serve.run_federation(grid, experiment, server, out / "out", callback=hear), hear, grid


@pytest.fixture(autouse=True)
def no_estimate(monkeypatch: pytest.MonkeyPatch, fast_polling: None) -> None:  # noqa: F811
    """The estimate starts one process per site."""
    monkeypatch.setattr(worker, "estimate_memory", lambda task, training, limit: 1e6)


HONEST: list[round_loop.Result] = []


@pytest.fixture
def honest(five: Path, tmp_path_factory: pytest.TempPathFactory, no_estimate: None) -> round_loop.Result:
    """The four without the bad one; trained once."""
    if not HONEST:
        HONEST.append(federation(five, tmp_path_factory.mktemp("honest"), without=(BAD,))[0])
    return HONEST[0]


def invert_weights(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The bad one's: half of the weights × −8.5; statistics (BatchNorm's, the last 24) as they are."""
    weights, end = trained.clone(), len(trained) - 24
    if name == BAD:
        weights[: end // 2] *= -8.5
    return weights


def test_inverted_weights_are_rejected_and_the_round_continues_with_the_others(
    five: Path, honest: round_loop.Result, tmp_path: Path
) -> None:
    result, hear, grid = federation(five, tmp_path, invert_weights)
    assert [row["clients"] for row in hear.rows] == [4] * ROUNDS
    refusals = [text for text in hear.said if "is rejected" in text]
    assert len(refusals) == ROUNDS
    for number, text in enumerate(refusals, 1):
        assert text.startswith(f"round {number}: the reply of {BAD} is rejected: its update is ")
        assert text.endswith("times the other clients' median; the limit is 5")
    assert not [text for text in hear.said if "tried again" in text]
    asked = [name for kind, name in grid.log if kind == TRAIN]
    assert all(asked.count(name) == ROUNDS for name in FIVE)  # nobody trained twice
    assert result.rows[-1]["map"] > 40  # one in ten is right by chance
    assert result.rows[-1]["map"] == pytest.approx(honest.rows[-1]["map"])
    assert all(torch.equal(honest.weights[name], tensor) for name, tensor in result.weights.items())
    assert f"round 5: the reply of {BAD} is rejected" in (tmp_path / "out" / "log.txt").read_text()


def test_the_same_attack_damages_the_run_without_the_comparison(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows that the test above tests something."""
    monkeypatch.setattr(outliers, "MAX_RATIO", float("inf"))
    monkeypatch.setattr(outliers, "MIN_CLIENTS", 10)  # no model is taken back either
    try:
        result, _, _ = federation(five, tmp_path, invert_weights)
        assert result.rows[-1]["map"] < 50
    except FederationError as error:
        assert "valid replies" in str(error)


def make_others_diverge(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The bad one adds a vector of the norm 40; from a model that is as long as that makes it, training runs away."""
    if name == BAD:
        return trained + 40 * torch.cat([torch.ones(len(trained) - 24), torch.zeros(24)]) / (len(trained) - 24) ** 0.5
    return trained if float(sent.norm()) < 8 else 100 * trained


def test_a_damaged_model_is_replaced_and_no_honest_client_is_rejected(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that is not found among the others spoils the model: the next round shows it."""
    monkeypatch.setattr(outliers, "MAX_RATIO", float("inf"))
    result, hear, grid = federation(five, tmp_path, make_others_diverge, partition__holdout=0.2)
    assert [row["clients"] for row in hear.rows] == [5, 4, 4, 4, 4]
    assert not [text for text in hear.said if "rejected:" in text]
    (taken_back,) = [text for text in hear.said if "tried again" in text]
    assert taken_back.startswith(
        "round 2 is tried again: from the model of round 1 the training of most clients diverges (site-a, site-c, "
        "site-d, site-e), and none of them is rejected for it. The run returns to the model before that round and "
        "continues without site-b, "
    )
    sent = [from_records(m.content)[0]["weights"] for m in grid.sent if m.metadata.message_type == TRAIN]
    assert torch.equal(sent[10], sent[0])  # five in round 1, five that ran away, four from where round 1 began
    asked = [name for kind, name in grid.log if kind in (TRAIN, EVALUATE)]
    assert asked.count(BAD) == 3  # trained twice, tested once
    assert result.rows[-1]["map"] > 35


def test_a_minority_cannot_cause_a_rollback(five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outliers, "MAX_RATIO", float("inf"))

    def two_of_five(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return 100 * trained if name in (BAD, "site-c") else trained

    _, hear, _ = federation(five, tmp_path, two_of_five, training__rounds=2)
    assert [row["clients"] for row in hear.rows] == [3, 3]
    assert len([text for text in hear.said if "is rejected: weights moved by the norm" in text]) == 4
    assert not [text for text in hear.said if "tried again" in text]


# ---- the comparison


def compare(*clients: tuple[int, float, float]) -> UpdateComparison:
    """A round of clients with so many images, an update and running statistics of such a norm."""
    comparison, sent = UpdateComparison(buffer_count=2), torch.tensor([3.0, 4.0, 0.0, 0.0])
    for number, (samples, update, running) in enumerate(clients):
        returned = sent + torch.tensor([0.6 * update, -0.8 * update, 0.0, running])
        comparison.add(f"c{number}", samples=samples, sent=sent, returned=returned)
    return comparison


def test_the_median_is_of_the_other_clients_with_as_many_images() -> None:
    comparison = compare((10, 1.0, 1), (10, 2.0, 1), (40, 11.0, 1), (10, 0.5, 7))
    # of c2: the others would have moved 4, 8 and 2 with as many images; of c0: 2, 11 and 0.5
    assert comparison.ratios("c2") == pytest.approx((11 / 4, 1))
    assert comparison.ratios("c0") == pytest.approx((1 / 2, 1))
    assert comparison.ratios("c3") == pytest.approx((0.5 / 2, 8 / 2))
    assert comparison.most_distant() == ("c3", pytest.approx(4))
    assert comparison.find_outliers() == {}


def test_outliers_are_named_with_the_reason() -> None:
    comparison = compare((10, 1.0, 1), (10, 5.01, 1), (10, 1.0, 1), (10, 1.0, 9.5))
    outliers = comparison.find_outliers()
    assert outliers == {
        "c1": "its update is 5.01 times the other clients' median; the limit is 5",
        "c3": "its running statistics are 5.25 times the other clients' median; the limit is 5",
    }
    comparison.remove(outliers)
    assert list(comparison.statistics) == ["c0", "c2"]
    assert comparison.most_distant() is None  # with two clients nobody can tell


def test_a_client_that_hardly_moves_makes_no_other_client_an_outlier() -> None:
    assert compare((10, 1.0, 1), (10, 0.0, 1), (10, 1.0, 1)).find_outliers() == {}
    assert compare((10, 9.0, 1), (10, 0.0, 1), (10, 0.0, 1)).find_outliers() == {}  # there is nothing to compare with
    assert compare((10, 9.0, 1), (10, 1.0, 1)).find_outliers() == {}
    assert list(compare((10, 9.0, 1), (10, 1.0, 1), (10, 0.0, 1)).find_outliers()) == ["c0"]


SKEWED = [
    {"partition.beta": 0.05, "partition.minimum": 2},
    {"partition.beta": 0.3, "training.optimizer": "sgd", "training.lr": 0.5, "training.momentum": 0.9},
    {"partition.beta": 0.05, "partition.clients": 5, "training.lr": 0.05},
    {
        "model.freeze": "backbone",
        "model.weights": "random",
        "training.optimizer": "sgd",
        "training.lr": 10.0,
        "partition.minimum": 2,
    },
    {"method.name": "scaffold", "training.optimizer": "sgd", "training.lr": 0.3, "partition.beta": 0.05},
    {"method.name": "fedavg-pl", "annotation.kind": "missing", "annotation.missing": 8, "partition.beta": 0.05},
]


@pytest.mark.parametrize("settings", SKEWED, ids=str)
def test_honest_clients_stay_far_below_the_limit(settings: dict[str, Any], tmp_path: Path) -> None:
    """However skewed, and however high the learning rate."""
    usual = {"data.name": "ml-digits", "model.channels": [4, 8], "partition.clients": 8, "partition.holdout": 0.0}
    data = build(Experiment().changed(usual | {"engine.workers": 0, "training.rounds": 3} | settings))
    engine = LocalEngine(data, tmp_path / "memory")
    state, largest = engine.initial_state(), (0.0, 0.0)
    for number in (1, 2, 3):
        comparison = UpdateComparison(engine.trainer.weights.buffer_count)
        aggregator = engine.method.aggregator(state, number)
        for client, reply in engine.collect_replies(state, number):
            samples = len(data.samples[client.index])
            comparison.add(client.name, samples=samples, sent=state["weights"], returned=reply["weights"])
            aggregator.add(client, reply)
        ratios = [comparison.ratios(name) for name in comparison.statistics]
        largest = max(largest[0], *(r[0] for r in ratios)), max(largest[1], *(r[1] for r in ratios))
        state = aggregator.result()[0]
    engine.close()
    assert 0.5 < largest[0] < 1.4
    assert largest[1] < 2.1
