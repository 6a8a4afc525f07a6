"""FedCurv against the dense Hessian of a logistic model, and its penalty against autograd."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from torch import Tensor
from torch.nn import functional as F

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data.dataset import Dataset
from fedmll.engines.client_trainer import Trainer
from fedmll.methods import fedcurv
from fedmll.methods.framework.client_round import Client
from fedmll.testing import aggregate, client_with, make_client, make_client_info, make_trainer, start_round

U, V, COUNTED = "curvature/u", "curvature/v", "curvature/counted"
CLASSES = ("a", "b", "c")


def vectors(channels: tuple[int, ...] = (), **changes: Any) -> Trainer:
    made = small(data__name="features:x.npz", method__name="fedcurv", model__channels=channels, **changes)
    return make_trainer(made, CLASSES, (4,), clients=4)


def client(trainer: Trainer, index: int, round: int = 1, samples: int = 90) -> Client:
    """With some unknown targets; more samples than a batch of an evaluation."""
    rng = np.random.default_rng(index)
    targets = rng.integers(-1, 2, (samples, 3)).astype(np.int8)
    vectors = rng.normal(size=(samples, 4)).astype(np.float16).astype(np.float32)  # tokens are kept as fp16
    data = Dataset(vectors, targets, CLASSES)
    return client_with(trainer, data, round=round, name=f"c{index:03d}")


def hessian(trainer: Trainer, data: Dataset, at: Tensor) -> Tensor:
    """Of the mean cross-entropy of the known entries of a linear model, dense, in float64."""
    x, y = torch.from_numpy(data.samples(slice(None))).double(), torch.from_numpy(data.labels)

    def loss(weights: Tensor) -> Tensor:
        logits = x @ weights[:12].view(3, 4).T + weights[12:]
        entries = F.binary_cross_entropy_with_logits(logits, (y == 1).double(), reduction="none")
        return entries[y >= 0].mean()

    found = torch.autograd.functional.hessian(loss, at.double())
    assert isinstance(found, Tensor)
    return found


def test_u_is_the_diagonal_of_the_dense_hessian() -> None:
    trainer = vectors()
    here = client(trainer, 0)
    found = fedcurv.fisher(
        start_round(trainer, here, trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1))
    )
    dense = hessian(trainer, here.data, trainer.weights.parameter_vector.clone())
    torch.testing.assert_close(found.double(), dense.diagonal(), atol=1e-7, rtol=1e-5)
    assert (dense - dense.diagonal().diag()).abs().max() > 0.01


def test_u_of_a_single_known_entry() -> None:
    trainer = vectors()
    here = client(trainer, 0)
    here.data.labels[:] = -1
    here.data.labels[5, 1] = 1
    message = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    found = fedcurv.fisher(start_round(trainer, here, message))
    dense = hessian(trainer, here.data, trainer.weights.parameter_vector.clone())
    torch.testing.assert_close(found.double(), dense.diagonal(), atol=1e-7, rtol=1e-5)
    assert found.any()


def test_u_of_hidden_layers_is_unbiased() -> None:
    trainer = vectors((3,))
    message = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    draws = [fedcurv.fisher(start_round(trainer, client(trainer, 0, round, 30), message)) for round in range(1, 61)]
    here, exact, entries = client(trainer, 0, 1, 30), torch.zeros_like(draws[0]), 0
    for image, targets in zip(torch.from_numpy(here.data.samples(slice(None))), here.targets, strict=True):
        for c in targets.ge(0).nonzero().flatten().tolist():
            z = trainer.model(image[None])[0, c]
            gradients = torch.autograd.grad(z, trainer.weights.parameters)
            p = torch.sigmoid(z.detach())
            exact += p * (1 - p) * torch.cat([gradient.flatten() for gradient in gradients]).square()
            entries += 1
    exact /= entries
    hidden = slice(0, 15)
    torch.testing.assert_close(draws[0][15:], exact[15:], atol=1e-7, rtol=1e-4)  # the head's rows: no chance in them
    assert not torch.equal(draws[0][hidden], draws[1][hidden])
    mean = torch.stack(draws).mean(0)
    assert (mean - exact).norm() < 0.1 * exact.norm()
    assert (draws[0] - exact).norm() < exact.norm()


def test_client_without_known_targets_adds_no_penalty() -> None:
    trainer = vectors()
    here = client(trainer, 0)
    here.data.labels[:] = -1
    assert not fedcurv.fisher(
        start_round(trainer, here, trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1))
    ).any()


def a_round(
    trainer: Trainer, state: Tensors, number: int, memories: dict[int, Tensors]
) -> tuple[Tensors, list[Message]]:
    replies = []
    for index, memory in memories.items():
        sent = trainer.method.send(state, make_client_info(index, 3), number)
        replies.append(trainer.train(client(trainer, index, number), sent, memory))
        assert trainer.method.find_problem(sent, replies[-1], number) is None
    pairs = [(make_client_info(index, 3), reply) for index, reply in zip(memories, replies, strict=True)]
    return aggregate(trainer.method, state, pairs, number)[0], replies


def test_penalty_is_over_the_other_clients() -> None:
    """Of three of four clients: one that was among them, and one that was not."""
    trainer = vectors(method__strength=0.7)
    memories: dict[int, Tensors] = {0: {}, 1: {}, 3: {}}
    state, replies = a_round(trainer, trainer.method.initial_state(), 1, memories)
    assert state[COUNTED].tolist() == [True, True, False, True]
    models = [reply["weights"] for reply in replies]
    curvatures = [
        hessian(trainer, client(trainer, index).data, model).diagonal().float()
        for index, model in zip(memories, models, strict=True)
    ]
    torch.testing.assert_close(state[U], sum(curvatures), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(state[V], sum(u * w for u, w in zip(curvatures, models, strict=True)))
    for index, others in ((1, (0, 2)), (2, (0, 1, 2))):
        message = trainer.method.send(state, make_client_info(index, 3), 2)
        trainer.weights.load(state)
        client_round = start_round(trainer, client(trainer, index, 2), message, memories.get(index, {}))
        theta = trainer.weights.parameter_vector.clone().add_(0.5).requires_grad_()
        penalty = sum((curvatures[j] * (theta - models[j]) ** 2).sum() for j in others)
        assert isinstance(penalty, Tensor)
        (expected,) = torch.autograd.grad(0.7 * penalty, theta)
        trainer.weights.parameter_vector.add_(0.5)
        for parameter in trainer.weights.parameters:
            parameter.grad = torch.ones_like(parameter)
        part = trainer.method.part(fedcurv.CurvaturePenalty)
        part.on_gradients(client_round, client_round.round_states[part.name])
        found = torch.cat([p.grad.flatten() for p in trainer.weights.parameters if p.grad is not None])
        torch.testing.assert_close(found - 1, expected, atol=1e-4, rtol=1e-4)
    lost = start_round(trainer, client(trainer, 1, 2), trainer.method.send(state, make_client_info(1, 3), 2))
    assert torch.equal(lost.round_states["curvature"][0], state[U])  # who has no memory is held to all
    later, _ = a_round(trainer, state, 2, {2: {}})
    assert later[COUNTED].tolist() == [False, False, True, False]


def test_without_its_penalty_and_in_round_1_it_is_fedavg_bit_for_bit() -> None:
    plain, off, on = (
        run(small(data__limit=80, partition__clients=2, **changes))
        for changes in ({}, {"method__name": "fedcurv", "method__strength": 0.0}, {"method__name": "fedcurv"})
    )
    assert all(torch.equal(plain.weights[name], off.weights[name]) for name in plain.weights)
    assert on.rows[0]["macro_auc"] == plain.rows[0]["macro_auc"]
    assert not torch.equal(on.weights["head.weight"], plain.weights["head.weight"])


def test_implausible_curvatures_are_rejected() -> None:
    trainer = vectors()
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    reply = trainer.train(client(trainer, 0), sent, {})
    for value, good in ((0.0, True), (1e6, True), (-1e-6, False), (1.1e6, False)):
        other = Message(reply.tensors | {U: torch.full_like(reply[U], value)}, reply.numbers)
        assert (trainer.method.find_problem(sent, other, 1) is None) == good
    short = Message(reply.tensors | {U: reply[U][1:]}, reply.numbers)
    assert U in str(trainer.method.find_problem(sent, short, 1))


def test_per_sample_gradients_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(small(method__name="fedcurv", model__channels=(4,)), CLASSES, clients=4)
    here = make_client(trainer, np.random.default_rng(0).integers(0, 2, (5, 3)))
    client_round = start_round(
        trainer, here, trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    )
    together = fedcurv.fisher(client_round)
    monkeypatch.setattr(fedcurv, "AT_ONCE", 1)
    torch.testing.assert_close(fedcurv.fisher(client_round), together)
    monkeypatch.setattr(fedcurv, "AT_ONCE", 2 * trainer.weights.parameter_end)
    torch.testing.assert_close(fedcurv.fisher(client_round), together)


@pytest.mark.parametrize("head", ["ctran", "etf-ladm", "sphere"])
def test_works_with_every_head(head: str) -> None:
    fusion = {"method": {"name": "compose", "head": head, "parts": ["masked", "curvature"]}, "model.channels": (8, 12)}
    assert np.isfinite(run(small(data__limit=80, partition__clients=2).changed(fusion)).rows[-1]["loss"])


def test_needs_a_global_model_of_all_classes() -> None:
    fusion = {"method.name": "compose", "method.parts": ["masked", "curvature"]}
    for average in ("local-models", "by-label"):
        with pytest.raises(ConfigError, match=f"'{average}' and 'curvature' cannot work together"):
            small().changed(fusion | {"method.average": average})
