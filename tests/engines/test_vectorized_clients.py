"""Clients trained at once: as one after the other except for the last bits, with the same bits for any number of
workers, and refused where the result would be wrong or training slower."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError, ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.registry import register
from fedmll.data.federation import build
from fedmll.engines.local import LocalEngine
from fedmll.engines.simulation import group_clients
from fedmll.methods.framework.base import (
    Aggregator,
    Head,
    Part,
    PartOptions,
    Records,
    TensorSpec,
    TruthAudit,
    vectorized,
)
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative
from fedmll.models.backbones import Backbone
from fedmll.models.network import Classifier
from fedmll.testing import experiment
from fedmll.training.callbacks import Callback
from fedmll.training.round_loop import resume, run

CLIENTS = 12
SGD = {"training__optimizer": "sgd", "training__lr": 0.2}
UNKNOWN = {"annotation__kind": "missing", "annotation__missing": 2}


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Twelve clients of 7 to 60 feature vectors: their numbers of batches differ."""
    generator, path = np.random.default_rng(0), tmp_path_factory.mktemp("data") / "vectors.npz"
    hidden = generator.normal(size=(360, 5))
    features = (hidden @ generator.normal(size=(5, 20)) + generator.normal(size=(360, 20))).astype(np.float32)
    labels = (hidden + generator.normal(size=hidden.shape) > 0.5).astype(np.int8)
    np.savez(path, x_train=features[:300], y_train=labels[:300], x_test=features[300:], y_test=labels[300:])
    return {
        "data__name": f"features:{path}", "data__limit": None, "partition__clients": CLIENTS, "partition__minimum": 7,
        "model__channels": (16,), "training__batch_size": 8, "training__lr": 0.01,
    }  # fmt: skip


def weights_of(made: Experiment, **options: Any) -> Tensors:
    return run(made, **options).weights


def assert_close(one: Tensors, other: Tensors) -> None:
    """Close within float32 after two rounds, but not the same bits, which would mean that the clients were trained one
    after the other."""
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], atol=2e-5, rtol=2e-4)
    assert not all(torch.equal(tensor, other[name]) for name, tensor in one.items())


CASES: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "sgd": SGD,
    "some clipped": SGD | {"training__clip": 0.6},
    "momentum, clipped": SGD | {"training__momentum": 0.9, "training__clip": 0.1},
    "adam, clipped": {"training__optimizer": "adam", "training__clip": 0.05},
    "three epochs": {"training__local_epochs": 3},
    "no hidden layer": {"model__channels": ()},
    "two hidden layers": {"model__channels": (16, 12)},
    "fedavg-pl, unknown targets": {"method__name": "fedavg-pl"} | UNKNOWN,
    "fedprox": {"method__name": "fedprox", "method__mu": 1.0},
    "fednova": {"method__name": "fednova"} | SGD,
    "scaffold": {"method__name": "scaffold", "training__rounds": 3} | SGD,
    "fedcurv": {"method__name": "fedcurv", "method__strength": 1.0, "training__rounds": 3} | SGD,
    "spherefed": {"method__name": "spherefed"},
    "surgical, unknown targets": {"method__name": "surgical"} | UNKNOWN,
    "a part of the clients": {"participation__count": 7, "training__rounds": 4},
    **{f"loss {name}": {"training__loss": name} for name in ("weighted", "asl", "hill", "splc", "em")},
}


@pytest.mark.parametrize("case", CASES)
def test_vectorized_training_equals_sequential_except_for_the_last_bits(vectors: dict[str, Any], case: str) -> None:
    setting = vectors | CASES[case]
    alone, at_once = experiment(**setting), experiment(training__clients_per_batch=5, **setting)
    sizes = build(alone).sizes
    assert len(set(sizes.tolist())) > 4  # they do not fit together by themselves
    one, other = run(alone), run(at_once)
    assert_close(one.weights, other.weights)
    for first, second in zip(one.rows, other.rows, strict=True):
        if first["round"] <= alone.training.rounds:  # a closing exchange trains nothing
            assert second["loss"] == pytest.approx(first["loss"], rel=1e-4)


