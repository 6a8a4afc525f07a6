"""What FedC-Tran and FedLGT tell their network of each label in a round, and what they learn from: seen from outside,
at the network's inputs and outputs. The networks have BatchNorm, whose statistics differ from a batch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import Exchange, Pass, Rounds, bce, method_for, rounds_of, rows_of, sigmoid, twelve, word_vectors
from torch import Tensor

from fedmll.data.federation import Federation, build
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.models import label_embeddings
from fedmll.models.backbones import build_backbone
from fedmll.models.ctran import CTran

MISSING = {"annotation__kind": "missing", "annotation__missing": 3}


@pytest.fixture(scope="module")
def federations() -> dict[bool, Federation]:
    """By whether every client annotates everything."""
    return {True: build(twelve()), False: build(twelve(**MISSING))}


@contextmanager
def watched_network(model: CTran) -> Iterator[list[Pass]]:
    """Every pass through the network, in order: images and states to logits, whether in one call or in two."""
    passes: list[Pass] = []
    entered: list[tuple[Any, ...]] = []
    features, logits = model.features, model.logits

    def enter(images: Tensor, states: Tensor | None = None) -> Tensor:
        entered.append((images.detach().clone(), None if states is None else states.clone()))
        return features(images, states)

    def leave(seen: Tensor) -> Tensor:
        output = logits(seen)
        passes.append(Pass(model.training, entered.pop(), output.detach().clone()))
        return output

    model.features, model.logits = enter, leave
    try:
        yield passes
    finally:
        del model.features, model.logits
    assert not entered


def trained(rounds: Rounds, peer: ClientInfo) -> tuple[Exchange, list[Pass]]:
    with watched_network(rounds.model) as passes:
        exchange, _ = rounds.train(peer)
    return exchange, passes


@pytest.fixture
def second_round(federations: dict[bool, Federation], tmp_path: Path) -> Iterator[Any]:
    """The largest client in the second round: its exchange, the network's passes, its rounds. With several epochs
    only a few clients train in the first round."""
    opened = []

    def train(full: bool = True, **overrides: Any) -> tuple[Exchange, list[Pass], Rounds]:
        settings = {"method__name": "fedlgt", "method__encoder": "learned"} | ({} if full else MISSING) | overrides
        if "training__local_epochs" in overrides:
            settings["participation__count"] = 3
        context = rounds_of(federations[full], twelve(**settings), tmp_path / str(len(opened)))
        opened.append(context)
        rounds = context.__enter__()
        rounds.next()
        largest = rounds.engine.clients[int(rounds.federation.sizes.argmax())]
        return *trained(rounds, largest), rounds

    yield train
    for context in opened:
        context.__exit__(None, None, None)


def fedctran(**overrides: Any) -> dict[str, Any]:
    return {"method__ca_mle": False} | overrides


def states_of(seen: Pass) -> np.ndarray:
    states: np.ndarray = seen.inputs[1].numpy()
    return states


# ---- label mask training


@pytest.mark.parametrize(("known", "most"), [(None, 7), (0.35, 3), (0.0, 0), (1.0, 10), (0.7, 7)])
def test_at_most_the_given_share_of_states_is_shown(second_round: Any, known: float | None, most: int) -> None:
    """⌊share · 10⌋; by default ⌊7.5⌋."""
    option = {} if known is None else {"method__known": known}
    exchange, passes, _ = second_round(training__local_epochs=6, **fedctran(**option))
    told = np.concatenate([(states_of(seen) >= 0).sum(1) for seen in passes])
    assert len(told) == 6 * exchange.samples > 150
    assert sorted(set(told)) == list(range(most + 1))
    assert told.mean() == pytest.approx(most / 2, abs=0.6)


@pytest.mark.parametrize("full", [True, False])
@pytest.mark.parametrize("ca_mle", [False, True])
def test_loss_is_over_hidden_states(second_round: Any, full: bool, ca_mle: bool) -> None:
    """Summed over the annotated labels whose state is unknown; a step's losses in the mean are what is reported."""
    exchange, passes, rounds = second_round(full, training__local_epochs=2, method__ca_mle=ca_mle)
    images, targets = rounds.inputs(exchange.peer), rounds.targets(exchange.peer)
    losses = []
    for seen in passes:
        if not seen.training:
            continue
        y, states = targets[rows_of(seen.images, images)], states_of(seen)
        assert np.isin(states, (-1, 0, 1)).all()
        assert (states == y)[states >= 0].all()
        entries = bce(seen.output.double().numpy(), y == 1)
        losses.append(entries[(states < 0) & (y >= 0)].sum())
    assert (targets < 0).any() == (not full)
    assert exchange.reply.numbers["steps"] == len(losses)
    assert exchange.reply.numbers["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_every_round_and_client_has_masks_of_its_own(second_round: Any) -> None:
    _, passes, rounds = second_round(**fedctran(training__rounds=3))
    others = [trained(rounds, peer)[1][0] for peer in rounds.engine.clients[:3]]
    rounds.number += 1
    later = [trained(rounds, peer)[1][0] for peer in rounds.engine.clients[:3]]
    masks = {(states_of(seen)[:6] >= 0).tobytes() for seen in [*others, *later]}
    assert len(masks) == 6
    assert all(seen.training for seen in passes)  # without CA-MLE nobody looks at the data first


# ---- CA-MLE


TAU, EPS = 0.45, 0.04
WIDE = {"method__tau": TAU, "method__eps": EPS}


def teacher_of(exchange: Exchange, rounds: Rounds, mode: str = "eval") -> np.ndarray:
    """The probabilities of the model that was sent, all states unknown."""
    return sigmoid(rounds.scores(exchange.sent.tensors, rounds.inputs(exchange.peer), mode=mode))


def test_the_teacher_is_the_model_that_was_sent_in_eval_mode(second_round: Any) -> None:
    exchange, passes, rounds = second_round(**WIDE, training__local_epochs=2)
    looks = [seen for seen in passes if not seen.training]
    assert passes[: len(looks)] == looks  # before training, once
    assert torch.equal(torch.cat([seen.images for seen in looks]), rounds.inputs(exchange.peer))
    for seen in looks:
        assert len(seen.inputs) == 1 or seen.inputs[1] is None or bool((seen.inputs[1] == -1).all())
    expected = teacher_of(exchange, rounds)
    np.testing.assert_allclose(sigmoid(torch.cat([seen.output for seen in looks]).numpy()), expected, atol=1e-5)
    other = teacher_of(exchange, rounds, "train")
    assert np.abs(other - expected).mean() > 0.02  # a teacher in train mode would be another one


@pytest.mark.parametrize("compat", ["none", "first-sample"])
def test_only_states_of_uncertain_labels_are_hidden(second_round: Any, compat: str) -> None:
    """τ − ε ≤ p ≤ τ + ε (Eq. 4); the released code looks at the first sample of a batch only."""
    exchange, passes, rounds = second_round(**WIDE, method__compat=compat)
    p = teacher_of(exchange, rounds)
    uncertain = np.abs(p - TAU) <= EPS
    clear = np.abs(np.abs(p - TAU) - EPS) > 1e-5  # not just at the limit
    assert 0.1 < uncertain.mean() < 0.9
    _, plain, _ = second_round(**fedctran())
    guided = [seen for seen in passes if seen.training]
    hidden = 0
    for with_teacher, without in zip(guided, plain, strict=True):
        assert torch.equal(with_teacher.images, without.images)
        rows = rows_of(with_teacher.images, rounds.inputs(exchange.peer))
        hide = uncertain[rows]
        if compat == "first-sample":
            hide[1:] = False
        expected = np.where(hide, -1, states_of(without))
        agree = states_of(with_teacher) == expected
        assert agree[clear[rows]].all()
        hidden += int((expected != states_of(without)).sum())
    assert hidden > 0


def test_default_margin_is_that_of_the_paper(second_round: Any) -> None:
    """Of predictions spread around one half exactly those within 0.02 are hidden, at every sample."""
    exchange, passes, rounds = second_round(method__known=1.0, training__local_epochs=8, training__lr=1e-4)
    p = teacher_of(exchange, rounds)
    near, outside = np.abs(p - 0.5) < 0.0199, np.abs(p - 0.5) > 0.0201
    assert near.mean() > 0.02
    shown = np.zeros(p.shape, dtype=bool)
    for seen in passes:
        if seen.training:
            np.logical_or.at(shown, rows_of(seen.images, rounds.inputs(exchange.peer)), states_of(seen) >= 0)
    assert not shown[near].any()
    assert shown[outside].mean() > 0.9


# ---- the network


@pytest.mark.parametrize("name", ["fedctran", "fedlgt"])
@pytest.mark.parametrize("options", [{}, {"layers": 1, "heads": 2, "dropout": 0.4}, {"dropout": 0.0}])
def test_network_follows_the_options(federations: dict[bool, Federation], name: str, options: dict[str, Any]) -> None:
    """Same weights, same outputs in eval mode and, with the same random numbers for dropout, in train mode."""
    more = {"method__encoder": "learned"} if name == "fedlgt" else {}
    experiment = twelve(method__name=name, **more, **{f"method__{key}": value for key, value in options.items()})
    method = method_for(federations[True], experiment)
    described = {"layers": 3, "heads": 4, "dropout": 0.1} | options
    backbone = build_backbone(experiment.model, method.task.sample_shape, 0)
    found, expected = method.build_model(), CTran(backbone, 10, None, **described)
    expected.load_state_dict(found.state_dict())
    images = method.task.preprocess(torch.from_numpy(federations[True].test.samples(slice(0, 20))))
    outputs = []
    for training in (False, True):
        for model in (found, expected):
            torch.manual_seed(1)
            outputs.append(model.train(training)(images).detach())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[2], outputs[3])


@pytest.mark.parametrize(("fine", "average"), [("concat", False), ("average", True)])
def test_frozen_label_embeddings_follow_the_options(
    federations: dict[bool, Federation], tmp_path: Path, fine: str, average: bool
) -> None:
    encoder, prompt = word_vectors(tmp_path), "photo {class}"
    (tmp_path / "fine.json").write_text('{"nine": ["eight", "one", "two"], "zero": ["seven", "three"]}')
    names = {"nine": ["eight", "one", "two"], "zero": ["seven", "three"]}
    experiment = twelve(
        method__name="fedlgt", method__encoder=encoder, method__prompt=prompt, method__fine=fine,
        method__fine_names=str(tmp_path / "fine.json"), seed=3,
    )  # fmt: skip
    model = method_for(federations[True], experiment).build_model()
    classes = federations[True].train.classes
    expected = label_embeddings.label_embeddings(encoder, classes, prompt, 8, 3, names, average)
    other = label_embeddings.label_embeddings(encoder, classes, prompt, 8, 3, names, not average)
    assert torch.equal(model.labels, expected.labels)
    assert torch.equal(model.states, expected.states)
    assert not torch.equal(expected.labels, other.labels)
