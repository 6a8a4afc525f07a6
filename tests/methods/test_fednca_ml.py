"""FedNCA-ML's losses against loops in NumPy; its ablations against the simpler methods, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import contrast_by_loops, rejection_by_loops, same_bits, sigmoid
from conftest import small

from fedmll.core.errors import ConfigError
from fedmll.data.federation import build
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.local import LocalEngine
from fedmll.methods import build_method
from fedmll.methods.fednca_ml import contrast, hinge_rejection, log_rejection
from fedmll.methods.framework.client_round import TrainStep
from fedmll.methods.framework.task import task_of
from fedmll.models.class_attention import PrototypeClassifier, simplex_etf
from fedmll.testing import aggregate, make_client, start_round
from fedmll.training.round_loop import run

# positives and negatives; no negative; no positive; unknown ones; nothing known
TARGETS = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [-1, 1, 0, -1], [-1, -1, -1, -1]], dtype=np.int8)


def nca(**options: Any) -> Any:
    """A small experiment; the ETF of ten digits needs a feature width of at least ten."""
    wide = {"model__channels": (8, 16)}
    return small(**wide | {"method__name": "fednca-ml"} | options)


def similarity(scale: float = 1.5) -> np.ndarray:
    return np.random.default_rng(0).normal(0, scale, (5, 4, 4))


@pytest.mark.parametrize("tau", [0.3, 0.5, 0.9])
def test_rejection_is_equation_12(tau: float) -> None:
    s = similarity()
    found = log_rejection(torch.tensor(s), torch.tensor(TARGETS == 0), tau)
    assert found.item() == pytest.approx(rejection_by_loops(s, TARGETS, tau), rel=1e-9)


def test_rejection_is_precise_for_extreme_input() -> None:
    """Three, five and six negatives: a third in float32 is wrong in the eighth digit."""
    rng = np.random.default_rng(3)
    s, targets = rng.normal(0, 2, (3, 7, 7)), np.ones((3, 7), dtype=np.int8)
    targets[0, :3] = targets[1, 2:] = targets[2, 1:] = 0
    found = log_rejection(torch.tensor(s), torch.tensor(targets == 0), 0.3)
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(rejection_by_loops(s, targets, 0.3), rel=1e-12)
    single = log_rejection(torch.tensor(s, dtype=torch.float32), torch.tensor(targets == 0), 0.3)
    assert single.dtype == torch.float32


def test_rejection_leaves_out_the_own_class_and_small_similarities() -> None:
    """One sample, two negative classes: only h_0·m_1 is over the threshold ln(0.3/0.7) = −0.847."""
    s = torch.tensor([[[5.0, 1.0], [-0.86, 5.0]]])
    found = log_rejection(s, torch.tensor([[True, True]]), 0.3)
    assert found.item() == pytest.approx(np.log(1 + np.e) / 2, rel=1e-6)


def test_rejection_indicator_has_no_gradient() -> None:
    """d/ds −log(1−σ(s)) = σ(s) where it counts, 0 elsewhere, over the same means."""
    s = torch.tensor(similarity(), requires_grad=True)
    log_rejection(s, torch.tensor(TARGETS == 0), 0.3).backward()
    p = sigmoid(s.detach().numpy())
    negative = (TARGETS == 0).astype(float)
    weight = negative / np.maximum(negative.sum(1, keepdims=True), 1) / 5 / 3
    expected = p * (p > 0.3) * (1 - np.eye(4)) * weight[:, :, None]
    np.testing.assert_allclose(s.grad.numpy(), expected, atol=1e-12)


def test_contrast_is_equation_13() -> None:
    rng = np.random.default_rng(1)
    h, m = rng.normal(size=(5, 4, 6)), rng.normal(size=(4, 6))
    positive = torch.tensor(TARGETS == 1)
    found = contrast(torch.tensor(h), torch.tensor(m), positive, None)
    assert found.item() == pytest.approx(contrast_by_loops(h @ m.T, TARGETS), rel=1e-9)
    unit = [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (h, m)]
    cosine = contrast(torch.tensor(h), torch.tensor(m), positive, 0.07)
    assert cosine.item() == pytest.approx(contrast_by_loops(unit[0] @ unit[1].T / 0.07, TARGETS), rel=1e-9)
    pooled = contrast(torch.tensor(h[:, 0]), torch.tensor(m), positive, None)  # one feature for all classes
    same = np.repeat((h[:, :1] @ m.T), 4, axis=1)
    assert pooled.item() == pytest.approx(contrast_by_loops(same, TARGETS), rel=1e-9)


def test_hinge_rejection_takes_the_highest_negatives_of_the_batch() -> None:
    s, targets = similarity()[:3], TARGETS[[0, 2, 3]]
    pairs = sorted((s[i, c].max() for i, c in zip(*np.nonzero(targets == 0), strict=True)), reverse=True)
    count = (targets == 1).sum()
    expected = sum(max(0.0, sigmoid(score) - 0.3) for score in pairs[:count]) / len(s)
    found = hinge_rejection(torch.tensor(s), torch.tensor(targets), 0.3)
    assert 0 < count < len(pairs)
    assert found.item() == pytest.approx(expected, rel=1e-9)
    few = np.array([[1, 1, 1, 0]], dtype=np.int8)  # fewer negatives than positives: all of them
    found = hinge_rejection(torch.tensor(s[:1]), torch.tensor(few), 0.3)
    assert found.item() == pytest.approx(max(0.0, sigmoid(s[0, 3].max()) - 0.3), rel=1e-9)


def test_losses_are_finite_for_extreme_and_for_empty_input() -> None:
    s = torch.tensor([[[100.0, -100.0], [100.0, -100.0]]], requires_grad=True)
    loss = log_rejection(s, torch.tensor([[True, True]]), 0.3)
    assert loss.item() == pytest.approx(50.0)  # softplus(100) of h_1·m_0, mean over the two negatives
    loss.backward()
    assert torch.isfinite(s.grad).all()
    h = torch.tensor([[[100.0, 0.0], [0.0, -100.0]]], requires_grad=True)
    loss = contrast(h, torch.eye(2), torch.tensor([[True, True]]), None)
    assert loss.item() == pytest.approx(50.0)  # (0 + 100) / 2
    loss.backward()
    assert torch.isfinite(h.grad).all()
    nothing = torch.zeros(1, 2, dtype=torch.int8) - 1
    for empty in (
        log_rejection(s, nothing == 0, 0.3),
        hinge_rejection(s, nothing, 0.3),
        contrast(h, torch.eye(2), nothing == 1, None),
    ):
        assert empty.item() == 0


def test_whole_loss_of_a_network() -> None:
    """BCE over the known entries + λ1 L_neg + λ2 L_pos, from the network's own class-wise features."""
    options = {"method__lambda_neg": 0.4, "method__lambda_pos": 0.7, "method__tau": 0.4}
    data = build(nca(**options))
    trainer = Trainer(task_of(data))
    targets = data.train.labels[:6].copy()
    targets[0, :4] = targets[3, 2:8] = -1
    own = replace(data.train.subset(np.arange(6)), labels=targets)
    client_round = start_round(trainer, replace(make_client(trainer, targets), data=own))
    model, batch = trainer.model.eval(), next(client_round.client.evaluation_batches())
    with torch.no_grad():
        found = trainer.loss(TrainStep(client_round, batch)).item()
        h = model.features(batch.images).double().numpy()
    s = h @ simplex_etf(16, 10, 0).double().numpy().T
    p = sigmoid(np.diagonal(s, axis1=1, axis2=2))
    known = targets >= 0
    bce = -np.where(targets == 1, np.log(p), np.log(1 - p))[known].mean()
    expected = bce + 0.4 * rejection_by_loops(s, targets, 0.4) + 0.7 * contrast_by_loops(s, targets)
    assert found == pytest.approx(expected, rel=1e-5)


