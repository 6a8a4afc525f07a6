"""Everything that is wrong with a user's own images and labels, in one report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.errors import DataError
from fedmll.settings import Reading

NAMED = 5  # examples of each problem; the others are counted
UNREADABLE = (
    "Replace them with files that open in an image viewer, remove their rows, or leave them out with --skip-unreadable."
)


class Problems:
    """What is wrong with one set of data, gathered so that one error says all of it."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[str] = []

    def add(self, text: str) -> None:
        self.found.append(text)

    def add_unreadable(self, named: Sequence[str], count: int, advice: str = UNREADABLE) -> None:
        if named:
            self.add(f"{len(named)} of {count} images cannot be read: {some(named)}. {advice}")

    def report(self) -> None:
        """A DataError with all of them, if there are any."""
        if len(self.found) == 1:
            raise DataError(f"{self.where}: {self.found[0]}")
        if self.found:
            listed = " ".join(f"({number}) {text}" for number, text in enumerate(self.found, 1))
            raise DataError(f"{self.where} has {len(self.found)} problems. {listed}")


def some(examples: Sequence[str], named: int = NAMED) -> str:
    """The first few, and how many more there are."""
    more = len(examples) - named
    return "; ".join(examples[:named]) + (f"; and {more} more" if more > 0 else "")


def readable(
    count: int, name: Callable[[int], str], unreadable: Mapping[int, str], reading: Reading, problems: Problems
) -> tuple[NDArray[np.int64], list[str]]:
    """The positions of the images that could be read, and the others' names, if they may be left out.

    Otherwise they are a problem as well; here all that were found are reported."""
    named = [f"{name(place)} ({reason})" for place, reason in unreadable.items()]
    if not reading.skip_unreadable or len(named) == count:
        problems.add_unreadable(named, count)
    problems.report()
    return np.setdiff1d(np.arange(count), list(unreadable)), named


def left_out(missing: Sequence[str], unreadable: Sequence[str]) -> tuple[str, ...]:
    """The note for images that were skipped, if there are any."""
    counts = [f"{len(names)} {what}" for names, what in ((missing, "missing"), (unreadable, "unreadable")) if names]
    if not counts:
        return ()
    total = len(missing) + len(unreadable)
    return (f"images left out (--skip-unreadable): {total} ({', '.join(counts)}): {some([*missing, *unreadable])}",)
