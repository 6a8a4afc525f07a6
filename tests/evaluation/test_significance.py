"""Significance tests against SciPy, against an enumeration of all signs, and by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import scipy.stats

from fedmll.evaluation.significance import holm, lowest_p, seeds_needed, wilcoxon


@pytest.mark.parametrize("seeds", [1, 2, 3, 5, 8, 12, 25])
def test_wilcoxon_equals_the_exact_test_of_scipy(seeds: int) -> None:
    generator = np.random.default_rng(seeds)
    for shift in (0.0, 0.5, 2.0):
        margins = generator.normal(shift, size=seeds)
        expected = scipy.stats.wilcoxon(margins, method="exact").pvalue
        assert wilcoxon(margins) == pytest.approx(expected, rel=1e-12)
        assert wilcoxon(-margins) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    "margins", [[1, 1, -2, 3], [1, 1, -2, -3], [1, 1, 1, 1], [0.5, -0.5, 2, 2, 2, -3], [1, 2, 2, -2, 7, 7, 7, 0]]
)
def test_wilcoxon_with_equal_margins_equals_the_enumeration_of_all_signs(margins: list[float]) -> None:
    known = np.array([m for m in margins if m])
    ranks = scipy.stats.rankdata(abs(known))
    middle = ranks.sum() / 2
    ours = abs(ranks[known > 0].sum() - middle)
    ways = [abs(ranks[list(signs)].sum() - middle) for signs in itertools.product([False, True], repeat=len(known))]
    assert wilcoxon(margins) == pytest.approx(np.mean([way >= ours - 1e-9 for way in ways]))


def test_wilcoxon_by_hand() -> None:
    assert wilcoxon([0.1, 0.5, 0.2]) == 0.25  # all of one sign: 2 of 8 ways
    assert wilcoxon([3, 2, -1]) == 0.5  # rank sums 5 and 1; 0 and 1 are as far out: 2 · 2 of 8
    assert wilcoxon([0, 0]) == wilcoxon([]) == 1
    assert wilcoxon([1, -1]) == 1


def test_holm_by_hand() -> None:
    # sorted 0.005, 0.01, 0.03, 0.04 times 4, 3, 2, 1: 0.02, 0.03, 0.06, 0.04; the last is not below the one before
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.25, 0.5]) == [0.5, 0.5]
    assert holm([0.9, 0.8]) == [1, 1]
    assert holm([]) == []
    one, none = holm([0.02, float("nan")])
    assert one == 0.02 and np.isnan(none)  # what was not tested does not count


def test_the_lowest_possible_p_and_the_seeds_that_are_needed() -> None:
    assert [lowest_p(seeds) for seeds in (1, 2, 3, 5, 6)] == [1, 0.5, 0.25, 0.0625, 0.03125]
    assert lowest_p(3) == wilcoxon([1, 2, 3]) and lowest_p(7) == wilcoxon(range(1, 8))
    assert lowest_p(6, 3) == pytest.approx(max(holm([wilcoxon(range(1, 7))] * 3)))
    assert lowest_p(1, 4) == 1  # a probability
    assert [seeds_needed(tests) for tests in (1, 2, 4, 9)] == [6, 7, 8, 9]
    assert seeds_needed() == 6  # one test: no correction
    for tests in (1, 2, 4, 9):
        assert lowest_p(seeds_needed(tests), tests) < 0.05 <= lowest_p(seeds_needed(tests) - 1, tests)
