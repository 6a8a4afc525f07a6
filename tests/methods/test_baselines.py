"""The FedAvg family against values worked out by hand or in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small
from fedmll.methods.base import Like, Method, WeightedMean, refuse_unlike

from fedmll.client import Batch, Peer
from fedmll.data.federation import build
from fedmll.engines.local import LocalEngine
from fedmll.errors import ReplyRefused
from fedmll.message import Message
from fedmll.methods import find
from fedmll.methods.fedprox import add_proximal_gradient
from fedmll.runs.loop import run

PEER = Peer(0, "c000", torch.ones(3, dtype=torch.bool))


def method_and_batch(name: str, targets: list[list[int]]) -> tuple[Method, Batch]:
    task = build(small(method__name=name)).task()
    labels = torch.tensor(targets, dtype=torch.int8)
    batch = Batch(task, torch.arange(len(labels)), torch.zeros(len(labels), 3), labels, "none", torch.Generator())
    return find(name)(task), batch


class Fixed(torch.nn.Module):
    def __init__(self, logits: np.ndarray) -> None:
        super().__init__()
        self.logits = torch.tensor(logits, dtype=torch.float32)

    def forward(self, _: torch.Tensor) -> torch.Tensor:
        return self.logits


LOGITS = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
TARGETS = [[1, -1, 0], [-1, -1, 1]]


def test_fedavg_takes_unknown_as_absent() -> None:
    method, batch = method_and_batch("fedavg", TARGETS)
    y = np.array([[1, 0, 0], [0, 0, 1]])
    p = 1 / (1 + np.exp(-LOGITS))
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert method.loss(Fixed(LOGITS), batch, {}).item() == pytest.approx(expected, abs=1e-6)


def test_fedavg_pl_leaves_unknown_out() -> None:
    method, batch = method_and_batch("fedavg-pl", TARGETS)
    sigmoid = 1 / (1 + np.exp(-LOGITS))
    known = [-np.log(sigmoid[0, 0]), -np.log(1 - sigmoid[0, 2]), -np.log(sigmoid[1, 2])]
    assert method.loss(Fixed(LOGITS), batch, {}).item() == pytest.approx(np.mean(known), abs=1e-6)


def test_fedprox_gradient_is_that_of_the_penalty() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    start = torch.tensor([0.5, 2.5, 1.0])
    (0.3 / 2 * ((parameter - start) ** 2).sum()).backward()
    expected = parameter.grad.clone()
    parameter.grad = torch.zeros(3)
    add_proximal_gradient([parameter], [start], mu=0.3)
    torch.testing.assert_close(parameter.grad, expected)
    with pytest.raises(ValueError, match="shorter"):  # a penalty on some of the parameters would not be seen
        add_proximal_gradient([parameter, parameter], [start], mu=0.3)


def test_fedprox_without_its_penalty_is_fedavg_and_with_it_stays_nearer() -> None:
    plain = run(small(method__name="fedavg")).weights
    off = run(small(method__name="fedprox", method__mu=0.0)).weights
    strong = run(small(method__name="fedprox", method__mu=100.0, training__optimizer="sgd", training__lr=0.01)).weights
    free = run(small(method__name="fedprox", method__mu=0.0, training__optimizer="sgd", training__lr=0.01)).weights
    assert all(torch.equal(plain[name], off[name]) for name in plain)
    start = dict(find("fedavg")(build(small()).task()).model().named_parameters())
    moved = [sum((w[n] - start[n]).norm().item() for n in start) for w in (strong, free)]
    assert moved[0] < 0.7 * moved[1]


def test_average_by_size_and_equal(tmp_path: Path) -> None:
    replies = [
        (PEER, Message({"weights": torch.tensor([1.0, 10.0]), "counters": torch.tensor([3])}, {"samples": 1.0})),
        (PEER, Message({"weights": torch.tensor([5.0, 20.0]), "counters": torch.tensor([9])}, {"samples": 3.0})),
    ]
    for weights, expected in (("size", [4.0, 17.5]), ("equal", [3.0, 15.0])):
        method = find("fedavg")(build(small(method__weights=weights)).task())
        state = method.merge({"weights": torch.zeros(2)}, iter(replies), 1)
        assert state["weights"].tolist() == expected
        assert state["counters"].tolist() == [3]  # integers are the first reply's


def test_fedavg_round_by_hand(tmp_path: Path) -> None:
    """One round with plain SGD: the engine's result is Σ n_k w_k / Σ n_k of separately trained clients."""
    experiment = small(training__optimizer="sgd", training__rounds=1, training__weight_decay=0.0, training__lr=0.1)
    data = build(experiment)
    result = run(experiment).weights
    engine = LocalEngine(data, tmp_path)
    try:
        start, weighted = engine.start(), dict.fromkeys(result, 0.0)
        for peer in engine.peers:
            client = data.client(peer, 1, engine.method, engine.model, engine.weights)
            engine.weights.load(start)
            engine.model.train()
            for batch in client.batches():
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    engine.model((batch.raw.float() / 255 - 0.5) / 0.5), (batch.targets == 1).float()
                )
                for parameter, gradient in zip(
                    engine.weights.parameters, torch.autograd.grad(loss, engine.weights.parameters), strict=True
                ):
                    parameter.data -= 0.1 * gradient
            for name, value in engine.weights.named(engine.weights.dump()).items():
                weighted[name] = weighted[name] + value.double() * len(client.data)
        total = data.sizes.sum()
        for name, value in result.items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), weighted[name] / total, atol=1e-6, rtol=1e-5)
    finally:
        engine.close()


