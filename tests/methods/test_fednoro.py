"""FedNoRo: its loss and its schedule against NumPy, and FedAvg-PL with both switches off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit
from semi_builders import ANNOTATED, LABELS, learner_for, logits_of

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.methods.fednoro import NoiseRobust
from fedmll.testing import compute_loss, experiment, first_step, start_round

ODDS = np.log(np.array([2 / 5, 1 / 12, 2 / 5]) / (1 - np.array([2 / 5, 1 / 12, 2 / 5])))  # of what is known


@pytest.mark.parametrize("round", [1, 5, 9])
@pytest.mark.parametrize("adjusted", [True, False])
@pytest.mark.parametrize("distilled", [True, False])
@pytest.mark.parametrize("view", ["same", "plain"])
def test_the_loss(round: int, adjusted: bool, distilled: bool, view: str) -> None:
    """Nine rounds, t0 = 2: s = (t − 3)/6, and 0 in round 1."""
    trainer, client = learner_for(
        "fednoro", client=LABELS, round=round, logit_adjustment=adjusted, distillation=distilled, temperature=0.5,
        ramp_start=2, teacher_view=view, training={"augment": "weak"},
    )  # fmt: skip
    plain = expit(logits_of(trainer, client) / 0.5)
    client_round = start_round(trainer, client)
    step = first_step(trainer, client_round)
    rows = step.rows.numpy()
    with torch.no_grad():
        theirs = expit(trainer.model(step.images).double().numpy() / 0.5) if view == "same" else plain[rows]
        trainer.weights.vector.add_(0.1)  # the student leaves the teacher
        z = trainer.model(step.images).double().numpy()
    labels = LABELS[rows]
    known, moved = labels >= 0, z + ODDS if adjusted else z
    bce = np.where(labels == 1, np.logaddexp(0, -moved), np.logaddexp(0, moved))[known].mean()
    s = {1: 0, 5: 2 / 6, 9: 1}[round]
    w = 0.8 * np.exp(-5 * (1 - s) ** 2) if distilled else 0.0
    expected = (1 - w) * bce + w * ((expit(z) - theirs) ** 2)[~known].mean()
    assert not np.allclose(theirs, plain[rows]) or view == "plain"
    assert compute_loss(trainer, client_round, step).item() == pytest.approx(expected, rel=1e-5)


def share(rounds: int, round: int, **options: Any) -> float:
    return float(learner_for("fednoro", rounds=rounds, **options).method.part(NoiseRobust).weight(round))


@pytest.mark.parametrize(
    ("round", "expected"),
    [
        (1, 0.8 * np.exp(-5)),
        (11, 0.8 * np.exp(-5)),  # the released code counts from 0: its round 10, where the weight begins to grow
        (12, 0.8 * np.exp(-5 * (488 / 489) ** 2)),
        (251, 0.8 * np.exp(-5 * (1 - 240 / 489) ** 2)),  # its round 250: 0.22
        (500, 0.8),
    ],
)
def test_the_published_schedule(round: int, expected: float) -> None:
    assert share(500, round) == pytest.approx(expected, rel=1e-6)


def test_the_schedule_of_other_runs() -> None:
    assert share(20, 20) == pytest.approx(0.8)  # t0 = 1
    assert share(20, 2) == pytest.approx(0.8 * np.exp(-5))
    assert share(20, 11) == pytest.approx(0.8 * np.exp(-5 / 4))  # s = 9/18
    assert share(9, 5, ramp_start=0) == pytest.approx(0.8 * np.exp(-5 / 4))  # s = 4/8
    assert share(9, 9, strength=0.25) == pytest.approx(0.25)
    assert share(1, 1) == pytest.approx(0.8 * np.exp(-5))
    made = experiment(method__name="fednoro", training__rounds=100)
    assert made.method.options["ramp_start"] == 2
    assert any("2 % of the rounds, as published" in note for note in made.notes)


def test_a_weight_that_never_grows_is_refused() -> None:
    experiment(method__name="fednoro", method__ramp_start=3, training__rounds=4)
    with pytest.raises(ConfigError, match=r"method.ramp_start = 4 leaves no round of 4 in which the weight"):
        experiment(method__name="fednoro", method__ramp_start=4, training__rounds=4)
    experiment(method__name="fednoro", method__ramp_start=4, training__rounds=4, method__distillation=False)
    experiment(method__name="fednoro", training__rounds=1)


def test_the_teacher_does_not_move_and_the_model_stays_in_training_mode() -> None:
    trainer, client = learner_for("fednoro", client=LABELS, round=9)
    client_round = start_round(trainer, client)
    teacher = client_round.round_states["noise-robust"][1]
    before, step = teacher.vector.clone(), first_step(trainer, client_round)
    trainer.model.train()
    compute_loss(trainer, client_round, step).backward()
    with torch.no_grad():
        trainer.weights.vector.add_(0.1)
    assert torch.equal(teacher.vector, before)
    assert trainer.model.training


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
