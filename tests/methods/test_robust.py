"""Averages that tolerate a faulty client, against NumPy and SciPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import small
from scipy.stats import trim_mean

from fedmll import run
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.data.federation import build
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.client_round import ClientInfo
from fedmll.methods.framework.task import task_of
from fedmll.methods.parts import averaging

SIZES = (5, 20, 1, 9, 14)


def trainer(**changes: Any) -> Trainer:
    return Trainer(task_of(build(small(**changes))))


def peer(index: int) -> ClientInfo:
    return ClientInfo(index, f"c{index}", torch.ones(10, dtype=torch.bool))


def replies(start: np.ndarray, count: int, buffers: int, seed: int = 0) -> np.ndarray:
    """Updates of very different lengths; the statistics stay positive, as they are in training."""
    generator = np.random.default_rng(seed)
    lengths = generator.uniform(0.01, 3, (count, 1))
    found = start + lengths * generator.normal(size=(count, len(start))) / np.sqrt(len(start))
    found[:, len(start) - buffers :] = generator.uniform(0, 2, (count, buffers))
    return found.astype(np.float32)


def merged(method: Any, state: Tensors, weights: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    merging = method.aggregator(state, 1)
    for index, (values, size) in enumerate(zip(weights, SIZES, strict=False)):
        rest = {"counters": torch.full_like(state["counters"], index)} if "counters" in state else {}
        merging.add(peer(index), Message({"weights": torch.from_numpy(values.copy())} | rest, {"samples": float(size)}))
    after, records = merging.result()
    if "counters" in state:
        assert not after["counters"].any()  # the first reply's
    return after["weights"].numpy(), records


@pytest.mark.parametrize("weights", ["size", "equal"])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_clipped_mean_by_hand(weights: str, count: int) -> None:
    here = trainer(method__average="clipped-mean", method__weighting=weights)
    state = here.method.initial_state()
    start, end = state["weights"].numpy().astype(np.float64), here.weights.parameter_end
    buffers = len(start) - end
    assert buffers  # BatchNorm's
    sent = replies(start, count, buffers)
    updates = sent - start
    for part in (slice(0, end), slice(end, None)):
        norms = np.linalg.norm(updates[:, part], axis=1)
        limit = np.sort(norms)[(count - 1) // 2]
        updates[:, part] *= np.minimum(1, limit / norms)[:, None]
    shares = np.array(SIZES[:count] if weights == "size" else [1] * count, float)
    found, records = merged(here.method, state, sent)
    np.testing.assert_allclose(found, start + (shares / shares.sum()) @ updates, rtol=2e-6, atol=2e-6)
    norms = np.linalg.norm(sent[:, :end] - start[:end], axis=1)
    assert records["update_norm"] == pytest.approx(np.sort(norms)[(count - 1) // 2])
    assert records["clipped"] == count - 1 - (count - 1) // 2


def centered(updates: np.ndarray, shares: np.ndarray) -> np.ndarray:
    """Karimireddy, He and Jaggi 2021, Algorithm 2, with the vectors themselves."""
    center = np.zeros(updates.shape[1])
    for _ in range(5):
        gaps = updates - center
        distances = np.linalg.norm(gaps, axis=1)
        radius = np.sort(distances)[(len(distances) - 1) // 2]
        center = center + shares @ (gaps * np.minimum(1, radius / distances)[:, None])
    return center


@pytest.mark.parametrize("weights", ["size", "equal"])
@pytest.mark.parametrize("count", [1, 2, 4, 5])
def test_centered_clipping_is_the_papers_algorithm(weights: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and running statistics are clipped separately, also where a block contains one or both of them."""
    here = trainer(method__average="centered-clipping", method__weighting=weights)
    state = here.method.initial_state()
    start, end = state["weights"].numpy().astype(np.float64), here.weights.parameter_end
    block = next(size for size in (7, 11) if end % size)
    assert here.weights.buffer_count > 2 * block
    monkeypatch.setattr(averaging, "PRODUCT_BLOCK", block)
    sent = replies(start, count, len(start) - end)
    shares = np.array(SIZES[:count] if weights == "size" else [1] * count, float)
    shares /= shares.sum()
    expected = start.copy()
    for part in (slice(0, end), slice(end, None)):
        expected[part] += sent[0, part] - start[part] if count == 1 else centered((sent - start)[:, part], shares)
    found, records = merged(here.method, state, sent)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)
    assert records["clipped"] == count - 1 - (count - 1) // 2
    assert records["update_radius"] >= 0


