"""Surgical Aggregation: classifier rows against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from conftest import small

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.testing import aggregate, make_client, make_client_info, make_trainer, start_round

FEW = {"data__limit": 80, "partition__clients": 2, "training__rounds": 1}
# The clients' sizes and the classes that they annotate: class a is shared by all, b by two, c has one owner, d none.
OWNED = {0: (10.0, (0, 1)), 1: (30.0, (0,)), 2: (20.0, (0, 1, 2))}


@pytest.mark.parametrize("weights", ["size", "equal"])
def test_rows_by_hand(weights: str) -> None:
    trainer = make_trainer(small(method__name="surgical", method__weighting=weights), ("a", "b", "c", "d"))
    state = trainer.method.initial_state()
    named = trainer.weights.named(state)
    models = {index: {name: tensor + 1.0 * (index + 1) ** 2 for name, tensor in named.items()} for index in OWNED}
    replies = []
    for index, (samples, owned) in OWNED.items():
        trainer.weights.load_named(models[index])
        replies.append((make_client_info(index, 4, owned), Message(trainer.weights.dump(), {"samples": samples})))
    after = trainer.weights.named(aggregate(trainer.method, state, replies, 1)[0])
    share = {index: samples if weights == "size" else 1.0 for index, (samples, _) in OWNED.items()}

    def mean(*owners: int) -> float:
        """How far the average over these owners is from the start."""
        return sum(share[k] * (k + 1) ** 2 for k in owners) / sum(share[k] for k in owners)

    for row, moved in enumerate((mean(0, 1, 2), mean(0, 2), 9.0, 0.0)):
        torch.testing.assert_close(after["head.weight"][row], named["head.weight"][row] + moved)
        torch.testing.assert_close(after["head.bias"][row], named["head.bias"][row] + moved)
    for name in named:
        if not name.startswith("head") and named[name].is_floating_point():
            torch.testing.assert_close(after[name], named[name] + mean(0, 1, 2))
        elif not name.startswith("head"):
            assert not after[name].any()  # how many batches a client trained on is not told
    assert mean(0, 1, 2) != mean(0, 2)


def test_every_client_has_and_sends_all_rows() -> None:
    trainer = make_trainer(small(method__name="surgical"), ("a", "b", "c", "d"))
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 4, (1,)), 1)
    assert torch.equal(sent["weights"], state["weights"])
    assert trainer.method.find_problem(sent, Message(dict(state), {"samples": 1.0}), 1) is None
    assert not trainer.method.has("private-labels")


def test_every_client_counts_alike_by_default() -> None:
    trainer = make_trainer(small(method__name="surgical"), ("a", "b", "c", "d"))
    state = trainer.method.initial_state()
    replies = [
        (make_client_info(k, 4), Message(state | {"weights": state["weights"] + k}, {"samples": samples}))
        for k, samples in enumerate((10.0, 90.0))
    ]
    after, _ = aggregate(trainer.method, state, replies, 1)
    torch.testing.assert_close(after["weights"], state["weights"] + 0.5)


def test_complete_annotation_is_fedavg_pl_bit_for_bit() -> None:
    for changes in ({"method__weighting": "size"}, {"method__weighting": "equal"}):
        plain = run(small(**FEW, method__name="fedavg-pl", **changes)).weights
        surgical = run(small(**FEW, method__name="surgical", method__warmup_epochs=0, **changes)).weights
        assert all(torch.equal(plain[name], surgical[name]) for name in plain)
    missing = {"annotation__kind": "missing", "annotation__missing": 5}
    plain, surgical = (run(small(**FEW, method__name=name, **missing)).weights for name in ("fedavg-pl", "surgical"))
    assert not torch.equal(plain["head.weight"], surgical["head.weight"])


LABELS = np.array([[1, -1, 0, 0], [0, -1, 1, 0], [0, -1, 1, -1], [1, -1, 0, 1], [0, -1, -1, 0]] * 5)


def test_warm_up_trains_the_head_alone_before_round_1() -> None:
    """Against torch's Adam on features that are computed here: 3 epochs of 25 samples in batches of 10."""
    changes = {"method__warmup_epochs": 3, "method__warmup_lr": 0.02, "training__batch_size": 10}
    trainer = make_trainer(small(method__name="surgical", **changes), ("a", "b", "c", "d"))
    client = make_client(trainer, LABELS)
    model, state = trainer.model.eval(), trainer.weights.dump()
    with torch.no_grad():
        features = model.features(trainer.task.model_inputs(client.data, slice(None)))
    head = torch.nn.Linear(features.shape[1], 4)
    head.load_state_dict(model.head.state_dict())
    optimizer, generator = torch.optim.Adam(head.parameters(), 0.02), client.generator("head-warmup")
    targets = torch.tensor(LABELS)
    for _ in range(3):
        order = torch.randperm(25, generator=generator)
        for rows in (order[:10], order[10:20], order[20:]):
            known = targets[rows] >= 0
            loss = torch.nn.BCEWithLogitsLoss()(head(features[rows])[known], targets[rows][known].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    client_round = start_round(trainer, client)
    torch.testing.assert_close(model.head.weight, head.weight)
    torch.testing.assert_close(model.head.bias, head.bias)
    assert torch.equal(model.head.weight[1], trainer.weights.named(state)["head.weight"][1])  # nothing is known of b
    others = [name for name in trainer.weights.named(state) if not name.startswith("head")]
    now = trainer.weights.named(trainer.weights.dump())
    assert all(torch.equal(now[name], trainer.weights.named(state)[name]) for name in others)
    assert all(parameter.grad is None for parameter in trainer.weights.parameters)
    expected = torch.sigmoid(head(features)).detach()
    torch.testing.assert_close(client_round.outputs().probabilities, expected)  # not those before the warm-up


@pytest.mark.parametrize(("round", "epochs"), [(1, 0), (2, 15)])
def test_no_warm_up(round: int, epochs: int) -> None:
    trainer = make_trainer(small(method__name="surgical", method__warmup_epochs=epochs), ("a", "b", "c", "d"))
    before = trainer.weights.vector.clone()
    start_round(trainer, make_client(trainer, LABELS, round=round))
    assert torch.equal(trainer.weights.vector, before)


def test_the_steps_of_round_1_continue_from_the_warm_head() -> None:
    """With a rate of nearly 0 the reply is the received backbone with the warm head."""
    frozen = {"training__optimizer": "sgd", "training__lr": 1e-12, "training__weight_decay": 0.0}
    trainer = make_trainer(small(method__name="surgical", **frozen), ("a", "b", "c", "d"))
    state, client = trainer.method.initial_state(), make_client(trainer, LABELS)
    reply = trainer.train(client, trainer.method.send(state, make_client_info(0, 4), 1), {})
    start, found = trainer.weights.named(state), trainer.weights.named(reply.tensors)
    assert not torch.allclose(found["head.weight"], start["head.weight"], atol=1e-3)
    backbone = [name for name, _ in trainer.model.named_parameters() if not name.startswith("head")]
    assert all(torch.allclose(found[name], start[name], atol=1e-9) for name in backbone)


def test_warm_up_of_clients_that_are_trained_at_once() -> None:
    frozen = {"model__freeze": "backbone", "model__weights": "random", "method__name": "surgical"}
    alone, at_once = (
        run(small(**FEW, **frozen, **changes)).weights for changes in ({}, {"training__clients_per_batch": 2})
    )
    for name in alone:
        torch.testing.assert_close(at_once[name], alone[name], rtol=1e-4, atol=1e-5)


def test_a_head_without_rows_is_refused() -> None:
    fusion = {"method": {"name": "compose", "head": "ctran", "parts": ["masked"], "average": "surgical"}}
    with pytest.raises(ConfigError, match="'surgical' requires a linear classifier with one row"):
        small().changed(fusion)
    assert np.isfinite(run(small(**FEW).changed(fusion | {"method.head": "linear-by-name"})).metrics["macro_auc"])
