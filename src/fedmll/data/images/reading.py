"""How a user's own images and labels are read, and everything that is wrong with them in one report."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.errors import ConfigError, DataError

NAMED = 5  # examples of each problem; the others are counted
UNREADABLE = (
    "Replace them with files that open in an image viewer, remove their rows, or leave them out with --skip-unreadable."
)


@dataclass(frozen=True)
class Reading:
    """The settings `data.…` (of `fedmll join` and `fedmll data pack`: the options --…) of these names.

    classes           the only columns of a labels file that are classes, in this order; empty: all that are left
    ignore            columns that are read as if they were not there
    group             the column that says whose image it is: a patient's images are on one side of every split
    window            which values become black and white in images with more than 8 bits a pixel; None: from the data
    skip_unreadable   leave out images that are missing or cannot be decoded, instead of an error
    """

    classes: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    group: str | None = None
    window: tuple[float, float] | None = None
    skip_unreadable: bool = False
    by_options: bool = False  # for errors: the user writes --ignore a,b and not --set data.ignore=["a","b"]

    def __post_init__(self) -> None:
        for name in ("classes", "ignore"):
            repeated = next((n for n in getattr(self, name) if getattr(self, name).count(n) > 1), None)
            if repeated is not None:
                raise ConfigError(f"{self.setting(name)} names '{repeated}' twice.")
        if self.window is not None:
            low, high = float(self.window[0]), float(self.window[1])
            if not low < high:
                raise ConfigError(
                    f"{self.setting('window')} is the value that becomes black and the value that becomes white, the "
                    f"smaller first; it is {low:g}, {high:g}."
                )
            object.__setattr__(self, "window", (low, high))

    def setting(self, name: str) -> str:
        return f"--{name}" if self.by_options else f"data.{name}"

    def how_to_set(self, name: str, value: str | Sequence[Any]) -> str:
        """What to write on the command line, ready to be copied."""
        if self.by_options:
            text = value if isinstance(value, str) else ",".join(str(part) for part in value)
            return f"--{name}={shlex.quote(text)}"
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return f"--set {shlex.quote(f'data.{name}={text}')}"

    def how_to_ignore(self, names: Sequence[str]) -> str:
        """These columns too, beside those that are ignored already."""
        return self.how_to_set("ignore", [*self.ignore, *names])


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
