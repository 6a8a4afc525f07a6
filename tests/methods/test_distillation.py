"""ConDistFL and FedVLS against values worked out here in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits, sigmoid
from conftest import small

from fedmll.engines.client_trainer import Trainer
from fedmll.methods.condist import ConditionalDistillation
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.parts.semi_supervised import tempered
from fedmll.testing import first_step, make_client, make_trainer, start_round
from fedmll.training.round_loop import run

TARGETS = np.array([[1, -1, 0, 0], [-1, -1, 1, 0], [0, -1, 1, -1]])
LOGITS = np.array([[1.0, -2.0, 0.5, 0.3], [0.0, 3.0, -1.0, 2.0], [-0.5, 1.5, 0.7, -1.2]])
CLASSES = ("a", "b", "c", "d")
MISSING = {"annotation__kind": "missing", "annotation__missing": 4}


STRONG: dict[str, dict[str, Any]] = {"distillation": {"distillation": {"temperature": 1.0, "first_weight": 1.0}}}


def at_work(round: int, targets: np.ndarray = TARGETS, **changes: Any) -> tuple[Trainer, ClientRound]:
    trainer = make_trainer(small(**{"training__rounds": 5} | changes), CLASSES)
    return trainer, start_round(trainer, make_client(trainer, targets, round=round))


def loss_at(trainer: Trainer, client_round: ClientRound) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss of a batch whose logits are LOGITS, its gradient, and what the teacher says."""
    step = first_step(trainer, client_round)
    logits = torch.tensor(LOGITS, dtype=torch.float64, requires_grad=True)
    step.logits = logits[step.rows]
    loss = trainer.loss(step)
    (gradient,) = torch.autograd.grad(loss, logits)
    model = trainer.model.eval()
    with torch.no_grad():
        teacher = torch.sigmoid(model(next(iter(client_round.client.evaluation_batches())).images))
    return loss.item(), gradient.numpy(), teacher.double().numpy()


def cross_entropy(p: np.ndarray, target: np.ndarray) -> np.ndarray:
    return -(target * np.log(p) + (1 - target) * np.log(1 - p))


def test_a_teacher_at_a_temperature() -> None:
    z = np.array([-3.0, 0.0, 0.7, 2.5])
    for temperature in (0.5, 1.0, 2.0):
        np.testing.assert_allclose(
            tempered(torch.tensor(sigmoid(z)), temperature), sigmoid(z / temperature), atol=1e-12
        )
    assert tempered(torch.tensor([0.0, 1.0]), 2.0).tolist() == [0.0, 1.0]


@pytest.mark.parametrize(("round", "weight"), [(1, 0.2), (2, 0.4), (3, 0.6), (5, 1.0)])
def test_condist_learns_unannotated_classes_from_the_global_model(round: int, weight: float) -> None:
    options = {"method__first_weight": 0.2, "method__last_weight": 1.0, "method__temperature": 3.0}
    loss, gradient, teacher = loss_at(*at_work(round, method__name="condist", **options))
    known, p = TARGETS >= 0, sigmoid(LOGITS)
    soft, student = sigmoid(np.log(teacher / (1 - teacher)) / 3), sigmoid(LOGITS / 3)
    supervised = cross_entropy(p, TARGETS == 1)[known].mean()
    distilled = cross_entropy(student, soft)[~known].mean()
    assert loss == pytest.approx(supervised + weight * distilled, abs=1e-6)
    expected = np.where(known, (p - (TARGETS == 1)) / known.sum(), weight * (student - soft) / 3 / (~known).sum())
    np.testing.assert_allclose(gradient, expected, atol=1e-6)


def test_condist_weight_grows_over_the_rounds() -> None:
    for round, weight in ((1, 0.01), (3, 0.505), (5, 1.0)):
        assert condist(5).weight(round) == pytest.approx(weight)
    assert condist(1).weight(1) == 0.01
    assert condist(2).weight(2) == 1.0


def condist(rounds: int) -> ConditionalDistillation:
    trainer, _ = at_work(1, method__name="condist", training__rounds=rounds)
    return trainer.method.part(ConditionalDistillation)


@pytest.mark.parametrize("part", ["distillation", "vacant-distillation"])
def test_distilled_entries_do_not_count_as_absent(part: str) -> None:
    """Beside FedAvg's loss, in which unknown counts as 0 otherwise."""
    parts = [part, "unknown-as-negative"]
    trainer, client_round = at_work(1, method={"name": "compose", "parts": parts, **STRONG.get(part, {})})
    _, gradient, teacher = loss_at(trainer, client_round)
    pull = sigmoid(LOGITS[:, 1]) - teacher[:, 1]  # nothing is known of b
    counted = 5 if part == "distillation" else 6
    np.testing.assert_allclose(gradient[:, 1], pull / counted, atol=1e-6)


def suppressed(targets: np.ndarray, classes: tuple[int, ...]) -> float:
    """The term of the released code, a loop instead of tensors. Its one label per image is one of several here."""
    positives = (targets == 1).sum(0)
    share, total = positives / positives.sum(), 0.0
    for c in classes:
        terms = []
        for label, z in zip(targets[:, c], LOGITS[:, c], strict=True):
            if label >= 0:
                terms.append(np.exp((z - np.log(share[c]) + np.log(1 / 4)) * (label == 0)))
        total += share[c] * np.log(np.mean(terms))
    return total


def shifted_loss(targets: np.ndarray, priors: list[float], counted: np.ndarray) -> float:
    p = sigmoid(LOGITS + np.log(priors) - np.log(1 - np.array(priors)))
    return float(cross_entropy(p, targets == 1)[counted].mean())


