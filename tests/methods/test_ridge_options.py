"""The ridge's options against others' arithmetic: Platt's calibration, leverages, lifted features."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.special import expit
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.utils.class_weight import compute_sample_weight
from test_ridge import FROZEN, PLAIN, pooled, solving_of

from fedmll import load_run, resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts import platt_calibration, ridge_head
from fedmll.models.flat_weights import sketch_frozen_tensors
from fedmll.models.network import Lift
from fedmll.testing import aggregate, experiment, make_client, make_client_info, make_trainer
from fedmll.training.callbacks import Callback

PLATT: dict[str, Any] = FROZEN | {"method__calibrate": "platt"}


def fitted(z: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """Platt's a and b by scipy, on known entries of one class."""
    positives, negatives = (y == 1).sum(), (y == 0).sum()
    t = np.where(y == 1, (positives + 1) / (positives + 2), 1 / (negatives + 2))

    def loss(ab: np.ndarray) -> float:
        logits = ab[0] * z + ab[1]
        return float((np.logaddexp(0, logits) - t * logits).sum())

    def slope(ab: np.ndarray) -> np.ndarray:
        wrong = expit(ab[0] * z + ab[1]) - t
        return np.array([(wrong * z).sum(), wrong.sum()])

    def bend(ab: np.ndarray) -> np.ndarray:
        p = expit(ab[0] * z + ab[1])
        w = p * (1 - p)
        return np.array([[(w * z * z).sum(), (w * z).sum()], [(w * z).sum(), w.sum()]])

    start = np.array([0.0, math.log((positives + 1) / (negatives + 1))])
    found = minimize(loss, start, jac=slope, hess=bend, method="trust-exact", options={"gtol": 1e-11, "maxiter": 1000})
    return float(found.x[0]), float(found.x[1])


def newton(
    shares: list[tuple[np.ndarray, np.ndarray]], rounds: int = platt_calibration.ROUNDS
) -> tuple[np.ndarray, list[float]]:
    """a and b (2, C) from clients' (z, targets), and the loss of every round."""
    targets = np.concatenate([y for _, y in shares])
    positives, negatives = (torch.from_numpy((targets == v).sum(0)).double() for v in (1, 0))
    taught = torch.stack([1 / (negatives + 2), (positives + 1) / (positives + 2)])
    start = torch.stack([0 * positives, torch.log((positives + 1) / (negatives + 1))])
    state = {"tried": start[None], "best": torch.cat([start, start[:1] * 0 + torch.inf])}
    losses = []
    for _ in range(rounds):
        total = sum(
            platt_calibration.sums_of(torch.from_numpy(z), torch.from_numpy(y), taught, state["tried"])
            for z, y in shares
        )
        assert isinstance(total, torch.Tensor)
        state = platt_calibration.better(state["tried"], state["best"], total)
        losses.append(float(state["best"][2].sum()))
    return state["best"][:2].numpy(), losses


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000), clients=st.integers(1, 5), scale=st.sampled_from([0.05, 1.0, 8.0]),
    kind=st.sampled_from(["noisy", "separable", "unknown", "rare", "empty", "useless"]),
)  # fmt: skip
def test_federated_newton_steps_are_the_pooled_fit(seed: int, clients: int, scale: float, kind: str) -> None:
    rng = np.random.default_rng(seed)
    owner, z = rng.integers(0, clients, 80), rng.normal(size=(80, 2)) * scale - 1
    noise = 0.0 if kind == "separable" else scale
    y = (z + 1 + noise * rng.normal(size=z.shape) > 0).astype(np.int8)
    if kind == "unknown":
        y[rng.random(y.shape) < 0.4] = -1
    elif kind == "rare":
        y[:, 0], y[3, 0] = 0, 1
    elif kind == "empty":
        y[:, 0] = -1
    elif kind == "useless":
        z[:, 0] = 2.0
    found, losses = newton([(z[owner == k], y[owner == k]) for k in range(clients)])
    assert all(after <= before for before, after in itertools.pairwise(losses))
    for c in range(2):
        known = y[:, c] >= 0
        p = expit(found[0, c] * z[:, c] + found[1, c])
        if kind == "useless" and c == 0:  # a and b are not unique, p is
            positives = y[:, 0].sum()
            t = np.where(y[:, 0] == 1, (positives + 1) / (positives + 2), 1 / (82 - positives))
            np.testing.assert_allclose(p, t.mean(), atol=1e-6)
        else:
            a, b = fitted(z[known, c], y[known, c])
            np.testing.assert_allclose(p, expit(a * z[:, c] + b), atol=1e-6)


