"""The contract of parts: exchanges outside the rounds, hooks, client state, replies that are read twice."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmll import resume, run
from fedmll.core.errors import ConfigError, ReplyRejected
from fedmll.core.message import DiskBuffer, Message, Tensors
from fedmll.methods import find
from fedmll.methods.framework import client_round as rounds
from fedmll.methods.framework.base import (
    LARGEST_SUMMED,
    Aggregator,
    ImageTransform,
    Part,
    PartOptions,
    Records,
    TensorSpec,
    option,
)
from fedmll.methods.framework.client_round import Batch, ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.parts.averaging import WeightedAverage, WeightedMean
from fedmll.methods.parts.semi_supervised import EmaTeacher, pseudo_targets, ramp_up
from fedmll.testing import (
    compute_loss,
    experiment,
    first_step,
    make_client,
    make_client_info,
    make_trainer,
    start_round,
)

LABELS = np.array([[1, -1, 0], [0, 1, 0], [0, -1, 1], [1, 0, 0], [0, 1, -1], [0, 0, 1]])


class Brightness(ImageTransform):
    """The mean pixel of all clients is known before round 1; of the last model's world after it."""

    name = "test-brightness"
    exchanges = frozenset({"opening", "closing"})
    sends = ("mean",)
    sums = ("sum",)
    asked: ClassVar[list[int]] = []

    def initial_state(self) -> Tensors:
        return {"mean": torch.zeros(2)}

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        self.asked.append(client_round.number)
        images = torch.cat([batch.raw for batch in client_round.client.evaluation_batches()]).double()
        return {"sum": torch.stack([images.sum(), torch.tensor(float(images.numel()))]).double()}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        asked = round == 0 or round > self.task.rounds
        return {"sum": TensorSpec((2,), torch.float64, low=0)} if asked else {}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return None if 0 < round <= self.task.rounds else super().aggregator(state, round, earlier)

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        mean, (total, count) = state["mean"].clone(), sums["sum"]
        mean[0 if round == 0 else 1] = total / count
        return {"mean": mean}, {}

    def transform_batch(self, step: TrainStep, round_state: Any) -> None:
        step.images = step.images - self.received(step.client_round)["mean"][0] / 255

    def finalize_model(self, state: Tensors, message: Message) -> None:
        message.tensors[f"{self.name}/mean"] = state["mean"]

    def transform_images(self, images: Tensor, received: Tensors) -> Tensor:
        assert received["mean"][0] > 0
        return images - received["mean"][0] / 255


class PlattStartAggregator(Method):
    name = "test-opening"
    parts = (*Method.parts, Brightness)


