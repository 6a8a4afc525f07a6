"""FedHarmony in whole rounds: twelve clients, five of them a round, networks with BatchNorm. Everything that is sent,
replied and averaged is worked out again from the round before, in NumPy."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from builders import (
    Exchange,
    Pass,
    Round,
    Rounds,
    bce,
    merged,
    method_for,
    rounds_of,
    rows_of,
    sigmoid,
    twelve,
    watched,
)

from fedmll import run
from fedmll.core.seeding import derive
from fedmll.data.federation import Federation, build
from fedmll.methods.parts.label_correlation import spectral_blocks
from fedmll.testing import make_client_info

CLASSES = 10
ROUNDS = 8
SOME = {"participation__count": 5, "training__rounds": ROUNDS, "method__name": "fedharmony", "training__lr": 0.005}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return build(twelve())


def correlation(p: np.ndarray) -> np.ndarray:
    """Eq. 1–2."""
    rate = p.mean(0)
    spread = rate * (1 - rate)
    return ((p - rate).T @ (p - rate) / len(p)) / np.sqrt(np.outer(spread, spread) + 1e-6)


def consensus(last: Round, client: int, kind: str = "mean") -> np.ndarray:
    """Eq. 3: of the others of the last round; of all, for a client that was not among them."""
    others = [e for e in last.exchanges if e.peer.index != client]
    found = np.stack([e.reply["correlation/correlation"].double().numpy() for e in others])
    if kind == "median":
        return np.median(found, axis=0)
    weights = [e.samples for e in others] if kind == "size-weighted" else None
    return np.average(found, axis=0, weights=weights)


def psi(first: np.ndarray, second: np.ndarray, blocks: np.ndarray) -> float:
    """One mean over the pairs of different labels in a block."""
    pairs = np.equal.outer(blocks, blocks) & ~np.eye(len(blocks), dtype=bool)
    return float(((first - second)[pairs] ** 2).mean())


def blocks_of(aim: torch.Tensor) -> np.ndarray:
    return spectral_blocks(aim, 4, derive(0, "blocks")).numpy()  # ⌈√10⌉ clusters


@pytest.fixture(scope="module")
def played(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> list[Round]:
    with rounds_of(federation, twelve(**SOME), tmp_path_factory.mktemp("rounds")) as rounds:
        return [rounds.next() for _ in range(5)]


def test_replies_hold_the_trained_models_correlations(
    federation: Federation, played: list[Round], tmp_path: Path
) -> None:
    """In eval mode: BatchNorm's running statistics, not those of the batches that are looked at."""
    with rounds_of(federation, twelve(**SOME), tmp_path) as rounds:
        for exchange in played[0].exchanges + played[3].exchanges:
            images = rounds.inputs(exchange.peer)
            found = exchange.reply["correlation/correlation"].numpy()
            expected, wrong = (
                correlation(sigmoid(rounds.scores(exchange.reply.tensors, images, mode=mode)))
                for mode in ("eval", "train")
            )
            np.testing.assert_allclose(found, expected, atol=1e-6, rtol=1e-3)
            assert np.abs(expected - wrong).max() > 1e-4


def test_participants_have_one_and_two_digit_indices(played: list[Round]) -> None:
    took_part = [{e.peer.index for e in r.exchanges} for r in played]
    assert all(len(clients) == 5 for clients in took_part)
    assert {10, 11} & set.union(*took_part)
    assert all(new - old and new & old for old, new in pairwise(took_part))


def test_every_client_receives_the_consensus_of_the_others(played: list[Round]) -> None:
    assert all(set(e.sent.tensors) == {"weights", "counters"} for e in played[0].exchanges)
    assert all("correlation/blocks" not in e.reply.tensors for e in played[0].exchanges)
    for last, this in pairwise(played):
        for e in this.exchanges:
            assert set(e.sent.tensors) == {"weights", "counters", "correlation/consensus"}
            np.testing.assert_allclose(e.sent["correlation/consensus"], consensus(last, e.peer.index), atol=1e-6)
            np.testing.assert_array_equal(e.reply["correlation/blocks"], blocks_of(e.sent["correlation/consensus"]))


def test_weights_are_by_size_and_agreement(played: list[Round]) -> None:
    """Eq. 9–10 with T0 = 8/2 and γ = 1/median(D) of the round before; by size as long as there is none."""
    median = None
    for place, this in enumerate(played):
        balance, share = 1.0, this.sizes / this.sizes.sum()
        if place:
            found = np.array(
                [
                    psi(
                        e.reply["correlation/correlation"].double().numpy(),
                        consensus(played[place - 1], e.peer.index),
                        blocks,
                    )
                    for e in this.exchanges
                    for blocks in [e.reply["correlation/blocks"].numpy()]
                ]
            )
            np.testing.assert_allclose(this.records["discrepancy"], found, rtol=1e-4)
            if median is not None:
                balance = max(0.0, 1 - this.number / (ROUNDS / 2))
                quality = np.exp(-found / median)
                share = balance * share + (1 - balance) * quality / quality.sum()
            median = np.median(found)
            assert this.records["median_discrepancy"] == pytest.approx(median, rel=1e-4)
        np.testing.assert_allclose(this.after["weights"], share @ this.models, atol=2e-6, rtol=1e-4)
        np.testing.assert_allclose(this.records["share"], share, rtol=1e-4)
        assert this.records["balance"] == pytest.approx(balance)
        assert this.records["clients"].tolist() == [e.peer.index for e in this.exchanges]
        assert this.records["sizes"].tolist() == this.sizes.tolist()
    assert played[2].records["balance"] == pytest.approx(0.25)  # some of both; then agreement alone
    assert played[3].records["balance"] == 0
    assert played[3].after["counters"].tolist() in [e.reply["counters"].tolist() for e in played[3].exchanges]


