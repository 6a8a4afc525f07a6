"""RSCFed: the group weights, the teacher's loss, groups from the seed, and FedAvg-PL with both switches off."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from builders import same_bits
from scipy.special import expit
from semi_builders import ANNOTATED, LABELS, batch_of, learner_for, logits_of, numbered, stopped_and_resumed

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import DiskBuffer, Message
from fedmll.core.seeding import numpy_generator
from fedmll.testing import aggregate, compute_loss, experiment, make_client_info, make_trainer, start_round

SIZES = (40.0, 10.0, 30.0, 20.0, 25.0)


def replies_for(trainer, sizes=SIZES):  # type: ignore[no-untyped-def]
    """Clients with models at random, far enough apart for the distances to count."""
    length = len(trainer.weights.vector)
    rng = np.random.default_rng(1)
    models = [torch.tensor(rng.normal(size=length) * (1 + 9 * k), dtype=torch.float32) for k in range(len(sizes))]
    counters = torch.zeros_like(trainer.weights.counters)
    return [
        (make_client_info(k, 3), Message({"weights": model, "counters": counters + k}, {"samples": size}))
        for k, (model, size) in enumerate(zip(models, sizes, strict=True))
    ]


def weights_by_numpy(trainer, replies, members, beta=0.01):  # type: ignore[no-untyped-def]
    models = np.stack([replies[k][1]["weights"].double().numpy() for k in members])
    sizes = np.array([replies[k][1].numbers["samples"] for k in members])
    ends = np.cumsum([place.shape.numel() for place in trainer.weights.layout.values()])[:-1]
    difference = models - models.mean(0)
    distance = np.array([sum(np.linalg.norm(part) for part in np.split(row, ends)) for row in difference])
    weights = sizes / sizes.sum() * np.exp(-beta * distance / sizes)
    return weights / weights.sum()


@pytest.mark.parametrize(("options", "size"), [({}, 3), ({"groups": 10, "group_size": 4, "sharpness": 0.5}, 4)])
def test_the_global_model_is_the_mean_of_the_groups_weighted_means(options: dict[str, float], size: int) -> None:
    trainer = learner_for("rscfed", **options)
    replies, round = replies_for(trainer), 7
    state, records = aggregate(trainer.method, trainer.method.initial_state(), replies, round)
    generator = numpy_generator(trainer.task.seed, round, "sub-consensus groups")
    share = np.zeros(5)
    count = int(options.get("groups", 3))
    for _ in range(count):
        members = generator.choice(5, size, replace=False)
        assert len(members) == size
        share[members] += weights_by_numpy(trainer, replies, members, options.get("sharpness", 0.01)) / count
    np.testing.assert_allclose(records["share"], share, rtol=1e-7)
    models = np.stack([reply["weights"].double().numpy() for _, reply in replies])
    np.testing.assert_allclose(state["weights"], share @ models, rtol=1e-5, atol=1e-5)
    assert share.sum() == pytest.approx(1)
    assert records["clients"].tolist() == [0, 1, 2, 3, 4]


def test_two_clients_by_hand() -> None:
    """n = 10 and 30, both at the distance d from the middle: the weights are 10 exp(−βd/10) and 30 exp(−βd/30)."""
    trainer = learner_for("rscfed", groups=1, group_size=2)
    near = torch.zeros_like(trainer.weights.vector)
    place = next(iter(trainer.weights.layout.values())).start
    far = near.clone()
    far[place] = 200.0  # the middle is at 100
    counters = torch.zeros_like(trainer.weights.counters)
    replies = [
        (make_client_info(k, 3), Message({"weights": w, "counters": counters}, {"samples": n}))
        for k, (w, n) in enumerate([(near, 10.0), (far, 30.0)])
    ]
    state, records = aggregate(trainer.method, trainer.method.initial_state(), replies, 1)
    first, second = 10 * np.exp(-0.1), 30 * np.exp(-1 / 30)
    assert records["share"].tolist() == pytest.approx([first / (first + second), second / (first + second)])
    assert state["weights"][place].item() == pytest.approx(200 * second / (first + second))


def test_one_group_without_distances_is_the_average_by_size() -> None:
    trainer = learner_for("rscfed", groups=1, group_size=5, sharpness=0)
    replies = replies_for(trainer)
    _, records = aggregate(trainer.method, trainer.method.initial_state(), replies, 1)
    np.testing.assert_allclose(records["share"], np.array(SIZES) / sum(SIZES))


def test_groups_differ_between_rounds_and_half_is_rounded_up() -> None:
    trainer = learner_for("rscfed", groups=1)
    replies = replies_for(trainer)
    heard = [
        tuple(np.flatnonzero(aggregate(trainer.method, trainer.method.initial_state(), replies, r)[1]["share"]))
        for r in range(1, 9)
    ]
    assert {len(members) for members in heard} == {3}  # of five
    assert len(set(heard)) > 1


@pytest.mark.parametrize(
    ("changes", "refused"),
    [
        ({"method__group_size": 5}, True),
        ({"method__group_size": 4}, False),
        ({"method__group_size": 3, "participation__count": 2}, True),
        ({"method__group_size": 2, "participation__fraction": 0.5}, False),
        ({"method__group_size": 3, "participation__fraction": 0.5}, True),
    ],
)
def test_group_larger_than_a_round_is_refused_before_training(changes: dict[str, float], refused: bool) -> None:
    trainer, peers = (
        make_trainer(experiment(method__name="rscfed", **changes)),
        [make_client_info(k, 3) for k in range(4)],
    )
    if refused:
        with pytest.raises(ConfigError, match=r"method.group_size = \d is more than the \d clients"):
            trainer.method.validate_clients(peers)
    else:
        trainer.method.validate_clients(peers)


def test_loss_is_bce_of_known_entries_and_distance_to_the_teacher() -> None:
    trainer, client = learner_for("rscfed", client=LABELS, view="none", strength=0.5)
    teacher = trainer.weights.vector.clone() - 0.2
    client_round = start_round(trainer, client, client_state={"mean-teacher/teacher": teacher})
    assert client_round.unknown_targets_taught
    rows, z = batch_of(client)
    labels, round_state = LABELS[rows], expit(z)
    theirs = expit(logits_of(trainer, client, teacher)[rows])
    known = labels >= 0
    bce = -np.where(labels == 1, np.log(round_state), np.log(1 - round_state))
    expected = bce[known].mean() + 0.5 * ((round_state - theirs) ** 2)[~known].mean()
    assert compute_loss(trainer, client_round).item() == pytest.approx(expected, rel=1e-5)


def test_teacher_is_updated_and_kept() -> None:
    trainer, client = learner_for("rscfed", client=LABELS, decay=0.9)
    memory: dict[str, torch.Tensor] = {}
    start = trainer.weights.dump()
    trainer.train(client, Message(start), memory)  # one step
    expected = 0.9 * start["weights"] + 0.1 * trainer.weights.vector
    torch.testing.assert_close(memory["mean-teacher/teacher"], expected)
    trainer.train(client, Message(start), memory)  # the student starts anew, the teacher goes on
    torch.testing.assert_close(memory["mean-teacher/teacher"], 0.9 * expected + 0.1 * trainer.weights.vector)


def test_view_is_for_the_teacher_and_an_unknown_view_is_refused() -> None:
    found = [
        compute_loss(lr, start_round(lr, c))
        for lr, c in (learner_for("rscfed", client=LABELS, view=v) for v in ("none", "weak"))
    ]
    assert found[0] != found[1]
    with pytest.raises(ConfigError, match=r"method.view: .*'nonsense'"):
        experiment(method__name="rscfed", method__view="nonsense")


def test_disk_buffer_reads_in_any_order() -> None:
    spill = DiskBuffer()
    for k in range(4):
        spill.add(make_client_info(k, 3), numbered(k))
        assert float(spill[0][1]["weights"][0]) == 0.0  # between two that are written
    assert [float(spill[k][1]["weights"][0]) for k in (3, 0, 2)] == [3.0, 0.0, 2.0]


def test_all_switches_off_is_fedavg_pl_and_each_switch_has_an_effect() -> None:
    parent = run(experiment(method__name="fedavg-pl", **ANNOTATED)).weights
    off = {"method__consistency": False, "method__sub_consensus": False}
    assert same_bits(run(experiment(method__name="rscfed", **off, **ANNOTATED)).weights, parent)
    for name in off:
        assert not same_bits(run(experiment(method__name="rscfed", **off | {name: True}, **ANNOTATED)).weights, parent)


def test_teachers_are_restored_after_resume(tmp_path: Path) -> None:
    stopped_and_resumed("rscfed", tmp_path, "mean-teacher/teacher")