@pytest.mark.parametrize("workers", [0, 2])
def test_opening_and_closing_exchange_include_every_client(
    tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedmll.data import federation

    made = experiment(method__name="test-opening", participation__count=2, engine__workers=workers, training__rounds=3)
    data = federation.build(made)
    Brightness.asked.clear()
    seen: list[Tensors] = []
    deploy = Brightness.finalize_model
    monkeypatch.setattr(
        Brightness,
        "finalize_model",
        lambda self, state, message: (seen.append(dict(state)), deploy(self, state, message))[1],
    )
    result = run(made, tmp_path / "run", prepared=data)
    mean = np.mean([data.train.samples(int(row)).mean() for row in np.concatenate(data.samples)])
    assert seen[0]["mean"].tolist() == [pytest.approx(mean, rel=1e-5), 0.0]  # before round 1 of all four clients
    assert seen[-1]["mean"].tolist() == [pytest.approx(mean, rel=1e-5)] * 2
    if not workers:
        assert sorted(Brightness.asked) == [0] * 4 + [4] * 4
    assert [row["round"] for row in result.rows] == [0, 1, 2, 3, 4]  # the last one is the closing exchange
    longer = resume(tmp_path / "run", rounds=5)  # the opening is in the checkpoint, the closing is made anew
    again = run(made.changed({"training.rounds": 5}))
    assert all(torch.equal(longer.weights[name], again.weights[name]) for name in again.weights)


class Follower(Part):
    """An EMA teacher that is remembered between a client's rounds, and is a term of the loss."""

    name = "test-follower"
    decays: ClassVar[list[float]] = []

    class Options(PartOptions):
        decay: float = option(0.5, "of the teacher", ge=0, le=1)

    def on_round_start(self, client_round: ClientRound) -> EmaTeacher:
        return EmaTeacher(client_round.client, self.client_state(client_round).get("teacher"))

    def loss(self, step: TrainStep, teacher: EmaTeacher) -> Tensor:
        strength = ramp_up(step.client_round.number, step.client_round.total_rounds)
        return strength * (step.probabilities - teacher.probabilities(step.images)).square().mean()

    def on_step_end(self, client_round: ClientRound, teacher: EmaTeacher) -> None:
        teacher.follow(self.options.decay)

    def on_round_end(self, client_round: ClientRound, teacher: EmaTeacher) -> Tensors:
        self.client_state(client_round)["teacher"] = teacher.vector
        return {}


class Following(Method):
    name = "test-following"
    parts = (*Method.parts, Follower)


def test_teacher_is_updated_after_every_step_and_kept() -> None:
    made = experiment(
        method__name="test-following", training__optimizer="sgd", training__lr=0.5, training__batch_size=2
    )
    trainer = make_trainer(made)
    client = make_client(trainer, LABELS)
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
    vectors: list[Tensor] = []
    stepped = Follower.on_step_end

    def watched(self: Follower, client_round: ClientRound, teacher: EmaTeacher) -> None:
        vectors.append(client_round.weights.vector.clone())
        stepped(self, client_round, teacher)

    Follower.on_step_end = watched  # type: ignore[method-assign]
    try:
        trainer = make_trainer(made)
        client = make_client(trainer, LABELS)
        memory: Tensors = {}
        trainer.train(client, sent, memory)
    finally:
        Follower.on_step_end = stepped  # type: ignore[method-assign]
    assert len(vectors) == 3
    expected = sent["weights"]
    for vector in vectors:
        expected = 0.5 * expected + 0.5 * vector
    torch.testing.assert_close(memory["test-follower/teacher"], expected)
    trainer.train(client, sent, memory)  # the next round starts from it
    assert not torch.allclose(memory["test-follower/teacher"], expected)


def test_teacher_predicts_with_its_own_weights_in_evaluation_mode() -> None:
    trainer = make_trainer(experiment())
    client = make_client(trainer, LABELS)
    images = next(client.evaluation_batches()).images
    before = client.weights.vector.clone()
    teacher = EmaTeacher(client)
    trainer.model.eval()
    expected = torch.sigmoid(trainer.model(images)).detach()
    client.weights.vector.add_(0.3)
    trainer.model.train()
    counters = client.weights.counters.clone()
    torch.testing.assert_close(teacher.probabilities(images), expected)
    assert trainer.model.training
    assert torch.equal(client.weights.counters, counters)  # and batch statistics are untouched
    assert torch.equal(client.weights.vector, before + 0.3)


def test_pseudo_targets_and_ramp_up() -> None:
    p = torch.tensor([[0.0, 0.1, 0.1001], [0.5, 0.9, 1.0]])
    assert pseudo_targets(p, 0.1, 0.9).tolist() == [[0, 0, -1], [-1, 1, 1]]
    assert [ramp_up(t, 30) for t in (0, 15, 30, 99)] == pytest.approx([math.exp(-5), math.exp(-1.25), 1, 1])


# ---- the second pass


def test_disk_buffer_returns_every_reply_bit_for_bit() -> None:
    rng = np.random.default_rng(0)
    replies = [
        (make_client_info(k, 3), Message({"weights": torch.tensor(rng.normal(size=k + 1), dtype=torch.float32),
                                 "own": torch.tensor([k])}, {"samples": float(k)}))
        for k in range(12)
    ]  # fmt: skip
    buffer = DiskBuffer[ClientInfo]()
    for peer, reply in replies:
        buffer.add(peer, reply)
    for _ in range(2):
        again = list(buffer)
        assert [peer.index for peer, _ in again] == list(range(12))
        for (_, one), (_, other) in zip(replies, again, strict=True):
            assert torch.equal(one["weights"], other["weights"])
            assert torch.equal(one["own"], other["own"])
            assert one.numbers == other.numbers
    buffer.add(*replies[0])  # it can go on
    assert len(list(buffer)) == len(buffer) == 13


class Nearest(WeightedAverage):
    """An average of the half that is nearest to the mean: it needs the mean first."""

    name = "test-nearest"

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return NearestHalf()


class NearestHalf(Aggregator):
    def __init__(self) -> None:
        self.buffer, self.mean = DiskBuffer[ClientInfo](), WeightedMean()

    def add(self, peer: ClientInfo, reply: Message) -> None:
        self.buffer.add(peer, reply)
        self.mean.add(reply.tensors, 1.0)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        middle = self.mean.result()["weights"]
        distances = sorted(float((reply["weights"] - middle).norm()) for _, reply in self.buffer)
        limit, best = distances[(len(distances) - 1) // 2], WeightedMean()
        for _, reply in self.buffer:
            if float((reply["weights"] - middle).norm()) <= limit:
                best.add(reply.tensors, 1.0)
        return best.result(), {"limit": limit}


def test_average_that_reads_replies_twice() -> None:
    made = experiment().changed({"method": {"name": "compose", "average": "test-nearest"}})
    result = run(made)
    assert result.rows[-1]["limit"] > 0


# ---- optimizer state


@pytest.mark.parametrize("optimizer", ["adamw", "adam", "sgd"])
def test_kept_optimizer_state_is_restored(optimizer: str) -> None:
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

    def on_round_start(self, client_round: ClientRound) -> int:
        self.calls.append("prepare")
        return 7

    def transform_batch(self, step: TrainStep, round_state: int) -> None:
        assert round_state == 7
        self.calls.append("shape")

    def loss(self, step: TrainStep, round_state: int) -> Tensor:
        assert round_state == 7
        self.calls.append("term")
        return 0 * step.logits.sum() + 0 * step.features.sum()

    def on_gradients(self, client_round: ClientRound, round_state: int) -> None:
        self.calls.append(f"adjust {client_round.steps}")

    def on_step_end(self, client_round: ClientRound, round_state: int) -> None:
        self.calls.append(f"stepped {client_round.steps}")

    def on_round_end(self, client_round: ClientRound, round_state: int) -> Tensors:
        self.calls.append("finish")
        return {}


class Counting(Method):
    name = "test-counting"
    parts = (*Method.parts, Counted)


def test_order_of_hooks_and_one_forward_pass_per_step() -> None:
    trainer = make_trainer(experiment(method__name="test-counting", training__batch_size=3))
    passes: list[int] = []
    trainer.model.backbone.register_forward_hook(lambda *_: passes.append(1))
    client = make_client(trainer, LABELS)
    Counted.calls.clear()
    trainer.train(client, trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1), {})
    assert Counted.calls == [
        "prepare", "shape", "term", "adjust 0", "stepped 1", "shape", "term", "adjust 1", "stepped 2", "finish",
    ]  # fmt: skip
    assert len(passes) == 2


def test_two_views_have_the_same_targets() -> None:
    trainer = make_trainer(experiment())
    client_round = start_round(trainer, make_client(trainer, LABELS))
    step = first_step(trainer, client_round)
    single = step.images
    step.set_views([single, single.flip(3)])
    assert len(step.images) == len(step.targets) == len(step.rows) == 2 * len(single)
    assert torch.equal(step.targets[: len(single)], step.targets[len(single) :])
    assert torch.isfinite(compute_loss(trainer, client_round, step))


# ---- replies


def test_rejected_reply_has_the_message_of_the_part() -> None:
    trainer = make_trainer(experiment(method__name="test-opening"))
    state = trainer.method.initial_state()
    sent = trainer.method.send(state, make_client_info(0, 3), 0)
    good = Message({"test-brightness/sum": torch.ones(2, dtype=torch.float64)}, {"samples": 1.0})
    assert trainer.method.find_problem(sent, good, 0) is None
    assert "unknown key weights" in str(
        trainer.method.find_problem(sent, Message(good.tensors | {"weights": sent["weights"]}, good.numbers), 0)
    )
    bad = Message({"test-brightness/sum": -torch.ones(2, dtype=torch.float64)}, {"samples": 1.0})
    assert "test-brightness/sum holds values outside" in str(trainer.method.find_problem(sent, bad, 0))
    spec = TensorSpec((2, 2), rule=lambda t: torch.equal(t, t.T), broken="is not symmetric", why="two classes")
    assert spec.find_problem("r", torch.eye(2)) is None
    assert str(spec.find_problem("r", torch.tensor([[0.0, 1.0], [2.0, 0.0]]))) == "r is not symmetric"
    assert str(spec.find_problem("r", torch.zeros(3))).endswith("(two classes)")


def test_average_without_replies_is_an_error() -> None:
    with pytest.raises(ReplyRejected, match="nothing to average"):
        WeightedMean().result()


def test_bounds_of_a_specification_are_allowed_values() -> None:
    spec = TensorSpec((2,), low=-3, high=4, norm=5)
    assert spec.find_problem("t", torch.tensor([-3.0, 4.0])) is None
    for wrong, text in (
        ([-3.1, 0.0], "outside [-3, 4]"),
        ([0.0, 4.1], "outside [-3, 4]"),
        ([3.5, 4.0], "has the norm 5.32; at most 5 is accepted"),
    ):
        assert text in str(spec.find_problem("t", torch.tensor(wrong)))


# ---- options and configurations


def test_shared_options_are_those_that_say_so() -> None:
    class Sharing(Part):
        class Options(PartOptions):
            one: float = option(1.0, "for all parts", shared=True)
            two: float = option(1.0, "for this part")

    assert Sharing.shared_options() == ["one"]


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_options_are_finite(value: float) -> None:
    with pytest.raises(ConfigError, match="mu"):
        experiment(method__name="fedprox", method__mu=value)


def test_sums_without_a_specification_are_bounded() -> None:
    class Summed(Part):
        sends = sums = ("total",)

    expected = Summed.reply_spec(Summed.__new__(Summed), {"total": torch.zeros(1)}, 1)["total"]
    assert LARGEST_SUMMED == 1e9
    for value in (1e9, -1e9):
        assert expected.find_problem("total", torch.tensor([value])) is None
        assert expected.find_problem("total", torch.tensor([1.001 * value])) is not None


def test_options_decided_by_a_rule_can_be_reopened() -> None:
    config = find("fedavg").configure({"server_optimizer": "adam", "server_lr": 0.3, "trim": 0.1})
    reopened = config.reopened().values
    assert reopened["server_lr"] == "auto"  # the rule decides it again
    assert (reopened["server_optimizer"], reopened["trim"]) == ("adam", 0.1)
    assert "inducing" not in find("fedctran").configure({}).values  # no value is not a value: TOML has no null


def test_sites_do_not_receive_the_options_of_the_server() -> None:
    config = find("fedavg").configure({"server_optimizer": "adam", "trim": 0.1})
    for_sites = config.values_for_sites(config.values)
    assert for_sites["trim"] == 0.1 and not [name for name in for_sites if name.startswith("server")]
    composed = find("compose").configure(
        {"parts": ["masked", "server-optimizer"], "server-optimizer": {"server_lr": 1}}
    )
    for_sites = composed.values_for_sites(composed.values)
    assert for_sites["parts"] == ["masked"] and "server-optimizer" not in for_sites and for_sites["head"] == "linear"


def test_only_the_centralized_upper_bound_pools_the_data() -> None:
    assert find("centralized").configure({}).pooled
    assert not find("fedavg").configure({}).pooled


def test_parts_share_one_pass_over_the_data() -> None:
    trainer = make_trainer(experiment(method__name="fedavg"))
    client_round = ClientRound(make_client(trainer, LABELS), Message())
    with_features = client_round.outputs(features=True)
    assert with_features.features is not None and client_round.outputs() is with_features
    client_round.model_changed()
    plain = client_round.outputs()
    assert plain is not with_features and plain.features is None
    torch.testing.assert_close(plain.probabilities, with_features.probabilities)


class StoredViews:
    """Six samples with stored views of frozen features: view v of sample n is 100 v + n."""

    def __init__(self, views: int) -> None:
        self.tokens = [100.0 * view + np.arange(6)[:, None] for view in range(views)]

    def __len__(self) -> int:
        return 6

    def frozen_features(self, rows: np.ndarray, views: np.ndarray) -> np.ndarray:
        return np.array([self.tokens[view][row] for view, row in zip(views, rows, strict=True)])


def test_one_of_several_stored_views_is_drawn_for_each_sample() -> None:
    task: Any = SimpleNamespace(
        tensor=torch.from_numpy,
        preprocess=lambda raw: raw,
        raw_samples=lambda data, rows: torch.from_numpy(data.tokens[0][rows]),
    )

    def view(views: int, augmentation: str) -> np.ndarray:
        data: Any = StoredViews(views)
        rows, generator = torch.arange(6).repeat(20), torch.Generator().manual_seed(0)
        batch = Batch(
            task=task, data=data, rows=rows, targets=rows, augmentation=augmentation, generator=generator
        )  # fmt: skip
        values = batch.images.numpy()[:, 0]
        assert (values % 100 == rows.numpy()).all()
        return np.unique(values // 100)

    assert view(2, "flip").tolist() == [0, 1]
    assert view(3, "flip").tolist() == [0, 1, 2]
    assert view(2, "none").tolist() == view(1, "flip").tolist() == [0]


def test_batches_are_the_same_if_the_samples_are_not_gathered_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(experiment(training__batch_size=2, training__local_epochs=2))
    gathered = [(batch.rows, batch.targets, batch.raw) for batch in make_client(trainer, LABELS).batches()]
    monkeypatch.setattr(rounds, "GATHERED_BYTES", 0)
    single = list(make_client(trainer, LABELS).batches())
    assert len(single) == len(gathered) == 6 and all(batch.gathered is None for batch in single)
    for batch, (rows, targets, raw) in zip(single, gathered, strict=True):
        assert torch.equal(batch.rows, rows) and torch.equal(batch.targets, targets) and torch.equal(batch.raw, raw)


@pytest.mark.parametrize(("views", "at_once"), [(1, True), (2, False)])
def test_several_views_are_not_gathered_at_once(views: int, at_once: bool) -> None:
    """The view of a sample is drawn batch by batch."""
    trainer = make_trainer(experiment())
    client = make_client(trainer, LABELS)
    task: Any = SimpleNamespace(raw_samples=lambda data, order: torch.from_numpy(data.tokens[0][order]))
    stored: Any = StoredViews(views)
    client.task, client.data = task, stored
    assert (client._gather(np.arange(6)) is not None) == at_once


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_number_that_is_not_finite_is_rejected(value: float) -> None:
    problem = TensorSpec((3,)).find_problem("sums", torch.tensor([1.0, value, 2.0]))
    assert "sums holds NaN or infinite values" in str(problem)
    large = torch.tensor([3e38, 3e38, 1.0])  # finite, although the sum is not
    assert TensorSpec((3,)).find_problem("sums", large) is None


def test_a_free_size_is_one_unless_more_is_allowed() -> None:
    assert TensorSpec((None, 2)).find_problem("rows", torch.zeros(1, 2)) is None
    assert TensorSpec((None, 2)).find_problem("rows", torch.zeros(2, 2)) is not None
    assert TensorSpec((None, 2), most=5).find_problem("rows", torch.zeros(5, 2)) is None
    assert TensorSpec((None, 2), most=5).most_bytes == 5 * 2 * 4  # float32