def test_vectorized_training_equals_fedavg_by_hand(vectors: dict[str, Any]) -> None:
    """One round in plain torch: every client starts from the same weights; the average is weighted by size."""
    made = experiment(**vectors | SGD, training__rounds=1, training__clients_per_batch=12)
    data = build(made)
    engine = LocalEngine(data, Path())
    model, start = engine.trainer.model, engine.initial_state()["weights"]
    total = torch.zeros_like(start)
    for peer in engine.clients:
        engine.trainer.weights.vector.copy_(start)
        client = engine.trainer.client_in_round(engine.federation, peer, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.2, weight_decay=0.01)
        for batch in client.batches():
            targets = (batch.targets == 1).float()
            torch.nn.functional.binary_cross_entropy_with_logits(model(batch.images), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
        total += engine.trainer.weights.vector * len(client.data)
    engine.close()
    found = torch.cat([tensor.flatten() for tensor in weights_of(made).values()])
    torch.testing.assert_close(found, total / data.sizes.sum(), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("method", [{}, {"method__name": "scaffold"} | SGD])
def test_vectorized_run_gives_the_same_bits_for_any_workers(vectors: dict[str, Any], method: dict[str, Any]) -> None:
    setting = vectors | method | {"training__clients_per_batch": 3}
    first, *others = (weights_of(experiment(**setting, engine__workers=workers)) for workers in (0, 1, 2, 3))
    for other in others:
        assert all(torch.equal(tensor, other[name]) for name, tensor in first.items())


class Stop(Callback):
    def on_client_end(self, round: int, done: int, total: int) -> None:
        if (round, done) == (3, 4):
            raise KeyboardInterrupt


def test_vectorized_run_gives_the_same_bits_after_resume(vectors: dict[str, Any], tmp_path: Path) -> None:
    """Control variates are client states: each client gets its own back."""
    made = experiment(**vectors | SGD, method__name="scaffold", training__rounds=4, training__clients_per_batch=4)
    expected = weights_of(made)
    with pytest.raises(KeyboardInterrupt):
        run(made, tmp_path / "run", callback=Stop())
    found = resume(tmp_path / "run", engine={"workers": 2}).weights
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


class Killing(Part):
    """Kills its worker in round 2 at one client, as the out-of-memory killer does, as long as a file does not exist."""

    name: ClassVar[str] = "test-killing-together"

    class Options(PartOptions):
        flag: str = ""

    def on_round_start(self, client_round: ClientRound) -> None:
        flag = Path(self.options.flag)
        if (client_round.number, client_round.client.name) == (2, "c003") and not flag.exists():
            if flag.name != "never":
                flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_group_of_a_dead_worker_is_trained_again(vectors: dict[str, Any], tmp_path: Path) -> None:
    setting = vectors | {"method__name": "compose", "training__clients_per_batch": 4, "engine__workers": 2}

    def made(flag: Path) -> Experiment:
        part = {"method__parts": ("unknown-as-negative", Killing.name), f"method__{Killing.name}__flag": str(flag)}
        return experiment(**setting | part)

    undisturbed, disturbed = weights_of(made(tmp_path)), weights_of(made(tmp_path / "died"))
    assert (tmp_path / "died").exists()
    assert all(torch.equal(tensor, disturbed[name]) for name, tensor in undisturbed.items())
    with pytest.raises(
        ClientError, match=r"worker that ran clients (c\d+, )*c003(, c\d+)* in round 2 was killed by signal 9"
    ):
        run(made(tmp_path / "never"))


def test_local_models_stay_with_their_clients(vectors: dict[str, Any]) -> None:
    one, other = (
        run(experiment(**vectors, method__name="local-only", **more))
        for more in ({}, {"training__clients_per_batch": 4})
    )
    for name in ("macro_auc", "map"):
        assert other.metrics[name] == pytest.approx(one.metrics[name], abs=0.02)


def test_frozen_tokens_with_a_linear_head() -> None:
    setting = {"model__freeze": "backbone", "model__weights": "random", "training__lr": 0.01, "partition__clients": 6}
    assert_close(weights_of(experiment(**setting)), weights_of(experiment(**setting, training__clients_per_batch=6)))


def test_pooled_method_trains_its_one_client_as_usual(vectors: dict[str, Any]) -> None:
    setting = vectors | {"method__name": "centralized"}
    one, other = weights_of(experiment(**setting)), weights_of(experiment(**setting, training__clients_per_batch=8))
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("clients", "size", "expected"),
    [(7, None, [1] * 7), (12, 5, [4, 4, 4]), (12, 12, [12]), (3, 8, [3]), (100, 16, [14] * 5 + [15] * 2), (0, 4, [])],
)
def test_groups_have_about_equal_sizes_and_keep_the_order(clients: int, size: int | None, expected: list[int]) -> None:
    order = list(range(100, 100 + clients))
    groups = group_clients(order, size)
    assert sorted(map(len, groups)) == expected and [client for group in groups for client in group] == order


# ---- parts


class Fixed(Part):
    """Pulls a client's logits to the client's own number, and its weights to those it started from."""

    name: ClassVar[str] = "test-fixed"

    def on_round_start(self, client_round: ClientRound) -> dict[str, Any]:
        mean = client_round.client.targets.float().mean(0)
        return {"mean": mean, "start": client_round.weights.parameter_vector.clone(), "strength": 0.5, "none": None}

    @vectorized
    def loss(self, step: TrainStep, round_state: dict[str, Any]) -> Tensor:
        return round_state["strength"] * (step.probabilities - round_state["mean"]).square().mean()

    @vectorized
    def on_gradients(self, client_round: ClientRound, round_state: dict[str, Any]) -> None:
        weights = client_round.weights
        weights.add_gradient(weights.parameter_vector - round_state["start"], round_state["strength"])


class Pulled(Method):
    name: ClassVar[str] = "test-pulled"
    parts = (UnknownAsNegative, Fixed)


class Other(Fixed):
    """A hook that a subclass overrides does not inherit the mark of its parent."""

    name: ClassVar[str] = "test-other"

    def loss(self, step: TrainStep, round_state: dict[str, Any]) -> Tensor:
        return super().loss(step, round_state)


def test_round_states_belong_to_their_clients(vectors: dict[str, Any]) -> None:
    setting = vectors | {"method__name": "test-pulled"}
    assert_close(weights_of(experiment(**setting)), weights_of(experiment(**setting, training__clients_per_batch=5)))


class Claiming(Part):
    """At some clients the unknown targets belong to another part."""

    name: ClassVar[str] = "test-claiming"

    def on_round_start(self, client_round: ClientRound) -> None:
        client_round.unknown_targets_taught = len(client_round.client.data) % 2 == 0


class Stepping(Part):
    """Its weight decreases in every step."""

    name: ClassVar[str] = "test-stepping"

    @vectorized
    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        return step.logits.square().mean() / (1 + step.client_round.steps)


class Replying(TruthAudit):
    """Replies with its weights, keeps them as client state, and draws from torch's global generator."""

    name: ClassVar[str] = "test-replying"

    def on_round_end(self, client_round: ClientRound, round_state: None) -> Tensors:
        vector, memory = client_round.weights.parameter_vector, self.client_state(client_round)
        memory["end"] = vector
        return {"end": vector, "drawn": torch.rand(1)}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"end": TensorSpec((self.weights.parameter_end,)), "drawn": TensorSpec((1,), low=0, high=1)}

    def count_correct(self, memory: Tensors, truth: Tensor) -> Tensor | None:
        return memory["end"]

    def audit_records(self, total: Tensor) -> Records:
        return {"remembered": float(total.abs().sum())}

    def aggregator(self, state: Tensors, round: int, beside: Any) -> Aggregator:
        return Spread()