def test_without_platt_s_targets_it_would_be_logistic_regression() -> None:
    rng = np.random.default_rng(2)
    z = rng.normal(size=(200, 1))
    y = (z + rng.normal(size=z.shape) > 0.5).astype(np.int8)
    state = {"tried": torch.zeros(1, 2, 1).double(), "best": torch.tensor([[0.0], [0.0], [torch.inf]]).double()}
    plain = torch.tensor([[0.0], [1.0]]).double()
    for _ in range(platt_calibration.ROUNDS):
        sums = platt_calibration.sums_of(torch.from_numpy(z), torch.from_numpy(y), plain, state["tried"])
        state = platt_calibration.better(state["tried"], state["best"], sums)
    theirs = LogisticRegression(C=1e12, tol=1e-12, max_iter=1000).fit(z, y[:, 0])
    assert state["best"][0].item() == pytest.approx(theirs.coef_.item(), abs=1e-5)
    assert state["best"][1].item() == pytest.approx(theirs.intercept_.item(), abs=1e-5)


@pytest.mark.parametrize("balanced", [False, True])
def test_leverages_are_those_of_the_hat_matrix(balanced: bool) -> None:
    rng = np.random.default_rng(5)
    x, y = rng.normal(size=(50, 4)) * [1, 5, 0.2, 3] + 2, (rng.random((50, 1)) < 0.2).astype(np.int8)
    solving = solving_of(1, 4)
    solving.add(make_client_info(0, 1), Message(ridge_head.sums_of(torch.from_numpy(x), torch.from_numpy(y), balanced)))
    solving.solve(0.05)
    z, w = (x - x.mean(0)) / x.std(0), np.ones(50)
    if balanced:
        w = compute_sample_weight("balanced", y[:, 0])
    # the hat matrix column by column: what a unit target at one sample does to its own prediction
    unit = [Ridge(alpha=0.05 * 50).fit(z, e, sample_weight=w).predict(z[[i]])[0] for i, e in enumerate(np.eye(50))]
    expected = [np.mean(np.array(unit)[y[:, 0] == value]) for value in (0, 1)] if balanced else [np.mean(unit)] * 2
    np.testing.assert_allclose(solving.leverage[:, 0].numpy(), expected, rtol=1e-8)


def test_score_of_a_left_out_sample() -> None:
    scores, targets = torch.tensor([[0.8], [0.3], [0.5]]).double(), torch.tensor([[1], [0], [-1]])
    found = platt_calibration.as_left_out(scores, targets, torch.tensor([[0.5], [0.2]]).double())
    torch.testing.assert_close(found, torch.tensor([[1 - 0.2 / 0.8], [0.3 / 0.5], [1.0]]).double())
    extreme = platt_calibration.as_left_out(scores, targets, torch.ones(2, 1).double())
    torch.testing.assert_close(extreme[0], torch.tensor([1 - 0.2 / platt_calibration.LEAST]).double())


# ---- runs


def seen(made: Any) -> tuple[np.ndarray, np.ndarray, Trainer]:
    """All clients' features and targets."""
    data = federation.build(made)
    trainer, rows = Trainer(task_of(data)), np.concatenate(data.samples)
    trainer.model.eval()
    with torch.no_grad():
        return (
            trainer.model.features(trainer.task.model_inputs(data.train, rows)).double().numpy(),
            data.train.labels[rows],
            trainer,
        )


