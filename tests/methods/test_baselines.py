"""The FedAvg family against values worked out by hand or in NumPy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message
from fedmll.data.federation import build
from fedmll.engines.local import LocalEngine
from fedmll.methods import build_method
from fedmll.methods.framework.allowed_replies import find_reply_problem
from fedmll.methods.framework.base import TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, TrainStep
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts.averaging import WeightedMean
from fedmll.methods.parts.proximal_term import ProximalTerm
from fedmll.testing import aggregate, first_step, make_client, make_client_info, make_trainer, start_round
from fedmll.training.round_loop import run

PEER = ClientInfo(0, "c000", torch.ones(3, dtype=torch.bool))


def loss_of_logits(name: str, logits: np.ndarray, targets: list[list[int]]) -> float:
    """The method's loss of a batch whose logits are these."""
    trainer = make_trainer(small(method__name=name))
    client_round = start_round(trainer, make_client(trainer, np.array(targets)))
    step = first_step(trainer, client_round)
    step.logits = torch.tensor(logits, dtype=torch.float32)[step.rows]
    return trainer.loss(step).item()


LOGITS = np.array([[1.0, -2.0, 0.5], [0.0, 3.0, -1.0]])
TARGETS = [[1, -1, 0], [-1, -1, 1]]


def test_fedavg_counts_unknown_targets_as_absent() -> None:
    y = np.array([[1, 0, 0], [0, 0, 1]])
    p = 1 / (1 + np.exp(-LOGITS))
    expected = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert loss_of_logits("fedavg", LOGITS, TARGETS) == pytest.approx(expected, abs=1e-6)


def test_fedavg_pl_leaves_unknown_targets_out() -> None:
    sigmoid = 1 / (1 + np.exp(-LOGITS))
    known = [-np.log(sigmoid[0, 0]), -np.log(1 - sigmoid[0, 2]), -np.log(sigmoid[1, 2])]
    assert loss_of_logits("fedavg-pl", LOGITS, TARGETS) == pytest.approx(np.mean(known), abs=1e-6)


def test_fedprox_gradient_is_the_gradient_of_the_penalty() -> None:
    trainer = make_trainer(small(method__name="fedprox", method__mu=0.3))
    part = trainer.method.part(ProximalTerm)
    client_round = start_round(trainer, make_client(trainer, np.array(TARGETS)))
    start = client_round.round_states[part.name]
    parameters, generator = client_round.weights.parameters, torch.Generator().manual_seed(0)
    origin = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn(parameter.shape, generator=generator)
    penalty = sum(((p - o) ** 2).sum() for p, o in zip(parameters, origin, strict=True))
    expected = torch.autograd.grad(0.3 / 2 * penalty, parameters)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    part.on_gradients(client_round, start)
    for parameter, gradient in zip(parameters, expected, strict=True):
        torch.testing.assert_close(parameter.grad, 1 + gradient)
    with pytest.raises(RuntimeError, match="size of tensor"):  # a penalty on some of the parameters would not be seen
        part.on_gradients(client_round, start[:-1])


def test_fedprox_reports_the_loss_with_its_penalty() -> None:
    """The mean over the steps of BCE + μ/2 ‖w − w_g‖², each before its step."""
    sgd = {"training__optimizer": "sgd", "training__lr": 0.5, "training__weight_decay": 0.0}
    trainer = make_trainer(small(method__name="fedprox", method__mu=0.8, **sgd))
    labels = np.random.default_rng(0).integers(0, 2, (48, 3))
    state = trainer.method.initial_state()
    reply = trainer.train(make_client(trainer, labels), trainer.method.send(state, make_client_info(0, 3), 1), {})
    trainer.weights.load(state)
    trainer.model.train()
    start, losses, penalties = trainer.weights.parameter_vector.clone(), [], []
    for batch in make_client(trainer, labels).batches():
        moved = trainer.weights.parameter_vector - start
        loss = torch.nn.functional.binary_cross_entropy_with_logits(trainer.model(batch.images), batch.targets.float())
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainer.weights.parameters)])
        losses.append(loss.item())
        penalties.append(0.4 * moved.square().sum().item())
        with torch.no_grad():
            trainer.weights.parameter_vector.sub_(0.5 * (gradient + 0.8 * moved))
    assert penalties[0] == 0 < penalties[1] < penalties[2]
    assert reply.numbers["loss"] == pytest.approx(np.mean(losses) + np.mean(penalties), rel=1e-5)
    assert np.mean(penalties) > 1e-3