class Spread(Aggregator):
    def __init__(self) -> None:
        self.ends, self.drawn = list[Tensor](), 0.0

    def add(self, peer: ClientInfo, reply: Message) -> None:
        self.ends.append(reply["end"])
        self.drawn += float(reply["drawn"])

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        return {}, {"spread": float(torch.stack(self.ends).std(0).sum()), "drawn": self.drawn}


@pytest.mark.parametrize("part", ["test-claiming", "test-stepping", "test-replying"])
def test_hooks_see_and_change_only_their_client(vectors: dict[str, Any], part: str) -> None:
    setting = vectors | UNKNOWN | {"method__name": "compose", "method__parts": ("unknown-as-negative", part)}
    setting |= {"engine__workers": 1}  # in the calling process a reply is merged before the next client comes
    one, other = run(experiment(**setting)), run(experiment(**setting, training__clients_per_batch=5))
    assert_close(one.weights, other.weights)
    for first, second in zip(one.rows, other.rows, strict=True):
        for key in {"spread", "drawn", "remembered"} & first.keys():
            assert second[key] == pytest.approx(first[key], rel=1e-3), key
    assert part != "test-replying" or {"spread", "drawn", "remembered"} <= other.rows[-1].keys()


class Unlike(Part):
    """Has round states that cannot be stacked."""

    name: ClassVar[str] = "test-unlike"

    class Options(PartOptions):
        what: str = "number"

    def on_round_start(self, client_round: ClientRound) -> Any:
        size = len(client_round.client.data)
        return {
            "number": size,
            "some": torch.zeros(3) if size % 2 else None,
            "samples": torch.zeros(size, 2),
            "object": ClientInfo(size, "", torch.zeros(1)),
            "keys": {str(size): torch.zeros(1)},
        }[self.options.what]

    @vectorized
    def loss(self, step: TrainStep, round_state: Any) -> None:
        return None