@pytest.mark.parametrize("balanced", [False, True])
def test_a_calibrated_run_is_scipy_s_fit_of_the_pooled_scores(tmp_path: Path, balanced: bool) -> None:
    partial = {"annotation__kind": "missing", "annotation__missing": 4}
    made = experiment(**PLATT, **PLAIN, **partial, method__ridge=0.01, method__ridge_balanced=balanced)
    result = run(made, tmp_path / "run")
    assert [row["round"] for row in result.rows] == list(range(platt_calibration.ROUNDS + 1))
    assert "loss" not in result.rows[-1]  # nobody trained
    features, targets, _ = seen(made)
    weights, bias = pooled(features, targets, 0.01, balanced)
    solving = solving_of(10, features.shape[1])
    sums = ridge_head.sums_of(torch.from_numpy(features), torch.from_numpy(targets), balanced)
    solving.add(make_client_info(0, 10), Message(sums))
    solving.solve(0.01)
    scores = torch.from_numpy((features @ weights.T + bias) / 4 + 0.5)
    z = 4 * (platt_calibration.as_left_out(scores, torch.from_numpy(targets), solving.leverage).numpy() - 0.5)
    ab = np.array([fitted(z[y >= 0, c], y[y >= 0]) for c, y in enumerate(targets.T)])
    np.testing.assert_allclose(result.weights["head.weight"].numpy(), ab[:, :1] * weights, rtol=5e-3, atol=1e-3)
    np.testing.assert_allclose(result.weights["head.bias"].numpy(), ab[:, 0] * bias + ab[:, 1], rtol=5e-3, atol=1e-3)


def log_loss(probabilities: np.ndarray, targets: np.ndarray) -> float:
    p = probabilities.clip(1e-9, 1 - 1e-9)
    return float(-np.where(targets == 1, np.log(p), np.log(1 - p)).mean())


class Killed(Exception):
    pass


class Killing(Callback):
    def on_round_end(self, row: dict[str, Any]) -> None:
        if row["round"] == 4:
            raise Killed


def test_calibrated_run_is_calibrated_and_has_the_same_bits_everywhere(tmp_path: Path) -> None:
    made = experiment(**PLATT, data__limit=600)
    data = federation.build(made)
    first = run(made, tmp_path / "one", prepared=data)
    workers = run(made.changed({"engine.workers": 2}))

    with pytest.raises(Killed):
        run(made, tmp_path / "two", callback=Killing())
    resumed = resume(tmp_path / "two")
    for other in (workers, resumed):
        assert all(torch.equal(other.weights[name], first.weights[name]) for name in first.weights)
    run(experiment(**FROZEN, data__limit=600), tmp_path / "plain", prepared=data)
    losses = [
        log_loss(load_run(tmp_path / name).predict(data.test.samples(slice(None))), data.test.labels)
        for name in ("one", "plain")
    ]
    assert losses[0] < losses[1]
    with pytest.raises(ConfigError, match="has 10 rounds"):
        resume(tmp_path / "one", rounds=12)


def test_implausible_sums_are_rejected() -> None:
    trainer = make_trainer(experiment(**PLATT))
    method, state = trainer.method, trainer.method.initial_state()
    labels = np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0]])
    sent = method.send(state, make_client_info(0, 3), 0)
    opening = trainer.train(make_client(trainer, labels, round=0), sent, {})
    assert "platt/sums" not in opening.tensors and method.find_problem(sent, opening, 0) is None
    state, _ = aggregate(method, state, [(make_client_info(0, 3), opening)], 0)
    before = method.final_model(state)["weights"]
    assert torch.equal(before, state["weights"])  # nothing is calibrated yet
    sent = method.send(state, make_client_info(0, 3), 1)
    good = trainer.train(make_client(trainer, labels, round=1), sent, {})
    assert set(good.tensors) == {"platt/sums"} and method.find_problem(sent, good, 1) is None
    for place, value in ((0, -1.0), (3, -1.0), (5, -1.0), (4, 1e3)):
        sums = good["platt/sums"].clone()
        sums[0, place] = value
        wrong = Message({"platt/sums": sums}, good.numbers)
        assert "not sums of a log-loss" in str(method.find_problem(sent, wrong, 1))
    state, _ = aggregate(method, state, [(make_client_info(0, 3), good)], 1)
    assert not torch.equal(method.final_model(state)["weights"], state["weights"])
    assert len(state["platt/tried"]) == len(platt_calibration.STEPS)


