"""Are two methods different? Tests of margins that are paired, a margin a seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVEL = 0.05


def wilcoxon(margins: Sequence[float]) -> float:
    """The two-sided p of Wilcoxon's signed-rank test, exact: of all 2ⁿ ways to give the margins their signs, the share
    whose rank sum is at least as far from the middle. Margins of zero are left out (as Wilcoxon did); equal ones share
    their mean rank, for which SciPy's exact method has no distribution. Without a margin that is not zero: 1."""
    from scipy.stats import rankdata  # here: it takes most of a second, and every command imports this file

    known = np.array([margin for margin in margins if margin != 0])
    ranks = np.rint(2 * rankdata(np.abs(known))).astype(int)  # twice: a shared rank may end in ½
    ways = np.ones(1)  # by rank sum: how many choices of positive margins give it
    for rank in ranks:
        longer = np.zeros(len(ways) + rank)
        longer[: len(ways)] += ways
        longer[rank:] += ways
        ways = longer
    low = int(min(ranks[known > 0].sum(), ranks[known < 0].sum()))
    return float(min(1.0, 2 * ways[: low + 1].sum() / ways.sum()))


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down correction: the k-th smallest of m is multiplied by m − k + 1, and is never below the one before
    it. What is NaN was not tested: it stays, and does not count."""
    order = [place for place in np.argsort(p) if not np.isnan(p[place])]
    adjusted, before = [float("nan")] * len(p), 0.0
    for rank, place in enumerate(order):
        before = min(1.0, max(before, (len(order) - rank) * p[place]))
        adjusted[place] = float(before)
    return adjusted


def lowest_p(seeds: int, tests: int = 1) -> float:
    """The lowest that the test can give with so many seeds, after Holm's correction over so many tests: that all
    margins have one sign has the probability 2 / 2ⁿ."""
    return min(1.0, tests * 2.0 ** (1 - seeds))


def seeds_needed(tests: int = 1) -> int:
    """The fewest with which p < 0.05 can be reached."""
    seeds = 1
    while lowest_p(seeds, tests) >= LEVEL:
        seeds += 1
    return seeds
