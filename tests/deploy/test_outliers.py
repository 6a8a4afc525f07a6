"""Outliers among the updates of a round are rejected by name; a damaged model is replaced, and the run goes on."""

from __future__ import annotations

import json
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
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import build
from fedmll.deploy.flower import outliers
from fedmll.deploy.flower.client_app import EVALUATE, TRAIN
from fedmll.deploy.flower.outliers import RUNNING, UPDATE, ReplyComparison
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
ChangeTensors = Callable[[str, int, Message, Message], Tensors]  # whose, round, trained, sent → other tensors


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
    five: Path,
    out: Path,
    change: Weights | None = None,
    without: tuple[str, ...] = (),
    change_tensors: ChangeTensors = lambda name, number, trained, sent: {},
    stop_after: int | None = None,
    **changes: Any,
) -> tuple[round_loop.Result, RecordingCallback, FakeGrid]:
    """A run in which sites reply other weights, or other tensors, than they trained; it is killed after a round."""
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
        if sent.metadata.message_type != TRAIN:
            return reply
        ((got, asked), (said, info)), name = map(from_records, (sent.content, reply.content)), node.site_file.stem
        if "error" in info:
            return reply
        changed = change_tensors(name, asked["round"], said, got)
        if change is not None:
            changed["weights"] = change(name, said["weights"], got["weights"])
        return FlowerMessage(to_records(Message(said.tensors | changed, said.numbers), info), reply_to=sent)

    grid.tamper = tamper
    values = SETTINGS | {"data": {"name": f"folder:{five / 'test' / 'labels.csv'}", "root": str(five / "images")}}
    settings = {"training__rounds": ROUNDS, "training__lr": 0.02} | changes
    experiment = Experiment.make(values).changed({key.replace("__", "."): value for key, value in settings.items()})
    if not (out / "out").exists():
        RunFolder(out / "out").create(experiment)
    if stop_after is not None:
        hear.at_round[stop_after] = kill
    server = ServerSettings(clients=names, min_clients=2, round_timeout=5.0, join_timeout=2.0, run="run1", keys=None)
    return serve.run_federation(grid, experiment, server, out / "out", callback=hear), hear, grid


def kill() -> None:
    raise KeyboardInterrupt


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


