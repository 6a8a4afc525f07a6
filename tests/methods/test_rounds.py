"""Whole rounds of the plain methods with twelve clients, against SGD and averages worked out here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import SGD, classifier, rounds_of, trained_by_hand, twelve
from torch import Tensor
from torch.nn import functional as F

from fedmll.data.federation import Federation, build
from fedmll.methods.framework.client_round import Batch

MISSING = {"annotation__kind": "missing", "annotation__missing": 4}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build(twelve(**MISSING))


def over_all(logits: Tensor, batch: Batch) -> Tensor:
    return F.binary_cross_entropy_with_logits(logits, (batch.targets == 1).float())


def over_known(logits: Tensor, batch: Batch) -> Tensor:
    known = batch.targets >= 0
    return F.binary_cross_entropy_with_logits(logits[known], (batch.targets[known] == 1).float())


@pytest.mark.parametrize(
    ("name", "options", "loss", "mu"),
    [
        ("fedavg", {}, over_all, 0.0),
        ("fedavg-pl", {}, over_known, 0.0),
        ("fedprox", {"method__mu": 0.8}, over_all, 0.8),
        ("fedprox", {}, over_all, 0.01),
    ],
)
def test_client_trains_with_sgd_on_the_loss_of_its_method(
    federation: Federation, tmp_path: Path, name: str, options: dict[str, Any], loss: Any, mu: float
) -> None:
    """In the second round, where BatchNorm's statistics and the round's start are no longer those of the seed."""
    experiment = twelve(method__name=name, training__local_epochs=2, **MISSING, **SGD, **options)
    with rounds_of(federation, experiment, tmp_path) as rounds:
        rounds.next()
        second = rounds.next()
        assert len(second.exchanges) == 12
        for exchange in second.exchanges[:2] + second.exchanges[-1:]:
            client = rounds.client(exchange.peer)
            model = classifier(rounds, 10)
            expected, mean = trained_by_hand(model, exchange.sent.tensors, client, loss, lr=0.1, mu=mu)
            torch.testing.assert_close(exchange.reply["weights"], expected["weights"], atol=2e-6, rtol=1e-5)
            assert exchange.reply.numbers["loss"] == pytest.approx(mean, rel=1e-5)
            assert exchange.samples == len(client.data)


LEARNED = {"method__encoder": "learned"}


@pytest.mark.parametrize(
    ("name", "options", "by_size"),
    [
        ("fedavg", {}, True),
        ("fedavg", {"method__weighting": "equal"}, False),
        ("fedavg-pl", {}, True),
        ("fedprox", {}, True),
        ("fedctran", {}, True),
        ("fedctran", {"method__weighting": "equal"}, False),
        ("fedlgt", LEARNED, True),
        ("fednca-ml", {"model__channels": (4, 12)}, False),
        ("fednca-ml", {"model__channels": (4, 12), "method__weighting": "size"}, True),
        ("fedharmony", {}, True),  # in round 1
        ("private-fedavg", {"method__labels": "public", "method__loss": "sigmoid"}, True),
        ("private-fedprox", {"method__labels": "public", "method__loss": "sigmoid"}, True),
    ],
)
def test_the_server_averages_models_and_their_statistics(
    federation: Federation, tmp_path: Path, name: str, options: dict[str, Any], by_size: bool
) -> None:
    """Σ n_k w_k / Σ n_k or the plain mean, BatchNorm's running statistics included; its counters are a client's."""
    with rounds_of(federation, twelve(method__name=name, **MISSING, **options), tmp_path) as rounds:
        first = rounds.next()
    sizes = first.sizes if by_size else np.ones(12)
    assert first.sizes.std() > 3
    np.testing.assert_allclose(first.after["weights"], sizes / sizes.sum() @ first.models, atol=1e-6, rtol=1e-5)
    assert first.after["counters"].tolist() in [exchange.reply["counters"].tolist() for exchange in first.exchanges]
    assert torch.equal(first.exchanges[0].sent["weights"], first.before["weights"])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fedavg", {}),
        ("fedavg-pl", {}),
        ("fedctran", {}),
        ("fedlgt", LEARNED),
        ("fednca-ml", {"model__channels": (4, 12)}),
        ("fedharmony", {}),
    ],
)
def test_only_training_batches_are_augmented(
    federation: Federation, tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    """In the second round: FedHarmony's alignment has begun then."""
    experiment = twelve(method__name=name, training__augment="shift", **MISSING, **options)
    with rounds_of(federation, experiment, tmp_path) as rounds:
        rounds.next()
        peer = rounds.engine.clients[0]
        originals = {image.numpy().tobytes() for image in rounds.inputs(peer)}
        _, passes = rounds.train(peer, rounds.model.backbone)
    assert any(p.training for p in passes)
    for seen in passes:
        unchanged = [image.numpy().tobytes() in originals for image in seen.images]
        if seen.training:
            assert sum(unchanged) < len(unchanged) / 2
        else:
            assert all(unchanged)
