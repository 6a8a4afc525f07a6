"""FedIRM: class relations and their divergence, the teacher, the ramp, the server, and FedAvg-PL with switches off."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit, rel_entr
from semi_builders import ANNOTATED, LABELS, batch_of, learner_for, stopped_and_resumed

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message
from fedmll.methods.fedirm import RelationMatching, relations, symmetric_divergence
from fedmll.methods.framework.allowed_replies import find_class_problem
from fedmll.testing import (
    aggregate,
    compute_loss,
    experiment,
    first_step,
    make_client,
    make_client_info,
    make_reply,
    start_round,
)

TOLD = torch.tensor([[0.9, 0.2, 0.4], [0.3, 0.8, 0.5], [0.1, 0.6, 0.7]])


def sent(votes: tuple[bool, ...] = (True, True, True)) -> Message:
    return Message({"relation-matching/relations": TOLD, "relation-matching/votes": torch.tensor(votes)})


def part_of(trainer: Any) -> RelationMatching:
    return trainer.method.part(RelationMatching)  # type: ignore[no-any-return]


def test_relations_by_hand() -> None:
    """Class 0 in two samples with the logits (2, 0) and (4, −2): σ(3/2), σ(−1/2); class 1 in none."""
    sums, counts = torch.tensor([[6.0, -2.0], [0.0, 0.0]]), torch.tensor([2.0, 0.0])
    np.testing.assert_allclose(relations(sums, counts, 2.0), [[expit(1.5), expit(-0.5)], [0.5, 0.5]], rtol=1e-6)


def test_divergence_by_hand() -> None:
    """½ (0.2 ln 0.2/0.6 + 0.6 ln 0.6/0.2) = ½ · 0.4 ln 3; equal values: 0; ½ (0.9 ln 9 − 0.1 ln 9) = 0.4 ln 9."""
    p, q = torch.tensor([0.2, 0.5, 0.9]), torch.tensor([0.6, 0.5, 0.1])
    assert symmetric_divergence(p, q).tolist() == pytest.approx([0.2 * np.log(3), 0, 0.4 * np.log(9)], rel=1e-5)
    a, b = p.double().numpy(), q.double().numpy()
    np.testing.assert_allclose(symmetric_divergence(p, q), (rel_entr(a, b) + rel_entr(b, a)) / 2, rtol=1e-5, atol=1e-7)
    assert symmetric_divergence(torch.tensor(1.0), torch.tensor(0.0)).item() == pytest.approx(0.5 * np.log(1e6))


@pytest.mark.parametrize("round", [1, 2, 3])
def test_a_client_sends_its_relations_from_the_end_of_the_first_stage_on(round: int) -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=round, first_stage=2, temperature=3.0)
    client_round = start_round(trainer, client)
    rows, z = batch_of(client)
    compute_loss(trainer, client_round)
    reply = make_reply(trainer, client_round)
    expected = {"weights"} | ({"relation-matching/relations", "relation-matching/votes"} if round >= 2 else set())
    assert reply.tensors.keys() - {"counters"} == expected
    asked = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), round)
    assert trainer.method.find_problem(asked, reply, round) is None
    if round >= 2:
        labels = LABELS[rows]
        assert reply["relation-matching/votes"].tolist() == [True, False, True]
        for c in (0, 2):
            row = expit(z[labels[:, c] == 1].mean(0) / 3)
            np.testing.assert_allclose(reply["relation-matching/relations"][c], row, rtol=1e-5)


def test_the_server_averages_rows_by_size_over_those_that_sent_them() -> None:
    trainer = learner_for("fedirm", first_stage=1)
    model = trainer.weights.dump()

    def reply(value: float, votes: list[bool], size: float) -> Message:
        own = {"relations": torch.full((3, 3), value), "votes": torch.tensor(votes)}
        return Message(model | {f"relation-matching/{k}": t for k, t in own.items()}, {"samples": size})

    told = [
        (make_client_info(0, 3), reply(0.2, [True, True, False], 30.0)),
        (make_client_info(1, 3), reply(0.6, [False, True, False], 10.0)),
    ]
    state, records = aggregate(trainer.method, trainer.method.initial_state(), told, 1)
    np.testing.assert_allclose(state["relation-matching/relations"][:, 0], [0.2, 0.3, 0.5], rtol=1e-6)
    assert state["relation-matching/votes"].tolist() == [True, True, False]
    assert torch.equal(records["relations"], state["relation-matching/relations"])
    later, _ = aggregate(trainer.method, state, [(make_client_info(1, 3), reply(0.7, [False, False, True], 10.0))], 2)
    np.testing.assert_allclose(later["relation-matching/relations"][:, 1], [0.2, 0.3, 0.7], rtol=1e-6)
    assert later["relation-matching/votes"].tolist() == [True, True, True]
    assert "relation-matching/relations" in trainer.method.send(later, make_client_info(0, 3), 2).tensors
    assert "relation-matching/relations" not in trainer.method.send(later, make_client_info(0, 3), 1).tensors


def test_relations_of_a_client_with_one_sample_are_not_shrunk() -> None:
    trainer = learner_for("fedirm", first_stage=1)
    own = {"relation-matching/relations": torch.full((3, 3), 0.4), "relation-matching/votes": torch.ones(3).bool()}
    reply = Message(trainer.weights.dump() | own, {"samples": 1.0})
    state, _ = aggregate(trainer.method, trainer.method.initial_state(), [(make_client_info(0, 3), reply)], 1)
    torch.testing.assert_close(state["relation-matching/relations"], torch.full((3, 3), 0.4))


@pytest.mark.parametrize(("smallest", "leaves"), [(3, True), (4, True), (5, False)])
def test_the_row_of_a_class_leaves_with_enough_positives(smallest: int, leaves: bool) -> None:
    """Four samples of eight have every class."""
    labels = np.repeat(np.array([[1, 1, 1], [0, 0, 0]]), 4, axis=0)
    trainer, client = learner_for("fedirm", client=labels, round=1, first_stage=1)
    part = part_of(trainer)
    part.task = replace(part.task, min_group_size=smallest)
    client_round = start_round(trainer, client)
    compute_loss(trainer, client_round)
    reply = make_reply(trainer, client_round)
    assert reply["relation-matching/votes"].tolist() == [leaves] * 3
    assert bool((reply["relation-matching/relations"] == 0.5).all()) != leaves


@pytest.mark.parametrize(("key", "tensor"), [("relations", 1.5 * torch.ones(3, 3)), ("votes", torch.ones(3))])
def test_implausible_reply_is_rejected(key: str, tensor: torch.Tensor) -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=1, first_stage=1)
    reply = make_reply(trainer, start_round(trainer, client))
    asked = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    assert trainer.method.find_problem(asked, reply, 1) is None
    reply.tensors[f"relation-matching/{key}"] = tensor
    assert key in str(trainer.method.find_problem(asked, reply, 1))


def test_votes_for_classes_that_a_client_does_not_annotate_are_noticed() -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=1, first_stage=1)
    client_round = start_round(trainer, client)
    compute_loss(trainer, client_round)
    reply = make_reply(trainer, client_round)
    asked = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    specs = trainer.method.reply_spec(asked, 1)
    assert find_class_problem(specs, reply, client.annotated) is None
    reply.tensors["relation-matching/votes"] = torch.tensor([True, True, True])
    assert "votes" in str(find_class_problem(specs, reply, client.annotated))


def test_confident_samples() -> None:
    part = part_of(learner_for("fedirm"))
    p = torch.tensor([[0.95, 0.05, 0.99], [0.95, 0.31, 0.99], [0.71, 0.29, 0.29], [1.0, 0.0, 1.0], [0.95, 0.69, 0.99]])
    assert part.confident(p).tolist() == [True, False, False, True, False]  # the third: an entropy of 0.60
    loose = part_of(learner_for("fedirm", entropy=0.61))
    assert loose.confident(p).tolist() == [True, False, True, True, False]


def divergence_of_the_comparison(outputs: np.ndarray, sure: np.ndarray, votes: tuple[bool, ...]) -> float:
    """Of the released code: F.kl_div with 'batchmean' in both directions, halved, of all C rows."""
    labels = (expit(outputs) > 0.5) & sure[:, None]
    total = 0.0
    for c in range(3):
        logits = outputs[labels[:, c]].mean(0) if labels[:, c].any() else np.zeros(3)
        q, p = expit(logits / 2), TOLD[c].double().numpy()
        total += votes[c] * 0.5 * (rel_entr(p, q).sum() + rel_entr(q, p).sum())
    return total / 3


@pytest.mark.parametrize("round", [3, 5, 9])
@pytest.mark.parametrize(("relating", "consistent"), [(True, True), (True, False), (False, True)])
@pytest.mark.parametrize("votes", [(True, True, True), (True, False, True)])
@pytest.mark.parametrize("both", [True, False])
def test_the_loss(round: int, relating: bool, consistent: bool, votes: tuple[bool, ...], both: bool) -> None:
    trainer, client = learner_for(
        "fedirm", client=LABELS, round=round, first_stage=2, ramp=6, view="weak" if both else "none", confidence=0.51,
        entropy=0.68, relations=relating, consistency=consistent, both_views=both,
    )  # fmt: skip
    generator = torch.Generator().manual_seed(9)
    vector = trainer.weights.vector.clone()
    teacher = vector + 0.1 * torch.randn(vector.shape, generator=generator)
    client_round = start_round(trainer, client, sent(votes), {"relation-matching/teacher": teacher})
    assert client_round.unknown_targets_taught
    step = first_step(trainer, client_round)
    rows, count = step.batch.rows.numpy(), len(step.batch)
    assert len(step.images) == (12 if both else 6)
    with torch.no_grad():
        z = trainer.model(step.images).double().numpy()
        trainer.weights.vector.copy_(teacher)
        theirs = expit(trainer.model(step.images[-count:]).double().numpy())
        trainer.weights.vector.copy_(vector)
    labels, known = LABELS[rows], LABELS[rows] >= 0
    supervised = [np.logaddexp(0, np.where(labels == 1, -own, own))[known].mean() for own in np.split(z, 1 + both)]
    assert not both or not np.isclose(*supervised)
    outputs, p = z[:count], expit(z[:count])
    weight, extra = np.exp(-5 * (1 - min(round, 6) / 6) ** 2), 0.0
    if consistent:
        extra += ((p - theirs) ** 2).sum() / count
    entropy = -(p * np.log(p) + (1 - p) * np.log(1 - p)).mean(1)
    sure = ((p > 0.51) | (p < 0.49)).all(1) & (entropy < 0.68)
    assert 0 < sure.sum() < len(rows)
    if relating:
        extra += divergence_of_the_comparison(outputs, sure, votes)
    assert compute_loss(trainer, client_round, step).item() == pytest.approx(sum(supervised) + weight * extra, rel=1e-5)


def test_relations_are_those_of_the_model_itself_also_for_known_classes() -> None:
    """Nothing depends on the labels of the batch, nor on the teacher."""
    found = []
    for labels, teacher in ((LABELS, 0.0), (1 - LABELS.clip(0), 0.0), (LABELS, 0.1)):
        trainer, client = learner_for(
            "fedirm", client=LABELS, round=9, first_stage=2, confidence=0.51, entropy=0.69, consistency=False
        )
        client = make_client(trainer, labels, round=9)
        client_round = start_round(
            trainer, client, sent(), {"relation-matching/teacher": trainer.weights.vector + teacher}
        )
        step = first_step(trainer, client_round)
        part = part_of(trainer)
        found.append(part.loss(step, client_round.round_states[part.name]))
    assert found[0].item() == found[1].item() == found[2].item() > 0


def test_relations_are_matched_by_their_gradient() -> None:
    """Steps along it bring the relations of a batch to those that were received."""
    part = part_of(learner_for("fedirm", confidence=0.5, entropy=0.7, temperature=1.0))
    logits = torch.tensor([[2.0, -1.0, -2.0], [-1.0, 2.0, -1.0], [-2.0, -2.0, 2.0]], requires_grad=True)
    received = {"relations": expit(np.eye(3) * 3 - 1), "votes": np.ones(3, dtype=bool)}
    told = {name: torch.tensor(value).float() for name, value in received.items()}
    before = part.mismatch(logits, told).item()
    optimizer = torch.optim.SGD([logits], lr=0.5)
    for _ in range(500):
        optimizer.zero_grad()
        part.mismatch(logits, told).backward()
        optimizer.step()
    assert part.mismatch(logits, told).item() < 0.001 < before
    np.testing.assert_allclose(torch.sigmoid(logits.detach()), told["relations"], atol=0.02)


def test_without_received_relations_there_is_no_relation_loss() -> None:
    found = []
    for options, message in (({}, None), ({"relations": False}, sent()), ({}, sent())):
        trainer, client = learner_for("fedirm", client=LABELS, round=3, first_stage=2, **options)
        found.append(compute_loss(trainer, start_round(trainer, client, message)).item())
    assert found[0] == found[1] != found[2]


def test_without_confident_samples_all_rows_are_one_half_and_have_no_gradient() -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=9, first_stage=2, entropy=1e-9, consistency=False)
    client_round = start_round(trainer, client, sent())
    step, part = first_step(trainer, client_round), part_of(trainer)
    loss = part.loss(step, client_round.round_states[part.name])
    told = TOLD.double().numpy()
    assert loss is not None
    assert loss.item() == pytest.approx(0.5 * (rel_entr(told, 0.5) + rel_entr(0.5, told)).sum() / 3, rel=1e-5)
    (gradient,) = torch.autograd.grad(loss, step.logits)
    assert not gradient.any()


def test_both_views_are_taught_in_the_first_stage_too() -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=1, first_stage=2, view="none")
    rows, z = batch_of(client)
    labels, known = LABELS[rows], LABELS[rows] >= 0
    one = np.logaddexp(0, np.where(labels == 1, -z, z))[known].mean()
    assert compute_loss(trainer, start_round(trainer, client)).item() == pytest.approx(2 * one, rel=1e-5)


def test_decay_of_the_teacher_grows_and_the_teacher_is_kept() -> None:
    """Decays min(1 − 1/(t+1), 0.6): 0, ½, then 0.6."""
    trainer, client = learner_for("fedirm", client=LABELS, round=2, first_stage=1, decay=0.6, training={"lr": 0.05})
    memory: dict[str, torch.Tensor] = {}
    start, expected = trainer.weights.dump(), None
    for decay in (0.0, 0.5, 0.6, 0.6):
        trainer.train(client, Message(start), memory)  # one step
        now = trainer.weights.vector.clone()
        expected = now if expected is None else decay * expected + (1 - decay) * now
        torch.testing.assert_close(memory["relation-matching/teacher"], expected)
    assert int(memory["relation-matching/steps"]) == 4


def test_in_the_first_stage_there_is_no_teacher() -> None:
    trainer, client = learner_for("fedirm", client=LABELS, round=1, first_stage=1)
    memory: dict[str, torch.Tensor] = {}
    trainer.train(client, Message(trainer.weights.dump()), memory)
    assert not memory


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"method.first_stage = 4 leaves no round .* 'relation-matching' would never"):
        experiment(method__name="fedirm", method__first_stage=4, training__rounds=4)
    off = {"method__relations": False, "method__consistency": False}
    experiment(method__name="fedirm", method__first_stage=4, training__rounds=4, **off)
    with pytest.raises(ConfigError, match=r"method.view: .*'nonsense'"):
        experiment(method__name="fedirm", method__view="nonsense")


def test_resolved_schedule_of_a_short_run_is_recorded() -> None:
    made = experiment(method__name="fedirm", training__rounds=100)
    assert (made.method.options["first_stage"], made.method.options["ramp"]) == (4, 6)
    assert any("4 % of the rounds, as published" in note for note in made.notes)
    assert any("6 % of the rounds, as published" in note for note in made.notes)
    published = experiment(method__name="fedirm", training__rounds=500).method.options
    assert (published["first_stage"], published["ramp"]) == (20, 30)


def test_all_switches_off_is_fedavg_pl_and_each_switch_has_an_effect() -> None:
    sure = ANNOTATED | {"method__confidence": 0.5, "method__entropy": 0.7, "method__first_stage": 1}
    parent = run(experiment(method__name="fedavg-pl", **ANNOTATED)).weights
    off = {"method__relations": False, "method__consistency": False, "method__both_views": False}
    without = run(experiment(method__name="fedirm", **off, **sure))
    assert same_bits(without.weights, parent)
    for name in off:
        assert not same_bits(run(experiment(method__name="fedirm", **off | {name: True}, **sure)).weights, parent)


def test_teachers_are_restored_after_resume(tmp_path: Path) -> None:
    stopped_and_resumed("fedirm", tmp_path, "relation-matching/teacher", "relation-matching/steps")
