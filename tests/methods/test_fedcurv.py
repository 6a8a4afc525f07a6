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
from fedmll.client import Client
from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods import fedcurv
from fedmll.testing import client_of, learner_of, merge, peer_of, work_of

U, V, COUNTED = "curvature/u", "curvature/v", "curvature/counted"
CLASSES = ("a", "b", "c")


def vectors(channels: tuple[int, ...] = (), **changes: Any) -> Learner:
    made = small(data__name="features:x.npz", method__name="fedcurv", model__channels=channels, **changes)
    return learner_of(made, CLASSES, (4,), clients=4)


def client(learner: Learner, index: int, round: int = 1, samples: int = 90) -> Client:
    """With some unknown targets; more samples than a batch of an evaluation."""
    rng = np.random.default_rng(index)
    targets = rng.integers(-1, 2, (samples, 3)).astype(np.int8)
    vectors = rng.normal(size=(samples, 4)).astype(np.float16).astype(np.float32)  # tokens are kept as fp16
    data = Dataset(vectors, targets, CLASSES)
    known = torch.ones(3, dtype=torch.bool)
    return Client(learner.task, f"c{index:03d}", round, data, known, known, learner.model, learner.weights)


def hessian(learner: Learner, data: Dataset, at: Tensor) -> Tensor:
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
    learner = vectors()
    here = client(learner, 0)
    found = fedcurv.fisher(work_of(learner, here, learner.method.send(learner.method.start(), peer_of(0, 3), 1)))
    dense = hessian(learner, here.data, learner.weights.parameter_vector.clone())
    torch.testing.assert_close(found.double(), dense.diagonal(), atol=1e-7, rtol=1e-5)
    assert (dense - dense.diagonal().diag()).abs().max() > 0.01


def test_behind_a_hidden_layer_it_is_right_on_average() -> None:
    learner = vectors((3,))
    message = learner.method.send(learner.method.start(), peer_of(0, 3), 1)
    draws = [fedcurv.fisher(work_of(learner, client(learner, 0, round, 30), message)) for round in range(1, 61)]
    here, exact, entries = client(learner, 0, 1, 30), torch.zeros_like(draws[0]), 0
    for image, targets in zip(torch.from_numpy(here.data.samples(slice(None))), here.targets, strict=True):
        for c in targets.ge(0).nonzero().flatten().tolist():
            z = learner.model(image[None])[0, c]
            gradients = torch.autograd.grad(z, learner.weights.parameters)
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


def test_who_knows_nothing_holds_nobody() -> None:
    learner = vectors()
    here = client(learner, 0)
    here.data.labels[:] = -1
    assert not fedcurv.fisher(
        work_of(learner, here, learner.method.send(learner.method.start(), peer_of(0, 3), 1))
    ).any()


def a_round(
    learner: Learner, state: Tensors, number: int, memories: dict[int, Tensors]
) -> tuple[Tensors, list[Message]]:
    replies = []
    for index, memory in memories.items():
        sent = learner.method.send(state, peer_of(index, 3), number)
        replies.append(learner.train(client(learner, index, number), sent, memory))
        assert learner.method.refuse(sent, replies[-1], number) is None
    pairs = [(peer_of(index, 3), reply) for index, reply in zip(memories, replies, strict=True)]
    return merge(learner.method, state, pairs, number)[0], replies


