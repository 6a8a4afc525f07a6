"""The trainer equals plain torch: optimizers, the sum of losses, evaluation mode."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from fedmll.core.message import Message
from fedmll.data import federation
from fedmll.testing import experiment, make_client, make_client_info, make_trainer

LABELS = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 1], [0, 1, 1], [1, 1, 0]])
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda p: torch.optim.AdamW(p, 0.05, weight_decay=0.3),
    "adam": lambda p: torch.optim.Adam(p, 0.05, weight_decay=0.3),
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.8, weight_decay=0.3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [None, 0.01])
def test_round_equals_plain_torch(name: str, clip: float | None) -> None:
    made = experiment(
        training__optimizer=name, training__lr=0.05, training__momentum=0.8, training__weight_decay=0.3,
        training__batch_size=2, training__local_epochs=2, training__clip=clip, model__norm="group",
    )  # fmt: skip
    trainer = make_trainer(made)
    start = trainer.method.initial_state()
    reply = trainer.train(make_client(trainer, LABELS), trainer.method.send(start, make_client_info(0, 3), 1), {})
    by_hand = make_trainer(made)
    client, model = make_client(by_hand, LABELS), by_hand.model.train()
    optimizer, losses = OPTIMIZERS[name](list(model.parameters())), []
    for batch in client.batches():
        loss = F.binary_cross_entropy_with_logits(model(batch.images), (batch.targets == 1).float())
        optimizer.zero_grad()
        loss.backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    torch.testing.assert_close(reply["weights"], by_hand.weights.vector, atol=1e-5, rtol=1e-4)
    assert reply.numbers == {"samples": 6.0, "steps": 6.0, "loss": pytest.approx(np.mean(losses), rel=1e-5)}


@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_batches_do_not_depend_on_gathering_an_epoch_at_once(monkeypatch: pytest.MonkeyPatch, augment: str) -> None:
    trainer = make_trainer(experiment(training__batch_size=4, training__local_epochs=2, training__augment=augment))
    client = make_client(trainer, LABELS)
    at_once = list(client.batches())
    monkeypatch.setattr("fedmll.methods.framework.client_round.GATHERED_BYTES", len(LABELS) * 64 - 1)
    one_by_one = list(client.batches())
    assert [len(batch) for batch in at_once] == [4, 2, 4, 2]
    for batch, other in zip(at_once, one_by_one, strict=True):
        assert batch.gathered is not None and other.gathered is None
        for name in ("rows", "targets", "raw", "images"):
            assert torch.equal(getattr(batch, name), getattr(other, name)), name
        assert torch.equal(batch.raw, torch.from_numpy(client.data.store[batch.rows]))
        assert torch.equal(batch.targets, torch.from_numpy(client.data.labels[batch.rows]))


def test_losses_of_parts_are_added() -> None:
    both = experiment().changed(
        {"method": {"name": "compose", "head": "etf-ladm", "parts": ["masked", "contrast"]}, "model.channels": (4, 8)}
    )
    one = both.changed({"method.parts": ["masked"]})
    sums = []
    for made in (both, one):
        trainer = make_trainer(made)
        sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 1)
        sums.append(trainer.train(make_client(trainer, LABELS), sent, {}).numbers["loss"])
    assert sums[0] > sums[1] + 0.5  # a contrast of three classes is about log 3


def test_predict_uses_evaluation_mode_and_accepts_no_samples() -> None:
    trainer = make_trainer(experiment())
    data = make_client(trainer, LABELS).data
    trainer.model.train()
    found = trainer.predict(data, 0, 6)
    trainer.model.eval()
    with torch.no_grad():
        expected = torch.sigmoid(trainer.model(trainer.task.model_inputs(data, slice(0, 6))))
    torch.testing.assert_close(found, expected)
    assert trainer.predict(data, 3, 3).shape == (0, 3)


def test_pooled_method_has_one_client_with_all_data() -> None:
    made = experiment(method__name="centralized", annotation__kind="missing", annotation__missing=3)
    data = federation.build(made)
    trainer = make_trainer(data.experiment, data.train.classes, data.train.sample_shape)
    (peer,) = trainer.client_infos(data)
    assert (peer.index, peer.name, bool(peer.owned.all())) == (0, "pooled", True)
    client = trainer.client_in_round(data, peer, 1)
    assert len(client.data) == len(data.pooled_rows) and bool((client.targets >= 0).all())
    assert trainer.participants(data, 5) == [0]


def test_opening_exchange_trains_no_client() -> None:
    trainer = make_trainer(experiment(method__name="fed-ridge", model__freeze="backbone", model__weights="random"))
    before = trainer.weights.vector.clone()
    sent = trainer.method.send(trainer.method.initial_state(), make_client_info(0, 3), 0)
    reply = trainer.train(make_client(trainer, LABELS, round=0), sent, {})
    assert reply.numbers == {"samples": 6.0, "steps": 0.0, "loss": 0.0}
    assert torch.equal(trainer.weights.vector, before)


def test_training_mode_is_restored_and_only_used_devices_are_seeded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(experiment(training__batch_size=4))  # with batch normalisation
    labels = np.random.default_rng(0).integers(0, 2, (8, 3))
    message = Message(trainer.weights.dump())
    monkeypatch.setattr(torch, "manual_seed", None)  # 200 times as slow as the one generator that is needed
    first = trainer.train(make_client(trainer, labels), message, {})
    trainer.model.backbone.eval()
    again = trainer.train(make_client(trainer, labels), message, {})
    assert trainer.model.backbone.training and torch.equal(first["weights"], again["weights"])
