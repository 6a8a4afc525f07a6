"""The exact logistic head against scikit-learn's LogisticRegression on pooled, masked data."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler

from fedmll import resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.allowed_replies import find_class_problem
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts import logistic_head
from fedmll.methods.parts import logistic_solver as solver
from fedmll.methods.parts.logistic_head import LogisticHead
from fedmll.models.products import FeatureProducts
from fedmll.testing import aggregate, experiment, make_client, make_client_info, make_trainer
from fedmll.training.round_loop import return_to_round


def pooled(features: np.ndarray, targets: np.ndarray, strength: float, balanced: bool = False) -> np.ndarray:
    """Rows [w, b], class by class, on the samples that know the class."""
    scaler = StandardScaler().fit(features)
    x, rows = scaler.transform(features), []
    for c in range(targets.shape[1]):
        known = targets[:, c] >= 0
        y = targets[known, c]
        if len(set(y.tolist())) < 2:
            rate = (y.sum() + 0.5) / (len(y) + 1)
            rows.append(np.append(np.zeros(x.shape[1]), np.log(rate / (1 - rate))))
            continue
        found = LogisticRegression(
            C=1 / (strength * len(y)),
            tol=1e-10,
            max_iter=10_000,
            class_weight="balanced" if balanced else None,
        ).fit(x[known], y)
        w = found.coef_[0] / scaler.scale_
        rows.append(np.append(w, found.intercept_ - w @ scaler.mean_))
    return np.array(rows)


class FederatedFit:
    """The part with clients that are arrays, without a model: the rows of the head after every round."""

    def __init__(self, clients: list[tuple[np.ndarray, np.ndarray]], **options: Any) -> None:
        self.clients = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in clients]
        self.classes = self.clients[0][1].shape[1]
        task = SimpleNamespace(classes=range(self.classes), rounds=99, min_group_size=1)
        self.part = LogisticHead(task, LogisticHead.Options(**options), {})  # type: ignore[arg-type]
        width = self.clients[0][0].shape[1]
        self.part.weights = SimpleNamespace(layout={})  # type: ignore[assignment]
        self.part.model = SimpleNamespace(width=width, backbone=SimpleNamespace(width=width))  # type: ignore[assignment]
        self.part.write_rows = lambda merged, rows, known: merged.update(rows=rows)  # type: ignore[method-assign]
        self.state: Tensors = {}
        self.rows = torch.zeros(0)
        self.records: dict[str, Any] = {}

    def held_out(self, samples: int) -> torch.Tensor:
        return torch.arange(samples) % 5 == 0

    def reply(self, features: torch.Tensor, targets: torch.Tensor, round: int) -> Tensors:
        folds = None
        if self.part.chooses(round):
            folds = logistic_head.split_folds(targets, self.held_out(len(targets)), 1)
        if round == 0:
            return logistic_head.opening_sums(features, targets, folds)
        sent = [self.state[name] for name in ("rows", "basis", "weights")]
        return logistic_head.round_sums(features, targets, *sent, folds)

    def run(self) -> np.ndarray:
        for round in range(LogisticHead.rounds(self.part.options) + 1):
            aggregator = self.part.aggregator(self.state, round, {})
            assert aggregator is not None
            for index, client in enumerate(self.clients):
                aggregator.add(make_client_info(index, self.classes), Message(self.reply(*client, round)))
            merged: Tensors = {"weights": torch.zeros(0)}
            self.state, self.records = aggregator.result(merged)
            self.rows = merged["rows"]
        return self.rows.numpy()


def drawn(seed: int, kind: str, classes: int, width: int = 6, samples: int = 80) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(samples, width)) * rng.uniform(0.1, 30, width) + rng.normal(size=width) * 5
    scores = StandardScaler().fit_transform(features) @ rng.normal(size=(width, classes)) + rng.normal(size=classes)
    targets = (rng.random((samples, classes)) < 1 / (1 + np.exp(-scores))).astype(np.int8)
    if kind == "entries":
        targets[rng.random(targets.shape) < 0.3] = -1
    elif kind == "empty":
        targets[:, 0] = -1
    elif kind == "rare":  # one positive, and a class that has none
        targets[:, 0], targets[7, 0], targets[:, -1] = 0, 1, 0
    elif kind == "separable":
        targets[:, 0] = features[:, 0] > np.median(features[:, 0])
    return features, targets


KINDS = ["all", "classes", "entries", "empty", "rare", "separable"]


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000), clients=st.integers(1, 5), classes=st.integers(1, 5),
    strength=st.floats(1e-3, 3), kind=st.sampled_from(KINDS), balanced=st.booleans(),
)  # fmt: skip
def test_the_sums_give_the_pooled_masked_regression(
    seed: int, clients: int, classes: int, strength: float, kind: str, balanced: bool
) -> None:
    features, targets = drawn(seed, kind, classes)
    rng = np.random.default_rng(seed)
    owner = rng.integers(0, clients, len(features))
    if kind == "classes":
        targets[~(rng.random((clients, classes)) < 0.6)[owner]] = -1
    own = [(features[owner == c], targets[owner == c]) for c in rng.permutation(clients) if (owner == c).any()]
    rows = FederatedFit(own, logistic=strength, logistic_balanced=balanced).run()
    expected = pooled(features, targets, strength, balanced)
    np.testing.assert_allclose(rows, expected, atol=1e-5 * max(1, np.abs(expected).max()))
    one = FederatedFit([(features, targets)], logistic=strength, logistic_balanced=balanced).run()
    np.testing.assert_allclose(rows, one, atol=1e-9 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("balanced", [False, True])
def test_the_penalty_has_the_smallest_held_out_loss(balanced: bool) -> None:
    """Every candidate fitted by scikit-learn to four fifths of the samples; the chosen one again to all of them."""
    features, targets = drawn(1, "entries", classes=3, samples=300)
    fit = FederatedFit([(features[:100], targets[:100]), (features[100:], targets[100:])], logistic_balanced=balanced)
    held_out = np.concatenate([fit.held_out(100).numpy(), fit.held_out(200).numpy()])
    counts = np.array([(targets == 0).sum(0), (targets == 1).sum(0)])
    weights = counts.sum(0) / 2 / counts if balanced else np.ones((2, 3))
    scaler = StandardScaler().fit(features)
    losses = []
    for strength in logistic_head.GRID:
        total = 0.0
        for c in range(3):
            known = targets[:, c] >= 0
            first, second = known & ~held_out, known & held_out
            omega = np.where(targets[:, c] == 1, weights[1, c], weights[0, c])
            model = LogisticRegression(C=1 / (strength * omega[first].sum()), tol=1e-10, max_iter=10_000)
            model.fit(scaler.transform(features[first]), targets[first, c], sample_weight=omega[first])
            log_p = model.predict_log_proba(scaler.transform(features[second]))
            total -= (omega[second] * log_p[np.arange(second.sum()), targets[second, c]]).sum()
        losses.append(total)
    rows = fit.run()
    chosen = logistic_head.GRID[int(np.argmin(losses))]
    assert fit.records["logistic"] == chosen
    expected = pooled(features, targets, chosen, balanced)
    np.testing.assert_allclose(rows, expected, atol=1e-5 * max(1, np.abs(expected).max()))


def test_more_features_than_exact_directions_need_more_rounds() -> None:
    features, targets = drawn(2, "entries", classes=2, width=60, samples=200)
    expected = pooled(features, targets, 0.01)
    errors = [
        np.abs(FederatedFit([(features, targets)], logistic=0.01, logistic_rounds=rounds).run() - expected).max()
        for rounds in (5, 10, 25)
    ]
    assert errors[0] > errors[1] > errors[2] < 1e-5


@pytest.mark.parametrize(("strength", "rounds"), [(0.1, 10), (0.01, 20), (0.001, 25)])
def test_two_hundred_correlated_features_of_rare_classes(strength: float, rounds: int) -> None:
    """As docs/guide/experiments.md says: with λ = 0.1 the default of ten rounds is exact to 1e-5 of the largest weight.
    Classes with 0.7 to 12 % positives, of which each client annotates some."""
    rng = np.random.default_rng(0)
    width, samples, classes, clients = 200, 3000, 5, 5
    mixed = rng.normal(size=(width, width)) * (np.arange(1, width + 1) ** -0.7)[:, None]
    features = rng.normal(size=(samples, width)) @ mixed + rng.normal(size=width)
    scores = StandardScaler().fit_transform(features) @ rng.normal(size=(width, classes)) * 2 / width**0.5
    bias = np.array([np.quantile(scores[:, c], 1 - rate) for c, rate in enumerate(np.geomspace(0.005, 0.3, classes))])
    targets = (rng.random((samples, classes)) < 1 / (1 + np.exp(-3 * (scores - bias)))).astype(np.int8)
    owner = rng.integers(0, clients, samples)
    targets[~(rng.random((clients, classes)) < 0.6)[owner]] = -1
    own = [(features[owner == c], targets[owner == c]) for c in range(clients)]
    expected = pooled(features, targets, strength)
    scale = np.abs(expected).max()
    fit = FederatedFit(own, logistic=strength, logistic_rounds=rounds)
    np.testing.assert_allclose(fit.run() / scale, expected / scale, atol=1e-5)
    assert fit.records["gradient"] < 2e-6  # the column that tells a user when the rounds are enough


def test_nothing_held_out_means_the_usual_penalty() -> None:
    features, targets = drawn(3, "all", classes=2)
    fit = FederatedFit([(features, targets)])
    fit.held_out = lambda samples: torch.zeros(samples, dtype=torch.bool)  # type: ignore[method-assign]
    rows = fit.run()
    assert fit.records["logistic"] == logistic_head.USUAL
    np.testing.assert_allclose(rows, pooled(features, targets, logistic_head.USUAL), atol=1e-5)


@pytest.mark.parametrize("missing", [3, logistic_head.CHOICE_ROUNDS, 9])
def test_a_round_without_all_clients_is_repeated(missing: int) -> None:
    features, targets = drawn(4, "all", classes=3)
    clients = [(features[:50], targets[:50]), (features[50:], targets[50:])]
    fit, full = FederatedFit(clients, logistic_rounds=20), FederatedFit(clients, logistic_rounds=20)
    for round in range(27):
        aggregator = fit.part.aggregator(fit.state, round, {})
        assert aggregator is not None
        for index, client in enumerate(fit.clients[: 1 if round == missing else 2]):
            aggregator.add(make_client_info(index, 3), Message(fit.reply(*client, round)))
        merged: Tensors = {"weights": torch.zeros(0)}
        before = fit.state.get("point")
        fit.state, fit.records = aggregator.result(merged)
        if round == missing == 3:
            assert before is not None and torch.equal(fit.state["point"], before)
    np.testing.assert_allclose(merged["rows"].numpy(), full.run(), atol=1e-8)
    assert fit.records["logistic"] == full.records["logistic"]


# ---- the solver, with numbers worked out by hand


def plain_coordinates(values: list[float], more: int = 0) -> solver.Coordinates:
    """Features that have mean 0 and deviation 1 already."""
    width = len(values)
    ones = torch.ones(width, dtype=torch.float64)
    return solver.Coordinates(0 * ones, ones, torch.tensor(values).double(), torch.eye(width - more).double())


def evaluated(loss: float, slope: list[float], curvature: list[float]) -> Tensors:
    values = {"loss": [[loss]], "gradient": [[slope]], "curvature": [[curvature]]}
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in values.items()}


def test_first_trial_is_half_a_newton_step_if_the_penalty_is_small() -> None:
    """Rate 0.2: π (1 − π) = 0.16, twice this is 0.32; the Hessian of the second coordinate is 0.16 · 2."""
    slope, rate = torch.tensor([[0.3, -0.6, 0.0]]).double(), torch.tensor([0.2]).double()
    penalty = torch.tensor([0.0, 0.1]).double()
    trial = solver.first_trial(plain_coordinates([0.5, 2.0]), slope, torch.tensor([-1.5]).double(), rate, penalty)
    expected = [[[-0.3 / 0.16, 0.6 / 0.64, -1.5]], [[-0.3 / 0.26, 0.6 / 0.74, -1.5]]]
    np.testing.assert_allclose(trial.numpy(), expected, rtol=1e-6)


def test_a_trial_with_a_larger_value_is_followed_by_a_shorter_step() -> None:
    coordinates, state = plain_coordinates([1.0]), solver.start(torch.zeros(1, 1, 2).double(), 1)
    rest = coordinates, torch.zeros(1).double(), torch.ones(1).double(), torch.ones(1, 1, 2, dtype=torch.bool)
    state = solver.advance(state, evaluated(1.0, [1.0, 0.0], [2.0, 0.0, 1.0]), *rest)
    np.testing.assert_allclose(state["trial"][0, 0], [-0.5, 0])  # Newton: −1/2
    state = solver.advance(state, evaluated(3.0, [-4.0, 0.0], [2.0, 0.0, 1.0]), *rest)
    assert state["point"].tolist() == [[[0, 0]]] and state["failures"].item() == 1
    # the slope fell from 1 to −4 over −1/2, so the curvature is 10; half of the step −1/10
    np.testing.assert_allclose(state["trial"][0, 0], [-0.05, 0], atol=1e-7)
    # larger by rounding, but the function still decreases in the direction of the step: the trial is better
    state = solver.advance(state, evaluated(1.0 + 1e-15, [0.5, 0.0], [2.0, 0.0, 1.0]), *rest)
    np.testing.assert_allclose(state["point"][0, 0], [-0.05, 0], atol=1e-7)
    assert state["failures"].item() == 0


def test_a_fixed_coordinate_and_a_curvature_that_is_not_finite_move_nothing() -> None:
    coordinates, start = plain_coordinates([1.0, 1.0], more=1), solver.start(torch.zeros(1, 1, 3).double(), 1)
    penalty, total, free = torch.zeros(1).double(), torch.ones(1).double(), torch.tensor([[[False, True, True]]])
    sums = evaluated(1.0, [1.0, 4.0, 0.0], [2.0, 0.0, 1.0])  # the gradient is by features: x comes first
    found = solver.advance(start, sums, coordinates, penalty, total, free)["trial"]
    np.testing.assert_allclose(found[0, 0], [0, -0.5, 0])
    found = solver.advance(start, sums, coordinates, penalty, total, torch.ones_like(free))["trial"]
    np.testing.assert_allclose(found[0, 0], [-2, -0.5, 0])  # the ratio of curvature and variance is 2
    sums = evaluated(1.0, [1.0, 4.0, 0.0], [2.0, 0.0, float("nan")])
    found = solver.advance(start, sums, coordinates, penalty, total, torch.ones_like(free))["trial"]
    assert found.tolist() == [[[0, 0, 0]]]


# ---- runs

FROZEN: dict[str, Any] = {
    "method__name": "fed-logistic",
    "model__freeze": "backbone",
    "model__weights": "random",
    "model__channels": (6, 10),
}
PARTITIONS = [
    {"partition__kind": "iid", "partition__clients": 1},
    {"partition__kind": "iid", "partition__clients": 12, "data__limit": 240},
    {"partition__kind": "dirichlet", "partition__beta": 0.1, "partition__clients": 5},
]


def test_the_result_is_the_same_for_every_partition_and_worker() -> None:
    """Also λ, because the same samples are held out."""
    results = [
        run(experiment(**FROZEN, **{"data__limit": 240} | change, partition__holdout=0.0, engine__workers=workers))
        for change, workers in zip(PARTITIONS, (0, 2, 1), strict=True)
    ]
    for other in results[1:]:
        for name in results[0].weights:
            torch.testing.assert_close(other.weights[name], results[0].weights[name], atol=1e-4, rtol=1e-4)
        assert other.rows[-1]["logistic"] == results[0].rows[-1]["logistic"]
    assert results[0].metrics["macro_auc"] > 60
    assert results[0].rows[-1]["gradient"] < 1e-6


@pytest.mark.parametrize("standardise", [True, False])
def test_a_run_equals_scikit_learn_on_all_features(tmp_path: Path, standardise: bool) -> None:
    made = experiment(
        **FROZEN,
        model__standardise=standardise,
        method__logistic=0.01,
        annotation__kind="missing",
        annotation__missing=4,
    )
    data = federation.build(made)
    result = run(made, tmp_path / "run", prepared=data)
    trainer = Trainer(task_of(data))
    rows = np.concatenate(data.samples)
    trainer.load(result.weights)
    trainer.model.eval()
    with torch.no_grad():
        features = trainer.model.features(trainer.task.model_inputs(data.train, rows)).double().numpy()
    expected = pooled(features, data.train.labels[rows], 0.01)
    found = np.column_stack([result.weights["head.weight"].numpy(), result.weights["head.bias"].numpy()])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)
    return_to_round(tmp_path / "run", 10)
    again = resume(tmp_path / "run")
    assert torch.equal(again.weights["head.weight"], result.weights["head.weight"])
    with pytest.raises(ConfigError, match="always has 10 rounds"):
        resume(tmp_path / "run", rounds=30)


def test_implausible_replies_are_rejected() -> None:
    trainer = make_trainer(experiment(**FROZEN))
    method, info = trainer.method, make_client_info(0, 3)
    rng = np.random.default_rng(0)
    labels = rng.integers(-1, 2, (40, 3))
    state = method.initial_state()
    wrong: dict[int, list[tuple[str, Any, str]]] = {
        0: [
            ("gram", lambda t: t * 2, "its sums are of 80 samples"),
            ("gram", lambda t: t - 2 * torch.diag_embed(t.diagonal(dim1=1, dim2=2)) * (1 - ONE), "not symmetric"),
            ("known", lambda t: t * 10, "more known targets than samples"),
            ("positive", lambda t: t * 10, "more positives"),
            ("positive", lambda t: t + 1e3 * (1 - ONE), "larger than its features allow"),
            ("folds", lambda t: t + 9, "holds out targets"),
        ],
        1: [
            ("loss", lambda t: t - 1e3, "outside"),
            ("loss", lambda t: 0 * t, "do not agree with its losses"),
            ("gradient", lambda t: t + 1e3 * ONE, "too large for its 40 samples"),
            ("gradient", lambda t: t + 1e7 * (1 - ONE), "its features are larger"),
            ("curvature", lambda t: -t, "do not agree with its losses"),
            ("curvature", lambda t: t * (t == t[..., -1:]) - (t != t[..., -1:]).double(), "not sums of squares"),
            ("loss", lambda t: t + torch.arange(len(t))[:, None] * 1e3, "one convex function"),
            ("held_out", lambda t: t - 1e3, "outside"),
        ],
    }
    for round, changes in wrong.items():
        sent = method.send(state, info, round)
        good = trainer.train(make_client(trainer, labels, round=round), sent, {})
        assert method.find_problem(sent, good, round) is None
        for name, change, reason in changes:
            reply = Message(good.tensors | {f"logistic/{name}": change(good[f"logistic/{name}"])}, good.numbers)
            assert reason in str(method.find_problem(sent, reply, round)), (name, reason)
        expected = method.reply_spec(sent, round)
        assert find_class_problem(expected, good, torch.tensor([True, True, True])) is None
        assert find_class_problem(expected, good, torch.tensor([False, True, True])) is not None
        state, _ = aggregate(method, state, [(info, good)], round)


def test_balanced_sums_are_as_large_as_their_weights_allow() -> None:
    """One positive among 40 targets has the weight 40 / 2, so the sums may be 20 times as large."""
    trainer = make_trainer(experiment(**FROZEN, method__logistic=0.1, method__logistic_balanced=True))
    method, info, labels = trainer.method, make_client_info(0, 3), np.zeros((40, 3), int)
    labels[0] = 1
    state = method.initial_state()
    for round in (0, 1):
        sent = method.send(state, info, round)
        reply = trainer.train(make_client(trainer, labels, round=round), sent, {})
        assert method.find_problem(sent, reply, round) is None
        state, _ = aggregate(method, state, [(info, reply)], round)
    assert state["logistic/weights"].max().item() == pytest.approx(20)
    larger = Message(reply.tensors | {"logistic/gradient": reply["logistic/gradient"] + 801 * ONE}, reply.numbers)
    assert "too large for its" in str(method.find_problem(sent, larger, 1))


ONE = torch.tensor([0.0] * 10 + [1.0], dtype=torch.float64)  # of the bias


def test_a_client_refuses_to_sum_more_rows_than_a_fit_needs() -> None:
    sent = {"rows": torch.zeros(7, 2, 4), "basis": torch.zeros(4, 3)}
    with pytest.raises(ConfigError, match="7 rows per class"):
        logistic_head.check_request(sent, 6)


def test_small_groups_are_not_held_out() -> None:
    """A class with two held-out positives takes no part in the choice; the sums over all samples include it."""
    targets = torch.zeros(100, 2, dtype=torch.int8)
    targets[:50, 0] = 1
    targets[40:60, 1] = 1  # of which 58 and 59 are held out
    held_out = torch.zeros(100, dtype=torch.bool)
    held_out[10:30], held_out[58:80] = True, True
    first, second = logistic_head.split_folds(targets, held_out, 5)
    assert (first[:, 1] == -1).all() and (second[:, 1] == -1).all()
    assert (first[~held_out, 0] >= 0).all() and (second[held_out, 0] >= 0).all()
    first, second = logistic_head.split_folds(targets, held_out, 1)
    assert (first[~held_out] >= 0).all() and (second[held_out] >= 0).all() and (first[held_out] == -1).all()


# ---- products


def test_products_are_those_of_uncorrelated_directions() -> None:
    """The first directions span the singular vectors of the classes; the others are principal directions."""
    features, targets = drawn(5, "all", classes=2, samples=500)
    x = torch.from_numpy(features)
    sums = logistic_head.opening_sums(x, torch.from_numpy(targets), None)
    coordinates = solver.Coordinates.of_sums(sums["gram"][0])
    rate = sums["positive"][:, -1] / 500
    slope = coordinates.gradients(rate[:, None] * sums["known"] - sums["positive"]) / 500
    for count in (1, 2, 5, 6):
        directions, offset = logistic_head.product_directions(coordinates, slope, rate, count)
        r = x @ directions.T + offset
        torch.testing.assert_close(r.mean(0), torch.zeros(count).double(), atol=1e-9, rtol=0)
        torch.testing.assert_close(r.T @ r / 500, torch.eye(count).double(), atol=1e-9, rtol=0)
    z = StandardScaler().fit_transform(features)
    y = targets - targets.mean(0)
    ridge = np.linalg.solve(z.T @ z / 500 + np.eye(6), z.T @ y / 500 / targets.std(0))
    directions, _ = logistic_head.product_directions(coordinates, slope, rate, 2)
    own = directions.numpy() * features.std(0)  # in standardised features
    assert np.linalg.matrix_rank(np.concatenate([own, ridge.T]), tol=1e-6) == 2
    first = logistic_head.product_directions(coordinates, slope, rate, 1)[0][0].numpy() * features.std(0)
    leading = np.linalg.svd(ridge)[0][:, 0]  # of the classes scaled to unit variance
    assert abs(first @ leading) / np.linalg.norm(first) == pytest.approx(1, abs=1e-9)


def test_products_of_numbers_worked_out_by_hand() -> None:
    """r = (3, 2) gives (3² − 1) / √2, 3 · 2 and (2² − 1) / √2. Only Q and q are stored."""
    module = FeatureProducts(3, 2)
    module.directions.copy_(torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 1.0]]))
    module.offset.copy_(torch.tensor([2.0, 0.0]))
    found = module(torch.tensor([[1.0, 5.0, -3.0]]))
    np.testing.assert_allclose(found, [[1, 5, -3, 8 / 2**0.5, 6, 3 / 2**0.5]], rtol=1e-6)
    assert module.width == 6 and set(module.state_dict()) == {"directions", "offset"}


def test_a_run_with_products_equals_scikit_learn(tmp_path: Path) -> None:
    changes = {"method__products": 4, "method__logistic": 0.05, "method__logistic_rounds": 40}
    made = experiment(**FROZEN | changes, partition__holdout=0.0)
    data = federation.build(made)
    result = run(made, prepared=data)
    trainer = Trainer(task_of(data))
    trainer.load(result.weights)
    trainer.model.eval()
    rows = np.concatenate(data.samples)
    with torch.no_grad():
        features = trainer.model.features(trainer.task.model_inputs(data.train, rows)).double().numpy()
    assert features.shape[1] == 10 + 10
    targets = data.train.labels[rows]
    found = np.column_stack([result.weights["head.weight"].numpy(), result.weights["head.bias"].numpy()])
    for c in range(targets.shape[1]):
        model = LogisticRegression(C=1 / (0.05 * len(rows)), tol=1e-10, max_iter=10_000).fit(features, targets[:, c])
        expected = np.append(model.coef_[0], model.intercept_)
        np.testing.assert_allclose(found[c], expected, rtol=1e-3, atol=1e-3)


def test_products_are_used_only_if_the_held_out_loss_is_smaller() -> None:
    result = run(experiment(**FROZEN | {"method__products": 4}))
    last = result.rows[-1]
    assert last["products"] in (0, 1)
    added = result.weights["head.weight"][:, 10:]
    assert bool((added != 0).any()) == bool(last["products"])
    assert result.metrics["macro_auc"] > 60
