"""FedLSR: its loss against NumPy, JS, the schedule, and FedAvg with the switch off."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.spatial.distance import jensenshannon
from scipy.special import expit, logit, rel_entr
from semi_builders import ANNOTATED, LABELS, learner_for

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.methods.fedlsr import SelfRegularised, jensen_shannon, mixed_logits
from fedmll.testing import compute_loss, experiment, first_step, make_client_info, start_round


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("divergence", ["positive", "bernoulli"])
@pytest.mark.parametrize("round", [1, 3, 9])
def test_the_loss(double: bool, divergence: str, round: int) -> None:
    options = {"ramp": 4, "scale": 2.0, "sharpening": 1.5, "double_sigmoid": double, "divergence": divergence}
    trainer, client = learner_for("fedlsr", client=LABELS, round=round, **options)
    client_round = start_round(trainer, client)
    step = first_step(trainer, client_round)
    rows = step.batch.rows.numpy()
    z = step.logits.detach().double().numpy()
    one, other = z[: len(rows)], z[len(rows) :]
    assert not np.allclose(one, other)
    share = torch.rand((), generator=client.generator("self-regularised")).item()
    p = share * expit(one) + (1 - share) * expit(other)
    sharp = expit(1.5 * logit(p))
    taught = expit(sharp) if double else sharp
    bce = -np.where(LABELS[rows] == 1, np.log(taught), np.log(1 - taught)).mean()  # unknown is absent
    a, b = expit(2 * one), expit(2 * other)
    js = np.mean([jensenshannon([x, 1 - x], [y, 1 - y]) ** 2 for x, y in zip(a.flat, b.flat, strict=True)])
    if divergence == "positive":
        js = (rel_entr(a, (a + b) / 2) + rel_entr(b, (a + b) / 2)).mean() / 2
    expected = bce + 0.4 * min(round / 4, 1) * js
    assert compute_loss(trainer, client_round, step).item() == pytest.approx(expected, rel=1e-5)


def test_first_view_is_training_augment_and_second_is_the_option() -> None:
    trainer, client = learner_for("fedlsr", client=LABELS)
    step = first_step(trainer, start_round(trainer, client))
    batch = next(iter(client.batches()))
    plain = batch.view("none")
    assert torch.equal(step.images, torch.cat([plain, batch.view("weak")]))
    assert not torch.equal(step.images[:6], step.images[6:])


def test_divergence_by_hand() -> None:
    """p = ¼, q = ¾, m = ½: ½ (¼ ln ½ + ¾ ln 3/2) = ½ (−0.173287 + 0.304099) = 0.065406. p = 1, q = 0: ½ ln 2."""
    found = jensen_shannon(torch.tensor([0.25, 0.5, 1.0, 0.0]), torch.tensor([0.75, 0.5, 0.0, 0.0]))
    assert found.tolist() == pytest.approx([0.065406, 0, 0.346574, 0], abs=1e-5)


def test_divergence_of_impossible_labels_has_a_finite_gradient() -> None:
    p = torch.tensor([0.0, 1.0], requires_grad=True)
    jensen_shannon(p, torch.tensor([0.0, 0.0])).sum().backward()
    assert p.grad is not None and torch.isfinite(p.grad).all()


def test_mixed_logits_are_exact_for_tiny_probabilities() -> None:
    one, other = torch.tensor([-60.0, 0.5, 60.0], requires_grad=True), torch.tensor([-60.0, -1.0, 60.0])
    found = mixed_logits(one, other, 0.25)
    middle = 0.25 * expit(0.5) + 0.75 * expit(-1.0)
    assert found.tolist() == pytest.approx([-60.0, logit(middle), 60.0], rel=1e-5)
    found.sum().backward()
    assert one.grad is not None and one.grad.tolist()[0] == pytest.approx(0.25, rel=1e-4)
    assert torch.isfinite(mixed_logits(one, other, 0.0)).all()


def test_the_schedule() -> None:
    trainer = learner_for("fedlsr", rounds=500)
    part = trainer.method.part(SelfRegularised)
    assert part.options.ramp == 40
    assert [part.gamma(t) for t in (1, 20, 40, 41, 500)] == pytest.approx([0.01, 0.2, 0.4, 0.4, 0.4])


def test_resolved_schedule_of_a_short_run_is_recorded() -> None:
    made = experiment(method__name="fedlsr", training__rounds=50)
    assert made.method.options["ramp"] == 4
    assert any("8 % of the rounds, as published" in note for note in made.notes)
    assert experiment(method__name="fedlsr", training__rounds=2).method.options["ramp"] == 1


def test_feature_vectors_are_refused() -> None:
    trainer = learner_for("fedlsr")
    trainer.method.validate_clients([make_client_info(0, 3)])
    part = trainer.method.part(SelfRegularised)
    part.task = replace(part.task, sample_shape=(12,))
    with pytest.raises(ConfigError, match=r"'self-regularised' compares two views.*fedavg-pl"):
        trainer.method.validate_clients([make_client_info(0, 3)])


def test_off_is_fedavg() -> None:
    parent = run(experiment(**ANNOTATED)).weights
    assert same_bits(
        run(experiment(method__name="fedlsr", method__self_regularisation=False, **ANNOTATED)).weights, parent
    )
    assert not same_bits(run(experiment(method__name="fedlsr", **ANNOTATED)).weights, parent)


def test_unknown_targets_taught_by_another_part_are_not_absent() -> None:
    trainer, client = learner_for("fedlsr", client=LABELS, strength=0)
    client_round = start_round(trainer, client)
    whole = compute_loss(trainer, client_round).item()
    client_round = start_round(trainer, client)
    client_round.unknown_targets_taught = True
    assert compute_loss(trainer, client_round).item() < whole
