"""FedNova against its equations, and on quadratics whose optimum is known."""

from __future__ import annotations

import numpy as np
import pytest
import quadratics
import torch
from conftest import small

from fedmll import run
from fedmll.config.settings import TrainingSettings
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.methods.fednova import accumulated
from fedmll.testing import aggregate, make_client, make_client_info, make_trainer

FEW = {"data__limit": 96, "partition__clients": 3, "training__rounds": 1}
SGD = {"method__name": "fednova", "training__optimizer": "sgd", "training__lr": 0.1}


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_a_is_the_total_weight_of_sgd_gradients(momentum: float, steps: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=0.25, momentum=momentum)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
    assert accumulated(steps, momentum) == pytest.approx(-weight.item() / 0.25)


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("samples", [1, 2, 4, 5, 6, 8, 9, 12, 13])
def test_steps_follow_from_the_samples(samples: int, size: int) -> None:
    trainer = make_trainer(small(**SGD, training__batch_size=size, training__local_epochs=3))
    batches = list(make_client(trainer, np.zeros((samples, 3))).batches())
    assert 3 * trainer.task.experiment.training.batches(samples) == len(batches)
    assert trainer.method.average_part.steps(samples) == len(batches)
    assert all(len(batch) > 1 for batch in batches) or samples == 1 or size == 1
    assert sum(map(len, batches)) == 3 * samples


def test_fractional_number_of_samples() -> None:
    assert TrainingSettings(batch_size=4).batches(0.5) == 1
    assert TrainingSettings(batch_size=4).batches(1e15) == 25 * 10**13


@pytest.mark.parametrize("weights", ["size", "equal"])
def test_round_follows_the_paper(weights: str) -> None:
    """w_g − (Σ p_i a_i) Σ p_i (w_g − w_i)/a_i in float64; buffers and counters as FedAvg's."""
    trainer = make_trainer(small(**SGD, training__momentum=0.5, training__local_epochs=2, method__weighting=weights))
    state, end = trainer.method.initial_state(), trainer.weights.parameter_end
    assert end < len(state["weights"])  # there are running statistics
    rng, sizes, steps = np.random.default_rng(0), np.array([16, 48, 33]), (2, 6, 4)
    models = rng.normal(size=(3, len(state["weights"]))).astype(np.float32)
    models[:, end:] = np.abs(models[:, end:])  # variances
    replies = [
        Message({"weights": torch.from_numpy(w), "counters": torch.tensor([n])}, {"samples": float(n)})
        for w, n in zip(models, sizes, strict=True)
    ]
    after, records = aggregate(
        trainer.method, state, [(make_client_info(k, 3), reply) for k, reply in enumerate(replies)], 1
    )
    p = sizes / sizes.sum() if weights == "size" else np.full(3, 1 / 3)
    a = np.array([(t - 0.5 * (1 - 0.5**t) / 0.5) / 0.5 for t in steps])
    start = state["weights"].double().numpy()
    expected = start - (p @ a) * (p / a) @ (start - models)
    np.testing.assert_allclose(after["weights"][:end], expected[:end], atol=1e-5)
    np.testing.assert_allclose(after["weights"][end:], p @ models[:, end:], atol=1e-5)
    assert after["counters"].tolist() == [16]
    assert records["reach"] == pytest.approx((p @ a) * (p @ (1 / a)))
    assert not np.allclose(after["weights"][:end], p @ models[:, :end], atol=1e-2)


def test_on_quadratics_fednova_reaches_the_optimum_and_fedavg_does_not() -> None:
    """A run comes to rest where the affine moves say; with short steps FedNova's place is the optimum, FedAvg's not."""
    equal, by_size = np.full(3, 1 / 3), np.array(quadratics.SIZES) / sum(quadratics.SIZES)
    for shares, weights in ((equal, "equal"), (by_size, "size")):
        best = quadratics.optimum(shares)
        found = quadratics.settled(quadratics.trainer([], "normalised", 3.0), 25, weights)
        np.testing.assert_allclose(found, quadratics.resting(shares, 3.0, normalised=True), atol=0.01)
        np.testing.assert_allclose(quadratics.resting(shares, 1e-4, normalised=True), best, atol=1e-3)
        assert np.abs(quadratics.resting(shares, 1e-4, normalised=False) - best).max() > 0.4
    biased = quadratics.settled(quadratics.trainer([], "mean", 3.0), 35, "equal")
    np.testing.assert_allclose(biased, quadratics.resting(equal, 3.0, normalised=False), atol=0.01)


def test_with_equal_steps_it_is_fedavg_bit_for_bit() -> None:
    same = {
        **FEW,
        "partition__kind": "iid",
        "training__optimizer": "sgd",
        "training__lr": 0.1,
        "partition__holdout": 0.0,
    }
    plain, nova = (run(small(**same, method__name=name)) for name in ("fedavg", "fednova"))
    assert all(torch.equal(plain.weights[name], nova.weights[name]) for name in plain.weights)
    assert [row["reach"] for row in nova.rows] == [1.0]
    skewed = {**FEW, "partition__beta": 0.5, "training__optimizer": "sgd", "training__lr": 0.1}
    plain, nova = (run(small(**skewed, method__name=name)) for name in ("fedavg", "fednova"))
    assert not torch.equal(plain.weights["head.weight"], nova.weights["head.weight"])
    assert all(row["reach"] > 1 for row in nova.rows)


def test_other_optimizers_are_refused() -> None:
    for optimizer in ("adam", "adamw"):
        with pytest.raises(ConfigError, match=rf"'{optimizer}'.*Set training\.optimizer = 'sgd'"):
            small(method__name="fednova", training__optimizer=optimizer)
    with pytest.raises(ConfigError, match=r"optimizer_state = 'fresh'"):
        small(**SGD, training__momentum=0.9, training__optimizer_state="kept")
    small(**SGD, training__momentum=0.9)
    small(**SGD, training__optimizer_state="kept")
