"""Are two methods different? Tests of the paired differences ("margins") between two methods, one per seed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

LEVEL = 0.05


def wilcoxon(margins: Sequence[float]) -> float:
    """The exact two-sided p-value of Wilcoxon's signed-rank test.

    It is the share of all 2ⁿ ways to give the margins their signs whose rank sum is at least as far from the middle.
    Margins of zero are left out, as Wilcoxon did. Equal margins share their mean rank; SciPy's exact method has no
    distribution for that. If all margins are zero, p is 1.
    """
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
    """Holm's step-down correction. The k-th smallest of m p-values is multiplied by m − k + 1, and is never below the
    one before it. A NaN was not tested: it stays NaN and does not count."""
    order = [place for place in np.argsort(p) if not np.isnan(p[place])]
    adjusted, before = [float("nan")] * len(p), 0.0
    for rank, place in enumerate(order):
        before = min(1.0, max(before, (len(order) - rank) * p[place]))
        adjusted[place] = float(before)
    return adjusted


def lowest_p(seeds: int, tests: int = 1) -> float:
    """The lowest p-value that is possible with this number of seeds, after Holm's correction over this number of tests.
    The probability that all margins have one sign is 2 / 2ⁿ."""
    return min(1.0, tests * 2.0 ** (1 - seeds))


def seeds_needed(tests: int = 1) -> int:
    """The smallest number of seeds with which p < 0.05 is possible."""
    seeds = 1
    while lowest_p(seeds, tests) >= LEVEL:
        seeds += 1
    return seeds
