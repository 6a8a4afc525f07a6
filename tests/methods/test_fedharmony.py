"""FedHarmony against its equations in NumPy; the correlations themselves are in tests/analysis/test_correlation.py."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor

from fedmll import Callback, resume, run
from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.seeding import derive
from fedmll.data.federation import Federation
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.local import LocalEngine
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.methods.framework.method import Method
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts.averaging import SoftmaxMean
from fedmll.methods.parts.label_correlation import BlockAlignmentLoss, spectral_blocks
from fedmll.testing import aggregate, first_step, make_client, make_client_info, make_trainer, start_round

CLASSES = 10  # of ml-digits
CORRELATION, CONSENSUS, BLOCKS_KEY = (f"correlation/{name}" for name in ("correlation", "consensus", "blocks"))
OFF = {"method.alignment": False, "method.aggregation": False}


def harmony(overrides: dict[str, Any] | None = None, **options: Any) -> Experiment:
    values = {f"method.{name}": value for name, value in options.items()}
    return small().changed({"method.name": "fedharmony"} | values | (overrides or {}))


@pytest.fixture
def method_of(small_federation: Federation) -> Any:
    def method(overrides: dict[str, Any] | None = None, **options: Any) -> Method:
        experiment = harmony({"training.rounds": 10, "model.norm": "group"} | (overrides or {}), **options)
        return Trainer(task_of(replace(small_federation, experiment=experiment))).method

    return method


def peer(index: int) -> ClientInfo:
    return make_client_info(index, CLASSES)


def matrices(count: int, seed: int = 0) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    drawn = [np.triu(rng.uniform(-0.5, 0.5, (CLASSES, CLASSES)), 1) for _ in range(count)]
    return [(m + m.T + np.eye(CLASSES)).astype(np.float32) for m in drawn]


class Replies:
    """Replies made up: a model of three weights and a matrix for each client."""

    def __init__(self, clients: list[int], sizes: list[int], seed: int, blocks: list[int] | None = None) -> None:
        rng = np.random.default_rng(seed)
        self.clients, self.sizes = clients, np.array(sizes, dtype=float)
        self.models = rng.normal(size=(len(clients), 3)).astype(np.float32)
        self.matrices = matrices(len(clients), seed)
        self.blocks = blocks

    def __iter__(self) -> Iterator[tuple[ClientInfo, Message]]:
        for k, client in enumerate(self.clients):
            tensors = {"weights": torch.tensor(self.models[k]), CORRELATION: torch.tensor(self.matrices[k])}
            if self.blocks is not None:
                tensors[BLOCKS_KEY] = torch.tensor(self.blocks)
            yield peer(client), Message(tensors, {"samples": self.sizes[k], "steps": 1, "loss": 1.0})


START: Tensors = {"weights": torch.zeros(3)}
FIRST = Replies([3, 1, 4, 2], [10, 40, 20, 30], seed=1)
BLOCKS = [0, 0, 0, 1, 1, 2, 2, 2, 2, 3]
SECOND = Replies([1, 2, 9], [40, 30, 5], seed=2, blocks=BLOCKS)


def teachers(first: Replies, clients: list[int]) -> list[NDArray[np.float64]]:
    """R*_k: the mean of the others; of all for a client that is new."""
    return [
        np.mean([m for c, m in zip(first.clients, first.matrices, strict=True) if c != client], axis=0, dtype=float)
        for client in clients
    ]


def discrepancies(first: Replies, second: Replies, blocks: list[int]) -> NDArray[np.float64]:
    same = np.equal.outer(blocks, blocks) & ~np.eye(CLASSES, dtype=bool)
    aims = teachers(first, second.clients)
    return np.array([((m - aim)[same] ** 2).mean() for m, aim in zip(second.matrices, aims, strict=True)])


def eq_10(sizes: NDArray[np.float64], quality: NDArray[np.float64], a: float) -> NDArray[np.float64]:
    return a * sizes / sizes.sum() + (1 - a) * quality / quality.sum()


def after(method: Method, *rounds: Replies) -> Tensors:
    """The state after these rounds."""
    state = START
    for number, replies in enumerate(rounds, 1):
        state, _ = aggregate(method, state, replies, number)
    return state


# What is sent


def test_each_client_receives_the_consensus_of_the_others(method_of: Any) -> None:
    method = method_of()
    assert set(method.send(START, peer(1), 1).tensors) == {"weights"}
    state, _ = aggregate(method, START, FIRST, 1)
    for client, expected in zip([3, 1, 4, 2, 9], teachers(FIRST, [3, 1, 4, 2, 9]), strict=True):
        sent = method.send(state, peer(client), 2)
        assert np.allclose(sent[CONSENSUS], expected, atol=1e-6)
        assert sent["weights"] is state["weights"]
    # all that are new share one tensor: it is in shared memory once, whatever their number
    assert method.send(state, peer(8), 2)[CONSENSUS] is method.send(state, peer(9), 2)[CONSENSUS]


def test_no_consensus_before_its_round_or_from_a_single_reply(method_of: Any) -> None:
    late = method_of(start_round=4)
    state, _ = aggregate(late, START, FIRST, 1)
    assert [(CONSENSUS in late.send(state, peer(1), round).tensors) for round in (2, 3, 4)] == [False, False, True]
    method = method_of()
    state = after(method, FIRST, Replies([5], [10], seed=3, blocks=BLOCKS))
    assert set(method.send(state, peer(1), 3).tensors) == {"weights"}
    assert set(aggregate(method, state, FIRST, 3)[0]) > set(state)  # and the consensus comes back


def test_common_blocks_are_clustered_once(method_of: Any) -> None:
    method = method_of(clustering="once", gamma=2.0, horizon=4)
    state, _ = aggregate(method, START, FIRST, 1)
    everyone = torch.tensor(np.mean(FIRST.matrices, axis=0))
    expected = spectral_blocks(everyone, 4, derive(0, "blocks"))  # ⌈√10⌉
    sent = [method.send(state, peer(client), 2)[BLOCKS_KEY] for client in (1, 9)]
    assert sent[0] is sent[1] and torch.equal(sent[0], expected)
    own = Replies([1, 2, 9], [40, 30, 5], seed=2)  # replies carry no blocks then
    _, records = aggregate(method, state, own, 2)
    assert np.allclose(records["discrepancy"], discrepancies(FIRST, own, expected.tolist()))


# Aggregation


def test_weights_are_eq_9_and_10(method_of: Any) -> None:
    method = method_of(gamma=20.0, horizon=5)
    state, _ = aggregate(method, START, FIRST, 1)
    assert np.allclose(state["weights"], FIRST.sizes / 100 @ FIRST.models, atol=1e-6)  # no consensus yet: by size
    merged, records = aggregate(method, state, SECOND, 2)
    quality = np.exp(-20 * discrepancies(FIRST, SECOND, BLOCKS))
    expected = eq_10(SECOND.sizes, quality, a=1 - 2 / 5)
    assert expected.std() > 0.05 and expected.sum() == pytest.approx(1)
    assert np.allclose(records["share"], expected, atol=1e-9)
    assert np.allclose(merged["weights"], expected @ SECOND.models, atol=1e-6)
    assert records["clients"].tolist() == SECOND.clients
    assert np.allclose(records["consensus"], np.mean(SECOND.matrices, axis=0), atol=1e-6)
    assert torch.equal(records["blocks"], torch.tensor([BLOCKS] * 3, dtype=torch.int16))


def test_from_pure_size_to_pure_quality(method_of: Any) -> None:
    method = method_of(gamma=20.0, horizon=3)
    balances = [method.average_part.balance(round) for round in (0, 1, 2, 3, 4, 100)]
    assert balances == pytest.approx([1, 2 / 3, 1 / 3, 0, 0, 0])
    assert method_of(overrides={"training.rounds": 40}).average_part.balance(5) == pytest.approx(1 - 5 / 20)
    quality = np.exp(-20 * discrepancies(FIRST, SECOND, BLOCKS))
    merged, _ = aggregate(method, after(method, FIRST), SECOND, 3)
    assert np.allclose(merged["weights"], quality / quality.sum() @ SECOND.models, atol=1e-6)


def test_size_scaled_quality_and_equal_sizes(method_of: Any) -> None:
    quality = np.exp(-20 * discrepancies(FIRST, SECOND, BLOCKS))
    for weights, sizes in (("size", SECOND.sizes), ("equal", np.ones(3))):
        scaled = method_of(gamma=20.0, horizon=4, quality="size-scaled", weighting=weights)
        _, records = aggregate(scaled, after(scaled, FIRST), SECOND, 2)
        assert np.allclose(records["share"], eq_10(sizes, SECOND.sizes * quality, 0.5), atol=1e-9)
    equal = method_of(gamma=20.0, horizon=4, weighting="equal", consolidation="size-weighted")
    state = after(equal, FIRST)
    # equal weights in the average; the consolidation still goes by the samples
    assert np.allclose(state["weights"], FIRST.models.mean(0), atol=1e-6)
    by_size = np.average(FIRST.matrices, axis=0, weights=FIRST.sizes)
    assert np.allclose(equal.send(state, peer(9), 2)[CONSENSUS], by_size, atol=1e-6)


def test_gamma_auto_is_one_over_the_last_rounds_median(method_of: Any) -> None:
    method = method_of(horizon=10)
    state, records = aggregate(method, after(method, FIRST), SECOND, 2)
    assert records["balance"] == 1  # the first D: by size alone
    assert np.allclose(state["weights"], SECOND.sizes / SECOND.sizes.sum() @ SECOND.models, atol=1e-6)
    third = Replies([9, 3], [7, 9], seed=5, blocks=BLOCKS)
    merged, records = aggregate(method, state, third, 3)
    gamma = 1 / np.median(discrepancies(FIRST, SECOND, BLOCKS))
    expected = eq_10(third.sizes, np.exp(-gamma * discrepancies(SECOND, third, BLOCKS)), a=0.7)
    assert records["gamma"] == pytest.approx(gamma, rel=1e-6)
    assert np.allclose(merged["weights"], expected @ third.models, atol=1e-6)


def test_no_gamma_is_too_large(method_of: Any) -> None:
    """exp(−γD) is 0 for every client here; the best of them still gets all the weight."""
    merged = after(method_of(gamma=1e6, horizon=1), FIRST, SECOND)
    found = discrepancies(FIRST, SECOND, BLOCKS)
    assert (np.exp(-1e6 * found) == 0).all()
    assert np.allclose(merged["weights"], SECOND.models[found.argmin()], atol=1e-6)


@pytest.mark.parametrize("scores", [[0.0, -3.0, 2.0, 1.0], [-1e4, -1e4 + 1, -2e4], [800.0, 799.0]])
def test_softmax_mean(scores: list[float]) -> None:
    values = np.random.default_rng(0).normal(size=(len(scores), 4)).astype(np.float32)
    mean = SoftmaxMean()
    for score, value in zip(scores, values, strict=True):
        mean.add({"x": torch.tensor(value), "n": torch.tensor([1])}, score)
    weights = np.exp(np.array(scores) - max(scores))
    assert np.allclose(mean.result()["x"], weights / weights.sum() @ values, atol=1e-6)


def test_aggregation_off_averages_by_size(method_of: Any) -> None:
    method = method_of(aggregation=False, gamma=20.0, horizon=1)
    merged, records = aggregate(method, after(method, FIRST), SECOND, 2)
    assert np.allclose(merged["weights"], SECOND.sizes / SECOND.sizes.sum() @ SECOND.models, atol=1e-6)
    # what the clients agree on is written down all the same
    assert np.allclose(records["discrepancy"], discrepancies(FIRST, SECOND, BLOCKS))
    assert not {"share", "balance", "gamma"} & set(records)


# Replies that are refused


def test_implausible_replies_are_rejected(method_of: Any) -> None:
    method = method_of()
    sent = method.send(after(method, FIRST), peer(1), 2)
    _, good = next(iter(SECOND))
    assert method.find_problem(sent, good, 2) is None

    def refused(**tensors: Tensor) -> str:
        changes = {f"correlation/{name}": tensor for name, tensor in tensors.items()}
        return str(method.find_problem(sent, Message(good.tensors | changes, good.numbers), 2))

    correlation, blocks = good[CORRELATION], good[BLOCKS_KEY]
    lopsided = correlation.clone()
    lopsided[0, 1] += 0.1
    assert "symmetric" in refused(correlation=lopsided)
    assert "correlation holds values outside" in refused(correlation=correlation * 1.1)
    assert "correlation is" in refused(correlation=torch.zeros(3, 3))
    assert "correlation holds NaN" in refused(correlation=correlation * torch.nan)
    assert "blocks holds values outside [0, 9]" in refused(blocks=blocks + 7)
    assert "unknown key" in refused(consensus=correlation)
    lacking = Message({"weights": torch.zeros(3)}, good.numbers)
    assert "lacks correlation/blocks, correlation/correlation" in str(method.find_problem(sent, lacking, 2))
    for numbers in ({"samples": 0.0}, {"samples": -3.0}, {}):
        assert "samples" in str(method.find_problem(sent, Message(good.tensors, numbers), 2))
    assert method.find_problem(sent, Message(good.tensors, {"samples": 1.0}), 2) is None
    last = blocks.clone()
    last[-1] = CLASSES - 1
    assert method.find_problem(sent, Message(good.tensors | {BLOCKS_KEY: last}, good.numbers), 2) is None
    assert "outside [0, 9]" in refused(blocks=last + 1)
    assert "outside [0, 9]" in refused(blocks=last - 1)
    first = Message({k: t for k, t in good.tensors.items() if k != BLOCKS_KEY}, good.numbers)
    assert method.find_problem(Message(START), first, 1) is None  # round 1: no consensus, no blocks
    off = method_of(alignment=False, aggregation=False)
    assert off.find_problem(Message(START), Message(START, {"samples": 1.0}), 1) is None


# The client


def test_loss_is_bce_plus_lambda_psi() -> None:
    trainer = make_trainer(harmony(strength=7.0), tuple(f"k{i}" for i in range(CLASSES)))
    rng = np.random.default_rng(0)
    logits, targets = rng.normal(size=(8, CLASSES)), rng.integers(0, 2, (8, CLASSES))
    aim = matrices(1)[0].astype(float)
    p = 1 / (1 + np.exp(-logits))
    spread = p.mean(0) * (1 - p.mean(0))
    found = np.cov(p.T, bias=True) / np.sqrt(np.outer(spread, spread) + 1e-6)
    pairs = np.equal.outer(BLOCKS, BLOCKS) & ~np.eye(CLASSES, dtype=bool)
    psi = ((found - aim)[pairs] ** 2).mean()
    bce = -(targets * np.log(p) + (1 - targets) * np.log(1 - p)).mean()
    told = {CONSENSUS: torch.tensor(aim, dtype=torch.float32), BLOCKS_KEY: torch.tensor(BLOCKS)}
    for received, expected in ((told, bce + 7 * psi), ({}, bce)):
        step = first_step(trainer, start_round(trainer, make_client(trainer, targets), Message(received)))
        step.logits = torch.tensor(logits, dtype=torch.float32)[step.rows]
        assert trainer.loss(step).item() == pytest.approx(expected, rel=1e-5)


def test_blocks_made_by_a_client_are_those_of_its_loss() -> None:
    trainer = make_trainer(harmony(), tuple(f"k{i}" for i in range(CLASSES)))
    aim = torch.tensor(matrices(1)[0])
    client_round = start_round(trainer, make_client(trainer, np.ones((8, CLASSES))), Message({CONSENSUS: aim}))
    blocks = spectral_blocks(aim, 4, derive(0, "blocks"))
    scores = torch.rand(8, CLASSES, generator=torch.Generator().manual_seed(0))
    assert client_round.round_states["alignment"](scores).item() == BlockAlignmentLoss(aim, blocks)(scores).item()


def engine_of(federation: Federation, experiment: Experiment, folder: Path) -> LocalEngine:
    return LocalEngine(replace(federation, experiment=experiment), folder)


def test_a_reply_holds_the_trained_models_correlations(small_federation: Federation, tmp_path: Path) -> None:
    """In eval mode, over the client's own data, of the weights that were sent; and its own consensus's blocks."""
    engine = engine_of(small_federation, harmony(), tmp_path)
    state, trainer = engine.initial_state(), engine.trainer
    for number in (1, 2):
        replies = [(p, Message(dict(m.tensors), dict(m.numbers))) for p, m in engine.collect_replies(state, number)]
        before, (state, _) = state, aggregate(engine.method, state, iter(replies), number)
    client, reply = replies[0]
    trainer.weights.load(reply.tensors)
    trainer.model.eval()
    data = small_federation.train.subset(small_federation.samples[client.index])
    with torch.no_grad():
        images = trainer.task.preprocess(torch.tensor(data.samples(slice(None))))
        scores = torch.sigmoid(trainer.model(images)).double().numpy()
    spread = scores.mean(0) * (1 - scores.mean(0))
    expected = np.cov(scores.T, bias=True) / np.sqrt(np.outer(spread, spread) + 1e-6)
    assert np.allclose(reply[CORRELATION], expected, atol=1e-6)
    sent = engine.method.send(before, client, 2)
    assert torch.equal(reply[BLOCKS_KEY], spectral_blocks(sent[CONSENSUS], 4, derive(0, "blocks")))
    assert engine.method.find_problem(sent, reply, 2) is None


def test_blocks_off_is_one_block_of_all_labels(small_federation: Federation, tmp_path: Path) -> None:
    engine = engine_of(small_federation, harmony(blocks=False), tmp_path)
    client = engine.trainer.client_in_round(small_federation, engine.clients[0], 2)
    message = Message(engine.initial_state() | {CONSENSUS: torch.tensor(matrices(1)[0])})
    assert start_round(engine.trainer, client, message).round_states["alignment"].pairs == CLASSES * (CLASSES - 1)
    reply = engine.trainer.train(client, message, {})
    assert CORRELATION in reply.tensors and BLOCKS_KEY not in reply.tensors
    nothing = Message(engine.initial_state() | {CONSENSUS: torch.eye(CLASSES)})  # no label has a partner
    engine = engine_of(small_federation, harmony(), tmp_path)
    client = engine.trainer.client_in_round(small_federation, engine.clients[0], 2)
    assert start_round(engine.trainer, client, nothing).round_states["alignment"] is None


def test_alignment_reduces_the_distance_of_correlations(small_federation: Federation, tmp_path: Path) -> None:
    """A client trains towards a consensus that its data does not show: the more, the stronger the alignment."""
    aim, found = torch.tensor(matrices(1)[0]), []
    for strength in (0.0, 10.0, 100.0):
        experiment = harmony({"training.lr": 0.01, "training.local_epochs": 20}, strength=strength, blocks=False)
        engine = engine_of(small_federation, experiment, tmp_path)
        client = engine.trainer.client_in_round(small_federation, engine.clients[0], 2)
        reply = engine.trainer.train(client, Message(engine.initial_state() | {CONSENSUS: aim}), {})
        found.append(((reply[CORRELATION] - aim)[~torch.eye(CLASSES, dtype=torch.bool)] ** 2).mean().item())
    assert found[1] < 0.97 * found[0] and found[2] < 0.8 * found[1], found


# Whole runs


def test_everything_off_is_fedavg_bit_for_bit(small_federation: Federation) -> None:
    expected = run(small(training__rounds=3), prepared=small_federation)
    found = run(harmony(OFF | {"training.rounds": 3}), prepared=small_federation)
    assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    assert found.metrics == expected.metrics
    assert [(r["bytes_up"], r["bytes_down"]) for r in found.rows] == [
        (r["bytes_up"], r["bytes_down"]) for r in expected.rows
    ]


def test_alignment_alone_starts_as_fedavg_bit_for_bit(small_federation: Federation) -> None:
    """The first round has no consensus, the second aligns: the same weights after one, others after two."""
    for rounds, same in ((1, True), (2, False)):
        expected = run(small(training__rounds=rounds), prepared=small_federation)
        found = run(harmony({"training.rounds": rounds}), prepared=small_federation)
        assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items()) == same


class StopIn(Callback):
    def __init__(self, round: int, client: int) -> None:
        self.where = (round, client)

    def on_client_end(self, round: int, done: int, total: int) -> None:
        if (round, done) == self.where:
            raise KeyboardInterrupt


@pytest.mark.parametrize("options", [{}, {"clustering": "once", "consolidation": "median"}], ids=["each", "once"])
def test_same_bits_with_workers_and_after_resume(
    small_federation: Federation, tmp_path: Path, options: dict[str, Any]
) -> None:
    settings = {"training.rounds": 4, "participation.count": 3, "engine.workers": 1}
    experiment = harmony(settings, **options)
    expected = run(experiment, tmp_path / "whole", prepared=small_federation)
    with pytest.raises(KeyboardInterrupt):
        run(experiment, tmp_path / "run", callback=StopIn(3, 2), prepared=small_federation)
    found = resume(tmp_path / "run", engine={"workers": 2}, prepared=small_federation)
    assert all(torch.equal(found.weights[name], value) for name, value in expected.weights.items())
    for number in (3, 4):
        old, new = (load_file(tmp_path / f / "records" / f"{number:06d}.safetensors") for f in ("whole", "run"))
        assert all(torch.equal(old[name], new[name]) for name in old)
    assert old["consensus"].shape == (CLASSES, CLASSES)
    assert old["share"].sum().item() == pytest.approx(1)
    assert len(old["blocks"]) == (1 if options else 3)


def test_options_out_of_range_are_refused() -> None:
    for options in ({"start_round": 1}, {"gamma": 0}, {"strength": -1}, {"consolidation": "mode"}, {"clusters": 0}):
        with pytest.raises(ConfigError, match=next(iter(options))):
            harmony(**options)
