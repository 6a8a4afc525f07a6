"""The exact head against scikit-learn's Ridge on pooled, masked data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge as Pooled
from sklearn.preprocessing import StandardScaler
from sklearn.utils.class_weight import compute_sample_weight

from fedmll import compare, resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts import ridge_head
from fedmll.testing import aggregate, experiment, make_client, make_client_info, make_trainer

FROZEN: dict[str, Any] = {
    "method__name": "fed-ridge",
    "model__freeze": "backbone",
    "model__weights": "random",
    "model__channels": (6, 10),
}
PLAIN: dict[str, Any] = {"model__standardise": False, "model__bias": "zero"}


def pooled(
    features: np.ndarray, targets: np.ndarray, strength: float, balanced: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Weights and intercepts of z = 4 (score − ½), class by class, on the samples that know the class."""
    scaler = StandardScaler().fit(features)
    x, rows, bias = scaler.transform(features), [], []
    for c in range(targets.shape[1]):
        known = targets[:, c] >= 0
        y = targets[known, c]
        if not known.any():
            rows.append(np.zeros(x.shape[1]))
            bias.append(0.0)
            continue
        weights = np.ones(len(y))
        if balanced and 0 < y.sum() < len(y):
            weights = compute_sample_weight("balanced", y)
        found = Pooled(alpha=strength * len(y), fit_intercept=True, solver="cholesky").fit(
            x[known], y, sample_weight=weights
        )
        w = found.coef_ / scaler.scale_
        rows.append(4 * w)
        bias.append(4 * (found.intercept_ - w @ scaler.mean_ - 0.5))
    return np.array(rows), np.array(bias)


def solving_of(classes: int, width: int) -> ridge_head.RidgeAggregator:
    part = SimpleNamespace(model=SimpleNamespace(width=width), task=SimpleNamespace(classes=range(classes)))
    return ridge_head.RidgeAggregator(part)  # type: ignore[arg-type]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000), clients=st.integers(1, 5), classes=st.integers(1, 5), strength=st.floats(1e-3, 10),
    kind=st.sampled_from(["all", "classes", "entries", "empty", "rare"]), balanced=st.booleans(),
)  # fmt: skip
def test_the_sums_give_the_pooled_masked_ridge(
    seed: int, clients: int, classes: int, strength: float, kind: str, balanced: bool
) -> None:
    rng = np.random.default_rng(seed)
    width, owner = 6, rng.integers(0, clients, 60)
    features = rng.normal(size=(60, width)) * rng.uniform(0.1, 30, width) + rng.normal(size=width) * 5
    targets = rng.integers(0, 2, (60, classes)).astype(np.int8)
    if kind == "classes":
        targets[~(rng.random((clients, classes)) < 0.6)[owner]] = -1
    elif kind == "entries":
        targets[rng.random(targets.shape) < 0.3] = -1
    elif kind == "empty":
        targets[:, 0] = -1
    elif kind == "rare":  # one positive, and a class that has none
        targets[:, 0], targets[7, 0], targets[:, -1] = 0, 1, 0
    solving = solving_of(classes, width)
    for client in rng.permutation(clients):
        round_state = owner == client
        if round_state.any():
            sums = ridge_head.sums_of(
                torch.from_numpy(features[round_state]), torch.from_numpy(targets[round_state]), balanced
            )
            solving.add(make_client_info(int(client), classes), Message(sums, {"samples": 1.0}))
    rows, used = solving.solve(strength)
    expected, bias = pooled(features, targets, strength, balanced)
    assert used == strength
    np.testing.assert_allclose(rows[:, :-1].numpy(), expected, atol=1e-6 * max(1, np.abs(expected).max()))
    np.testing.assert_allclose(rows[:, -1].numpy(), bias, atol=1e-6 * max(1, np.abs(bias).max()))
    assert len(solving.grams) <= classes