OFF = {"method__neg": False, "method__pos": False}


def test_without_its_parts_it_is_fedavg_with_partial_labels() -> None:
    """No ETF, no LADM, no regulariser, average by size: FedAvg-PL's weights, bit for bit."""
    missing = {"annotation__kind": "missing", "annotation__missing": 3}
    bare = run(nca(method__etf=False, method__ladm=False, method__weighting="size", **OFF, **missing)).weights
    plain = run(nca(method__name="fedavg-pl", **missing)).weights
    names = {"head.weight": "prototypes", "head.bias": "bias"}
    assert same_bits({names.get(name, name): tensor for name, tensor in plain.items()}, bare)


def test_regularisers_off_is_the_plain_loss() -> None:
    off = run(nca(training__rounds=1, **OFF)).weights
    assert same_bits(off, run(nca(training__rounds=1, method__lambda_neg=0.0, method__lambda_pos=0.0)).weights)
    assert not same_bits(off, run(nca(training__rounds=1)).weights)


def test_lambda_of_the_paper() -> None:
    """Decided when the experiment is made, by the source: a file is not CIFAR-10 because its name sounds like it."""
    assert nca().method.options["lambda_neg"] == 0.01
    for name, expected in {"ml-cifar10": 1.0, "cifar10": 1.0, "packed:cifar100.npz": 0.01, "ml-digits": 0.01}.items():
        made = nca(data__name=name)
        assert made.method.options["lambda_neg"] == expected
        assert f"lambda_neg = {expected}" in made.to_toml()
    assert nca(data__name="ml-cifar10", method__lambda_neg=0.3).method.options["lambda_neg"] == 0.3
    assert nca().method.options["weighting"] == "equal"


