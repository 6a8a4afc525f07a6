"""FedNoRo: its loss and its schedule against NumPy, and FedAvg-PL with both switches off."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit
from semi_builders import ANNOTATED, LABELS, batch_of, learner_for, logits_of

from fedmll import run
from fedmll.methods.fednoro import NoiseRobust
from fedmll.testing import compute_loss, experiment, start_round

ODDS = np.log(np.array([2 / 5, 1 / 12, 2 / 5]) / (1 - np.array([2 / 5, 1 / 12, 2 / 5])))  # of what is known


@pytest.mark.parametrize("round", [1, 5, 9])
@pytest.mark.parametrize("adjusted", [True, False])
@pytest.mark.parametrize("distilled", [True, False])
def test_the_loss(round: int, adjusted: bool, distilled: bool) -> None:
    trainer, client = learner_for(
        "fednoro", client=LABELS, round=round, logit_adjustment=adjusted, distillation=distilled, temperature=0.5
    )
    teacher = expit(logits_of(trainer, client) / 0.5)
    client_round = start_round(trainer, client)
    with torch.no_grad():
        trainer.weights.vector.add_(0.1)  # the student leaves the teacher
    rows, z = batch_of(client)
    labels = LABELS[rows]
    known, moved = labels >= 0, z + ODDS if adjusted else z
    bce = np.where(labels == 1, np.logaddexp(0, -moved), np.logaddexp(0, moved))[known].mean()
    w = 0.8 * np.exp(-5 * (1 - round / 9) ** 2) if distilled else 0.0
    expected = (1 - w) * bce + w * ((expit(z) - teacher[rows]) ** 2)[~known].mean()
    assert compute_loss(trainer, client_round).item() == pytest.approx(expected, rel=1e-5)


def test_the_schedule_by_hand() -> None:
    """0.8 exp(−5) … 0.8 exp(−5/4) in the middle … 0.8 at the end."""
    shares = []
    for round in (1, 10, 20):
        trainer, _ = learner_for("fednoro", client=LABELS, round=round, rounds=20)
        shares.append(trainer.method.part(NoiseRobust).weight(round))
    assert shares == pytest.approx([0.8 * np.exp(-5 * 0.95**2), 0.8 * 0.28650480, 0.8])


def test_the_largest_share_is_an_option() -> None:
    trainer, _ = learner_for("fednoro", client=LABELS, round=9, strength=0.25)
    assert trainer.method.part(NoiseRobust).weight(9) == pytest.approx(0.25)


def test_weighted_loss_gives_positives_more_weight() -> None:
    found = []
    for loss in ("bce", "weighted"):
        trainer, client = learner_for("fednoro", client=LABELS, training={"loss": loss})
        found.append(compute_loss(trainer, start_round(trainer, client)).item())
    assert found[0] < found[1]


def test_all_switches_off_is_fedavg_pl_and_each_switch_has_an_effect() -> None:
    parent = run(experiment(method__name="fedavg-pl", **ANNOTATED)).weights
    off = {"method__logit_adjustment": False, "method__distillation": False}
    assert same_bits(run(experiment(method__name="fednoro", **off, **ANNOTATED)).weights, parent)
    for name in off:
        assert not same_bits(run(experiment(method__name="fednoro", **off | {name: True}, **ANNOTATED)).weights, parent)
