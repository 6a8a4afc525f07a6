"""SphereFed: unit features, a fixed classifier, its calibration against NumPy's least squares on pooled features."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small

from fedmll import load_run, run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.task import task_of
from fedmll.testing import (
    aggregate,
    compute_loss,
    experiment,
    first_step,
    make_client,
    make_client_info,
    make_trainer,
    start_round,
)

WIDE: dict[str, Any] = {"method__name": "spherefed", "model__channels": (8, 12)}
FEW = {"data__limit": 80, "partition__clients": 2}
LABELS = np.array([[1, 0, -1], [0, 1, 1], [-1, -1, 0], [1, 0, 1], [0, 1, -1]])


def test_features_have_norm_one_and_rows_are_orthonormal_and_fixed() -> None:
    trainer = make_trainer(small(**WIDE))
    client = make_client(trainer, LABELS)
    step = first_step(trainer, start_round(trainer, client))
    torch.testing.assert_close(step.features.norm(dim=1), torch.ones(5))
    rows = trainer.model.classifier
    assert isinstance(rows, torch.Tensor)
    torch.testing.assert_close(rows @ rows.T, torch.eye(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(step.logits, 4 * (step.features @ rows.T - 0.5))
    assert torch.equal(make_trainer(small(**WIDE)).model.classifier, rows)  # everybody builds the same
    assert not torch.equal(make_trainer(small(**WIDE, seed=1)).model.classifier, rows)
    before = rows.clone()
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    reply = trainer.train(client, sent, {})
    assert torch.equal(trainer.weights.named(reply.tensors)["classifier"], before)
    assert not torch.equal(reply["weights"], sent["weights"])


def test_the_loss_is_the_squared_error_of_known_scores() -> None:
    trainer = make_trainer(small(**WIDE))
    client_round = start_round(trainer, make_client(trainer, LABELS))
    step = first_step(trainer, client_round)
    scores = (step.features @ trainer.model.classifier.T).detach().numpy()  # type: ignore[operator]
    y = LABELS[step.rows.numpy()]
    assert compute_loss(trainer, client_round, step).item() == pytest.approx(
        ((scores - y) ** 2)[y >= 0].mean(), rel=1e-5
    )


def least_squares(features: np.ndarray, targets: np.ndarray, eps: float) -> np.ndarray:
    """w_c = argmin Σ (f w − y)² + ε n ‖w‖² over the samples whose target of c is known, by lstsq."""
    rows = []
    for c in range(targets.shape[1]):
        known = targets[:, c] >= 0
        ridge = np.sqrt(eps * known.sum()) * np.eye(features.shape[1])
        design, y = np.concatenate([features[known], ridge]), np.concatenate([targets[known, c], np.zeros(len(ridge))])
        rows.append(np.linalg.lstsq(design, y, rcond=None)[0])
    return np.stack(rows)


@pytest.mark.parametrize("eps", [1e-4, 0.1])
def test_the_closing_exchange_is_the_pooled_least_squares(eps: float, tmp_path: Path) -> None:
    made = experiment(
        **WIDE,
        data__limit=100,
        training__rounds=1,
        method__eps=eps,
        annotation__kind="missing",
        annotation__missing=4,
        engine__workers=2,
    )
    data = federation.build(made)
    result = run(made, tmp_path / "run", prepared=data)
    trainer = Trainer(task_of(data))
    trainer.weights.load_named(result.weights)
    trainer.model.eval()
    round_state = np.concatenate(data.samples)
    with torch.no_grad():
        features = trainer.model.features(trainer.task.model_inputs(data.train, round_state)).double().numpy()
    expected = least_squares(features, data.train.labels[round_state], eps)
    np.testing.assert_allclose(result.weights["classifier"].numpy(), expected, rtol=1e-3, atol=1e-4 / eps * 1e-2)
    loaded = load_run(tmp_path / "run")  # a calibrated model is a model like any other
    scores = 1 / (1 + np.exp(-4 * (features @ expected.T - 0.5)))
    np.testing.assert_allclose(loaded.predict(data.train.samples(round_state)), scores, atol=2e-3)


def test_calibration_is_optional_and_changes_only_the_classifier() -> None:
    on, off = (run(small(**FEW, **WIDE, method__calibrated=on)) for on in (True, False))
    assert [name for name in on.weights if not torch.equal(on.weights[name], off.weights[name])] == ["classifier"]
    fusion = {"method": {"name": "compose", "head": "sphere", "parts": ["squared-error"]}, "model.channels": (8, 12)}
    plain = run(small(**FEW).changed(fusion))
    assert all(torch.equal(plain.weights[name], off.weights[name]) for name in off.weights)
    assert on.rows[-2]["loss"] == off.rows[-1]["loss"] and "loss" not in on.rows[-1]  # the closing exchange


def test_class_without_known_targets_keeps_its_row() -> None:
    trainer = make_trainer(small(**WIDE))
    labels = LABELS.copy()
    labels[:, 1] = -1
    state, number = trainer.method.initial_state(), trainer.task.rounds + 1
    sent = trainer.method.send(state, make_client_info(0, 3), number)
    reply = trainer.train(make_client(trainer, labels, round=number), sent, {})
    assert trainer.method.find_problem(sent, reply, number) is None
    after, _ = aggregate(trainer.method, state, [(make_client_info(0, 3), reply)], number)
    old, new = (trainer.weights.named(tensors)["classifier"] for tensors in (state, after))
    assert torch.equal(old[1], new[1])
    assert not torch.equal(old[0], new[0]) and not torch.equal(old[2], new[2])
    lie = Message(reply.tensors | {"calibration/gram": reply["calibration/gram"].triu()}, reply.numbers)
    assert "not symmetric" in str(trainer.method.find_problem(sent, lie, number))


def test_sums_are_sent_only_at_the_end() -> None:
    trainer = make_trainer(small(**WIDE))
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 2)  # the last round of two
    reply = trainer.train(make_client(trainer, LABELS, round=2), sent, {})
    assert trainer.method.find_problem(sent, reply, 2) is None
    assert set(reply.tensors) == {"weights", "counters"}
    assert trainer.method.has_exchange("closing") and not trainer.method.has_exchange("opening")


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"3 orthonormal rows need features at least 3 wide.*gives 2"):
        make_trainer(small(method__name="spherefed", model__channels=(4, 2)))
    assert make_trainer(small(method__name="spherefed", model__channels=(4, 3))).model.width == 3
    with pytest.raises(ConfigError, match="'calibration' requires features of norm 1"):
        small().changed({"method": {"name": "compose", "parts": ["masked", "calibration"]}})