def test_fedprox_reports_the_same_loss_of_clients_that_are_trained_at_once() -> None:
    linear = {"model__freeze": "backbone", "model__weights": "random", "method__name": "fedprox", "method__mu": 2.0}
    alone, at_once, free = (
        [row["loss"] for row in run(small(**linear | more)).rows if row["round"]]
        for more in ({}, {"training__clients_per_batch": 2}, {"method__mu": 0.0})
    )
    assert at_once == pytest.approx(alone, rel=1e-5)
    assert at_once != pytest.approx(free, rel=1e-5)


def test_fedprox_without_penalty_is_fedavg_and_with_it_stays_closer() -> None:
    plain = run(small(method__name="fedavg")).weights
    off = run(small(method__name="fedprox", method__mu=0.0)).weights
    strong = run(small(method__name="fedprox", method__mu=100.0, training__optimizer="sgd", training__lr=0.01)).weights
    free = run(small(method__name="fedprox", method__mu=0.0, training__optimizer="sgd", training__lr=0.01)).weights
    assert all(torch.equal(plain[name], off[name]) for name in plain)
    start = dict(build_method(task_of(build(small()))).build_model().named_parameters())
    moved = [sum((w[n] - start[n]).norm().item() for n in start) for w in (strong, free)]
    assert moved[0] < 0.7 * moved[1]


def test_average_by_size_and_equal(tmp_path: Path) -> None:
    replies = [
        (PEER, Message({"weights": torch.tensor([1.0, 10.0]), "counters": torch.tensor([3])}, {"samples": 1.0})),
        (PEER, Message({"weights": torch.tensor([5.0, 20.0]), "counters": torch.tensor([9])}, {"samples": 3.0})),
    ]
    for weights, expected in (("size", [4.0, 17.5]), ("equal", [3.0, 15.0])):
        method = build_method(task_of(build(small(method__weighting=weights))))
        state, _ = aggregate(method, {"weights": torch.zeros(2)}, iter(replies), 1)
        assert state["weights"].tolist() == expected
        assert state["counters"].tolist() == [3]  # integers are the first reply's


def test_fedavg_round_by_hand(tmp_path: Path) -> None:
    """One round with plain SGD: the engine's result is Σ n_k w_k / Σ n_k of separately trained clients."""
    experiment = small(training__optimizer="sgd", training__rounds=1, training__weight_decay=0.0, training__lr=0.1)
    data = build(experiment)
    result = run(experiment).weights
    engine = LocalEngine(data, tmp_path)
    try:
        trainer = engine.trainer
        start, weighted = engine.initial_state(), dict.fromkeys(result, 0.0)
        for peer in engine.clients:
            client = trainer.client_in_round(data, peer, 1)
            trainer.weights.load(start)
            trainer.model.train()
            for batch in client.batches():
                loss = torch.nn.functional.binary_cross_entropy_with_logits(
                    trainer.model((batch.raw.float() / 255 - 0.5) / 0.5), (batch.targets == 1).float()
                )
                for parameter, gradient in zip(
                    trainer.weights.parameters, torch.autograd.grad(loss, trainer.weights.parameters), strict=True
                ):
                    parameter.data -= 0.1 * gradient
            for name, value in trainer.weights.named(trainer.weights.dump()).items():
                weighted[name] = weighted[name] + value.double() * len(client.data)
        total = data.sizes.sum()
        for name, value in result.items():
            if value.is_floating_point():
                torch.testing.assert_close(value.double(), weighted[name] / total, atol=1e-6, rtol=1e-5)
    finally:
        engine.close()


