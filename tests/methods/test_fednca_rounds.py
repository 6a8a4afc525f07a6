"""FedNCA-ML in whole rounds: the loss that a client reports is worked out again from what its network computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    Exchange,
    Pass,
    Rounds,
    bce,
    contrast_by_loops,
    method_for,
    rejection_by_loops,
    rounds_of,
    rows_of,
    sigmoid,
    twelve,
    watched,
)

from fedmll.data.federation import Federation, build
from fedmll.models.backbones import build_backbone
from fedmll.models.class_attention import Ladm, PrototypeClassifier, simplex_etf

MISSING = {"annotation__kind": "missing", "annotation__missing": 3}
CLASSES, WIDTH = 10, 12


def nca(**options: Any) -> Any:
    wide = {"model__channels": (4, WIDTH), "method__name": "fednca-ml"}
    return twelve(**wide, **MISSING, **{f"method__{key}": value for key, value in options.items()})


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build(nca())


def hinge(s: np.ndarray, targets: np.ndarray, tau: float) -> float:
    scores = np.sort(s.max(2)[targets == 0])[::-1][: (targets == 1).sum()]
    return float(np.maximum(0, sigmoid(scores) - tau).sum() / len(targets))


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


def losses_of(
    exchange: Exchange, rounds: Rounds, passes: list[Pass], images: list[Pass], option: dict[str, Any]
) -> Any:
    """Eq. 10–14 of the class-wise features h (batch, C, width) that were seen, step by step."""
    m = simplex_etf(WIDTH, CLASSES, 0).double().numpy()
    all_targets, all_images = rounds.targets(exchange.peer), rounds.inputs(exchange.peer)
    for seen, batch in zip(passes, images, strict=True):
        y = all_targets[rows_of(batch.images, all_images)]
        h = seen.output.double().numpy()
        if not option.get("ladm", True):  # one pooled feature for all classes
            h = np.repeat(h.mean((2, 3))[:, None], CLASSES, axis=1)
        s = h @ m.T
        z = np.diagonal(s, axis1=1, axis2=2)
        if "logit_scale" in option:
            z = z * option["logit_scale"]
        loss = bce(z, y == 1)[y >= 0].mean()
        tau = option.get("tau", 0.3)
        rejection = hinge(s, y, tau) if "rejection" in option else rejection_by_loops(s, y, tau)
        if "contrast" in option:
            s = unit(h) @ unit(m).T / option.get("temperature", 0.07)
        loss += option.get("lambda_neg", 0.01) * rejection * option.get("neg", True)
        loss += option.get("lambda_pos", 1.0) * contrast_by_loops(s, y) * option.get("pos", True)
        yield loss


@pytest.mark.parametrize(
    "option",
    [
        {},
        {"lambda_neg": 2.0, "tau": 0.45},
        {"lambda_neg": 2.0, "pos": False},
        {"lambda_pos": 0.3, "neg": False},
        {"lambda_neg": 2.0, "rejection": "hinge-topk", "tau": 0.4},
        {"contrast": "cosine"},
        {"contrast": "cosine", "temperature": 0.5},
        {"ladm": False, "lambda_neg": 2.0},
        {"ladm": False, "lambda_neg": 2.0, "rejection": "hinge-topk", "contrast": "cosine"},
    ],
    ids=str,
)
def test_the_loss_of_a_client_in_the_second_round(
    federation: Federation, tmp_path: Path, option: dict[str, Any]
) -> None:
    with rounds_of(federation, nca(**option), tmp_path) as rounds:
        first = rounds.next()
        with watched(rounds.model.backbone) as images:
            exchange, passes = rounds.train(first.exchanges[1].peer, rounds.model.ladm or rounds.model.backbone)
        expected = list(losses_of(exchange, rounds, passes, images, option))
    assert all(seen.training for seen in passes)
    assert len(expected) > 1
    assert exchange.reply.numbers["loss"] == pytest.approx(np.mean(expected), rel=1e-5)


def test_a_learned_scale_of_the_logits(federation: Federation, tmp_path: Path) -> None:
    """It starts as the option says, and scales z_c alone. One batch, so that it does not change meanwhile."""
    experiment = nca(logit_scale=7.0).changed({"training.batch_size": 500})
    with rounds_of(federation, experiment, tmp_path) as rounds:
        with watched(rounds.model.backbone) as images:
            exchange, passes = rounds.train(rounds.engine.clients[11], rounds.model.ladm)
        (expected,) = losses_of(exchange, rounds, passes, images, {"logit_scale": 7.0})
    assert exchange.reply.numbers["loss"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("option", "queries", "learnable"),
    [
        ({}, "etf", False),
        ({"heads": 3}, "etf", False),
        ({"positional": False}, "etf", False),
        ({"query": "learnable-etf"}, "etf", True),
        ({"query": "learnable-random"}, "random", True),
        ({"etf": False}, "etf", False),
        ({"etf": False, "query": "learnable-random"}, "random", True),
        ({"ladm": False}, None, False),
        ({"ladm": False, "query": "learnable-random"}, None, False),
    ],
    ids=str,
)
def test_network_follows_the_options(
    federation: Federation, option: dict[str, Any], queries: str | None, learnable: bool
) -> None:
    method = method_for(federation, nca(**option))
    found = method.build_model().eval()
    etf = simplex_etf(WIDTH, CLASSES, 0)
    ladm = None
    if queries is not None:
        start = etf if queries == "etf" else torch.zeros(CLASSES, WIDTH)
        heads, positional = option.get("heads", 4), option.get("positional", True)
        ladm = Ladm(start, heads, learnable=learnable, positional=positional)
    backbone = build_backbone(method.task.experiment.model, method.task.sample_shape, 0)
    expected = PrototypeClassifier(backbone, CLASSES, etf if option.get("etf", True) else None, ladm).eval()
    expected.load_state_dict(found.state_dict())
    images = method.task.preprocess(torch.from_numpy(federation.test.samples(slice(0, 20))))
    with torch.no_grad():
        assert torch.equal(found(images), expected(images))
    assert {n for n, p in found.named_parameters()} == {n for n, p in expected.named_parameters()}
    if queries == "random":  # the size of a unit vector, as the ETF's
        lengths = found.ladm.queries.detach().norm(dim=1)
        assert lengths.mean().item() == pytest.approx(1, abs=0.25)
        assert lengths.std().item() > 0.05
    elif queries == "etf":
        assert torch.equal(found.ladm.queries.detach(), etf)


def test_lambda_of_the_paper_in_the_loss(federation: Federation, tmp_path: Path) -> None:
    """λ1 = "auto" is 1 for CIFAR-10 and 0.01 elsewhere: the same round under another name of the data."""
    losses = {}
    for name in ("ml-cifar10", "ml-digits"):
        for option in ({}, {"lambda_neg": 1.0}, {"lambda_neg": 0.01}):
            experiment = nca(**option).changed({"data.name": name})
            with rounds_of(federation, experiment, tmp_path / f"{name}{option}") as rounds:
                exchange, _ = rounds.train(rounds.engine.clients[0])
            losses[name, str(option)] = exchange.reply.numbers["loss"]
    assert losses["ml-cifar10", "{}"] == losses["ml-cifar10", "{'lambda_neg': 1.0}"]
    assert losses["ml-digits", "{}"] == losses["ml-digits", "{'lambda_neg': 0.01}"]
    assert losses["ml-digits", "{}"] != losses["ml-cifar10", "{}"]
