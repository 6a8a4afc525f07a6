"""FedMLP's switches really switch, and what is scanned is scanned in evaluation mode (with BatchNorm)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from scipy.special import expit
from test_fedmlp import LABELS, bce, make, one_batch, stage_two

from fedmll import run
from fedmll.client import Client, Task
from fedmll.data.dataset import Dataset
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.methods.fedmlp import FedMLP, look
from fedmll.models.flat import FlatWeights

PARTIAL = {
    "method__name": "fedmlp", "method__t1": 1, "annotation__kind": "missing", "annotation__missing": 5,
    "partition__kind": "iid", "training__rounds": 3, "method__T0": 0.2, "method__T1": 0.2,
}  # fmt: skip


def normed(round: int, **options: Any) -> tuple[FedMLP, Client]:
    """A client whose network has batch statistics that are not those of its batches."""
    experiment = Experiment.make(
        {"method": {"name": "fedmlp", "t1": 1, **options}, "model": {"channels": (4, 6), "norm": "batch"},
         "training": {"batch_size": 6, "rounds": 9}}
    )  # fmt: skip
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), dtype=np.uint8)
    task = Task(experiment, ("a", "b", "c"), (1, 8, 8), 2, torch.device("cpu"))
    method = FedMLP(task)
    model = method.model()
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.fill_(0.7)
            module.running_var.fill_(3.0)
    known = torch.tensor([True, False, True])
    data = Dataset(images, LABELS.astype(np.int8), ("a", "b", "c"))
    return method, Client(task, "a", round, data, known, known, model, FlatWeights(model))


def in_evaluation_mode(client: Client) -> tuple[torch.Tensor, torch.Tensor]:
    client.model.eval()
    with torch.no_grad():
        features = client.model.features(next(client.scan()).images)
        return features, torch.sigmoid(client.model.head(features))


def test_features_and_predictions_are_those_of_evaluation_mode() -> None:
    _, client = normed(1)
    features, p = in_evaluation_mode(client)
    client.model.train()
    found, probabilities = look(client)
    torch.testing.assert_close(found, features)
    torch.testing.assert_close(probabilities, p)
    client.model.train()
    trained = client.model.features(next(client.scan()).images)
    assert not torch.allclose(trained, features)


def test_prototypes_and_difficulty_are_those_of_evaluation_mode() -> None:
    method, client = normed(1)
    features, p = in_evaluation_mode(client)
    client.model.train()
    reply = Message()
    method.finish(client, {}, reply, {})
    positives = LABELS[:, 0] == 1
    np.testing.assert_allclose(reply["prototypes"][1, 0], features.numpy()[positives].mean(0), rtol=1e-5)
    sure = ((p < 0.3) | (p > 0.7)).float().mean(0)
    assert reply["difficulty"].tolist() == [-1.0, pytest.approx(sure[1].item()), -1.0]


def test_the_teacher_is_the_global_model_in_evaluation_mode() -> None:
    method, client = normed(2)
    _, p = in_evaluation_mode(client)
    client.model.train()
    local = method.prepare(client, Message(), {})
    torch.testing.assert_close(local["teacher"], p)


def test_consistency_alone_enters_the_second_stage() -> None:
    method, client = make({"t1": 1, "mld": False}, LABELS, round=2)
    assert method.second_stage(2)
    local = method.prepare(client, Message(), {})
    assert local["consistency"]
    assert local["views"] == 1
    with torch.no_grad():
        for parameter in client.weights.parameters:
            parameter.add_(0.1)
    batch, again = one_batch(client), one_batch(client)
    labels, rows = LABELS[batch.rows.numpy()], batch.rows
    prior = np.array([2 / 6, 1 / 12, 2 / 5])
    z = client.model(again.view("weak")).detach().double().numpy()
    far = (expit(z) - local["teacher"][rows].numpy()) ** 2
    expected = np.where(labels >= 0, bce(z + np.log(prior / (1 - prior)), labels == 1), far).mean()
    np.testing.assert_allclose(method.loss(client.model, batch, local).item(), expected, rtol=1e-5)
    assert method.expects(Message({"weights": torch.zeros(3)}), 2).keys() == {"weights"}  # no prototypes without tags


def test_without_either_there_is_no_second_stage() -> None:
    method, client = make({"t1": 1, "mld": False, "cr": False}, LABELS, round=2)
    assert not method.second_stage(2)
    assert method.prepare(client, Message(), {})["views"] == 2  # WPC only goes on with two views


def test_stages_change_after_t1() -> None:
    method, _ = make({"t1": 3}, LABELS)
    assert [method.second_stage(round) for round in (1, 3, 4, 9)] == [False, False, True, True]
    assert [method.uploads(round) for round in (2, 3, 4)] == [False, True, True]


@pytest.mark.parametrize("adaptive", [True, False])
def test_without_the_adaptive_threshold_the_difficulty_is_one(adaptive: bool) -> None:
    method, client = make({"t1": 1, "st": adaptive}, LABELS, round=1)
    reply = Message()
    method.finish(client, {}, reply, {})
    assert ("difficulty" in reply.tensors) == adaptive
    assert ("difficulty" in method.expects(Message({"weights": torch.zeros(3)}), 1)) == adaptive
    labels = np.full((40, 3), -1)
    labels[:, 0] = np.arange(40) % 2
    memory: Tensors = {}
    method, client = make({"t1": 1, "T0": 0.5, "T1": 0.5, "st": adaptive}, labels, round=2)
    prototypes = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    sent = {"prototypes": prototypes, "votes": torch.ones(2, 3, dtype=torch.bool)}
    if adaptive:
        sent["difficulty"] = torch.tensor([1.0, 0.5, 1.0])
    method.prepare(client, Message(sent), memory)
    tagged = (memory["tags"] >= 0).sum(0).tolist()
    assert tagged[0] == 0
    if adaptive:
        assert tagged[1] in (9, 10)  # a half of a half of 40, each side rounded down
    else:
        assert tagged[1] in (19, 20)


def test_a_class_needs_both_prototypes_to_be_tagged() -> None:
    labels = np.full((20, 3), -1)
    labels[:, 0] = 1
    memory: Tensors = {}
    method, client = make({"t1": 1, "T0": 0.5, "T1": 0.5}, labels, round=2)
    votes = torch.tensor([[True, True, False], [True, True, True]])  # nobody has a negative of the last class
    message = Message({"prototypes": torch.randn(2, 3, 6), "votes": votes, "difficulty": torch.ones(3)})
    method.prepare(client, message, memory)
    assert (memory["tags"][:, 2] == -1).all()
    assert (memory["tags"][:, 1] >= 0).any()


@pytest.mark.parametrize("view", ["none", "flip", "shift", "crop-flip", "weak"])
def test_the_view_is_the_one_that_was_asked_for(view: str) -> None:
    method, client = make({"view": view}, LABELS)
    local = method.prepare(client, Message(), {})
    batch, again = one_batch(client), one_batch(client)
    prior = local["prior"].double().numpy()
    labels = LABELS[batch.rows.numpy()]
    entries = [
        bce(client.model(again.view(view)).detach().numpy() + prior, labels == 1) * (labels >= 0) for _ in range(2)
    ]
    np.testing.assert_allclose(method.loss(client.model, batch, local).item(), np.mean(entries), rtol=1e-5)


def test_a_tagged_class_has_its_prior_over_all_samples() -> None:
    tags = np.full(LABELS.shape, -1, np.int8)
    tags[0, 1], tags[1, 1], tags[2, 1] = 1, 1, 0
    _, _, local, _ = stage_two(LABELS, {"tags": torch.from_numpy(tags)}, T0=0.0, T1=0.0)
    prior = expit(local["prior"].double().numpy())
    np.testing.assert_allclose(prior, [2 / 6, 2 / 6, 2 / 5], rtol=1e-6)  # the last: one blank, over the known five


def test_a_prior_counts_blanks_that_were_tagged() -> None:
    tags = np.full(LABELS.shape, -1, np.int8)
    tags[4, 2] = 1  # the blank of the last class
    _, _, local, _ = stage_two(LABELS, {"tags": torch.from_numpy(tags)}, T0=0.0, T1=0.0)
    np.testing.assert_allclose(expit(local["prior"].double().numpy())[2], 3 / 6, rtol=1e-6)


@pytest.mark.parametrize("switch", ["mld", "wpc", "cr", "st", "warmup_consistency", "momentum", "difficulty", "view"])
def test_every_switch_changes_a_run(switch: str) -> None:
    value = {"warmup_consistency": True, "momentum": 0.5, "difficulty": "active", "view": "none"}.get(switch, False)
    base = {"data__limit": 300, "training__lr": 0.02, "training__rounds": 4, "method__L": 0.45, "method__R": 0.55}
    plain = run(small(**PARTIAL | base)).weights
    other = run(small(**PARTIAL | base, **{f"method__{switch}": value})).weights
    assert any(not torch.equal(plain[name], other[name]) for name in plain)


def test_records_of_the_second_stage() -> None:
    result = run(
        small(**PARTIAL | {"data__limit": 300, "training__rounds": 4, "training__lr": 0.02, "method__st": False})
    )
    assert "tags_0" not in result.rows[0]
    later = result.rows[-1]
    assert later["tags_0"] + later["tags_1"] > 0
    assert 0 <= later["tag_precision"] <= 100