def test_the_penalty_is_that_of_the_other_clients() -> None:
    """Of three of four clients: one that was among them, and one that was not."""
    learner = vectors(method__strength=0.7)
    memories: dict[int, Tensors] = {0: {}, 1: {}, 3: {}}
    state, replies = a_round(learner, learner.method.start(), 1, memories)
    assert state[COUNTED].tolist() == [True, True, False, True]
    models = [reply["weights"] for reply in replies]
    curvatures = [
        hessian(learner, client(learner, index).data, model).diagonal().float()
        for index, model in zip(memories, models, strict=True)
    ]
    torch.testing.assert_close(state[U], sum(curvatures), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(state[V], sum(u * w for u, w in zip(curvatures, models, strict=True)))
    for index, others in ((1, (0, 2)), (2, (0, 1, 2))):
        message = learner.method.send(state, peer_of(index, 3), 2)
        learner.weights.load(state)
        work = work_of(learner, client(learner, index, 2), message, memories.get(index, {}))
        theta = learner.weights.parameter_vector.clone().add_(0.5).requires_grad_()
        penalty = sum((curvatures[j] * (theta - models[j]) ** 2).sum() for j in others)
        assert isinstance(penalty, Tensor)
        (expected,) = torch.autograd.grad(0.7 * penalty, theta)
        learner.weights.parameter_vector.add_(0.5)
        for parameter in learner.weights.parameters:
            parameter.grad = torch.ones_like(parameter)
        part = learner.method.part(fedcurv.Curvature)
        part.adjust(work, work.fixed[part.name])
        found = torch.cat([p.grad.flatten() for p in learner.weights.parameters if p.grad is not None])
        torch.testing.assert_close(found - 1, expected, atol=1e-4, rtol=1e-4)
    lost = work_of(learner, client(learner, 1, 2), learner.method.send(state, peer_of(1, 3), 2))
    assert torch.equal(lost.fixed["curvature"][0], state[U])  # who has no memory is held to all
    later, _ = a_round(learner, state, 2, {2: {}})
    assert later[COUNTED].tolist() == [False, False, True, False]


def test_without_its_penalty_and_in_round_1_it_is_fedavg_bit_for_bit() -> None:
    plain, off, on = (
        run(small(data__limit=80, partition__clients=2, **changes))
        for changes in ({}, {"method__name": "fedcurv", "method__strength": 0.0}, {"method__name": "fedcurv"})
    )
    assert all(torch.equal(plain.weights[name], off.weights[name]) for name in plain.weights)
    assert on.rows[0]["macro_auc"] == plain.rows[0]["macro_auc"]
    assert not torch.equal(on.weights["head.weight"], plain.weights["head.weight"])


def test_strange_curvatures_are_refused() -> None:
    learner = vectors()
    sent = learner.method.send(learner.method.start(), peer_of(0, 3), 1)
    reply = learner.train(client(learner, 0), sent, {})
    for value, good in ((0.0, True), (1e6, True), (-1e-6, False), (1.1e6, False)):
        other = Message(reply.tensors | {U: torch.full_like(reply[U], value)}, reply.numbers)
        assert (learner.method.refuse(sent, other, 1) is None) == good
    short = Message(reply.tensors | {U: reply[U][1:]}, reply.numbers)
    assert U in str(learner.method.refuse(sent, short, 1))


def test_gradients_of_single_samples_fit_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_of(small(method__name="fedcurv", model__channels=(4,)), CLASSES, clients=4)
    here = client_of(learner, np.random.default_rng(0).integers(0, 2, (5, 3)))
    work = work_of(learner, here, learner.method.send(learner.method.start(), peer_of(0, 3), 1))
    together = fedcurv.fisher(work)
    monkeypatch.setattr(fedcurv, "AT_ONCE", 1)
    torch.testing.assert_close(fedcurv.fisher(work), together)
    monkeypatch.setattr(fedcurv, "AT_ONCE", 2 * learner.weights.parameter_end)
    torch.testing.assert_close(fedcurv.fisher(work), together)


@pytest.mark.parametrize("head", ["ctran", "etf-ladm", "sphere"])
def test_it_goes_with_every_head(head: str) -> None:
    fusion = {"method": {"name": "compose", "head": head, "parts": ["known", "curvature"]}, "model.channels": (8, 12)}
    assert np.isfinite(run(small(data__limit=80, partition__clients=2).changed(fusion)).rows[-1]["loss"])


def test_it_needs_a_common_model_of_all_classes() -> None:
    fusion = {"method.name": "compose", "method.parts": ["known", "curvature"]}
    for average in ("alone", "by-label"):
        with pytest.raises(ConfigError, match=f"'{average}' and 'curvature' cannot work together"):
            small().changed(fusion | {"method.average": average})