CHANGES: dict[str, dict[str, Any]] = {
    "etf": {"method__etf": False},
    "ladm": {"method__ladm": False},
    "neg": {"method__neg": False},
    "pos": {"method__pos": False},
    "learnable-etf": {"method__query": "learnable-etf"},
    "learnable-random": {"method__query": "learnable-random"},
    "positional": {"method__positional": False},
    "hinge-topk": {"method__rejection": "hinge-topk"},
    "cosine": {"method__contrast": "cosine"},
    "logit_scale": {"method__logit_scale": 10.0},
    "asl": {"training__loss": "asl"},
    "weighted": {"training__loss": "weighted"},
    "size": {"method__weighting": "size"},
}


@pytest.fixture(scope="module")
def whole() -> dict[str, torch.Tensor]:
    return run(nca(training__rounds=1, method__lambda_neg=1.0)).weights


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_runs_and_matters(name: str, whole: dict[str, torch.Tensor]) -> None:
    result = run(nca(training__rounds=1, method__lambda_neg=1.0, **CHANGES[name]))
    assert np.isfinite(result.rows[0]["loss"])
    assert not same_bits(result.weights, whole)


def test_the_etf_never_changes_and_is_never_sent(tmp_path: Path) -> None:
    engine = LocalEngine(build(nca()), tmp_path)
    try:
        trainer = engine.trainer
        model = trainer.model
        before = model.prototypes.clone()
        state = engine.initial_state()
        for number in (1, 2):
            state, _ = aggregate(engine.method, state, engine.collect_replies(state, number), number)
        trainer.receive(engine.method.final_model(state))
        expected = simplex_etf(16, 10, 0)
        for fixed in (before, model.prototypes, model.ladm.queries):
            assert torch.equal(fixed, expected)
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        assert trained == trainer.weights.parameter_end
        assert not any(p.shape == before.shape for p in model.parameters())
    finally:
        engine.close()


def test_learnable_queries_are_trained_and_the_classifier_is_not() -> None:
    result = run(nca(method__query="learnable-etf", training__rounds=1))
    assert not torch.equal(result.weights["ladm.queries"], simplex_etf(16, 10, 0))
    assert "prototypes" not in result.weights


def test_attention_maps_of_a_trained_model() -> None:
    data = build(nca())
    model = build_method(task_of(data)).build_model()
    assert isinstance(model, PrototypeClassifier)
    images = task_of(data).preprocess(torch.from_numpy(data.test.samples(slice(0, 3))))
    maps = model.attention(images)
    assert maps.shape[:3] == (3, 4, 10)
    torch.testing.assert_close(maps.sum((-1, -2)), torch.ones(3, 4, 10))
    assert maps.std() > 1e-4  # not all the same


def test_narrow_backbone_is_refused_before_training() -> None:
    with pytest.raises(ConfigError, match="width 10 or more"):
        run(nca(model__channels=(4, 8)))


def test_feature_vectors(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(120, 6)).astype(np.float32)
    y = (x[:, :3] > 0.3).astype(np.int8)
    np.savez(tmp_path / "f.npz", x_train=x[:80], y_train=y[:80], x_test=x[80:], y_test=y[80:])
    experiment = nca(
        data__name=f"features:{tmp_path / 'f.npz'}", data__limit=80, model__backbone="auto", model__channels=(16,),
        training__rounds=6, training__lr=0.02,
    )  # fmt: skip
    assert run(experiment).metrics["macro_auc"] > 75  # one token: all h_c are the same, and the logits sum to 0


@pytest.mark.parametrize("backbone", ["resnet18", "small-vit"])
@pytest.mark.parametrize("name", ["fednca-ml", "fedctran"])
def test_works_with_every_backbone_with_tokens(name: str, backbone: str) -> None:
    data = build(small(method__name=name, model__backbone=backbone, model__channels=(32, 32)))
    method = build_method(task_of(data))
    images = method.task.preprocess(torch.from_numpy(data.test.samples(slice(0, 3))))
    with torch.no_grad():
        scores = method.predict(method.build_model().eval(), images)
    assert scores.shape == (3, 10)
    assert (scores.std(0) > 0).all()  # it looks at the image