def test_gcv_follows_the_textbook_formula() -> None:
    """n RSS / (n − tr H)², H the hat matrix with the intercept, by hand for every λ of the grid."""
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(40, 5)), rng.integers(0, 2, (40, 2)).astype(np.int8)
    y[:, 1] = x[:, 0] > 0
    sums = ridge_head.sums_of(torch.from_numpy(x), torch.from_numpy(y))
    z = StandardScaler().fit_transform(x)
    errors = []
    for strength in ridge_head.GRID.tolist():
        hat = z @ np.linalg.inv(z.T @ z + 40 * strength * np.eye(5)) @ z.T + np.ones((40, 40)) / 40
        residual = y - hat @ y
        errors.append(40 * (residual**2).sum() / (40 - np.trace(hat)) ** 2)
    system = ridge_head._RidgeSystem(sums["gram"][0], sums["cross"], torch.from_numpy(1 / x.std(0)))
    np.testing.assert_allclose(system.gcv(ridge_head.GRID).numpy(), errors, rtol=1e-9)
    solving = solving_of(2, 5)
    solving.add(make_client_info(0, 2), Message(sums))
    _, chosen = solving.solve("gcv")
    assert chosen == pytest.approx(ridge_head.GRID[int(np.argmin(errors))].item())


PARTITIONS = [
    {"partition__kind": "iid", "partition__clients": 1},
    {"partition__kind": "iid", "partition__clients": 12, "data__limit": 240},
    {"partition__kind": "dirichlet", "partition__beta": 0.1, "partition__clients": 5},
]


def test_the_result_is_the_same_for_every_partition_and_worker() -> None:
    results = [
        run(experiment(**FROZEN, **{"data__limit": 240} | change, partition__holdout=0.0, engine__workers=workers))
        for change, workers in zip(PARTITIONS, (0, 2, 1), strict=True)
    ]
    for other in results[1:]:
        for name in results[0].weights:
            torch.testing.assert_close(other.weights[name], results[0].weights[name], atol=1e-5, rtol=1e-4)
    assert [row["round"] for row in results[0].rows] == [0]
    assert results[0].metrics["macro_auc"] > 60


def test_a_run_equals_scikit_learn_on_all_features(tmp_path: Path) -> None:
    made = experiment(**FROZEN, **PLAIN, method__ridge=0.01, annotation__kind="missing", annotation__missing=4)
    data = federation.build(made)
    result = run(made, tmp_path / "run", prepared=data)
    trainer = Trainer(task_of(data))
    rows = np.concatenate(data.samples)
    trainer.model.eval()
    with torch.no_grad():
        features = trainer.model.features(trainer.task.model_inputs(data.train, rows)).double().numpy()
    expected, bias = pooled(features, data.train.labels[rows], 0.01)
    np.testing.assert_allclose(result.weights["head.weight"].numpy(), expected, rtol=2e-3, atol=2e-4)
    np.testing.assert_allclose(result.weights["head.bias"].numpy(), bias, rtol=2e-3, atol=2e-4)
    again = resume(tmp_path / "run")
    assert torch.equal(again.weights["head.weight"], result.weights["head.weight"])
    assert len(again.rows) == 1


def test_fed_ridge_in_a_comparison(tmp_path: Path) -> None:
    base = experiment(model__freeze="backbone", model__weights="random", model__channels=(6, 10)).changed(
        {"method": {"name": "compose", "parts": ["masked", "proximal"]}}
    )
    rows = ["fed-ridge", "fedavg:start=ridge", "compose:proximal.mu=0.5"]
    found = compare(base, rows, [0, 1], tmp_path / "table")
    assert [row.label for row in found.rows] == rows
    assert "fed-ridge" in (tmp_path / "table" / "table.md").read_text()
    assert all(np.isfinite(list(row.values("s/round").values())).all() for row in found.rows)