def test_platt_calibration_can_be_composed() -> None:
    frozen = {key: value for key, value in FROZEN.items() if key != "method__name"}
    made = experiment(**frozen, training__rounds=platt_calibration.ROUNDS).changed(
        {"method": {"name": "compose", "parts": ["masked", "platt"]}}
    )
    fused, own = run(made), run(experiment(**PLATT))
    torch.testing.assert_close(fused.weights["head.weight"], own.weights["head.weight"])


def test_calibration_rounds_work_with_every_backbone() -> None:
    assert run(experiment(method__name="fed-ridge", method__calibrate="platt")).metrics["macro_auc"] > 60


# ---- the lift


@pytest.mark.parametrize("kind", ["relu", "fourier", "second"])
def test_lifted_features_are_the_formula_s(kind: str) -> None:
    lift = Lift(kind, 6, 40, seed=3)
    features = np.random.default_rng(0).normal(size=(5, 6)) * 4 + 1
    found = lift(torch.from_numpy(features).float()).numpy()
    assert found.shape == (5, 46) and lift.width == 46
    scaled = (features - features.mean(1, keepdims=True)) / np.sqrt(features.var(1, keepdims=True) + 1e-5)
    w, other = lift.first.double().numpy(), lift.second.double().numpy()
    expected = {
        "relu": lambda: np.maximum(scaled @ w.T + other, 0),
        "fourier": lambda: np.sqrt(2) * np.cos(scaled @ w.T + other),
        "second": lambda: (scaled @ w.T) * (scaled @ other.T),
    }[kind]()
    np.testing.assert_allclose(found[:, :6], features, rtol=1e-6)
    np.testing.assert_allclose(found[:, 6:], expected, atol=1e-5)
    assert abs(w.var() - 1 / 6) < 0.05 and w.mean() == pytest.approx(0, abs=0.1)
    if kind == "fourier":
        assert 0 <= other.min() < 1 and 5 < other.max() < 2 * math.pi
    elif kind == "relu":
        assert abs(other.std() - 1) < 0.4
    else:
        assert other.shape == w.shape and abs(other.var() - 1 / 6) < 0.05 and not np.array_equal(w, other)
    assert torch.equal(Lift(kind, 6, 40, seed=3).first, lift.first)
    assert not torch.equal(Lift(kind, 6, 40, seed=4).first, lift.first)


@pytest.mark.parametrize("kind", ["relu", "second"])
def test_a_lifted_run_equals_scikit_learn_and_predicts_from_its_folder(tmp_path: Path, kind: str) -> None:
    made = experiment(**FROZEN, method__ridge=0.01, method__lift=kind, method__lift_width=12, data__limit=300)
    result = run(made, tmp_path / "run")
    assert set(result.weights) == {"head.weight", "head.bias"}  # the lift is no weight
    features, targets, trainer = seen(made)
    assert features.shape[1] == 22
    assert any(name.startswith("lift.") for name in sketch_frozen_tensors(trainer.model))  # checked when a site joins
    expected, _ = pooled(features, targets, 0.01)
    np.testing.assert_allclose(result.weights["head.weight"].numpy(), expected, rtol=5e-3, atol=5e-3)
    saved = load_run(tmp_path / "run")
    data = federation.build(made)
    trainer.load(result.weights)
    torch.testing.assert_close(
        torch.from_numpy(saved.predict(data.test.samples(slice(0, 9)))), trainer.predict(data.test, 0, 9)
    )


def test_lifted_features_help_if_products_matter() -> None:
    """Exclusive or of two features: no linear head sees it, a second-order one does."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 8))
    y = ((x[:, 0] > 0) ^ (x[:, 1] > 0)).astype(np.int8)[:, None]
    right = {}
    for kind in ("none", "second", "relu", "fourier"):
        f = torch.from_numpy(x).float()
        f = f if kind == "none" else Lift(kind, 8, 300, seed=0)(f)
        solving = solving_of(1, f.shape[1])
        solving.add(make_client_info(0, 1), Message(ridge_head.sums_of(f[:1500].double(), torch.from_numpy(y[:1500]))))
        rows, _ = solving.solve("gcv")
        z = f[1500:].double() @ rows[0, :-1] + rows[0, -1]
        right[kind] = float(((z > 0).numpy() == (y[1500:, 0] == 1)).mean())
    assert right["none"] < 0.65 and min(right["second"], right["relu"], right["fourier"]) > 0.7, right