def test_weighted_mean_without_replies_is_an_error() -> None:
    with pytest.raises(ReplyRejected, match="No client replied"):
        WeightedMean().result()


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Message({}), "lacks weights"),
        (Message({"weights": torch.zeros(3), "extra": torch.zeros(1)}), "unknown key extra"),
        (Message({"weights": torch.zeros(2)}, {"samples": 5.0}), r"\(2,\), not"),
        (Message({"weights": torch.zeros(3, dtype=torch.float64)}, {"samples": 5.0}), "float64"),
        (Message({"weights": torch.tensor([1.0, float("nan"), 0.0])}, {"samples": 5.0}), "NaN or infinite"),
        (Message({"weights": torch.full((3,), 1e3)}, {"samples": 5.0}), "norm 1.73e.*at most 10"),
        (Message({"weights": torch.tensor([10.0, 0.0, 0.0])}, {"samples": 5.0}), None),
        (Message({"weights": torch.zeros(3)}, {"samples": float("inf")}), "not finite"),
        (Message({"weights": torch.zeros(3)}, {"loss": 1.0}), "how many samples"),
        (Message({"weights": torch.zeros(3)}, {"samples": 0.0}), "how many samples"),
        (Message({"weights": torch.zeros(3)}, {"samples": 1.0}), None),
    ],
)
def test_replies_with_other_tensors_than_expected_are_rejected(reply: Message, reason: str | None) -> None:
    import re

    found = find_reply_problem({"weights": TensorSpec.trained_weights(torch.zeros(3))}, reply)
    assert (found is None) if reason is None else re.search(reason, str(found))


def test_centralized_trains_on_the_fully_annotated_pool_and_keeps_the_best_round(tmp_path: Path) -> None:
    experiment = small(
        method__name="centralized", annotation__kind="missing", annotation__missing=5, training__rounds=4,
        training__lr=0.02,
    )  # fmt: skip
    data = build(experiment)
    engine = LocalEngine(data, tmp_path)
    engine.close()
    client = engine.trainer.client_in_round(data, engine.clients[0], 1)
    assert len(client.data) == data.sizes.sum()
    assert (client.data.labels >= 0).all()
    assert (data.train.labels < 0).any()
    result = run(experiment)
    values = [row["val_macro_auc"] for row in result.rows]
    assert result.summary["round"] == 1 + int(np.argmax(values))
    assert result.metrics["macro_auc"] == pytest.approx(result.rows[result.summary["round"] - 1]["macro_auc"])


@pytest.mark.parametrize("loss", ["weighted", "asl"])
@pytest.mark.parametrize("name", ["fedavg", "fedavg-pl", "fedprox"])
def test_every_bce_method_accepts_the_other_losses(name: str, loss: str) -> None:
    plain = run(small(method__name=name, training__rounds=1))
    other = run(small(method__name=name, training__rounds=1, training__loss=loss))
    assert np.isfinite(other.rows[0]["loss"])
    assert other.rows[0]["loss"] != plain.rows[0]["loss"]


def test_reply_has_number_of_steps_and_mean_loss(tmp_path: Path) -> None:
    """With a learning rate of nothing every step has the loss of the weights that were sent."""
    experiment = small(training__lr=1e-12, training__weight_decay=0.0, model__norm="group", training__local_epochs=2)
    data = build(experiment)
    engine = LocalEngine(data, tmp_path)
    state = engine.initial_state()
    replies = list(engine.collect_replies(state, 1))
    engine.close()
    trainer = engine.trainer
    trainer.weights.load(state)
    for peer, reply in replies:
        client_round = start_round(trainer, trainer.client_in_round(data, peer, 1))
        with torch.no_grad():
            losses = [trainer.loss(TrainStep(client_round, batch)).item() for batch in client_round.client.batches()]
        assert reply.numbers["steps"] == len(losses)
        assert reply.numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5)
        assert reply.numbers["samples"] == len(client_round.client.data)
    assert max(reply.numbers["steps"] for _, reply in replies) > 3
