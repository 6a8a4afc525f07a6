"""SCAFFOLD against its equations, and on quadratics whose optimum is known."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import quadratics
import torch
from conftest import small
from torch.nn import functional as F

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.scaffold import ControlVariates
from fedmll.testing import aggregate, make_client, make_client_info, make_trainer

SGD: dict[str, Any] = {"training__optimizer": "sgd", "training__lr": 0.1, "training__weight_decay": 0.0}
FEW = SGD | {"data__limit": 80, "partition__clients": 2}
C, CHANGE = "control-variates/c", "control-variates/change"
LABELS = np.random.default_rng(0).integers(0, 2, (48, 3))  # three batches


def made(**changes: Any) -> Trainer:
    return make_trainer(small(**SGD | {"method__name": "scaffold"} | changes), clients=5)


def test_round_of_a_client_follows_the_paper() -> None:
    trainer = made()
    end, method, generator = trainer.weights.parameter_end, trainer.method, torch.Generator().manual_seed(0)
    c, own = (0.3 * torch.randn(end, generator=generator) for _ in range(2))
    state = method.initial_state()
    assert state[C].shape == (end,) and not state[C].any()
    sent = method.send(state | {C: c}, make_client_info(0, 3), 2)
    memory = {C: own.clone()}
    reply = trainer.train(make_client(trainer, LABELS, round=2), sent, memory)

    trainer.weights.load(state)  # the same by hand: three steps, each gradient + c − c_i
    trainer.model.train()
    for batch in make_client(trainer, LABELS, round=2).batches():
        loss = F.binary_cross_entropy_with_logits(trainer.model(batch.images), batch.targets.float())
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(loss, trainer.weights.parameters)])
        with torch.no_grad():
            trainer.weights.parameter_vector.sub_(0.1 * (gradient + c - own))
    after = trainer.weights.parameter_vector
    torch.testing.assert_close(reply["weights"][:end], after, atol=1e-6, rtol=1e-5)
    new = own - c + (state["weights"][:end] - after) / (3 * 0.1)
    torch.testing.assert_close(memory[C], new, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(reply[CHANGE], new - own, atol=1e-5, rtol=1e-4)
    assert method.find_problem(sent, reply, 2) is None


@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_option_1_is_the_gradient_at_the_received_weights(decay: float) -> None:
    """Of the mean loss over all 44 samples, in batches of 16, 16 and 12 as BatchNorm sees them."""
    trainer = made(method__control_update="I", training__weight_decay=decay, training__local_epochs=2)
    end, method, generator = trainer.weights.parameter_end, trainer.method, torch.Generator().manual_seed(0)
    c, own = (0.3 * torch.randn(end, generator=generator) for _ in range(2))
    state, labels = method.initial_state(), LABELS[:44]
    sent = method.send(state | {C: c}, make_client_info(0, 3), 2)
    memory = {C: own.clone()}
    reply = trainer.train(make_client(trainer, labels, round=2), sent, memory)
    after, plain = trainer.weights.dump(), made(training__weight_decay=decay, training__local_epochs=2)
    usual = plain.train(make_client(plain, labels, round=2), sent, {C: own.clone()})
    assert torch.equal(reply["weights"], usual["weights"])  # the steps are those of option II
    assert torch.equal(after["weights"], reply["weights"])  # and the model is as trained

    trainer.weights.load(state)
    trainer.model.train()
    expected = decay * state["weights"][:end].double()
    for number, batch in enumerate(make_client(trainer, labels, round=2).batches()):
        if number < 3:  # one epoch
            loss = F.binary_cross_entropy_with_logits(trainer.model(batch.images), batch.targets.float())
            found = torch.autograd.grad(loss, trainer.weights.parameters)
            expected += len(batch) / 44 * torch.cat([g.flatten() for g in found])
    torch.testing.assert_close(memory[C], expected.float(), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(reply[CHANGE], expected.float() - own, atol=1e-6, rtol=1e-4)
    assert method.find_problem(sent, reply, 2) is None


def test_option_1_also_reaches_the_optimum_of_quadratics() -> None:
    best = quadratics.optimum(np.full(3, 1 / 3))
    trainer = quadratics.trainer(["control-variates"], "mean", 4.0)
    trainer.method.part(ControlVariates).options.control_update = "I"
    np.testing.assert_allclose(quadratics.settled(trainer, 60, "equal"), best, atol=2e-3)


def test_option_1_of_clients_that_are_trained_at_once() -> None:
    linear = {"model__freeze": "backbone", "model__weights": "random", "method__name": "scaffold"}
    changes = FEW | linear | {"method__control_update": "I"}
    alone, at_once = (run(small(**changes | more)).weights for more in ({}, {"training__clients_per_batch": 2}))
    for name in alone:
        torch.testing.assert_close(at_once[name], alone[name], rtol=1e-4, atol=1e-5)


def test_c_is_divided_by_the_number_of_all_clients() -> None:
    trainer = made()
    state = trainer.method.initial_state()
    state[C] += 1
    weights = {"weights": state["weights"], "counters": state["counters"]}
    replies = [Message(weights | {CHANGE: torch.full_like(state[C], x)}, {"samples": 9.0}) for x in (2.0, 4.0)]
    after, _ = aggregate(trainer.method, state, [(make_client_info(k, 3), reply) for k, reply in enumerate(replies)], 1)
    assert after[C].dtype == torch.float32
    torch.testing.assert_close(after[C], torch.full_like(state[C], 1 + 6 / 5))  # two of five took part
    pooled = made(method__name="centralized", method__of="scaffold").method  # one client has everything
    alone, _ = aggregate(pooled, state, [(make_client_info(0, 3), replies[0])], 1)
    torch.testing.assert_close(alone[C], torch.full_like(state[C], 3.0))


def test_on_quadratics_it_reaches_the_optimum_for_any_number_of_steps() -> None:
    """Its fixed point is where Σ_i g_i = 0: every client counts alike."""
    best = quadratics.optimum(np.full(3, 1 / 3))
    found = quadratics.settled(quadratics.trainer(["control-variates"], "mean", 4.0), 30, "size")
    np.testing.assert_allclose(found, best, atol=2e-3)
    assert np.abs(quadratics.resting(np.full(3, 1 / 3), 4.0, normalised=False) - best).max() > 0.4  # FedAvg's


def test_zero_control_variates_are_fedavg_bit_for_bit() -> None:
    plain, first = (run(small(**FEW, training__rounds=1, method__name=name)).weights for name in ("fedavg", "scaffold"))
    assert all(torch.equal(plain[name], first[name]) for name in plain)
    plain, second = (run(small(**FEW, method__name=name)).weights for name in ("fedavg", "scaffold"))
    assert not torch.equal(plain["head.weight"], second["head.weight"])


def test_implausible_control_variates_are_rejected() -> None:
    trainer = made()
    method = trainer.method
    sent = method.send(method.initial_state(), make_client_info(0, 3), 1)
    reply = trainer.train(make_client(trainer, LABELS), sent, {})
    longest = 21 * (1 + sent["weights"].norm().item()) / 0.1
    ones = torch.ones_like(reply[CHANGE])
    for norm, c, good in ((0.99, 0.0, True), (1.01, 0.0, False), (1.01, 0.02, True), (1.03, 0.02, False)):
        believed = Message(sent.tensors | {C: ones * (c * longest / ones.norm())})
        other = Message(reply.tensors | {CHANGE: ones * (norm * longest / ones.norm())}, reply.numbers)
        assert (method.find_problem(believed, other, 1) is None) == good
    short = Message(reply.tensors | {CHANGE: ones[1:]}, reply.numbers)
    assert CHANGE in str(method.find_problem(sent, short, 1))


def test_other_optimizers_and_local_models_are_refused() -> None:
    for word, change in (
        ("'adamw'", {"training__optimizer": "adamw"}),
        ("'adam'", {"training__optimizer": "adam"}),
        ("momentum", {"training__momentum": 0.9}),
    ):
        with pytest.raises(ConfigError, match=rf"not possible with {word}.*optimizer = 'sgd'.*training\.momentum = 0"):
            small(**SGD | {"method__name": "scaffold"} | change)
    fusion = {"method.name": "compose", "method.parts": ["masked", "control-variates"]}
    plain = small(**SGD)
    plain.changed(fusion)
    with pytest.raises(
        ConfigError, match=r"'local-models' and 'control-variates' cannot work together.*no global model"
    ):
        plain.changed(fusion | {"method.average": "local-models"})
    with pytest.raises(ConfigError, match="'by-label' and 'control-variates' cannot work together"):
        plain.changed(fusion | {"method.average": "by-label"})