def test_weighted_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ReplyRefused, match="No client replied"):
        WeightedMean().result()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Message({}), "lacks weights"),
        (Message({"weights": torch.zeros(3), "extra": torch.zeros(1)}), "unknown key extra"),
        (Message({"weights": torch.zeros(2)}, {"samples": 5.0}), r"\(2,\), not"),
        (Message({"weights": torch.zeros(3, dtype=torch.float64)}, {"samples": 5.0}), "float64"),
        (Message({"weights": torch.tensor([1.0, float("nan"), 0.0])}, {"samples": 5.0}), "NaN or infinite"),
        (Message({"weights": torch.full((3,), 1e3)}, {"samples": 5.0}), "norm 1.73e.*at most 20"),
        (Message({"weights": torch.tensor([20.0, 0.0, 0.0])}, {"samples": 5.0}), None),
        (Message({"weights": torch.zeros(3)}, {"samples": float("inf")}), "not finite"),
        (Message({"weights": torch.zeros(3)}, {"loss": 1.0}), "how many samples"),
        (Message({"weights": torch.zeros(3)}, {"samples": 0.0}), "how many samples"),
        (Message({"weights": torch.zeros(3)}, {"samples": 1.0}), None),
    ],
)
def test_replies_unlike_what_was_sent_are_refused(reply: Message, reason: str | None) -> None:
    import re

    found = refuse_unlike({"weights": Like.sent(torch.zeros(3))}, reply)
    assert (found is None) if reason is None else re.search(reason, found or "")


def test_centralized_trains_on_the_fully_annotated_pool_and_keeps_the_best_round(tmp_path: Path) -> None:
    experiment = small(
        method__name="centralized", annotation__kind="missing", annotation__missing=5, training__rounds=4,
        training__lr=0.02,
    )  # fmt: skip
    data = build(experiment)
    engine = LocalEngine(data, tmp_path)
    engine.close()
    client = data.client(engine.peers[0], 1, engine.method, engine.model, engine.weights)
    assert len(client.data) == data.sizes.sum()
    assert (client.data.labels >= 0).all()
    assert (data.train.labels < 0).any()
    result = run(experiment)
    values = [row["val_macro_auc"] for row in result.rows]
    assert result.summary["round"] == 1 + int(np.argmax(values))
    assert result.metrics["macro_auc"] == pytest.approx(result.rows[result.summary["round"] - 1]["macro_auc"])


@pytest.mark.parametrize("loss", ["weighted", "asl"])
@pytest.mark.parametrize("name", ["fedavg", "fedavg-pl", "fedprox"])
def test_every_bce_method_takes_the_other_losses(name: str, loss: str) -> None:
    plain = run(small(method__name=name, training__rounds=1))
    other = run(small(method__name=name, training__rounds=1, training__loss=loss))
    assert np.isfinite(other.rows[0]["loss"])
    assert other.rows[0]["loss"] != plain.rows[0]["loss"]


def test_a_reply_says_how_many_steps_there_were_and_their_mean_loss(tmp_path: Path) -> None:
    """With a learning rate of nothing every step has the loss of the weights that were sent."""
    experiment = small(training__lr=1e-12, training__weight_decay=0.0, model__norm="group", training__local_epochs=2)
    data = build(experiment)
    engine = LocalEngine(data, tmp_path)
    state = engine.start()
    replies = list(engine.round(state, 1))
    engine.close()
    engine.weights.load(state)
    for peer, reply in replies:
        client = data.client(peer, 1, engine.method, engine.model, engine.weights)
        with torch.no_grad():
            losses = [engine.method.loss(client.model, batch, {}).item() for batch in client.batches()]
        assert reply.numbers["steps"] == len(losses)
        assert reply.numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert reply.numbers["samples"] == len(client.data)
    assert max(reply.numbers["steps"] for _, reply in replies) > 3