def test_fedvls_learns_vacant_classes_from_the_global_model() -> None:
    """Of b nothing is known, of d negatives alone: both are vacant, and d's negatives are in no loss."""
    loss, gradient, teacher = loss_at(*at_work(1, method__name="fedvls", method__distill=0.7, method__suppress=0.3))
    p, vacant = sigmoid(LOGITS), [1, 3]
    kept = (TARGETS >= 0) & ~np.isin(np.arange(4), vacant)
    g = teacher[:, vacant]
    divergence = (g * np.log(g / p[:, vacant]) + (1 - g) * np.log((1 - g) / (1 - p[:, vacant]))).mean()
    # of the known targets of a one of two are positive, of c two of three
    supervised = shifted_loss(TARGETS, [1 / 2, 0.5, 2 / 3, 0.5], kept)
    assert loss == pytest.approx(supervised + 0.7 * divergence + 0.3 * suppressed(TARGETS, (0, 2)), abs=1e-6)
    np.testing.assert_allclose(gradient[:, vacant], 0.7 * (p[:, vacant] - g) / 6, atol=1e-6)
    # c is absent in the first sample and present in two: exp(z − log 2/3 − log 4) of a sum with two times exp(0)
    away = np.exp(0.5 - np.log(2 / 3 * 4))
    shifted = sigmoid(np.array([0.5 + np.log(2)]))[0]
    np.testing.assert_allclose(gradient[0, 2], shifted / 5 + 0.3 * 2 / 3 * away / (away + 2), atol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("shift", [True, False])
def test_suppression_counts_samples_with_the_class_as_exp_0(weight: float, shift: bool) -> None:
    targets = np.array([[1, 0, 0, 0], [0, 1, 0, 1], [0, 0, 1, 1]])  # no class is vacant
    options = {"method__suppress": weight, "method__prior_shift": shift}
    loss, _, _ = loss_at(*at_work(1, targets, method__name="fedvls", **options))
    everything = np.ones_like(targets, dtype=bool)
    supervised = shifted_loss(targets, [1 / 3, 1 / 3, 1 / 3, 2 / 3] if shift else [0.5] * 4, everything)
    assert loss == pytest.approx(supervised + weight * suppressed(targets, (0, 1, 2, 3)), abs=1e-6)


def test_class_that_is_present_everywhere_is_not_suppressed() -> None:
    everywhere = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 1]])  # a is absent nowhere: log mean exp(0) = 0
    options = {"method__suppress": 2.0, "method__prior_shift": False}
    loss, gradient, _ = loss_at(*at_work(1, everywhere, method__name="fedvls", **options))
    supervised = cross_entropy(sigmoid(LOGITS), everywhere == 1).mean()
    assert loss == pytest.approx(supervised + 2.0 * suppressed(everywhere, (1, 2, 3)), abs=1e-6)
    np.testing.assert_allclose(gradient[:, 0], (sigmoid(LOGITS[:, 0]) - 1) / 12, atol=1e-6)


def test_share_of_a_single_positive_is_one() -> None:
    targets = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    off = {"method__distill": 0.0, "method__suppress": 2.0, "method__prior_shift": False}
    loss, _, _ = loss_at(*at_work(1, targets, method__name="fedvls", **off))
    supervised = cross_entropy(sigmoid(LOGITS), targets == 1).mean()
    held = np.log((1 + np.exp(LOGITS[1:, 0] - np.log(4)).sum()) / 3)
    assert loss == pytest.approx(supervised + 2.0 * held, abs=1e-6)


def test_shift_of_a_class_that_is_nowhere_or_everywhere_is_finite() -> None:
    """Three samples: its prior is at least 1/6 and at most 5/6; of b nothing is known."""
    targets = np.array([[1, -1, 0, 0], [1, -1, 0, 1], [1, -1, 0, -1]])
    off = {"method__distill": 0.0, "method__suppress": 0.0}
    loss, gradient, _ = loss_at(*at_work(1, targets, method__name="fedvls", **off))
    assert loss == pytest.approx(shifted_loss(targets, [5 / 6, 0.5, 1 / 6, 1 / 2], targets >= 0), abs=1e-6)
    assert not gradient[:, 1].any()
    targets[0, 1] = 1  # the only known target of b is positive
    loss, _, _ = loss_at(*at_work(1, targets, method__name="fedvls", **off))
    assert loss == pytest.approx(shifted_loss(targets, [5 / 6, 5 / 6, 1 / 6, 1 / 2], targets >= 0), abs=1e-6)


def test_a_client_without_any_positive_has_a_finite_loss() -> None:
    loss, gradient, _ = loss_at(*at_work(1, np.zeros((3, 4), dtype=int), method__name="fedvls"))
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


OFF: dict[str, dict[str, Any]] = {
    "condist": {"method__first_weight": 0.0, "method__last_weight": 0.0},
    "fedvls": {"method__distill": 0.0, "method__suppress": 0.0, "method__prior_shift": False},
}


@pytest.mark.parametrize("name", OFF)
def test_switched_off_both_are_fedavg_pl(name: str) -> None:
    plain = run(small(method__name="fedavg-pl", **MISSING)).weights
    assert same_bits(run(small(method__name=name, **OFF[name], **MISSING)).weights, plain)
    for option in OFF[name]:
        others = {key: value for key, value in OFF[name].items() if key != option}
        assert not same_bits(run(small(method__name=name, **others, **MISSING)).weights, plain), option


@pytest.mark.parametrize("name", OFF)
def test_only_weights_are_sent(name: str) -> None:
    plain, result = (run(small(method__name=method, **MISSING)) for method in ("fedavg-pl", name))
    for way in ("bytes_up", "bytes_down"):
        assert [row[way] for row in result.rows] == [row[way] for row in plain.rows]