class Curious(Part):
    name: ClassVar[str] = "test-curious"

    @vectorized
    def on_gradients(self, client_round: ClientRound, round_state: None) -> None:
        client_round.weights.vector.zero_()


@pytest.mark.parametrize("what", ["number", "some", "samples", "object", "keys"])
def test_round_states_of_different_structure_are_refused(vectors: dict[str, Any], what: str) -> None:
    parts = {
        "method__name": "compose",
        "method__parts": ("unknown-as-negative", "test-unlike"),
        "method__test-unlike__what": what,
    }
    with pytest.raises(
        ClientError, match=r"clients_per_batch = 4: the round states of the part 'test-unlike' differ .* Leave"
    ):
        run(experiment(**vectors | parts, training__clients_per_batch=4))


def test_on_gradients_may_use_only_rows_of_weights(vectors: dict[str, Any]) -> None:
    setting = vectors | {
        "method__name": "compose",
        "method__parts": ("unknown-as-negative", "test-curious"),
        "training__clients_per_batch": 4,
    }
    with pytest.raises(ConfigError, match=r"'test-curious' failed in `on_gradients` .*, but not weights.vector"):
        run(experiment(**setting))


@pytest.mark.parametrize(
    ("method", "part"),
    [
        ({"method__name": "fednca-ml"}, "rejection"),
        ({"method__name": "fedharmony"}, "alignment"),
        ({"method__name": "private-fedavg", "method__loss": "sigmoid"}, "by-label"),
        ({"method__name": "rscfed"}, "mean-teacher"),
        ({"method__name": "fedrdn", "data__name": "ml-digits"}, "random-normalisation"),
        ({"method__name": "compose", "method__parts": ("unknown-as-negative", "test-other")}, "test-other"),
    ],
)
def test_part_that_is_not_vectorized_is_refused(vectors: dict[str, Any], method: dict[str, Any], part: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"training.clients_per_batch = 4: the part '{part}' can train only one client at a time"
    ):
        experiment(**({} if "data__name" in method else vectors) | method, training__clients_per_batch=4)


def test_incompatible_settings_are_refused(vectors: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"needs training.optimizer_state = 'fresh'"):
        experiment(**vectors, training__clients_per_batch=4, training__optimizer_state="kept")
    with pytest.raises(ConfigError, match=r"training.clients_per_batch.*greater than or equal to 2"):
        experiment(**vectors, training__clients_per_batch=1)


@pytest.mark.parametrize(
    ("setting", "layer"),
    [({}, "Conv2d"), ({"model__freeze": "backbone", "model__weights": "random", "model__width": 8}, "Conv2d")],
)
def test_network_with_other_layers_is_refused_before_training(
    setting: dict[str, Any], layer: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=rf"is for networks of linear layers .* a {layer}. Leave it out"):
        run(experiment(**setting, training__clients_per_batch=4), tmp_path / "run")
    assert not (tmp_path / "run").exists()