def accept_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is an outlier; who is furthest from the others is still known."""
    monkeypatch.setattr(ReplyComparison, "find_outliers", lambda self: {})


def test_the_same_attack_damages_the_run_without_the_comparison(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """This shows that the test above tests something."""
    accept_all_sizes(monkeypatch)
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
    accept_all_sizes(monkeypatch)
    result, hear, grid = federation(five, tmp_path, make_others_diverge, partition__holdout=0.2)
    assert [row["clients"] for row in hear.rows] == [5, 4, 4, 4, 4]
    assert not [text for text in hear.said if "rejected:" in text]
    (taken_back,) = [text for text in hear.said if "tried again" in text]
    assert taken_back.startswith(
        "round 2 is tried again: from the model of round 1 the training of most clients diverges (site-a, site-c, "
        "site-d, site-e), and none of them is rejected for it. The run returns to the state before that round and "
        "continues without site-b, "
    )
    sent = [from_records(m.content)[0]["weights"] for m in grid.sent if m.metadata.message_type == TRAIN]
    assert torch.equal(sent[10], sent[0])  # five in round 1, five that ran away, four from where round 1 began
    asked = [name for kind, name in grid.log if kind in (TRAIN, EVALUATE)]
    assert asked.count(BAD) == 3  # trained twice, tested once
    assert result.rows[-1]["map"] > 20  # one in ten is right by chance


def test_a_minority_cannot_cause_a_rollback(five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accept_all_sizes(monkeypatch)

    def two_of_five(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return 100 * trained if name in (BAD, "site-c") else trained

    _, hear, _ = federation(five, tmp_path, two_of_five, training__rounds=2)
    assert [row["clients"] for row in hear.rows] == [3, 3]
    assert len([text for text in hear.said if "is rejected: weights moved by the norm" in text]) == 4
    assert not [text for text in hear.said if "tried again" in text]


# ---- the comparison


def compare(*clients: tuple[int, float, float]) -> ReplyComparison:
    """A round of clients with so many images, an update and running statistics of such a norm."""
    comparison, sent = ReplyComparison(buffer_count=2), torch.tensor([3.0, 4.0, 0.0, 0.0])
    for number, (samples, update, running) in enumerate(clients):
        reply = Message({"weights": sent + torch.tensor([0.6 * update, -0.8 * update, 0.0, running])})
        comparison.add(f"c{number}", samples=samples, sent=Message({"weights": sent}), reply=reply)
    return comparison


def ratios(comparison: ReplyComparison, name: str) -> tuple[float, ...]:
    return tuple(each.ratio for each in comparison.deviations(name))


def test_the_median_is_of_the_other_clients_with_as_many_images() -> None:
    comparison = compare((10, 1.0, 1), (10, 2.0, 1), (40, 11.0, 1), (10, 0.5, 7))
    # of c2: the others would have moved 4, 8 and 2 with as many images; of c0: 2, 11 and 0.5
    assert ratios(comparison, "c2") == pytest.approx((11 / 4, 1))
    assert ratios(comparison, "c0") == pytest.approx((1 / 2, 1))
    assert ratios(comparison, "c3") == pytest.approx((0.5 / 2, 8 / 2))
    assert comparison.most_distant() == ("c3", RUNNING, pytest.approx(4))
    assert list(comparison.find_outliers()) == ["c3"]


def test_outliers_are_named_with_the_reason() -> None:
    comparison = compare((10, 1.0, 1), (10, 5.01, 1), (10, 1.0, 1), (10, 1.0, 9.5))
    outliers = comparison.find_outliers()
    assert outliers == {
        "c1": "its update is 5.01 times the other clients' median; the limit is 5",
        "c3": "its running statistics are 5.25 times the other clients' median; the limit is 3",
    }
    comparison.remove(outliers)
    assert list(comparison.statistics) == ["c0", "c2"]
    assert comparison.most_distant() is None  # with two clients nobody can tell


def test_a_client_that_hardly_moves_makes_no_other_client_an_outlier() -> None:
    assert compare((10, 1.0, 1), (10, 0.0, 1), (10, 1.0, 1)).find_outliers() == {}
    assert compare((10, 9.0, 1), (10, 0.0, 1), (10, 0.0, 1)).find_outliers() == {}  # there is nothing to compare with
    assert compare((10, 9.0, 1), (10, 1.0, 1)).find_outliers() == {}
    assert list(compare((10, 9.0, 1), (10, 1.0, 1), (10, 0.0, 1)).find_outliers()) == ["c0"]


FROZEN = {"model.freeze": "backbone", "model.weights": "random"}
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
    {"method.name": "fedcurv", "partition.beta": 0.05},
    {"method.name": "fedmlp", "partition.beta": 0.05, "annotation.kind": "missing", "annotation.missing": 5},
    {"method.name": "fed-ridge", "method.calibrate": "platt", "partition.beta": 0.05, **FROZEN},
]


@pytest.mark.parametrize("settings", SKEWED, ids=str)
def test_honest_clients_stay_far_below_the_limits(settings: dict[str, Any], tmp_path: Path) -> None:
    """However skewed the labels are, and however high the learning rate is."""
    usual = {"data.name": "ml-digits", "model.channels": [4, 8], "partition.clients": 8, "partition.holdout": 0.0}
    data = build(Experiment().changed(usual | {"engine.workers": 0, "training.rounds": 3} | settings))
    engine = LocalEngine(data, tmp_path / "memory")
    method, state, largest = engine.method, engine.initial_state(), dict[str, float]()
    rounds = [0] * method.has_exchange("opening") + list(range(1, data.experiment.training.rounds + 1))
    rounds += [data.experiment.training.rounds + 1] * method.has_exchange("closing")
    for number in rounds:
        comparison = ReplyComparison(engine.trainer.weights.buffer_count)
        aggregator = method.aggregator(state, number)
        for client, reply in engine.collect_replies(state, number):
            sent, samples = method.send(state, client, number), len(data.samples[client.index])
            by_class = [name for name, spec in method.reply_spec(sent, number).items() if spec.by_class is not None]
            comparison.add(client.name, samples=samples, sent=sent, reply=reply, by_class=by_class)
            aggregator.add(client, reply)
        for name in comparison.statistics:
            for each in comparison.deviations(name):
                largest[each.subject] = max(largest.get(each.subject, 0.0), each.ratio)
        assert [each for each in comparison.find_unusual({}, number) if each.kind != "opposing"] == []
        state = aggregator.result()[0]
    engine.close()
    assert largest.pop(UPDATE, 1.0) < 1.4
    assert largest.pop(RUNNING, 1.0) < 2.1
    assert all(ratio < 4 for ratio in largest.values()), largest


# ---- the tensors of parts


FEDCURV: Any = {"method__name": "fedcurv", "training__optimizer": "sgd", "training__lr": 0.3}


def test_first_reply_of_a_late_client_is_compared_with_first_replies() -> None:
    """SCAFFOLD: the first change of a control variate is the whole gradient; later ones are small."""

    def compare_changes(medians: dict[str, float], *norms: float) -> ReplyComparison:
        comparison = ReplyComparison(0, medians)
        for number, norm in enumerate(norms):
            reply = Message({"control-variates/change": torch.tensor([norm])})
            comparison.add(f"c{number}", samples=10, sent=Message(), reply=reply)
        return comparison

    medians = compare_changes({}, 8.0, 9.0).medians()
    medians = compare_changes(medians, 0.1, 0.2).medians()
    assert medians == {"control-variates/change": 8.0}
    assert compare_changes(medians, 0.1, 0.2, 9.0).find_outliers() == {}
    assert list(compare_changes(medians, 0.1, 0.2, 81.0).find_outliers()) == ["c2"]
    assert list(compare_changes({}, 0.1, 0.2, 9.0).find_outliers()) == ["c2"]


def raise_curvature(name: str, number: int, trained: Message, sent: Message) -> Tensors:
    """FedCurv: in round 1 the bad one's diagonal of the Fisher information is 900,000 everywhere."""
    if name != BAD or number != 1:
        return {}
    return {"curvature/u": torch.full_like(trained["curvature/u"], 9e5)}


