"""What the contract offers to parts: exchanges beside the rounds, a word after every step, memory, a second pass."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmll import resume, run
from fedmll.client import Peer, Step, Work
from fedmll.errors import ReplyRefused
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like, Merger, Part, PartOptions, Records, Sum, option
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Mean, WeightedMean
from fedmll.methods.parts.semi_supervised import EmaTeacher, pseudo_targets, ramp_up
from fedmll.methods.parts.spill import Spill
from fedmll.testing import client_of, experiment, learner_of, loss_of, peer_of, step_of, work_of

LABELS = np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0], [0, 1, -1], [0, 0, 1]])


class Brightness(Part):
    """The mean pixel of all clients is known before round 1; of the last model's world after it."""

    name = "test-brightness"
    exchanges = frozenset({"opening", "closing"})
    sends = ("mean",)
    asked: ClassVar[list[int]] = []

    def start(self) -> Tensors:
        return {"mean": torch.zeros(2)}

    def survey(self, work: Work) -> Tensors:
        self.asked.append(work.round)
        images = torch.cat([batch.raw for batch in work.client.scan()]).double()
        return {"sum": torch.stack([images.sum(), torch.tensor(float(images.numel()))]).double()}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        asked = round == 0 or round > self.task.rounds
        return {"sum": Like((2,), torch.float64, low=0)} if asked else {}

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger | None:
        if 0 < round <= self.task.rounds:
            return None
        place = 0 if round == 0 else 1

        def then(total: Tensor) -> Tensors:
            mean = state["mean"].clone()
            mean[place] = total[0] / total[1]
            return {"mean": mean}

        return Sum("sum", then)

    def shape(self, step: Step, mine: Any) -> None:
        step.images = step.images - step.work.received(self.name)["mean"][0] / 255

    def deploy(self, state: Tensors, message: Message) -> None:
        message.tensors[f"{self.name}/mean"] = state["mean"]

    def inputs(self, images: Tensor, received: Tensors) -> Tensor:
        assert received["mean"][0] > 0
        return images - received["mean"][0] / 255


class Opening(Method):
    name = "test-opening"
    parts = (*Method.parts, Brightness)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_opening_and_a_closing_exchange_ask_every_client(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmll.data import federation

    made = experiment(method__name="test-opening", participation__count=2, engine__workers=workers, training__rounds=3)
    data = federation.build(made)
    Brightness.asked.clear()
    seen: list[Tensors] = []
    deploy = Brightness.deploy
    monkeypatch.setattr(
        Brightness, "deploy", lambda self, state, message: (seen.append(dict(state)), deploy(self, state, message))[1]
    )
    result = run(made, tmp_path / "run", prepared=data)
    mean = np.mean([data.train.samples(int(row)).mean() for row in np.concatenate(data.samples)])
    assert seen[0]["mean"].tolist() == [pytest.approx(mean, rel=1e-5), 0.0]  # before round 1 of all four clients
    assert seen[-1]["mean"].tolist() == [pytest.approx(mean, rel=1e-5)] * 2
    if not workers:
        assert sorted(Brightness.asked) == [0] * 4 + [4] * 4
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3]
    longer = resume(tmp_path / "run", rounds=5)  # the opening is in the checkpoint, the closing is made anew
    again = run(made.changed({"training.rounds": 5}))
    assert all(torch.equal(longer.weights[name], again.weights[name]) for name in again.weights)


class Follower(Part):
    """An EMA teacher that is remembered between a client's rounds, and is a term of the loss."""

    name = "test-follower"
    decays: ClassVar[list[float]] = []

    class Options(PartOptions):
        decay: float = option(0.5, "of the teacher", ge=0, le=1)

    def prepare(self, work: Work) -> EmaTeacher:
        return EmaTeacher(work.client, work.memory(self.name).get("teacher"))

    def term(self, step: Step, teacher: EmaTeacher) -> Tensor:
        strength = ramp_up(step.work.round, step.work.rounds)
        return strength * (step.probabilities - teacher.probabilities(step.images)).square().mean()

    def stepped(self, work: Work, teacher: EmaTeacher) -> None:
        teacher.follow(self.options.decay)

    def finish(self, work: Work, teacher: EmaTeacher) -> Tensors:
        work.memory(self.name)["teacher"] = teacher.vector
        return {}


