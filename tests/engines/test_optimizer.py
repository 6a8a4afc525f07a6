"""The optimizer equals torch's own, bit for bit."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedmll.config.settings import TrainingSettings
from fedmll.core.message import Tensors
from fedmll.core.seeding import derive, seed_global
from fedmll.engines.optimizer import ClientOptimizer, backward

KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "sgd": ({"optimizer": "sgd"}, torch.optim.SGD),
    "momentum": ({"optimizer": "sgd", "momentum": 0.9}, lambda p, **k: torch.optim.SGD(p, momentum=0.9, **k)),
    "adam": ({"optimizer": "adam"}, torch.optim.Adam),
    "adamw": ({"optimizer": "adamw"}, torch.optim.AdamW),
}


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((5, 7), (5,), (3, 5))]


def teach(own: list[nn.Parameter], step: int, without: int | None = None) -> None:
    """Set a gradient for every parameter except one."""
    generator = torch.Generator().manual_seed(step + 1)
    for number, parameter in enumerate(own):
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = None if number == without else gradient


@pytest.mark.parametrize("kind", KINDS)
def test_every_step_has_the_bits_of_torchs_optimizer(kind: str) -> None:
    changes, torchs = KINDS[kind]
    own, theirs = parameters(), parameters()
    optimizer = ClientOptimizer(TrainingSettings(lr=0.05, weight_decay=0.1, **changes), own)
    reference = torchs(theirs, lr=0.05, weight_decay=0.1, fused=True)
    for step in range(5):
        without = 1 if step else None  # from the second step on one has no gradient, and is not even decayed
        for each in (own, theirs):
            teach(each, step, without)
        optimizer.step()
        reference.step()
        assert all(torch.equal(a, b) for a, b in zip(own, theirs, strict=True)), step
    assert all(parameter.grad is None for parameter in own)


@pytest.mark.parametrize("kind", KINDS)
def test_next_client_starts_with_a_fresh_state(kind: str) -> None:
    training = TrainingSettings(lr=0.05, **KINDS[kind][0])
    own, fresh = parameters(), parameters()
    optimizer = ClientOptimizer(training, own)
    for step in range(3):
        teach(own, step)
        optimizer.step()
    with torch.no_grad():
        for parameter, start in zip(own, fresh, strict=True):
            parameter.copy_(start)
    optimizer.reset({})
    assert not optimizer.started
    for each, its in ((own, optimizer), (fresh, ClientOptimizer(training, fresh))):
        for step in range(3):
            teach(each, step, without=None if step else 1)
            its.step()
    assert all(torch.equal(a, b) for a, b in zip(own, fresh, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_kept_state_continues_in_the_next_round(kind: str) -> None:
    training = TrainingSettings(lr=0.05, **KINDS[kind][0])
    own, broken = parameters(), parameters()
    whole, memory = ClientOptimizer(training, own), Tensors()
    interrupted = ClientOptimizer(training, broken)
    for step in range(4):
        interrupted.reset(memory)
        for each, optimizer in ((own, whole), (broken, interrupted)):
            teach(each, step)
            optimizer.step()
        memory = {name: value.clone() for name, value in interrupted.state().items()}
    assert all(torch.equal(a, b) for a, b in zip(own, broken, strict=True))
    assert memory.keys() == whole.state().keys() and bool(memory) == (kind != "sgd")


def test_state_belongs_to_the_caller() -> None:
    """There is one copy of the state, and no other client writes to it."""
    own = parameters()
    optimizer = ClientOptimizer(TrainingSettings(lr=0.05), own)
    for client in range(2):
        teach(own, client)
        optimizer.step()
        state = optimizer.state()
        kept = {name: value.clone() for name, value in state.items()}
        optimizer.reset({})
        teach(own, 5)
        optimizer.step()
        assert all(torch.equal(state[name], kept[name]) for name in state)
    optimizer.reset(state)
    assert optimizer.kept["exp_avg"][0] is state["0.exp_avg"]


def test_loss_that_is_not_a_scalar_gives_torchs_error() -> None:
    own = parameters()
    with pytest.raises(RuntimeError, match="only for scalar outputs"):
        backward(own[0] * 2)
    backward((own[0] * 2).sum().reshape(1))  # one number in a vector is one
    assert torch.equal(own[0].grad, torch.full_like(own[0], 2))  # type: ignore[arg-type]


def test_momentum_starts_with_the_first_gradient_of_a_parameter() -> None:
    own = parameters()
    start = own[1].detach().clone()
    optimizer = ClientOptimizer(TrainingSettings(optimizer="sgd", lr=0.5, momentum=0.9, weight_decay=0.0), own)
    gradients = list[Tensor]()
    for step in range(3):
        teach(own, step, without=None if step else 1)
        gradients += [] if own[1].grad is None else [own[1].grad.clone()]
        optimizer.step()
    torch.testing.assert_close(own[1].detach(), start - 0.5 * gradients[0] - 0.5 * (gradients[1] + 0.9 * gradients[0]))


def test_backward_gives_torchs_gradients() -> None:
    own, theirs = parameters(), parameters()
    for each, go in ((own, backward), (theirs, Tensor.backward)):
        for _ in range(2):  # they are added to those that are there
            go((each[2] @ torch.tanh(each[0]) * each[1][:3, None]).square().mean())
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(own, theirs, strict=True))  # type: ignore[arg-type]
    unused = parameters()
    backward(unused[0].sum())
    assert unused[0].grad is not None and unused[1].grad is None


def test_seed_global_equals_manual_seed() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(3, 1, "c000", "torch"))
        expected = torch.rand(5)
        seed_global(torch.device("cpu"), 3, 1, "c000", "torch")
        assert torch.equal(torch.rand(5), expected)
