"""How many training images of each site have a class, do not, or are not known to: what the operator sees before round
1. A count of some images, but fewer than the site's minimum, is not said, nor is another that it would follow from."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.errors import FederationError
from fedmll.running.folder import write_csv

if TYPE_CHECKING:
    from fedmll.deploy.introduction import Introduction

FILE = "labels.csv"
FEW, UNSAID = -1, -2  # instead of a count: some, but fewer than the minimum; more, and it would say another one
MOST_COLUMNS = 8  # sites in the table on the screen; of more it has the sums

Counts = dict[str, tuple[int, int, int]]  # by class: present, absent, unknown
Here = Mapping[str, "Introduction"]


def of_site(data: Dataset, annotated: NDArray[np.bool_], smallest: int) -> Counts:
    """What leaves a site: of the classes that it annotates."""
    counts = np.stack([(data.labels == value).sum(axis=0) for value in (PRESENT, ABSENT, UNKNOWN)], axis=1)
    few = (counts > 0) & (counts < smallest)
    told = np.where(few, FEW, counts)
    for row in np.flatnonzero(few.any(axis=1) & ~few.all(axis=1)):
        told[row, np.argmax(np.where(few[row], -1, counts[row]))] = UNSAID
    rows = {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in zip(data.classes, told, strict=True)}
    return {name: rows[name] for name, own in zip(data.classes, annotated, strict=True) if own}


def nothing_said(classes: Sequence[str]) -> Counts:
    return dict.fromkeys(classes, (UNSAID, UNSAID, UNSAID))


def believed(told: Any, classes: Sequence[str], samples: int) -> Counts | None:
    """What a site says of its own classes; None: no images can have such counts."""
    if not isinstance(told, dict) or list(told) != list(classes):
        return None
    for row in told.values():
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(type(count) is int for count in row):
            return None
        said = [count for count in row if count >= 0]
        if min(row) < UNSAID or sum(said) > samples or (len(said) == 3 and sum(said) != samples):
            return None
    return {name: (row[0], row[1], row[2]) for name, row in told.items()}


def settle(
    out: Path, classes: Sequence[str], names: Sequence[str], here: Here, say: Callable[[str], None],
    confirm: Callable[[Sequence[str]], None],
) -> None:  # fmt: skip
    """Before round 1: show the counts, have what is doubtful confirmed, write them down. Not a second time."""
    here = {name: here[name] for name in names if name in here}
    if not (out / FILE).exists():
        for line in shown(classes, here):
            say(line)
        found = doubts(classes if len(here) == len(names) else (), here)  # who comes later may know them
        for doubt in found:
            say(doubt)
        if found:
            confirm(found)
    write(out, classes, names, here)


def doubts(classes: Sequence[str], here: Here) -> list[str]:
    """What a person should know before hours of training. What is not said of few images counts as some."""
    known = {label: [told.labels[label] for told in here.values() if label in told.labels] for label in classes}
    nowhere = [label for label, rows in known.items() if not any(row[0] or row[1] for row in rows)]
    never = [label for label, rows in known.items() if label not in nowhere and not any(row[0] for row in rows)]
    found = []
    if nowhere:
        found.append(f"no site has a training image with a known label of {', '.join(nowhere)}")
    if never:
        found.append(f"no site has a training image with {', '.join(never)}")
    for name, told in here.items():
        rows = told.labels.values()
        if not any(row[0] or row[1] for row in rows):
            found.append(f"{name} knows no label of any of its {told.samples} training images")
        elif not any(row[0] for row in rows):
            found.append(f"{name} has no training image with any of its classes")
    return found


def at_terminal(found: Sequence[str]) -> None:
    """A person's word; FederationError without one."""
    if sys.stdin.isatty() and input("Start all the same? [y/N] ").strip().lower() in ("y", "yes"):
        return
    raise FederationError(
        f"Nobody confirmed that the run starts although {'; '.join(found)}. Have it put right at the sites, or go on "
        "with `fedmll resume FOLDER --yes`."
    )


def beforehand(found: Sequence[str]) -> None:
    """With --yes, and where the sites are one's own (a rehearsal)."""


def write(out: Path, classes: Sequence[str], names: Sequence[str], here: Here) -> None:
    """labels.csv: a line a class of each site, in the order of `names`, that has come."""
    rows: list[tuple[str, ...]] = []
    for name, told in ((name, here[name]) for name in names if name in here):
        for label in classes:
            row = told.labels.get(label, (0, 0, told.samples))
            rows.append((name, label, str(told.samples), *(_cell(count, told.min_count) for count in row)))
    header = ("site", "class", "images", "present", "absent", "unknown")
    write_csv(out / FILE, {key: np.array([row[place] for row in rows]) for place, key in enumerate(header)})


def shown(classes: Sequence[str], here: Here) -> list[str]:
    """The table for the operator: a class a line, of each site present / absent / unknown; of many sites their sums."""
    header = ["training images: present / absent / unknown"]
    if len(here) <= MOST_COLUMNS:
        header += [f"{name} ({told.samples})" for name, told in here.items()]
        lines = [[label, *(_cells(told, label) for told in here.values())] for label in classes]
    else:
        header += ["sites that know it", "all sites together, at least"]
        lines = [[label, *_sums(here, label)] for label in classes]
    return [" | ".join(line) for line in [header, *lines]]


def _cell(count: int, smallest: int) -> str:
    return {FEW: f"< {smallest}", UNSAID: "not said"}.get(count, str(count))


def _cells(told: Introduction, label: str) -> str:
    row = told.labels.get(label)
    return "–" if row is None else " / ".join(_cell(count, told.min_count) for count in row)


def _sums(here: Here, label: str) -> tuple[str, str]:
    rows = [(told.samples, told.labels.get(label, (0, 0, told.samples))) for told in here.values()]
    know = sum(bool(row[0] or row[1]) for _, row in rows)
    return str(know), " / ".join(str(sum(max(row[place], 0) for _, row in rows)) for place in range(3))