def test_an_outlier_among_the_tensors_of_a_part_is_rejected(five: Path, tmp_path: Path) -> None:
    result, hear, _ = federation(five, tmp_path, change_tensors=raise_curvature, **FEDCURV)
    assert [row["clients"] for row in hear.rows] == [4, 5, 5, 5, 5]
    (refusal,) = [text for text in hear.said if "is rejected" in text]
    assert refusal.startswith(f"round 1: the reply of {BAD} is rejected: its curvature/u is ")
    assert refusal.endswith("times the other clients' median; the limit is 10")
    assert result.rows[-1]["map"] > 20  # one in ten is right by chance


def test_a_damaged_state_is_replaced_and_the_client_furthest_in_any_tensor_is_named(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_all_sizes(monkeypatch)
    result, hear, _ = federation(five, tmp_path, change_tensors=raise_curvature, **FEDCURV)
    assert [row["clients"] for row in hear.rows] == [5, 4, 4, 4, 4]
    assert not [text for text in hear.said if "rejected:" in text]  # no honest client
    (rolled_back,) = [text for text in hear.said if "tried again" in text]
    assert f"continues without {BAD}, whose curvature/u was furthest from the others' there (" in rolled_back
    assert result.rows[-1]["map"] > 20  # one in ten is right by chance


def test_a_restarted_server_returns_to_the_checkpoint_before_the_damaged_one(
    five: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept_all_sizes(monkeypatch)
    attack: Any = {"change_tensors": raise_curvature, **FEDCURV}
    with pytest.raises(KeyboardInterrupt):  # the damaged state is in the checkpoint
        federation(five, tmp_path, stop_after=1, **attack)
    result, hear, _ = federation(five, tmp_path, **attack)
    (rolled_back,) = [text for text in hear.said if "tried again" in text]
    assert f"continues without {BAD}, whose curvature/u was furthest" in rolled_back
    assert [row["clients"] for row in result.rows] == [5, 4, 4, 4, 4]
    assert result.rows[-1]["map"] > 20  # one in ten is right by chance


def test_a_large_control_variate_gets_no_honest_client_rejected(five: Path, tmp_path: Path) -> None:
    def large_change(name: str, number: int, trained: Message, sent: Message) -> Tensors:
        """SCAFFOLD: the bad one's control variate changes by 20 in every coordinate, in every round."""
        key = "control-variates/change"
        return {key: torch.full_like(trained[key], 20.0)} if name == BAD else {}

    sgd = {"training__optimizer": "sgd", "training__lr": 0.1}
    _, hear, _ = federation(five, tmp_path, change_tensors=large_change, method__name="scaffold", **sgd)
    assert [row["clients"] for row in hear.rows] == [4] * ROUNDS
    refused = [text for text in hear.said if "is rejected" in text]
    assert len(refused) == ROUNDS
    assert all(f"the reply of {BAD} is rejected: its control-variates/change is " in text for text in refused)


def test_features_that_are_much_larger_than_the_others_are_rejected(five: Path, tmp_path: Path) -> None:
    def enlarge(name: str, number: int, trained: Message, sent: Message) -> Tensors:
        """fed-ridge: the bad one's features are ten times as large, and its labels are inverted."""
        if name != BAD or "ridge/gram" not in trained.tensors:
            return {}
        gram, cross, moments = trained["ridge/gram"].clone(), trained["ridge/cross"], trained["ridge/all"].clone()
        absent = gram[0, -1] - cross  # Σ f over the negatives; the last one is their number
        scale = torch.cat([torch.full_like(gram[0, 0, :-1], 10.0), gram.new_ones(1)])
        moments[1] *= 10
        moments[2] *= 100
        return {"ridge/gram": gram * scale * scale[:, None], "ridge/cross": absent * scale, "ridge/all": moments}

    ridge = {"method__name": "fed-ridge", "model__freeze": "backbone", "model__weights": "random"}
    _, hear, _ = federation(five, tmp_path, change_tensors=enlarge, **ridge)
    (refusal,) = [text for text in hear.said if "is rejected" in text]
    assert f"the reply of {BAD} is rejected: its mean square of the features is " in refusal


def test_large_running_statistics_are_rejected(five: Path, tmp_path: Path) -> None:
    def enlarge(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return torch.cat([trained[:-24], 4.5 * trained[-24:]]) if name == BAD else trained

    _, hear, _ = federation(five, tmp_path, enlarge, training__rounds=2)
    refused = [text for text in hear.said if "is rejected" in text]
    assert len(refused) == 2
    assert all(f"the reply of {BAD} is rejected: its running statistics are " in text for text in refused)


# ---- averages


def flip_sign(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """The bad one's update points the other way and is 4.5 times as long, which is just below the limit."""
    flipped = sent - 4.5 * (trained - sent)
    return torch.cat([flipped[:-24], trained[-24:]]) if name == BAD else trained


def test_sign_flip_of_one_site_of_five_is_tolerated_and_named(
    five: Path, honest: round_loop.Result, tmp_path: Path
) -> None:
    found = {}
    for average in ("mean", "centered-clipping"):
        result, hear, _ = federation(five, tmp_path / average, flip_sign, method__average=average)
        assert [row["clients"] for row in hear.rows] == [5] * ROUNDS  # nobody is rejected
        assert any(f"the reply of {BAD} is unusual: its update opposes" in text for text in hear.said)
        found[average] = result.rows[-1]["macro_auc"]
    best = honest.rows[-1]["macro_auc"]
    assert found["mean"] < best - 20
    assert found["centered-clipping"] > best - 10


# ---- unusual replies, which are shown


def test_inverted_unchanged_and_repeated_replies_are_named(five: Path, tmp_path: Path) -> None:
    first: list[torch.Tensor] = []

    def misbehave(name: str, trained: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        if name == "site-b":
            return torch.cat([(2 * sent - trained)[:-24], trained[-24:]])
        if name == "site-c":
            return sent
        if name == "site-d":
            first.append(trained)
            return first[0]
        return trained

    _, hear, _ = federation(five, tmp_path, misbehave, training__rounds=3)
    unusual = [text for text in hear.said if "unusual" in text]
    start = "the reply of"
    assert unusual[0].startswith(f"round 1: {start} site-b is unusual: its update opposes the other clients' updates")
    assert unusual[1] == f"round 1: {start} site-c is unusual: it returned the weights that it was sent, unchanged"
    assert f"round 2: {start} site-d is unusual: its weights are those that site-d sent in round 1" in unusual
    assert len([text for text in unusual if "site-c" in text]) == 1  # once, not in every round
    assert not [text for text in unusual if "site-a" in text or "site-e" in text]
    kinds = [json.loads(line).get("kind") for line in (tmp_path / "out" / "audit.jsonl").read_text().splitlines()]
    assert kinds.count("unchanged") == 3  # every one is in the audit log