def test_centered_clipping_of_numbers_worked_out_by_hand() -> None:
    """Updates 1, 1 and −4 on a line. The center moves by a third of the remaining way: 1/3, 5/9, 19/27, 65/81, …"""
    updates = torch.tensor([1.0, 1.0, -4.0], dtype=torch.float64)
    center, radius, clipped = averaging.clipped_center(torch.outer(updates, updates), torch.full((3,), 1 / 3).double())
    assert float(center @ updates) == pytest.approx(1 - (2 / 3) ** 5)
    assert radius == pytest.approx((2 / 3) ** 4)
    assert clipped == 1


def test_centered_clipping_of_equal_updates_is_their_mean() -> None:
    here = trainer(method__average="centered-clipping")
    state = here.method.initial_state()
    sent = np.repeat(replies(state["weights"].numpy(), 1, here.weights.buffer_count), 4, axis=0)
    np.testing.assert_allclose(merged(here.method, state, sent)[0], sent[0], rtol=1e-6, atol=1e-7)
    unchanged = np.repeat(state["weights"].numpy()[None], 3, axis=0)
    assert np.array_equal(merged(here.method, state, unchanged)[0], unchanged[0])  # all distances are 0


@pytest.mark.parametrize(("trim", "count"), [(0.2, 5), (0.25, 4), (0.4, 5), (0.0, 3), (0.2, 2)])
def test_trimmed_mean_is_scipys(trim: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "BLOCK", 100)  # several blocks, the last one short
    here = trainer(method__average="trimmed-mean", method__trim=trim)
    state = here.method.initial_state()
    sent = replies(state["weights"].numpy(), count, here.weights.buffer_count)
    found, records = merged(here.method, state, sent)
    np.testing.assert_allclose(found, trim_mean(sent.astype(np.float64), trim, axis=0), rtol=1e-6, atol=1e-7)
    assert records["trimmed"] == 2 * int(trim * count)


def test_one_of_three_replies_is_trimmed_at_each_end() -> None:
    here = trainer(method__average="trimmed-mean")
    sent = replies(here.method.initial_state()["weights"].numpy(), 3, here.weights.buffer_count)
    assert np.array_equal(merged(here.method, here.method.initial_state(), sent)[0], np.median(sent, axis=0))


def test_half_of_the_replies_cannot_be_trimmed_at_each_end() -> None:
    with pytest.raises(ConfigError, match=r"trim.*less than 0\.5"):
        trainer(method__average="trimmed-mean", method__trim=0.5)


@pytest.mark.parametrize("average", ["clipped-mean", "trimmed-mean", "centered-clipping"])
def test_one_faulty_client_has_bounded_influence(average: str) -> None:
    """Four honest updates of length ½ and one of length 9 the other way, by the largest client."""
    here = trainer(method__average=average)
    state = here.method.initial_state()
    start, end = state["weights"].numpy(), here.weights.parameter_end
    direction = np.zeros_like(start)
    direction[:end] = 1 / np.sqrt(end)
    sent = np.stack([start + length * direction for length in (0.5, -9, 0.5, 0.45, 0.55)])
    found, _ = merged(here.method, state, sent)
    plain, _ = merged(trainer().method, state, sent)
    assert (plain - start) @ direction < -3
    assert np.linalg.norm(found - start) <= 0.5
    if average == "trimmed-mean":
        assert (found - start) @ direction == pytest.approx(0.4833, abs=1e-3)  # of 0.45, 0.5, 0.5
    if average == "centered-clipping":  # the faulty client has 20 of 49 samples: by size, clipped-mean hardly moves
        assert (found - start) @ direction > 0.25


@pytest.mark.parametrize("average", ["clipped-mean", "trimmed-mean", "centered-clipping"])
def test_same_bits_with_workers(average: str) -> None:
    here, there = (run(small(method__average=average, engine__workers=workers)) for workers in (0, 2))
    assert all(torch.equal(here.weights[name], there.weights[name]) for name in here.weights)


@pytest.mark.parametrize("name", ["scaffold", "fedcurv", "fedmlp", "fedvls", "fedctran", "condist"])
def test_methods_with_the_mean_can_use_centered_clipping(name: str) -> None:
    changes = {"training__optimizer": "sgd"} if name == "scaffold" else {}
    row = run(small(method__name=name, method__average="centered-clipping", **changes)).rows[-1]
    assert row["clipped"] >= 0 and row["update_radius"] > 0


def test_robust_average_can_be_composed() -> None:
    method = {"name": "compose", "average": "trimmed-mean", "parts": ["masked"], "trimmed-mean": {"trim": 0.3}}
    assert run(small(method=method)).rows[-1]["trimmed"] == 2
