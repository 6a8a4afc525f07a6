"""Which labels a round's clients have. With few labels a client and few clients a round, a label may be absent from all
of them: its classifier row then learns nothing, and the pairwise tuning loss goes wrong. Known before any training."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.data.federation import Federation


def coverage(federation: Federation, rounds: int) -> NDArray[np.int64]:
    """(rounds, classes): how many of a round's clients have the label (may show it, and annotate it)."""
    owned = federation.allowed & federation.annotated
    return np.stack([owned[federation.participants(number)].sum(0) for number in range(1, rounds + 1)])


def table(counts: NDArray[np.int64], classes: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Header and one row a label: clients a round (fewest, mean, most), rounds without it, the longest such gap."""
    header = ["label", "fewest", "mean", "most", "rounds without", "longest gap"]
    rows = []
    for name, column in zip(classes, counts.T, strict=True):
        numbers = [column.min(), f"{column.mean():.1f}", column.max(), (column == 0).sum(), longest_gap(column)]
        rows.append([name, *map(str, numbers)])
    return header, rows


def longest_gap(column: NDArray[np.int64]) -> int:
    """The most rounds in succession with a count of 0."""
    longest = gap = 0
    for count in column:
        gap = gap + 1 if count == 0 else 0
        longest = max(longest, gap)
    return longest


def as_csv(counts: NDArray[np.int64], classes: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["round", *classes])
    writer.writerows([number, *row] for number, row in enumerate(counts.tolist(), 1))
    return text.getvalue()
