"""`start = "logistic"` and `refit`: the exact heads at the beginning and at the end of other methods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.preprocessing import StandardScaler

from fedmll import resume, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.testing import experiment, make_client, make_client_info, make_trainer
from fedmll.training.callbacks import Result
from fedmll.training.round_loop import return_to_round

FROZEN: dict[str, Any] = {
    "model__freeze": "backbone",
    "model__weights": "random",
    "model__channels": (6, 10),
    "training__rounds": 2,
    "partition__holdout": 0.0,
}
MISSING: dict[str, Any] = {"annotation__kind": "missing", "annotation__missing": 4}
EXACT = {"ridge": "fed-ridge", "logistic": "fed-logistic"}


def head(result: Result) -> np.ndarray:
    return np.column_stack([result.weights["head.weight"].numpy(), result.weights["head.bias"].numpy()])


def features_of(result: Result, made: Any) -> tuple[np.ndarray, np.ndarray]:
    """The features of all clients' samples in the final network, and the targets."""
    data = federation.build(made)
    trainer = Trainer(task_of(data))
    trainer.load(result.weights)
    trainer.model.eval()
    rows = np.concatenate(data.samples)
    with torch.no_grad():
        features = trainer.model.features(trainer.task.model_inputs(data.train, rows)).double().numpy()
    return features, data.train.labels[rows]