class Following(Method):
    name = "test-following"
    parts = (*Method.parts, Follower)


def test_a_teacher_follows_every_step_and_is_remembered() -> None:
    made = experiment(
        method__name="test-following", training__optimizer="sgd", training__lr=0.5, training__batch_size=2
    )
    learner = learner_of(made)
    client = client_of(learner, LABELS)
    sent = learner.method.send(learner.method.start(), peer_of(0, 3), 1)
    vectors: list[Tensor] = []
    stepped = Follower.stepped

    def watched(self: Follower, work: Work, teacher: EmaTeacher) -> None:
        vectors.append(work.client.weights.vector.clone())
        stepped(self, work, teacher)

    Follower.stepped = watched  # type: ignore[method-assign]
    try:
        learner = learner_of(made)
        client = client_of(learner, LABELS)
        memory: Tensors = {}
        learner.train(client, sent, memory)
    finally:
        Follower.stepped = stepped  # type: ignore[method-assign]
    assert len(vectors) == 3
    expected = sent["weights"]
    for vector in vectors:
        expected = 0.5 * expected + 0.5 * vector
    torch.testing.assert_close(memory["test-follower/teacher"], expected)
    learner.train(client, sent, memory)  # the next round starts from it
    assert not torch.allclose(memory["test-follower/teacher"], expected)


def test_a_teacher_predicts_with_its_own_weights_in_evaluation_mode() -> None:
    learner = learner_of(experiment())
    client = client_of(learner, LABELS)
    images = next(client.scan()).images
    before = client.weights.vector.clone()
    teacher = EmaTeacher(client)
    learner.model.eval()
    expected = torch.sigmoid(learner.model(images)).detach()
    client.weights.vector.add_(0.3)
    learner.model.train()
    counters = client.weights.counters.clone()
    torch.testing.assert_close(teacher.probabilities(images), expected)
    assert learner.model.training
    assert torch.equal(client.weights.counters, counters)  # and batch statistics are untouched
    assert torch.equal(client.weights.vector, before + 0.3)


def test_pseudo_targets_and_ramp_up() -> None:
    p = torch.tensor([[0.0, 0.1, 0.1001], [0.5, 0.9, 1.0]])
    assert pseudo_targets(p, 0.1, 0.9).tolist() == [[0, 0, -1], [-1, 1, 1]]
    assert [ramp_up(t, 30) for t in (0, 15, 30, 99)] == pytest.approx([math.exp(-5), math.exp(-1.25), 1, 1])


# ---- the second pass


def test_a_spill_gives_every_reply_again_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    replies = [
        (peer_of(k, 3), Message({"weights": torch.tensor(rng.normal(size=k + 1), dtype=torch.float32),
                                 "own": torch.tensor([k])}, {"samples": float(k)}))
        for k in range(12)
    ]  # fmt: skip
    spill = Spill()
    for peer, reply in replies:
        spill.add(peer, reply)
    for _ in range(2):
        again = list(spill)
        assert [peer.index for peer, _ in again] == list(range(12))
        for (_, one), (_, other) in zip(replies, again, strict=True):
            assert torch.equal(one["weights"], other["weights"])
            assert torch.equal(one["own"], other["own"])
            assert one.numbers == other.numbers
    spill.add(*replies[0])  # it can go on
    assert len(list(spill)) == len(spill) == 13


class Nearest(Mean):
    """An average of the half that is nearest to the mean: it needs the mean first."""

    name = "test-nearest"

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return NearestHalf()


