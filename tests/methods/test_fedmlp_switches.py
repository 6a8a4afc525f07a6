"""FedMLP's switches really switch, and what is scanned is scanned in evaluation mode (with BatchNorm)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from fedmlp_builders import LABELS, bce, expected_keys, make, move, one_batch, seen_by, sent, stage_two, tags_of
from scipy.special import expit

from fedmll import run
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client, ClientRound
from fedmll.methods.parts.missing_label_detection import FedMLPPart
from fedmll.testing import compute_loss, make_reply, start_round

PARTIAL = {
    "method__name": "fedmlp", "method__t1": 1, "annotation__kind": "missing", "annotation__missing": 5,
    "partition__kind": "iid", "training__rounds": 3, "method__T0": 0.2, "method__T1": 0.2,
}  # fmt: skip


def normed(round: int, **options: Any) -> tuple[Trainer, Client]:
    """A client whose network has batch statistics that are not those of its batches."""
    trainer, client = make({"t1": 1, **options}, round=round, norm="batch")
    for module in trainer.model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.fill_(0.7)
            module.running_var.fill_(3.0)
    return trainer, client


def test_features_and_predictions_are_those_of_evaluation_mode() -> None:
    _, client = normed(1)
    features, p = seen_by(client)
    client.model.train()
    found = ClientRound(client, Message()).outputs(features=True)
    np.testing.assert_allclose(found.features, features, rtol=1.3e-6, atol=1e-5)
    np.testing.assert_allclose(found.probabilities, p, rtol=1.3e-6, atol=1e-5)
    client.model.train()
    alone = ClientRound(client, Message()).outputs()  # the same without features
    assert alone.features is None
    np.testing.assert_allclose(alone.probabilities, p, rtol=1.3e-6, atol=1e-5)
    client.model.train()
    trained = client.model.features(next(client.evaluation_batches()).images)
    assert not np.allclose(trained.detach(), features)


def test_prototypes_and_difficulty_are_those_of_evaluation_mode() -> None:
    trainer, client = normed(1)
    features, p = seen_by(client)
    reply = make_reply(trainer, start_round(trainer, client))  # the model is in training mode when it replies
    positives = LABELS[:, 0] == 1
    np.testing.assert_allclose(reply["tags/prototypes"][1, 0], features[positives].mean(0), rtol=1e-5)
    sure = ((p < 0.3) | (p > 0.7)).mean(0)
    assert reply["tags/difficulty"].tolist() == [-1.0, pytest.approx(sure[1]), -1.0]


def test_the_teacher_is_the_global_model_in_evaluation_mode() -> None:
    trainer, client = normed(2)
    _, p = seen_by(client)
    client.model.train()
    client_round = start_round(trainer, client)
    np.testing.assert_allclose(client_round.round_states["consistency"], p, rtol=1.3e-6, atol=1e-5)


def test_consistency_alone_enters_the_second_stage() -> None:
    trainer, client = make({"t1": 1, "mld": False}, round=2)
    assert all(stages(trainer, 2))
    client_round = start_round(trainer, client)
    assert client_round.unknown_targets_taught
    assert client_round.round_states["prior-adjusted"][1] == 1
    _, teacher = seen_by(client)
    move(client)
    again = one_batch(client)
    labels, rows = LABELS[again.rows.numpy()], again.rows.numpy()
    prior = np.array([2 / 6, 1 / 12, 2 / 5])
    z = client.model(again.view("weak")).detach().double().numpy()
    far = (expit(z) - teacher[rows]) ** 2
    expected = np.where(labels >= 0, bce(z + np.log(prior / (1 - prior)), labels == 1), far).mean()
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), expected, rtol=1e-5)
    assert expected_keys(trainer, 2) == {"weights"}  # no prototypes without tags


def stages(trainer: Trainer, round: int) -> list[bool]:
    """Whether it is the second one, for each part that asks."""
    found = [part.second_stage(round) for part in trainer.method.active_parts if isinstance(part, FedMLPPart)]
    assert found
    return found


def test_without_either_there_is_no_second_stage() -> None:
    trainer, client = make({"t1": 1, "mld": False, "cr": False}, round=2)
    assert not any(stages(trainer, 2))
    assert start_round(trainer, client).round_states["prior-adjusted"][1] == 2  # WPC only goes on with two views


def test_stages_change_after_t1() -> None:
    trainer, _ = make({"t1": 3})
    assert [stages(trainer, round) for round in (1, 3, 4, 9)] == [[False] * 3, [False] * 3, [True] * 3, [True] * 3]
    assert ["tags/prototypes" in expected_keys(trainer, round) for round in (2, 3, 4)] == [False, True, True]


def test_first_stage_is_a_tenth_of_the_rounds() -> None:
    assert small(method__name="fedmlp", training__rounds=5000).method.options["first_stage"] == 500


@pytest.mark.parametrize("adaptive", [True, False])
def test_without_the_adaptive_threshold_the_difficulty_is_one(adaptive: bool) -> None:
    trainer, client = make({"t1": 1, "st": adaptive})
    reply = make_reply(trainer, start_round(trainer, client))
    assert ("tags/difficulty" in reply.tensors) == adaptive
    assert ("tags/difficulty" in expected_keys(trainer, 1)) == adaptive
    labels = np.full((40, 3), -1)
    labels[:, 0] = np.arange(40) % 2
    trainer, client = make({"t1": 1, "T0": 0.5, "T1": 0.5, "st": adaptive}, labels, round=2)
    prototypes = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(5))
    spoken = {"prototypes": prototypes, "votes": torch.ones(2, 3, dtype=torch.bool)}
    if adaptive:
        spoken["difficulty"] = torch.tensor([1.0, 0.5, 1.0])
    tagged = (tags_of(start_round(trainer, client, sent(**spoken))) >= 0).sum(0).tolist()
    assert tagged[0] == 0
    if adaptive:
        assert tagged[1] in (9, 10)  # a half of a half of 40, each side rounded down
    else:
        assert tagged[1] in (19, 20)


def test_a_class_needs_both_prototypes_to_be_tagged() -> None:
    labels = np.full((20, 3), -1)
    labels[:, 0] = 1
    trainer, client = make({"t1": 1, "T0": 0.5, "T1": 0.5}, labels, round=2)
    votes = torch.tensor([[True, True, False], [True, True, True]])  # nobody has a negative of the last class
    tags = tags_of(
        start_round(trainer, client, sent(prototypes=torch.randn(2, 3, 6), votes=votes, difficulty=torch.ones(3)))
    )
    assert (tags[:, 2] == -1).all()
    assert (tags[:, 1] >= 0).any()


@pytest.mark.parametrize("view", ["none", "flip", "shift", "crop-flip", "weak"])
def test_view_is_the_requested_one(view: str) -> None:
    trainer, client = make({"view": view})
    client_round = start_round(trainer, client)
    prior = client_round.round_states["prior-adjusted"][0].double().numpy()
    again = one_batch(client)
    labels = LABELS[again.rows.numpy()]
    entries = [
        bce(client.model(again.view(view)).detach().numpy() + prior, labels == 1) * (labels >= 0) for _ in range(2)
    ]
    np.testing.assert_allclose(compute_loss(trainer, client_round).item(), np.mean(entries), rtol=1e-5)


def test_prior_of_a_tagged_class_is_over_all_samples() -> None:
    tags = np.full(LABELS.shape, -1, np.int8)
    tags[0, 1], tags[1, 1], tags[2, 1] = 1, 1, 0
    _, client_round, _ = stage_two(LABELS, tags, T0=0.0, T1=0.0)
    prior = expit(client_round.round_states["prior-adjusted"][0].double().numpy())
    np.testing.assert_allclose(prior, [2 / 6, 2 / 6, 2 / 5], rtol=1e-6)  # the last: one blank, over the known five


def test_prior_counts_tagged_blanks() -> None:
    tags = np.full(LABELS.shape, -1, np.int8)
    tags[4, 2] = 1  # the blank of the last class
    _, client_round, _ = stage_two(LABELS, tags, T0=0.0, T1=0.0)
    np.testing.assert_allclose(
        expit(client_round.round_states["prior-adjusted"][0].double().numpy())[2], 3 / 6, rtol=1e-6
    )


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
