"""FedOpt: two steps of every optimizer by hand, BatchNorm statistics, all averages, sites, workers and resumed runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from all_methods import names, settings_of
from builders import same_bits, small
from semi_builders import Stopping

from fedmll import resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods import find
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.testing import aggregate, make_client_info, make_trainer

OPTIMIZERS = ("sgd", "adam", "yogi", "adagrad")
M, V = "server-optimizer/m", "server-optimizer/v"
OPTIONS = {
    "method__server_lr": 0.3,
    "method__server_beta1": 0.9,
    "method__server_beta2": 0.99,
    "method__server_tau": 0.1,
}


def made(optimizer: str, **changes: Any) -> Any:
    return make_trainer(small(method__server_optimizer=optimizer, **changes), ("a", "b", "c"))


def replies(state: Tensors, *changes: torch.Tensor) -> list[tuple[ClientInfo, Message]]:
    """Clients of 10, 20, … samples, whose models are the global one plus these changes."""
    own = {name: tensor for name, tensor in state.items() if "/" not in name}
    return [
        (make_client_info(k, 3), Message(own | {"weights": own["weights"] + change}, {"samples": 10.0 * (k + 1)}))
        for k, change in enumerate(changes)
    ]


# The average update is 0.5 in round 1 and −0.2 in round 2. With η = 0.3, β1 = 0.9, β2 = 0.99, τ = 0.1:
#   sgd      m = 0.5, 0.45 − 0.2 = 0.25                                 w moves by 0.15, 0.075
#   others   m = 0.05, 0.045 − 0.02 = 0.025
#   adam     v = 0.0099 + 0.0025 = 0.0124, 0.012276 + 0.0004 = 0.012676
#   yogi     v = 0.01 + 0.0025 = 0.0125 (0.01 < 0.25), 0.0125 + 0.0004 = 0.0129 (0.0125 < 0.04)
#   adagrad  v = 0.01 + 0.25 = 0.26, 0.26 + 0.04 = 0.3
#            w moves by 0.3 · 0.05/(√v + 0.1), 0.3 · 0.025/(√v + 0.1)
BY_HAND: dict[str, tuple[list[float], list[float], list[float]]] = {
    "sgd": ([0.15, 0.075], [0.5, 0.25], []),
    "adam": ([0.07097055, 0.03527955], [0.05, 0.025], [0.0124, 0.012676]),
    "yogi": ([0.07082039, 0.03511595], [0.05, 0.025], [0.0125, 0.0129]),
    "adagrad": ([0.02459412, 0.01157903], [0.05, 0.025], [0.26, 0.3]),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_two_steps_by_hand(optimizer: str) -> None:
    trainer = made(optimizer, **OPTIONS)
    state, end = trainer.method.initial_state(), trainer.weights.parameter_end
    moves, momenta, squares = BY_HAND[optimizer]
    assert state[M].shape == (end,) and not state[M].any()
    assert (V in state) == (optimizer != "sgd")
    if squares:
        assert torch.equal(state[V], torch.full((end,), 0.1**2))
    for step, update in enumerate((0.5, -0.2)):
        before = state["weights"]
        ones = torch.ones_like(before)
        # by size: (10 · 2 update + 20 · ½ update) / 30 = update
        state, records = aggregate(
            trainer.method, state, replies(state, 2 * update * ones, update / 2 * ones), step + 1
        )
        np.testing.assert_allclose((state["weights"] - before)[:end], moves[step], rtol=1e-4)
        np.testing.assert_allclose(state[M], momenta[step], rtol=1e-5)
        if squares:
            np.testing.assert_allclose(state[V], squares[step], rtol=1e-5)
        assert records["server_step"] == pytest.approx(abs(moves[step]) * end**0.5, rel=1e-4)
        assert {state[name].dtype for name in state if "/" in name} == {torch.float32}


def test_yogi_adds_and_subtracts_per_coordinate() -> None:
    """v = 0.01: it grows by 0.01 Δ² where Δ² > v, and shrinks by as much where Δ² < v."""
    trainer = made("yogi", **OPTIONS)
    state = trainer.method.initial_state()
    change = torch.zeros_like(state["weights"])
    change[:3] = torch.tensor([0.5, 0.05, -0.08])
    after, _ = aggregate(trainer.method, state, replies(state, change), 1)
    expected = [0.01 + 0.01 * 0.25, 0.01 - 0.01 * 0.0025, 0.01 - 0.01 * 0.0064, 0.01]
    np.testing.assert_allclose(after[V][:4], expected, rtol=1e-5)
    moved = 0.3 * 0.1 * np.array([0.5, 0.05, -0.08, 0.0]) / (np.sqrt(expected) + 0.1)
    np.testing.assert_allclose((after["weights"] - state["weights"])[:4], moved, rtol=1e-3, atol=1e-8)


def test_yogi_keeps_v_where_it_is_the_square_of_the_update() -> None:
    trainer = made("yogi", **OPTIONS | {"method__server_tau": 0.5})
    state = trainer.method.initial_state()
    state["weights"].zero_()  # so that the update is exactly ½
    after, _ = aggregate(trainer.method, state, replies(state, torch.full_like(state["weights"], 0.5)), 1)
    assert torch.equal(after[V], torch.full_like(after[V], 0.25))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_batch_statistics_are_averaged_and_not_optimized(optimizer: str) -> None:
    trainer = made(optimizer, **OPTIONS)
    state, end = trainer.method.initial_state(), trainer.weights.parameter_end
    assert trainer.weights.buffer_count
    change = torch.arange(len(state["weights"])).float() / 100
    after, _ = aggregate(trainer.method, state, replies(state, -change, change), 1)
    mean = state["weights"].double() + (20 * change.double() - 10 * change.double()) / 30
    torch.testing.assert_close(after["weights"][end:], mean[end:].float())
    assert not torch.allclose(after["weights"][:end], mean[:end].float())


def test_sgd_with_rate_1_and_without_momentum_is_the_average() -> None:
    plain = run(small())
    same = run(small(method__server_optimizer="sgd", method__server_beta1=0.0))
    for name in plain.weights:
        torch.testing.assert_close(same.weights[name], plain.weights[name], rtol=0, atol=1e-7)
    momentum = run(small(method__server_optimizer="sgd"))
    assert not same_bits(momentum.weights, plain.weights)


@pytest.mark.parametrize(
    ("optimizer", "rate", "beta1"),
    [("sgd", 1.0, 0.9), ("adam", 0.01, 0.9), ("yogi", 0.01, 0.9), ("adagrad", 0.01, 0.0)],
)
def test_defaults_of_each_optimizer(optimizer: str, rate: float, beta1: float) -> None:
    options = small(method__server_optimizer=optimizer).method.options
    assert (options["server_lr"], options["server_beta1"]) == (rate, beta1)
    assert (options["server_beta2"], options["server_tau"]) == (0.99, 1e-3)
    given = small(method__server_optimizer=optimizer, method__server_lr=0.5, method__server_beta1=0.25).method.options
    assert (given["server_lr"], given["server_beta1"]) == (0.5, 0.25)


@pytest.mark.parametrize("average", ["clipped-mean", "trimmed-mean", "centered-clipping"])
def test_the_update_is_that_of_any_average(average: str) -> None:
    plain, moved = (
        make_trainer(small(method__average=average, **changes), ("a", "b", "c"))
        for changes in ({}, {"method__server_optimizer": "sgd", "method__server_lr": 0.5, "method__server_beta1": 0.0})
    )
    state, end = moved.method.initial_state(), plain.weights.parameter_end
    noise = torch.randn(3, len(state["weights"]), generator=torch.Generator().manual_seed(0)).abs()
    half, _ = aggregate(moved.method, state, replies(state, *noise), 1)
    whole, _ = aggregate(plain.method, plain.method.initial_state(), replies(state, *noise), 1)
    middle = (whole["weights"] + state["weights"]) / 2
    torch.testing.assert_close(half["weights"][:end], middle[:end])
    assert torch.equal(half["weights"][end:], whole["weights"][end:])


def test_state_of_the_optimizer_stays_at_the_server() -> None:
    trainer = made("adam")
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    assert not any("server-optimizer" in name for name in sent.tensors)
    experiment = small(method__server_optimizer="adam")
    config = find("fedavg").configure(experiment.method.options)
    assert not any("server" in name for name in config.values_for_sites(config.values))


def test_every_method_that_averages_has_the_option() -> None:
    without = {name for name in names() if "server_optimizer" not in small(**settings_of(name)).method.options}
    assert without == {"compose", "fed-logistic", "fed-ridge", "local-only"}
    fusion = {"name": "compose", "parts": ["masked", "server-optimizer"], "server-optimizer": {"server_lr": 0.1}}
    assert run(small(method=fusion)).rows[-1]["server_step"] > 0
    with pytest.raises(ConfigError, match="'local-models' and 'server-optimizer' cannot work together"):
        small(method=fusion | {"average": "local-models"})


@pytest.mark.parametrize(
    ("name", "optimizer"), [("private-fedavg", "adam"), ("cbafed", "yogi"), ("fednova", "adagrad")]
)
def test_methods_with_their_own_average_run_with_it(name: str, optimizer: str) -> None:
    changes = settings_of(name) | {"method__server_optimizer": optimizer}
    found = run(small(**changes))
    assert found.rows[-1]["server_step"] > 0
    assert not same_bits(found.weights, run(small(**settings_of(name))).weights)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_same_bits_with_workers_and_after_resume(optimizer: str, tmp_path: Path) -> None:
    experiment = small(method__server_optimizer=optimizer, training__rounds=3)
    whole = run(experiment.changed({"engine.workers": 2}))
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "stopped", callback=Stopping(2))
    assert same_bits(resume(tmp_path / "stopped").weights, whole.weights)
