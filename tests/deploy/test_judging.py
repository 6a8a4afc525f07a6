"""Updates beside each other: who stands out is refused by name, a spoilt model is taken back, the others go on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason="Flower is not installed (the extra `flower`)")

from flwr.app import Message as FlowerMessage
from PIL import Image
from sites import CLASSES, SETTINGS, write_csv
from sklearn.datasets import load_digits
from test_flower import FakeGrid, FakeNode, Hear, quick  # noqa: F401  (a fixture)

from fedmll.client import Peer
from fedmll.data.federation import build
from fedmll.deploy import serving, site_worker
from fedmll.deploy.flower import judging
from fedmll.deploy.flower.judging import Round
from fedmll.deploy.flower.records import from_records, to_records
from fedmll.deploy.flower.site_app import EVALUATE, TRAIN
from fedmll.deploy.serving import Server
from fedmll.deploy.site import Site
from fedmll.deploy.site_worker import remember_site
from fedmll.engines.local import LocalEngine
from fedmll.errors import FederationError
from fedmll.experiment import Experiment
from fedmll.message import Message
from fedmll.running import loop

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
) -> tuple[loop.Result, Hear, FakeGrid]:
    """A run in which sites reply other weights than they trained."""
    names = tuple(name for name in FIVE if name not in without)
    nodes, hear = [], Hear()
    for number, name in enumerate(names, 1):
        here = Site(name, five / name / "labels.csv", five / "images", out / "memory" / name, device="cpu")
        remember_site(here, out / "nodes" / f"{name}.json")
        nodes.append(FakeNode(number, out / "nodes" / f"{name}.json"))
    grid = FakeGrid(nodes)

    def tamper(node: FakeNode, sent: FlowerMessage, reply: FlowerMessage) -> FlowerMessage:
        if change is None or sent.metadata.message_type != TRAIN:
            return reply
        (got, _), (said, about) = from_records(sent.content), from_records(reply.content)
        weights = change(node.site_file.stem, said["weights"], got["weights"])
        return FlowerMessage(
            to_records(Message(said.tensors | {"weights": weights}, said.numbers), about), reply_to=sent
        )

    grid.tamper = tamper
    values = SETTINGS | {"data": {"name": f"folder:{five / 'test' / 'labels.csv'}", "root": str(five / "images")}}
    settings = {"training__rounds": ROUNDS, "training__lr": 0.02} | changes
    experiment = Experiment.make(values).changed({key.replace("__", "."): value for key, value in settings.items()})
    loop.create(out / "out", experiment)
    server = Server(names, min_clients=2, round_timeout=5.0, join_timeout=2.0, run="run1", keys=None)
    return serving.drive(grid, experiment, server, out / "out", hear), hear, grid


@pytest.fixture(autouse=True)
def no_estimate(monkeypatch: pytest.MonkeyPatch, quick: None) -> None:  # noqa: F811
    """It takes a process a site."""
    monkeypatch.setattr(site_worker, "bytes_needed", lambda task, training, most: 1e6)


HONEST: list[loop.Result] = []


@pytest.fixture
def honest(five: Path, tmp_path_factory: pytest.TempPathFactory, no_estimate: None) -> loop.Result:
    """The four without the bad one; trained once."""
    if not HONEST:
        HONEST.append(federation(five, tmp_path_factory.mktemp("honest"), without=(BAD,))[0])
    return HONEST[0]


def turned(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The bad one's: half of the weights × −8.5; statistics (BatchNorm's, the last 24) as they are."""
    weights, end = trained.clone(), len(trained) - 24
    if name == BAD:
        weights[: end // 2] *= -8.5
    return weights


def test_a_member_that_turns_its_weights_is_refused_and_the_others_go_on(
    five: Path, honest: loop.Result, tmp_path: Path
) -> None:
    result, hear, grid = federation(five, tmp_path, turned)
    assert [row["clients"] for row in hear.rows] == [4] * ROUNDS
    refusals = [text for text in hear.said if "is refused" in text]
    assert len(refusals) == ROUNDS
    for number, text in enumerate(refusals, 1):
        assert text.startswith(f"round {number}: the reply of {BAD} is refused: its update is ")
        assert text.endswith("times as long as the others' median; 5 is believed")
    assert f"Round 1 is tried again: its replies are merged without {BAD}." in hear.said
    asked = [name for kind, name in grid.log if kind == TRAIN]
    assert all(asked.count(name) == ROUNDS for name in FIVE)  # nobody trained twice
    assert result.rows[-1]["map"] > 40  # one in ten is right by chance
    assert result.rows[-1]["map"] == pytest.approx(honest.rows[-1]["map"])
    assert all(torch.equal(honest.weights[name], tensor) for name, tensor in result.weights.items())
    assert f"round 5: the reply of {BAD} is refused" in (tmp_path / "out" / "log.txt").read_text()


def test_the_same_attack_spoils_the_run_where_nobody_is_compared(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the tests above stand against what they mean to."""
    monkeypatch.setattr(judging, "MOST_TIMES", float("inf"))
    monkeypatch.setattr(judging, "FEWEST", 10)  # no model is taken back either
    try:
        result, _, _ = federation(five, tmp_path, turned)
        assert result.rows[-1]["map"] < 50
    except FederationError as error:
        assert "good replies" in str(error)


def running_away(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The bad one adds a vector of the norm 40; from a model that is as long as that makes it, training runs away."""
    if name == BAD:
        return trained + 40 * torch.cat([torch.ones(len(trained) - 24), torch.zeros(24)]) / (len(trained) - 24) ** 0.5
    return trained if float(sent.norm()) < 8 else 100 * trained


def test_a_spoilt_model_is_taken_back_and_nobody_honest_is_refused(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An attack that is not found among the others spoils the model: the next round shows it."""
    monkeypatch.setattr(judging, "MOST_TIMES", float("inf"))
    result, hear, grid = federation(five, tmp_path, running_away, partition__holdout=0.2)
    assert [row["clients"] for row in hear.rows] == [5, 4, 4, 4, 4]
    assert not [text for text in hear.said if "refused:" in text]
    (taken_back,) = [text for text in hear.said if "tried again" in text]
    assert taken_back.startswith(
        "Round 2 is tried again: from the model of round 1 the training of most clients runs away (site-a, site-c, "
        "site-d, site-e), and nobody is refused for it. The model before that round is taken instead, and site-b, "
    )
    sent = [from_records(m.content)[0]["weights"] for m in grid.sent if m.metadata.message_type == TRAIN]
    assert torch.equal(sent[10], sent[0])  # five in round 1, five that ran away, four from where round 1 began
    asked = [name for kind, name in grid.log if kind in (TRAIN, EVALUATE)]
    assert asked.count(BAD) == 3  # trained twice, tested once
    assert result.rows[-1]["map"] > 35


def test_a_minority_cannot_have_a_model_taken_back(five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judging, "MOST_TIMES", float("inf"))

    def two_of_five(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return 100 * trained if name in (BAD, "site-c") else trained

    _, hear, _ = federation(five, tmp_path, two_of_five, training__rounds=2)
    assert [row["clients"] for row in hear.rows] == [3, 3]
    assert len([text for text in hear.said if "is refused: weights moved by the norm" in text]) == 4
    assert not [text for text in hear.said if "tried again" in text]


# ---- the comparison


def compared(tmp_path: Path, *moved: tuple[int, float, float]) -> Round:
    """A round of clients with so many images, an update and statistics of such a norm."""
    beside, sent = Round(tmp_path, buffers=2), torch.tensor([3.0, 4.0, 0.0, 0.0])
    for number, (samples, update, running) in enumerate(moved):
        weights = sent + torch.tensor([0.6 * update, -0.8 * update, 0.0, running])
        reply = Message({"weights": weights, "counters": torch.tensor([number])}, {"samples": 1.0})
        beside.add(Peer(number, f"c{number}", torch.ones(1, dtype=torch.bool)), sent, reply, samples)
    return beside


def test_the_median_is_of_the_others_and_of_as_many_images(tmp_path: Path) -> None:
    beside = compared(tmp_path, (10, 1.0, 1), (10, 2.0, 1), (40, 11.0, 1), (10, 0.5, 7))
    # of c2: the others would have moved 4, 8 and 2 with as many images; of c0: 2, 11 and 0.5
    assert beside.times("c2") == pytest.approx((11 / 4, 1))
    assert beside.times("c0") == pytest.approx((1 / 2, 1))
    assert beside.times("c3") == pytest.approx((0.5 / 2, 8 / 2))
    assert beside.furthest() == ("c3", pytest.approx(4))
    assert beside.standing_out() == {}


def test_who_stands_out_and_what_is_left(tmp_path: Path) -> None:
    beside = compared(tmp_path, (10, 1.0, 1), (10, 5.01, 1), (10, 1.0, 1), (10, 1.0, 9.5))
    out = beside.standing_out()
    assert out == {
        "c1": "its update is 5.01 times as long as the others' median; 5 is believed",
        "c3": "its statistics are 5.25 times as long as the others' median; 5 is believed",
    }
    beside.leave_out(out)
    again = list(beside)
    assert [(peer.name, reply["counters"].tolist()) for peer, reply in again] == [("c0", [0]), ("c2", [2])]
    assert again[1][1]["weights"].tolist() == pytest.approx([3.6, 3.2, 0, 1])
    assert beside.furthest() is None  # of two nobody can say


def test_one_that_hardly_moves_makes_nobody_stand_out(tmp_path: Path) -> None:
    assert compared(tmp_path, (10, 1.0, 1), (10, 0.0, 1), (10, 1.0, 1)).standing_out() == {}
    assert compared(tmp_path, (10, 9.0, 1), (10, 0.0, 1), (10, 0.0, 1)).standing_out() == {}  # nobody to compare with
    assert compared(tmp_path, (10, 9.0, 1), (10, 1.0, 1)).standing_out() == {}
    assert list(compared(tmp_path, (10, 9.0, 1), (10, 1.0, 1), (10, 0.0, 1)).standing_out()) == ["c0"]


SKEWED = [
    {"partition.beta": 0.05, "partition.minimum": 2},
    {"partition.beta": 0.3, "training.optimizer": "sgd", "training.lr": 0.5, "training.momentum": 0.9},
    {"partition.beta": 0.05, "partition.clients": 5, "training.lr": 0.05},
    {"model.freeze": "backbone", "training.optimizer": "sgd", "training.lr": 10.0, "partition.minimum": 2},
    {"method.name": "scaffold", "training.optimizer": "sgd", "training.lr": 0.3, "partition.beta": 0.05},
    {"method.name": "fedavg-pl", "annotation.kind": "missing", "annotation.missing": 8, "partition.beta": 0.05},
]


@pytest.mark.parametrize("settings", SKEWED, ids=str)
def test_honest_clients_stay_far_below(settings: dict[str, Any], tmp_path: Path) -> None:
    """However skewed, and however high the learning rate."""
    usual = {"data.name": "ml-digits", "model.channels": [4, 8], "partition.clients": 8, "partition.holdout": 0.0}
    data = build(Experiment().changed(usual | {"engine.workers": 0, "training.rounds": 3} | settings))
    engine = LocalEngine(data, tmp_path / "memory")
    state, furthest = engine.start(), (0.0, 0.0)
    for number in (1, 2, 3):
        beside = Round(tmp_path, engine.learner.weights.buffer_count)
        merger = engine.method.merger(state, number)
        for peer, reply in engine.round(state, number):
            beside.add(peer, state["weights"], reply, len(data.samples[peer.index]))
            merger.add(peer, reply)
        times = [beside.times(name) for name in beside.moved]
        furthest = max(furthest[0], *(t[0] for t in times)), max(furthest[1], *(t[1] for t in times))
        state = merger.result()[0]
    engine.close()
    assert 0.5 < furthest[0] < 1.4
    assert furthest[1] < 2.1