class NearestHalf(Merger):
    def __init__(self) -> None:
        self.spill, self.mean = Spill(), WeightedMean()

    def add(self, peer: Peer, reply: Message) -> None:
        self.spill.add(peer, reply)
        self.mean.add(reply.tensors, 1.0)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        middle = self.mean.result()["weights"]
        distances = sorted(float((reply["weights"] - middle).norm()) for _, reply in self.spill)
        limit, best = distances[(len(distances) - 1) // 2], WeightedMean()
        for _, reply in self.spill:
            if float((reply["weights"] - middle).norm()) <= limit:
                best.add(reply.tensors, 1.0)
        return best.result(), {"limit": limit}


def test_an_average_with_a_second_pass() -> None:
    made = experiment().changed({"method": {"name": "compose", "average": "test-nearest"}})
    result = run(made)
    assert result.rows[-1]["limit"] > 0


# ---- optimiser state


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_kept_optimiser_state_goes_on_where_it_was(optimizer: str) -> None:
    """One client and one batch of everything: three rounds are one round of three epochs, and fresh ones are not."""
    base = experiment(
        training__optimizer=optimizer, training__momentum=0.9, training__batch_size=200, training__rounds=3,
        training__optimizer_state="kept", partition__clients=1, partition__holdout=0.0, model__norm="group",
        data__limit=32, training__lr=0.01,
    )  # fmt: skip
    long = base.changed({"training.rounds": 1, "training.local_epochs": 3})
    fresh = base.changed({"training.optimizer_state": "fresh"})
    kept, expected, other = (run(made).weights for made in (base, long, fresh))
    for name in expected:
        torch.testing.assert_close(kept[name], expected[name], atol=1e-6, rtol=1e-4)
    assert not all(torch.allclose(kept[name], other[name], atol=1e-5) for name in kept)


# ---- steps


class Counted(Part):
    name = "test-counted"
    calls: ClassVar[list[str]] = []

    def prepare(self, work: Work) -> int:
        self.calls.append("prepare")
        return 7

    def shape(self, step: Step, mine: int) -> None:
        assert mine == 7
        self.calls.append("shape")

    def term(self, step: Step, mine: int) -> Tensor:
        assert mine == 7
        self.calls.append("term")
        return 0 * step.logits.sum() + 0 * step.features.sum()

    def adjust(self, work: Work, mine: int) -> None:
        self.calls.append(f"adjust {work.steps}")

    def stepped(self, work: Work, mine: int) -> None:
        self.calls.append(f"stepped {work.steps}")

    def finish(self, work: Work, mine: int) -> Tensors:
        self.calls.append("finish")
        return {}


class Counting(Method):
    name = "test-counting"
    parts = (*Method.parts, Counted)


def test_the_order_of_a_client_s_round_and_one_forward_pass_a_step() -> None:
    learner = learner_of(experiment(method__name="test-counting", training__batch_size=3))
    passes: list[int] = []
    learner.model.backbone.register_forward_hook(lambda *_: passes.append(1))
    client = client_of(learner, LABELS)
    Counted.calls.clear()
    learner.train(client, learner.method.send(learner.method.start(), peer_of(0, 3), 1), {})
    assert Counted.calls == [
        "prepare", "shape", "term", "adjust 0", "stepped 1", "shape", "term", "adjust 1", "stepped 2", "finish",
    ]  # fmt: skip
    assert len(passes) == 2


def test_two_views_are_taught_the_same_targets() -> None:
    learner = learner_of(experiment())
    work = work_of(learner, client_of(learner, LABELS))
    step = step_of(learner, work)
    single = step.images
    step.show([single, single.flip(3)])
    assert len(step.images) == len(step.targets) == len(step.rows) == 2 * len(single)
    assert torch.equal(step.targets[: len(single)], step.targets[len(single) :])
    assert torch.isfinite(loss_of(learner, work, step))


# ---- replies


def test_a_part_s_reply_is_refused_by_its_own_words() -> None:
    learner = learner_of(experiment(method__name="test-opening"))
    state = learner.method.start()
    sent = learner.method.send(state, peer_of(0, 3), 0)
    good = Message({"test-brightness/sum": torch.ones(2, dtype=torch.float64)}, {"samples": 1.0})
    assert learner.method.refuse(sent, good, 0) is None
    assert "unknown key weights" in str(
        learner.method.refuse(sent, Message(good.tensors | {"weights": sent["weights"]}, good.numbers), 0)
    )
    bad = Message({"test-brightness/sum": -torch.ones(2, dtype=torch.float64)}, {"samples": 1.0})
    assert "test-brightness/sum holds values outside" in str(learner.method.refuse(sent, bad, 0))
    like = Like((2, 2), rule=lambda t: torch.equal(t, t.T), broken="is not symmetric", why="two classes")
    assert like.refuse("r", torch.eye(2)) is None
    assert like.refuse("r", torch.tensor([[0.0, 1.0], [2.0, 0.0]])) == "r is not symmetric"
    assert str(like.refuse("r", torch.zeros(3))).endswith("(two classes)")


def test_an_average_of_nothing_is_an_error() -> None:
    with pytest.raises(ReplyRefused, match="nothing to average"):
        WeightedMean().result()
