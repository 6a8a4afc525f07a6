"""What a client with a private label set sees and leaves: nothing of other classes, not even how many there are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn

from fedmll import run
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ClientError
from fedmll.core.message import Message, Tensors
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import Client, ClientRound
from fedmll.methods.framework.task import Task, task_of
from fedmll.methods.private_labels import PrivateFedAvg, SoftmaxLoss
from fedmll.testing import client_with

FEW = ("apple", "bean", "corn", "date")
MANY = ("egg", "date", "bean", "fig", "apple", "corn", "gum")  # more classes, in another order
OURS = ("apple", "date")
THEIRS = {FEW: ("bean", "corn"), MANY: ("egg", "fig", "gum")}
WIDTH, HIDDEN, EACH = 6, 5, 40


class FrozenEncoder(PrivateFedAvg):
    """The same encoder everywhere and always: what else a client receives is then seen by itself."""

    name: ClassVar[str] = "test-frozen-encoder"

    def build_model(self) -> nn.Module:
        model = super().build_model()
        model.get_submodule("backbone").requires_grad_(False)
        return model


def federation_of(classes: tuple[str, ...], method: dict[str, Any]) -> Federation:
    """Client `us` with the labels apple and date, always the same samples; client `them` with other labels."""
    rng = np.random.default_rng(0)
    features = rng.normal(size=(3 * EACH, WIDTH)).astype(np.float32)
    labels = np.zeros((3 * EACH, len(classes)), np.int8)
    drawn = rng.integers(1000, size=3 * EACH)
    for row, number in enumerate(drawn):
        names = OURS if row < EACH else THEIRS[classes]
        labels[row, classes.index(names[number % len(names)])] = 1
    owned = np.array([[name in names for name in classes] for names in (OURS, THEIRS[classes])])
    experiment = Experiment.make(
        {
            "data": {"name": "features:none.npz"},
            "method": {"loss": "softmax"} | method,
            "model": {"channels": (HIDDEN,)},
            "partition": {"clients": 2, "server": 0.1},
            "training": {"rounds": 4, "lr": 0.05, "batch_size": 8},
            "engine": {"workers": 0},
        }
    )
    everything = Dataset(features, labels, classes)
    train, test = everything.subset(np.arange(2 * EACH)), everything.subset(np.arange(2 * EACH, 3 * EACH))
    rows = (np.arange(EACH), np.arange(EACH, 2 * EACH))
    nobody = test.subset(np.arange(0))
    return Federation(
        experiment=experiment, train=train, true_labels=labels[: 2 * EACH], test=test, validation=nobody,
        held_out=nobody, held_out_owners=np.zeros(0, np.int64), names=("us", "them"), samples=rows,
        annotated=np.ones_like(owned), allowed=owned, report={}, server=test, source=train,
        pooled_rows=np.arange(2 * EACH), derived_settings={},
    )  # fmt: skip


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every message to the client `us` in a run, byte by byte, and its reply."""
    messages: list[dict[str, Any]] = []
    real = Trainer.train

    def train(self: Trainer, client: Client, message: Message, memory: Tensors) -> Message:
        reply = real(self, client, message, memory)
        if client.name == "us":
            content = {name: (t.dtype, tuple(t.shape), t.numpy().tobytes()) for name, t in message.tensors.items()}
            messages.append({"sent": (content, message.numbers), "reply": reply, "memory": memory})
        return reply

    monkeypatch.setattr(Trainer, "train", train)
    return messages


def run_in(classes: tuple[str, ...], seen: list[dict[str, Any]], **method: Any) -> list[dict[str, Any]]:
    seen.clear()
    prepared = federation_of(classes, method)
    run(prepared.experiment, prepared=prepared)
    return list(seen)


def test_messages_do_not_depend_on_the_labels_of_other_clients(seen: list[dict[str, Any]]) -> None:
    few, many = (run_in(classes, seen, name="test-frozen-encoder") for classes in (FEW, MANY))
    assert len(few) == 4
    assert [message["sent"] for message in few] == [message["sent"] for message in many]
    received = {message["sent"][0]["weights"] for message in few}
    assert len(received) == 4  # and it did learn


