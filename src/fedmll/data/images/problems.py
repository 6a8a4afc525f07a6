"""Collects all problems of a user's images and labels, so that one error reports them together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from fedmll.config.settings import ReadingOptions
from fedmll.core.errors import DataError

NAMED = 5  # examples per problem; the others are only counted
UNREADABLE = (
    "Replace them with files that open in an image viewer, remove their rows, or leave them out with --skip-unreadable."
)


class Problems:
    """The problems of one set of data."""

    def __init__(self, where: str) -> None:
        self.where = where
        self.found: list[str] = []

    def add(self, text: str) -> None:
        self.found.append(text)

    def add_unreadable(self, named: Sequence[str], count: int, advice: str = UNREADABLE) -> None:
        if named:
            self.add(f"{len(named)} of {count} images cannot be read: {abbreviate(named)}. {advice}")

    def report(self) -> None:
        """Raise a DataError that lists all problems, if there are any."""
        if len(self.found) == 1:
            raise DataError(f"{self.where}: {self.found[0]}")
        if self.found:
            listed = " ".join(f"({number}) {text}" for number, text in enumerate(self.found, 1))
            raise DataError(f"{self.where} has {len(self.found)} problems. {listed}")


def abbreviate(examples: Sequence[str], named: int = NAMED) -> str:
    """The first few examples, and the number of others."""
    more = len(examples) - named
    return "; ".join(examples[:named]) + (f"; and {more} more" if more > 0 else "")


def check_readable(
    count: int,
    name: Callable[[int], str],
    unreadable: Mapping[int, str],
    reading: ReadingOptions,
    problems: Problems,
    window_problem: str | None = None,
) -> tuple[NDArray[np.int64], list[str]]:
    """The positions of the readable images and the names of the skipped ones; raises all problems found so far.

    Unreadable images are a problem too, unless the user allows to skip them (`data.skip_unreadable`). Images that only
    need a window are never skipped.
    """
    if window_problem is not None:
        problems.add(window_problem)
    named = [f"{name(place)} ({reason})" for place, reason in unreadable.items()]
    if not reading.skip_unreadable or len(named) == count:
        problems.add_unreadable(named, count)
    problems.report()
    return np.setdiff1d(np.arange(count), list(unreadable)), named


def describe_skipped(missing: Sequence[str], unreadable: Sequence[str]) -> tuple[str, ...]:
    """The note about skipped images, if there are any."""
    counts = [f"{len(names)} {what}" for names, what in ((missing, "missing"), (unreadable, "unreadable")) if names]
    if not counts:
        return ()
    total = len(missing) + len(unreadable)
    return (
        f"images skipped (--skip-unreadable): {total} ({', '.join(counts)}): {abbreviate([*missing, *unreadable])}",
    )