def test_run_equals_these_rounds(federation: Federation, played: list[Round]) -> None:
    result = run(twelve(**SOME | {"training__rounds": 2, "method__horizon": ROUNDS / 2}), prepared=federation)
    flat = torch.cat([tensor.flatten() for tensor in result.weights.values() if tensor.is_floating_point()])
    torch.testing.assert_close(flat.sort().values, played[1].after["weights"].sort().values, atol=1e-6, rtol=0)


# ---- the loss


def losses_of(
    exchange: Exchange, rounds: Rounds, passes: list[tuple[Pass, Pass]], strength: float, blocks: np.ndarray | None
) -> list[float]:
    """Of every training step, from what went into the backbone and what came out of the head."""
    images, targets = rounds.inputs(exchange.peer), rounds.targets(exchange.peer)
    losses = []
    for seen, found in passes:
        if seen.training:
            z = found.output.double().numpy()
            loss = bce(z, targets[rows_of(seen.images, images)] == 1).mean()
            if blocks is not None:
                aim = exchange.sent["correlation/consensus"].double().numpy()
                loss += strength * psi(correlation(sigmoid(z)), aim, blocks)
            losses.append(loss)
    return losses


@pytest.mark.parametrize(
    ("options", "strength", "blocks"),
    [
        ({}, 3.0, "own"),
        ({"strength": 40.0}, 40.0, "own"),
        ({"blocks": False}, 3.0, "one"),
        ({"clusters": 2}, 3.0, "two"),
        ({"alignment": False}, 0.0, None),
        ({"start_round": 3}, 0.0, None),
        ({"clustering": "once"}, 3.0, "sent"),
    ],
    ids=str,
)
def test_the_loss_is_bce_and_the_distance_from_the_consensus(
    federation: Federation, tmp_path: Path, options: dict[str, Any], strength: float, blocks: str | None
) -> None:
    experiment = twelve(**SOME, **{f"method__{key}": value for key, value in options.items()})
    with rounds_of(federation, experiment, tmp_path) as rounds:
        first = rounds.next()
        peer = rounds.engine.clients[11]
        with watched(rounds.model.backbone) as seen:
            exchange, found = rounds.train(peer, rounds.model.head)
        used = None
        if blocks is not None:
            aim = exchange.sent["correlation/consensus"]
            used = {
                "own": blocks_of(aim),
                "one": np.zeros(CLASSES),
                "two": spectral_blocks(aim, 2, derive(0, "blocks")).numpy(),
                "sent": blocks_of(torch.tensor(consensus(first, -1), dtype=torch.float32)),
            }[blocks]
            if blocks == "sent":
                np.testing.assert_array_equal(exchange.sent["correlation/blocks"], used)
            if blocks in ("own", "two"):
                np.testing.assert_array_equal(exchange.reply["correlation/blocks"], used)
        expected = losses_of(exchange, rounds, list(zip(seen, found, strict=True)), strength, used)
    assert exchange.reply.numbers["loss"] == pytest.approx(np.mean(expected), rel=1e-4)
    if blocks in (None, "one", "sent"):
        # without alignment they are still made, for the server's weights
        assert ("correlation/blocks" in exchange.reply.tensors) == (options == {"alignment": False})


# ---- variants of the server, with the same replies


@pytest.mark.parametrize("kind", ["mean", "size-weighted", "median"])
def test_consolidations(federation: Federation, played: list[Round], kind: str) -> None:
    first = played[0]
    method = method_for(federation, twelve(**SOME, method__consolidation=kind))
    state, records = merged(method, first.before, first.exchanges, 1)
    for index in range(12):
        sent = method.send(state, make_client_info(index, CLASSES), 2)
        np.testing.assert_allclose(sent["correlation/consensus"], consensus(first, index, kind), atol=1e-6)
    np.testing.assert_allclose(records["consensus"], consensus(first, -1, kind), atol=1e-6)


def test_median_is_kept_over_a_round_without_discrepancies(federation: Federation, played: list[Round]) -> None:
    """γ's scale is that of the last round that had a D: here two rounds before, because one reply makes no
    consensus."""
    method = method_for(federation, twelve(**SOME))
    lonely, records = merged(method, played[1].after, played[2].exchanges[:1], 3)
    sent = method.send(lonely, played[3].exchanges[0].peer, 4)
    assert "correlation/consensus" not in sent.tensors
    scale = records["median_discrepancy"]
    again, records = merged(method, lonely, played[0].exchanges, 4)
    assert records["balance"] == 1  # nothing to compare with
    _, records = merged(method, again, played[4].exchanges, 5)
    assert records["gamma"] == pytest.approx(1 / scale, rel=1e-6)


def test_two_replies_are_enough_for_a_consensus(federation: Federation, played: list[Round]) -> None:
    method = method_for(federation, twelve(**SOME))
    state, _ = merged(method, played[0].before, played[0].exchanges[:2], 1)
    one, other = played[0].exchanges[:2]
    for round_state, theirs in ((one, other), (other, one)):
        sent = method.send(state, round_state.peer, 2)
        torch.testing.assert_close(sent["correlation/consensus"], theirs.reply["correlation/correlation"])


def test_states_hold_nothing_of_older_rounds(played: list[Round]) -> None:
    """A server's state does not grow: the same names and shapes in every round with a consensus."""
    shapes = [{name: tuple(t.shape) for name, t in r.after.items()} for r in played[1:]]
    assert all(s == shapes[0] for s in shapes)
