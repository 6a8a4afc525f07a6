"""FedFixMatch: which samples are used, their loss, the two views, and FedAvg-PL with the switch off."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit
from semi_builders import ANNOTATED, LABELS, learner_for

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.methods.fedfixmatch import FixMatch
from fedmll.testing import compute_loss, experiment, first_step, make_client_info, start_round


def part_of(trainer: Any) -> FixMatch:
    return trainer.method.part(FixMatch)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("select", "expected"),
    [
        ("sample", [[0, 1, 1], [0, 0, 0], [1, 1, 1], [0, 0, 0]]),
        ("entry", [[0, 1, 1], [0, 1, 0], [1, 1, 1], [0, 0, 0]]),
    ],
)
def test_selection_by_hand(select: str, expected: list[list[int]]) -> None:
    p = torch.tensor([[0.5, 0.9, 0.1], [0.5, 0.9, 0.5], [0.05, 0.95, 0.81], [0.9, 0.1, 0.5]])
    missing = torch.tensor([[0, 1, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]], dtype=torch.bool)
    labels, used = part_of(learner_for("fedfixmatch", select=select)).labels(p, missing)
    assert used.int().tolist() == expected
    assert labels.tolist() == [[-1, 1, 0], [-1, 1, -1], [0, 1, 1], [1, 0, -1]]


@pytest.mark.parametrize("select", ["sample", "entry"])
def test_the_loss(select: str) -> None:
    trainer, client = learner_for("fedfixmatch", client=LABELS, confidence=0.55, strength=0.5, select=select)
    client_round = start_round(trainer, client)
    assert client_round.unknown_targets_taught
    step = first_step(trainer, client_round)
    rows, z = step.batch.rows.numpy(), step.logits.detach().double().numpy()
    labels, weak, strong = LABELS[rows], expit(z[: len(rows)]), expit(z[len(rows) :])
    known = labels >= 0
    total, count = 0.0, 0
    for i in range(len(rows)):
        sure = (weak[i] >= 0.55) | (weak[i] <= 0.45)
        if select == "sample" and not sure[~known[i]].all():
            continue
        for c in np.flatnonzero(~known[i] & sure):
            total -= np.log(strong[i, c] if weak[i, c] > 0.5 else 1 - strong[i, c])
            count += 1
    assert 0 < count < (~known).sum()
    bce = -np.where(labels == 1, np.log(weak), np.log(1 - weak))[known].mean()
    assert compute_loss(trainer, client_round, step).item() == pytest.approx(bce + 0.5 * total / count, rel=1e-5)


def test_pseudo_labels_have_no_gradient() -> None:
    trainer, client = learner_for("fedfixmatch", client=LABELS, confidence=0.5)
    step = first_step(trainer, start_round(trainer, client))
    step.logits.retain_grad()
    part_of(trainer).loss(step, None).backward()
    count = len(step.batch)
    assert step.logits.grad is not None
    assert not step.logits.grad[:count].any()
    assert step.logits.grad[count:].any()


def test_without_confident_labels_the_loss_is_fedavg_pls() -> None:
    trainer, client = learner_for("fedfixmatch", client=LABELS, confidence=1 - 1e-6)
    client_round = start_round(trainer, client)
    step = first_step(trainer, client_round)
    assert part_of(trainer).loss(step, None).item() == 0


def test_views() -> None:
    trainer, client = learner_for("fedfixmatch", client=LABELS)
    step = first_step(trainer, start_round(trainer, client))
    batch = next(iter(client.batches()))
    assert torch.equal(step.images, torch.cat([batch.view("none"), batch.view("strong")]))
    assert step.targets[len(batch) :].eq(-1).all()  # what is known is taught in the weak view alone
    assert torch.equal(step.targets[: len(batch)], batch.targets)


def test_feature_vectors_are_refused() -> None:
    trainer = learner_for("fedfixmatch")
    trainer.method.validate_clients([make_client_info(0, 3)])
    part = trainer.method.part(FixMatch)
    part.task = replace(part.task, sample_shape=(12,))
    with pytest.raises(ConfigError, match=r"'fixmatch' compares two views.*fedavg-pl"):
        trainer.method.validate_clients([make_client_info(0, 3)])


def test_frozen_features_are_two_stored_views() -> None:
    """With several kept views the two views differ; with one they are the same, and it trains too."""
    for views, augment in ((1, "none"), (3, "weak")):
        kept = {
            "model__freeze": "backbone",
            "model__weights": "random",
            "model__views": views,
            "training__augment": augment,
        }
        made = experiment(method__name="fedfixmatch", **kept, **ANNOTATED)
        assert np.isfinite(run(made).metrics["macro_auc"])


def test_off_is_fedavg_pl() -> None:
    parent = run(experiment(method__name="fedavg-pl", **ANNOTATED)).weights
    on = {"method__name": "fedfixmatch", "method__confidence": 0.55, "method__select": "entry"}
    assert same_bits(run(experiment(**on, method__pseudo_labels=False, **ANNOTATED)).weights, parent)
    assert not same_bits(run(experiment(**on, **ANNOTATED)).weights, parent)
