"""Participation: the clients of a round; training samples and held-out samples of a client."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmll.core.errors import ConfigError
from fedmll.data import federation
from fedmll.data.federation import split_holdout
from fedmll.data.participation import choose_clients
from fedmll.testing import experiment


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 1000), min_size=1, max_size=60),
    share=st.floats(0.001, 1),
    sampling=st.sampled_from(["uniform", "size"]),
    round=st.integers(0, 1000),
)
def test_requested_number_of_distinct_clients_in_order(
    sizes: list[int], share: float, sampling: str, round: int
) -> None:
    chosen = choose_clients(sizes, round, 7, fraction=share, sampling=sampling)
    assert len(chosen) == ceil(Fraction(str(share)) * len(sizes))
    assert (np.diff(chosen) > 0).all()
    assert chosen[0] >= 0 and chosen[-1] < len(sizes)
    assert (chosen == choose_clients(sizes, round, 7, fraction=share, sampling=sampling)).all()


def test_number_of_chosen_clients() -> None:
    sizes = [5] * 50
    assert len(choose_clients(sizes, 1, 0)) == 50
    assert len(choose_clients(sizes, 1, 0, fraction=0.001)) == 1
    assert len(choose_clients(sizes, 1, 0, fraction=0.1, count=7)) == 7  # count wins


@pytest.mark.parametrize(
    ("fraction", "clients", "expected"),
    [
        (0.25, 10, 3),  # 2.5
        (0.1, 12, 2),  # 1.2: rounded, it would be 1
        (0.5, 12, 6),
        (0.29, 100, 29),  # in binary floats 28.999999999999996 …
        (0.07, 100, 7),  # … and 7.000000000000001, whose ceiling is 8
        (0.28, 50, 14),
        (1.0, 13, 13),
    ],
)
def test_a_fraction_is_rounded_up(fraction: float, clients: int, expected: int) -> None:
    """⌈ρK⌉ clients, Algorithm 1 of FedLGT."""
    assert len(choose_clients([5] * clients, 1, 0, fraction=fraction)) == expected


@pytest.mark.parametrize("sampling", ["uniform", "size"])
def test_choice_depends_on_seed_and_round(sampling: str) -> None:
    sizes = np.arange(1, 101)
    picks = {
        (seed, r): tuple(choose_clients(sizes, r, seed, count=10, sampling=sampling))
        for seed in (0, 1)
        for r in range(20)
    }
    assert len(set(picks.values())) == 40


def test_uniform_sampling_gives_equal_chances() -> None:
    sizes = [1, 10, 100, 1000, 10_000]
    rounds = 4_000
    counts = np.bincount(np.concatenate([choose_clients(sizes, r, 0, count=2) for r in range(rounds)]), minlength=5)
    assert np.allclose(counts / rounds, 0.4, atol=0.04)  # five standard deviations


def test_size_sampling_gives_chances_in_proportion() -> None:
    sizes = np.array([10, 20, 30, 40])
    rounds = 4_000
    counts = np.bincount(np.concatenate([choose_clients(sizes, r, 0, count=1, sampling="size") for r in range(rounds)]))
    assert np.allclose(counts / rounds, sizes / 100, atol=0.04)


def test_size_draws_one_after_the_other_without_replacement() -> None:
    sizes = np.array([10.0, 20, 30, 40])
    share = sizes / 100
    expected = np.zeros(4)
    for first, second in itertools.permutations(range(4), 2):
        expected[[first, second]] += share[first] * share[second] / (1 - share[first])
    rounds = 4_000
    counts = np.bincount(np.concatenate([choose_clients(sizes, r, 0, count=2, sampling="size") for r in range(rounds)]))
    assert np.allclose(counts / rounds, expected, atol=0.04)
    assert abs(expected - 2 * share).max() > 0.04  # the test would see draws with replacement


def test_clients_without_data_come_last() -> None:
    for round in range(20):
        assert choose_clients([0, 3, 0, 5], round, 0, count=2, sampling="size").tolist() == [1, 3]
    assert len(choose_clients([0, 3, 0, 5], 0, 0, count=3, sampling="size")) == 3


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({"count": 0}, "participation.count = 0"),
        ({"count": 4}, "use 1 to 3"),
    ],
)
def test_impossible_count_is_rejected(options: dict[str, object], hint: str) -> None:
    with pytest.raises(ConfigError) as error:
        choose_clients([1, 2, 3], 0, 0, **options)  # type: ignore[arg-type]
    assert hint in str(error.value) and "\n" not in str(error.value)


def test_no_clients_is_rejected() -> None:
    with pytest.raises(ConfigError, match="no client"):
        choose_clients([], 0, 0)


@pytest.mark.parametrize(("count", "share", "held"), [(9, 0.1, 0), (10, 0.1, 1), (8, 0.0, 0), (7, 0.5, 3)])
def test_client_with_too_few_samples_holds_out_nothing(count: int, share: float, held: int) -> None:
    rows = np.array([5, 3, 90, 14, 8, 2, 61, 30, 77, 40])[:count]
    kept, out = split_holdout(rows, share, 0, "a")
    assert len(out) == held
    assert kept.dtype == out.dtype == rows.dtype
    assert np.array_equal(np.sort(np.concatenate([kept, out])), np.sort(rows))
    assert (np.diff(kept) > 0).all()


def test_no_random_draw_without_holdout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A random generator takes 0.1 ms, and there may be 51,414 clients with 8 samples each."""
    monkeypatch.setattr(federation, "numpy_generator", None)
    assert split_holdout(np.arange(9), 0.1, 0, "a")[0].tolist() == list(range(9))


def test_the_sizes_of_all_clients_are_counted_once() -> None:
    found = federation.build(experiment())
    assert found.sizes.tolist() == [len(rows) for rows in found.samples]
    assert found.sizes is found.sizes and found.active_clients is found.active_clients
    fewer = replace(found, samples=(found.samples[0][:0], *found.samples[1:]))
    assert fewer.sizes[0] == 0 and fewer.active_clients.tolist() == [1, 2, 3]