class Odd(Classifier):
    """A linear head with another layer next to it."""

    def __init__(self, backbone: Backbone, classes: int, beside: nn.Module) -> None:
        super().__init__(backbone, classes)
        self.beside = beside

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        features = super().features(images, states)
        return features if isinstance(self.beside, nn.Linear) else self.beside(features)


class OddHead(Head):
    name: ClassVar[str] = "test-odd"

    class Options(PartOptions):
        beside: str = "unused"

    def build(self, backbone: Backbone) -> Odd:
        width = backbone.width
        beside = {
            "norm": nn.BatchNorm1d(width, affine=False),
            "dropout": nn.Dropout(0.5),
            "unused": nn.Linear(width, 2),
        }
        return Odd(backbone, len(self.task.classes), beside[self.options.beside])


@pytest.mark.parametrize(("beside", "layer"), [("norm", "BatchNorm1d"), ("dropout", "Dropout")])
def test_network_with_dropout_or_statistics_is_refused(vectors: dict[str, Any], beside: str, layer: str) -> None:
    head = {"method__name": "compose", "method__head": "test-odd", "method__test-odd__beside": beside}
    with pytest.raises(ConfigError, match=rf"this one has beside, a {layer}"):
        run(experiment(**vectors | head, training__clients_per_batch=4))


def test_attention_is_refused(vectors: dict[str, Any]) -> None:
    head = {"method__name": "compose", "method__head": "etf-ladm"}
    with pytest.raises(ConfigError, match=r"this one has ladm, a Ladm"):
        run(experiment(**vectors | head, training__clients_per_batch=4))


def test_layer_without_a_gradient_is_reported(vectors: dict[str, Any]) -> None:
    """A client trained alone leaves such a layer unchanged; in a stacked row weight decay would change it."""
    head = {"method__name": "compose", "method__head": "test-odd"}
    with pytest.raises(ClientError, match=r"clients_per_batch = 4: the loss does not depend on beside.weight. Leave"):
        run(experiment(**vectors | head, training__clients_per_batch=4))


def test_error_names_the_methods_that_can_be_vectorized(vectors: dict[str, Any]) -> None:
    able = "fed-ridge, fedavg, fedavg-pl, fedcurv, fednova, fedprox, local-only, scaffold, spherefed, surgical"
    with pytest.raises(ConfigError) as found:
        experiment(**vectors, method__name="fedharmony", training__clients_per_batch=4)
    named = str(found.value).rpartition("at once: ")[2].removesuffix(".").split(", ")
    assert set(able.split(", ")) <= set(named) and not {"fednca-ml", "fedlgt", "centralized"} & set(named)


@register("loss", "test-deciding")
def deciding(logits: Tensor, targets: Tensor, positive_weight: Tensor | None = None) -> Tensor:
    return logits if logits.sum() > 0 else -logits


@pytest.mark.parametrize("workers", [0, 2])
def test_loss_with_branches_on_values_is_reported(vectors: dict[str, Any], workers: int) -> None:
    made = experiment(**vectors, training__loss="test-deciding", training__clients_per_batch=4, engine__workers=workers)
    with pytest.raises(
        ClientError, match=r"cannot be computed for several clients at once .* Leave training.clients_per_batch out"
    ):
        run(made)


def test_vectorized_error_names_a_diverging_client(vectors: dict[str, Any]) -> None:
    made = experiment(**vectors | {"training__optimizer": "sgd", "training__lr": 1e30}, training__clients_per_batch=12)
    with pytest.raises(ClientError, match=r"The loss of client c\d+ became (nan|inf) in round 1. Lower training.lr"):
        run(made)


def test_fingerprint_depends_on_clients_per_batch_only_if_set(vectors: dict[str, Any]) -> None:
    plain = experiment(**vectors)
    assert "together" not in plain.to_toml()
    prints = {
        made.fingerprint() for made in (plain, *(experiment(**vectors, training__clients_per_batch=n) for n in (2, 3)))
    }
    assert len(prints) == 3