def test_federations_differ_only_in_the_values_of_the_encoder(seen: list[dict[str, Any]]) -> None:
    few, many = (run_in(classes, seen, name="private-fedavg") for classes in (FEW, MANY))
    assert few[0]["sent"] == many[0]["sent"]  # before the others have trained, nothing does
    head = WIDTH * HIDDEN + HIDDEN
    for ours, theirs in zip(few[1:], many[1:], strict=True):
        (a, numbers), (b, others) = ours["sent"], theirs["sent"]
        assert {n: value[:2] for n, value in a.items()} == {n: value[:2] for n, value in b.items()}
        assert numbers == others == {}
        assert a["weights"][1] == (head + 2 * (HIDDEN + 1),)
        assert a["weights"][2][: 4 * head] != b["weights"][2][: 4 * head]


@pytest.mark.parametrize("tuning", ["mse", "pairwise"])
def test_tuning_changes_no_shape(seen: list[dict[str, Any]], tuning: str) -> None:
    few, many = (run_in(classes, seen, name="private-fedavg", tuning=tuning) for classes in (FEW, MANY))
    shapes = [[{n: value[:2] for n, value in m["sent"][0].items()} for m in run] for run in (few, many)]
    assert shapes[0] == shapes[1]


def test_client_sends_only_its_own_rows(seen: list[dict[str, Any]], tmp_path: Path) -> None:
    prepared = federation_of(MANY, {"name": "private-fedprox"})
    run(prepared.experiment, tmp_path / "run", prepared=prepared)
    for message in seen:
        assert set(message["reply"].tensors) == {"weights"}
        assert set(message["reply"].numbers) == {"samples", "steps", "loss"}
        assert len(message["reply"]["weights"]) == WIDTH * HIDDEN + HIDDEN + 2 * (HIDDEN + 1)
        assert message["memory"] == {}
    assert not list(tmp_path.glob("run/checkpoint/client_state/*"))


def narrowed(classes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> Client:
    """The client as its method's parts see it."""
    caught: list[Client] = []
    real = SoftmaxLoss.on_round_start

    def prepare(self: SoftmaxLoss, client_round: ClientRound) -> Any:
        if client_round.client.name == "us":
            caught.append(client_round.client)
        return real(self, client_round)

    with monkeypatch.context() as patch:
        patch.setattr(SoftmaxLoss, "on_round_start", prepare)
        prepared = federation_of(classes, {"name": "private-fedavg"})
        run(prepared.experiment, prepared=prepared)
    return caught[-1]


def test_client_with_two_labels_trains_two_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    client = narrowed(MANY, monkeypatch)
    assert client.task.classes == client.data.classes == OURS
    assert client.task.server_data is None
    assert client.data.labels.shape == (EACH, 2)
    assert client.owned.shape == client.annotated.shape == (2,)
    assert all(7 not in parameter.shape for parameter in client.model.parameters())
    assert client.model.head.out_features == 2


def test_site_that_knows_only_its_classes_has_the_same_result() -> None:
    """As in a real federation: the site's task, data and model are of its own classes, in an order of its own."""
    prepared = federation_of(MANY, {"name": "private-fedavg"})
    everywhere = Trainer(task_of(prepared))
    peer = everywhere.client_infos(prepared)[0]
    message = everywhere.method.send(everywhere.method.initial_state(), peer, 1)
    simulated = everywhere.client_in_round(prepared, peer, 1)
    columns = np.array([MANY.index(name) for name in ("date", "apple")])
    own = simulated.data.select_classes(columns)
    task = Task(prepared.experiment, own.classes, (WIDTH,), 2, torch.device("cpu"))
    trainer = Trainer(task)
    both = torch.ones(2, dtype=torch.bool)
    site = replace(client_with(trainer, own, name=simulated.name), annotated=both, owned=both)
    replies = [everywhere.train(simulated, message, {}), trainer.train(site, message, {})]
    assert torch.equal(replies[0]["weights"], replies[1]["weights"])
    assert replies[0].numbers == replies[1].numbers


def test_errors_name_no_class() -> None:
    prepared = federation_of(MANY, {"name": "private-fedavg"})
    labels = prepared.train.labels.copy()
    labels[:3, [MANY.index(name) for name in OURS]] = 1
    broken = replace(prepared, train=prepared.train.with_labels(labels))
    with pytest.raises(ClientError, match="3 samples with two or more labels") as error:
        run(broken.experiment, prepared=broken)
    assert not any(name in str(error.value) for name in MANY)
