"""CBAFed: thresholds, pseudo labels, the average by labels used, residual mixing; without its switches FedAvg-PL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit
from semi_builders import ANNOTATED, LABELS, batch_of, learner_for, stopped_and_resumed

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.methods.cbafed import LabelsUsed
from fedmll.testing import aggregate, compute_loss, experiment, first_step, make_client_info, make_reply, start_round


def thresholds(values: list[float]) -> Message:
    return Message({"labels-used/thresholds": torch.tensor(values)})


def replies(trainer: Any, used: list[list[float]], sizes: list[float]) -> list[Any]:
    """Client k's model is k + 1 everywhere."""
    model = trainer.weights.dump()
    return [
        (make_client_info(k, 3), Message(model | {"weights": torch.full_like(model["weights"], k + 1.0),
                                         "labels-used/used": torch.tensor(share)}, {"samples": size}))
        for k, (share, size) in enumerate(zip(used, sizes, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("used", "expected"),
    [
        ([50, 50, 50], [1 / 3 + 0.45] * 3),
        ([60, 30, 10], [0.6 + 0.45 - 0.2516611, 0.55, 0.55]),  # std² = (0.2667² + 0.0333² + 0.2333²)/2 = 0.0633333
        ([100, 0, 0], [1 + 0.45 - 0.5773503, 0.55, 0.55]),  # std² = (4/9 + 1/9 + 1/9)/2 = 1/3
        ([1, 0, 0], [1 + 0.45 - 0.5773503, 0.55, 0.55]),  # a single label
        ([0, 0, 0], [0.55, 0.55, 0.55]),
    ],
)
def test_thresholds_by_hand(used: list[float], expected: list[float]) -> None:
    part = learner_for("cbafed").method.part(LabelsUsed)
    assert part.thresholds(torch.tensor(used, dtype=torch.float64)).tolist() == pytest.approx(expected)


def test_two_classes_have_a_spread() -> None:
    """π = ¾, ¼: std² = (¼² + ¼²)/1 = 1/8."""
    part = learner_for("cbafed").method.part(LabelsUsed)
    assert part.thresholds(torch.tensor([30.0, 10.0])).tolist() == pytest.approx([0.75 + 0.45 - 0.125**0.5, 0.55])


def test_one_class_has_no_spread() -> None:
    part = learner_for("cbafed", highest=1.0, base=0.3).method.part(LabelsUsed)
    assert part.thresholds(torch.tensor([9.0])).tolist() == [1.0]
    assert part.thresholds(torch.tensor([0.0])).tolist() == pytest.approx([0.55])


def test_initial_thresholds_are_those_of_equal_classes() -> None:
    trainer = learner_for("cbafed", base=0.3)
    assert trainer.method.initial_state()["labels-used/thresholds"].tolist() == pytest.approx([1 / 3 + 0.3] * 3)
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    assert "labels-used/thresholds" in sent.tensors


def test_server_counts_labels_and_weights_the_average_by_them() -> None:
    trainer = learner_for("cbafed", first_stage=1, residual=False)
    told = replies(trainer, [[1.0, 0.5, 0.0], [0.0, 0.0, 0.5], [0.0, 0.0, 0.0]], [40.0, 120.0, 10.0])
    state, records = aggregate(trainer.method, trainer.method.initial_state(), told, 2)
    assert records["labels_used"].tolist() == [40, 20, 60]
    std = np.std([1 / 3, 1 / 6, 1 / 2], ddof=1)
    expected = np.clip(np.array([1 / 3, 1 / 6, 1 / 2]) + 0.45 - std, 0.55, 0.95)
    np.testing.assert_allclose(state["labels-used/thresholds"], expected, rtol=1e-6)
    np.testing.assert_allclose(records["thresholds"], expected, rtol=1e-6)
    assert state["weights"][0].item() == pytest.approx((60 * 1 + 60 * 2 + 1 * 3) / 121)  # no labels: as if one
    plain = learner_for("cbafed", by_labels=False)
    for method, round in ((trainer.method, 1), (plain.method, 1), (plain.method, 2)):  # the first stage: by size
        found, _ = aggregate(method, method.initial_state(), told, round)
        assert found["weights"][0].item() == pytest.approx(310 / 170)


def test_share_above_one_is_rejected() -> None:
    trainer = learner_for("cbafed")
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    (_, good), (_, bad), (_, less) = replies(trainer, [[1.0, 0.0, 0.5], [1.1, 0.0, 0.5], [-0.1, 0.0, 0.5]], [9.0] * 3)
    assert trainer.method.find_problem(sent, good, 1) is None
    assert "labels-used/used" in str(trainer.method.find_problem(sent, bad, 1))
    assert "labels-used/used" in str(trainer.method.find_problem(sent, less, 1))


TAU = [0.52, 0.55, 0.53]


@pytest.mark.parametrize(("round", "over"), [(1, "sum"), (2, "sum"), (2, "mean")])
def test_loss_and_number_of_labels_used(round: int, over: str) -> None:
    """t1 = 1: the second round has pseudo labels."""
    trainer, client = learner_for("cbafed", client=LABELS, round=round, first_stage=1, over_classes=over)
    client_round = start_round(trainer, client, thresholds(TAU))
    rows, z = batch_of(client)
    labels, p, tau = LABELS[rows], expit(z), np.array(TAU)
    known = labels >= 0
    expected = -np.where(labels == 1, np.log(p), np.log(1 - p))[known].mean()
    made = ~known & ((p > tau) | (p < 1 - tau))
    if round == 2:
        own = -np.where(p > 0.5, np.log(p), np.log(1 - p))
        by_class = [own[:, c][made[:, c]].mean() for c in range(3) if made[:, c].any()]
        assert len(by_class) > 1
        expected += np.sum(by_class) if over == "sum" else np.mean(by_class)
        assert 0 < made.sum() < (~known).sum()
    assert compute_loss(trainer, client_round).item() == pytest.approx(expected, rel=1e-5)
    used = known.sum(0) + (made.sum(0) if round == 2 else 0)
    assert make_reply(trainer, client_round)["labels-used/used"].tolist() == pytest.approx((used / len(rows)).tolist())
    assert client_round.unknown_targets_taught == (round == 2)


def test_labels_used_are_those_of_one_epoch() -> None:
    trainer, client = learner_for(
        "cbafed", client=LABELS, round=2, first_stage=1, training={"local_epochs": 3, "lr": 1e-9}
    )
    sent = Message(trainer.weights.dump() | thresholds(TAU).tensors)
    reply = trainer.train(client, sent, {})
    client_round = start_round(trainer, client, thresholds(TAU))
    compute_loss(trainer, client_round)
    counts = client_round.round_states["labels-used"]  # of one epoch
    assert counts.made.any()
    expected = (counts.known + counts.made) / len(LABELS)
    assert reply["labels-used/used"].tolist() == pytest.approx(expected.tolist())
    assert (expected < 1).any()
    client_round.round_states["labels-used"].made *= 3
    assert make_reply(trainer, client_round)["labels-used/used"].tolist() == pytest.approx(expected.tolist())


def test_weighted_loss_gives_pseudo_positives_more_weight() -> None:
    trainer, client = learner_for("cbafed", client=LABELS, round=2, first_stage=1, training={"loss": "weighted"})
    client_round = start_round(trainer, client, thresholds([0.5, 0.5, 0.5]))
    step = first_step(trainer, client_round)
    part = next(part for part in trainer.method.active_parts if part.name == "adaptive-labels")
    found = part.loss(step, client_round.round_states[part.name]).item()
    p = expit(step.logits.detach().double().numpy())
    missing = step.targets.numpy() < 0
    means = []
    for c in range(3):
        label, at = p[missing[:, c], c] >= 0.5, p[missing[:, c], c]
        weight = len(label) / max(label.sum(), 1)  # (n⁰ + n⁺) / n⁺
        means.append(np.mean(np.where(label, -weight * np.log(at), -np.log(1 - at))))
    assert found == pytest.approx(np.sum(means), rel=1e-5)


def mixed(rounds: int, **options: Any) -> list[float]:
    """The global model after each round, if the clients' model is the round's number."""
    trainer = learner_for("cbafed", rounds=rounds + 1, **options)
    state, found = trainer.method.initial_state(), []
    for round in range(1, rounds + 1):
        model = trainer.weights.dump() | {"weights": torch.full_like(trainer.weights.vector, float(round))}
        reply = Message(model | {"labels-used/used": torch.ones(3)}, {"samples": 5.0})
        state, _ = aggregate(trainer.method, state, [(make_client_info(0, 3), reply)], round)
        found.append(state["weights"][0].item())
    assert "residual/before" not in trainer.method.send(state, make_client_info(0, 3), rounds).tensors
    return found


def test_rounds_6_and_11_and_then_those_of_the_second_stage_are_mixed() -> None:
    """The released code, with 12 rounds of the first stage instead of 50. Its rounds are counted from 0."""
    expected, before = [], 0.0
    for rnd in range(25):
        w = float(rnd + 1)
        if rnd < 12 and rnd % 5 == 0:
            w = w if rnd == 0 else 0.2 * w + 0.8 * before
            before = w
        elif rnd >= 12 and (rnd - 12) % 5 == 0:
            w = w if rnd == 12 else 0.5 * w + 0.5 * before
            before = w
        expected.append(w)
    found = mixed(25, first_stage=12)
    assert found == pytest.approx(expected)
    assert [t for t, value in enumerate(found, 1) if value != t] == [6, 11, 18, 23]


def test_residual_mixing_by_hand() -> None:
    """Every second round. The second stage begins with round 6, which only stores its model, as round 1 does."""
    found = mixed(10, first_stage=5, every=2, early=0.25, late=0.5)
    third, eighth = 0.25 * 3 + 0.75 * 1, 0.5 * 8 + 0.5 * 6
    fifth, tenth = 0.25 * 5 + 0.75 * third, 0.5 * 10 + 0.5 * eighth
    assert found == pytest.approx([1, 2, third, 4, fifth, 6, 7, eighth, 9, tenth])


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.first_stage = 4 leaves no round .* 'adaptive-labels' would never"):
        experiment(method__name="cbafed", method__first_stage=4, training__rounds=4)
    experiment(method__name="cbafed", method__first_stage=4, training__rounds=4, method__pseudo_labels=False)
    with pytest.raises(ConfigError, match=r"method.lowest = 0.9 is above method.highest = 0.8"):
        experiment(method__name="cbafed", method__lowest=0.9, method__highest=0.8)


def test_resolved_schedule_of_a_short_run_is_recorded() -> None:
    made = experiment(method__name="cbafed", training__rounds=50)
    assert made.method.options["first_stage"] == 5
    assert any("10 % of the rounds, as published" in note for note in made.notes)
    assert experiment(method__name="cbafed", training__rounds=500).method.options["first_stage"] == 50


def test_all_switches_off_is_fedavg_pl_and_each_switch_has_an_effect() -> None:
    common = ANNOTATED | {"method__every": 1, "method__first_stage": 1}
    parent = run(experiment(method__name="fedavg-pl", **ANNOTATED)).weights
    off = {"method__pseudo_labels": False, "method__by_labels": False, "method__residual": False}
    assert same_bits(run(experiment(method__name="cbafed", **off, **common)).weights, parent)
    for name in ("method__pseudo_labels", "method__residual"):
        assert not same_bits(run(experiment(method__name="cbafed", **off | {name: True}, **common)).weights, parent)


def test_resumed_run_has_the_same_result(tmp_path: Path) -> None:
    stopped_and_resumed("cbafed", tmp_path, method__every=2)