def test_implausible_replies_are_rejected() -> None:
    trainer = make_trainer(experiment(**FROZEN))
    client = make_client(trainer, np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0]]), round=0)
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 0)
    good = trainer.train(client, sent, {})
    assert trainer.method.find_problem(sent, good, 0) is None
    assert good["ridge/group"].tolist() == [1, 0, 1]
    for key, wrong, reason in (
        ("ridge/gram", good["ridge/gram"].repeat(4, 1, 1), "ridge/gram is"),
        ("ridge/gram", good["ridge/gram"] + torch.arange(11.0, dtype=torch.float64), "not symmetric"),
        ("ridge/cross", good["ridge/cross"] * torch.inf, "NaN or infinite"),
        ("ridge/group", good["ridge/group"] + 5, "outside"),
    ):
        assert reason in str(trainer.method.find_problem(sent, Message(good.tensors | {key: wrong}, good.numbers), 0))


def test_client_without_known_targets_changes_nothing() -> None:
    trainer = make_trainer(experiment(**FROZEN, **PLAIN))
    known = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]])
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 3), 0)
    one = trainer.train(make_client(trainer, known, round=0), sent, {})
    nothing = trainer.train(make_client(trainer, np.full((1, 3), -1), round=0, seed=0), sent, {})
    nothing.tensors["ridge/all"] = torch.zeros_like(nothing["ridge/all"])
    alone, _ = aggregate(trainer.method, state, [(make_client_info(0, 3), one)], 0)
    both, _ = aggregate(trainer.method, state, [(make_client_info(0, 3), one), (make_client_info(1, 3), nothing)], 0)
    torch.testing.assert_close(alone["weights"], both["weights"])


def resume_more(folder: Path) -> None:
    run(experiment(**FROZEN), folder / "run")
    resume(folder / "run", rounds=3)


def test_every_method_with_a_linear_head_can_start_from_it(tmp_path: Path) -> None:
    frozen = {key: value for key, value in FROZEN.items() if key != "method__name"}
    ridge_alone = run(experiment(**FROZEN))
    for method in ("fedavg", "fedprox", "fedmlp", "fedharmony"):
        started = run(experiment(**frozen, method__name=method, method__start="ridge", training__lr=1e-9))
        assert [row["round"] for row in started.rows] == [0, 1, 2]
        assert started.rows[0]["map"] == pytest.approx(ridge_alone.metrics["map"], abs=1e-6)
        torch.testing.assert_close(
            started.weights["head.weight"], ridge_alone.weights["head.weight"], atol=1e-4, rtol=0
        )
    with pytest.raises(ConfigError, match=r"'ridge' requires a linear classifier with one row .*the head 'ctran'"):
        experiment(method__name="fedctran", method__start="ridge")
    with pytest.raises(ConfigError, match="'by-label' and 'ridge'"):
        experiment(**frozen, method__name="private-fedavg", method__loss="sigmoid", method__start="ridge")
    with pytest.raises(ConfigError, match="batch normalisation changes them"):
        experiment(method__start="ridge")
    with pytest.raises(ConfigError, match="has 0 rounds"):
        resume_more(tmp_path)


def test_impossible_sums_are_rejected() -> None:
    trainer = make_trainer(experiment(**FROZEN))
    client = make_client(trainer, np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0]]), round=0)
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 0)
    good = trainer.train(client, sent, {})
    for key, wrong in (
        ("ridge/gram", -good["ridge/gram"]),
        ("ridge/gram", good["ridge/gram"] * 1e18),
        ("ridge/cross", good["ridge/cross"] * 1e15),
        ("ridge/all", good["ridge/all"] * 0),
        ("ridge/all", good["ridge/all"] * torch.tensor([[1.0], [-1e3], [1.0]])),
        ("ridge/all", good["ridge/all"] * torch.tensor([[1.0], [1.0], [1e19]])),
    ):
        assert trainer.method.find_problem(sent, Message(good.tensors | {key: wrong}, good.numbers), 0), key