@pytest.mark.parametrize("standardise", [True, False])
@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_on_frozen_features_a_refit_is_the_exact_head(kind: str, standardise: bool) -> None:
    """Whatever was trained before. λ is chosen in the same way, too."""
    shared = FROZEN | MISSING | {"model__standardise": standardise}
    exact = run(experiment(**shared, method__name=EXACT[kind]))
    trained = run(experiment(**shared, method__name="fedavg", method__refit=kind))
    np.testing.assert_allclose(head(trained), head(exact), rtol=2e-3, atol=2e-3)
    assert trained.rows[-1][kind] == exact.rows[-1][kind]
    assert trained.metrics["map"] == pytest.approx(exact.metrics["map"], abs=0.1)


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_start_is_the_exact_head(kind: str) -> None:
    """With a learning rate of almost 0 the trained model is the start."""
    exact = run(experiment(**FROZEN, method__name=EXACT[kind]))
    started = run(experiment(**FROZEN, method__name="fedprox", method__start=kind, training__lr=1e-12))
    np.testing.assert_allclose(head(started), head(exact), rtol=1e-5, atol=1e-5)
    assert [row["round"] for row in started.rows] == [0, 1, 2]
    assert started.rows[0][kind] == exact.rows[-1][kind]
    assert started.rows[0]["map"] == pytest.approx(exact.metrics["map"], abs=0.01)
    assert started.rows[1]["bytes_up"] < started.rows[0]["bytes_up"]  # the solver's tensors are not sent in the rounds
    assert started.rows[1]["bytes_down"] == started.rows[2]["bytes_down"]


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
@pytest.mark.parametrize(
    "model",
    [
        {"model__channels": (6, 8), "model__norm": "batch"},
        FROZEN | {"model__width": 7, "model__norm": "batch", "model__standardise": True},
    ],
)
def test_a_refit_is_the_pooled_fit_on_the_features_of_the_trained_network(kind: str, model: dict[str, Any]) -> None:
    options = {"method__refit": kind, f"method__{kind}": 0.03, "method__logistic_rounds": 30}
    made = experiment(**{"training__rounds": 2} | model | MISSING | options, method__name="fedavg-pl")
    result = run(made)
    features, targets = features_of(result, made)
    scaler = StandardScaler().fit(features)
    x, found = scaler.transform(features), head(result)
    for c in range(targets.shape[1]):
        known = targets[:, c] >= 0
        y, count = targets[known, c], int(known.sum())
        if kind == "ridge":
            fit = Ridge(alpha=0.03 * count).fit(x[known], y)
            w, b = 4 * fit.coef_ / scaler.scale_, 4 * (fit.intercept_ - 0.5)
        else:
            fit = LogisticRegression(C=1 / (0.03 * count), tol=1e-10, max_iter=10_000).fit(x[known], y)
            w, b = fit.coef_[0] / scaler.scale_, fit.intercept_[0]
        expected = np.append(w, b - w @ scaler.mean_)
        np.testing.assert_allclose(found[c], expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_only_the_head_changes_and_a_class_without_targets_keeps_its_row(kind: str) -> None:
    changes = FROZEN | MISSING | {"model__width": 7, "model__standardise": False}
    made = experiment(**changes, method__name="fedavg-pl")
    data = federation.build(made)
    data.train.labels[:, 1] = -1
    plain = run(made, prepared=data)
    refit = run(made.changed({"method.refit": kind}), prepared=data)
    for name, tensor in plain.weights.items():
        assert torch.equal(tensor, refit.weights[name]) == (not name.startswith("head.")), name
    same = (head(plain) == head(refit)).all(1)
    assert same.tolist() == [False, True] + [False] * (len(same) - 2)


@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_bits_are_the_same_with_workers_and_after_resume(tmp_path: Path, kind: str) -> None:
    changes = FROZEN | MISSING | {"method__name": "fedavg", "method__start": kind, "method__refit": kind}
    result = run(experiment(**changes), tmp_path / "run")
    other = run(experiment(**changes, engine__workers=2))
    assert np.array_equal(head(result), head(other))
    return_to_round(tmp_path / "run", 2)
    again = resume(tmp_path / "run")
    assert np.array_equal(head(result), head(again))
    kept = ("round", "bytes_up", "bytes_down", "map", kind)
    rows = [[{name: row.get(name) for name in kept} for row in one.rows] for one in (result, again)]
    assert rows[0] == rows[1] and [row["round"] for row in rows[0]] == [0, 1, 2, 3]
    # more rounds continue from the trained model, not from the refit one
    longer = resume(tmp_path / "run", rounds=3)
    assert np.array_equal(head(longer), head(run(experiment(**changes | {"training__rounds": 3}))))
    assert [row["round"] for row in longer.rows] == [0, 1, 2, 3, 4]


def test_closing_exchanges_count_in_bytes_and_metrics() -> None:
    changes = FROZEN | {"method__name": "fedavg", "method__logistic": 0.1, "method__logistic_rounds": 3}
    plain, refit = run(experiment(**changes)), run(experiment(**changes, method__refit="logistic"))
    *training, closing = refit.rows
    assert [row["bytes_up"] for row in training] == [row["bytes_up"] for row in plain.rows]
    assert closing["round"] == 3 and closing["closing"] == 1
    assert refit.summary["bytes_up"] == plain.summary["bytes_up"] + closing["bytes_up"]
    assert closing["map"] == refit.metrics["map"] and training[-1]["map"] == plain.metrics["map"]
    width, classes, clients = 10, len(refit.summary["classes"]), refit.summary["clients"]
    opening = (width + 1) ** 2 + 2 * classes * (width + 1) + 4 * classes
    later = classes * (1 + (width + 1) + 66)  # 66: a symmetric matrix of 11 directions
    assert closing["bytes_up"] == 8 * clients * (opening + 3 * later + 4 * 3)  # and three numbers in every reply


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"method__name": "private-fedavg"}, "clients know only their own classes"),
        ({"method__name": "local-only"}, "there is no global model"),
        ({"method__name": "fednca-ml"}, "a linear classifier with one row of weights per class"),
        ({"method__name": "spherefed", "model__width": 20}, "a linear classifier with one row of weights per class"),
    ],
)
@pytest.mark.parametrize("kind", ["ridge", "logistic"])
def test_methods_without_a_global_linear_head_refuse_it(changes: dict[str, Any], reason: str, kind: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        experiment(**changes, method__refit=kind)


def test_features_that_training_changes_cannot_start_from_it() -> None:
    with pytest.raises(ConfigError, match=r"method\.start = 'logistic'"):
        experiment(method__name="fedavg", method__start="logistic", model__norm="batch")
    with pytest.raises(ConfigError, match=r"model\.width comes after"):
        experiment(**FROZEN, method__name="fed-logistic", model__width=5)


@pytest.mark.parametrize(("kind", "tensor"), [("ridge", "gram"), ("logistic", "gram")])
def test_implausible_sums_of_a_refit_are_rejected(kind: str, tensor: str) -> None:
    trainer = make_trainer(experiment(**FROZEN, method__name="fedavg", method__refit=kind))
    method, info = trainer.method, make_client_info(0, 3)
    labels = np.random.default_rng(0).integers(-1, 2, (40, 3))
    number = method.exchange_rounds("closing")[0]
    sent = method.send(method.initial_state(), info, number)
    reply = trainer.train(make_client(trainer, labels, round=number), sent, {})
    assert method.find_problem(sent, reply, number) is None
    name = f"{kind}-refit/{tensor}"
    assert set(reply.tensors) == set(method.reply_spec(sent, number)) and name in reply.tensors
    assert method.find_problem(sent, Message(reply.tensors | {name: 3 * reply[name]}, reply.numbers), number)


def test_numbers_of_exchanges() -> None:
    """The rounds of training are 1 … T; the other exchanges have the numbers around them."""
    options = {"method__start": "logistic", "method__refit": "logistic", "method__logistic": 0.1}
    method = make_trainer(experiment(**FROZEN, method__name="fedavg", **options, method__logistic_rounds=2)).method
    assert method.exchange_rounds("opening") == [0, -1, -2] and method.exchange_rounds("closing") == [3, 4, 5]
    replying = {number: [part.name for part in method.replying_parts(number)] for number in (0, -1, 3, 5)}
    assert replying == {
        0: ["standardise", "logistic-start"],
        -1: ["logistic-start"],
        3: ["logistic-refit"],
        5: ["logistic-refit"],
    }
