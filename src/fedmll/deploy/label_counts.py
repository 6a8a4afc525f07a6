"""Label counts: how many training images of each site have a class, do not have it, or have no label for it.

The operator sees them before round 1. core/small_groups.py decides which counts leave a site.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import FederationError
from fedmll.core.small_groups import FEW, ROUNDED_TO, WITHHELD, min_released_count, release_label_counts, round_counts
from fedmll.core.text import Confirm
from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN, Dataset
from fedmll.runs.formatting import write_csv

if TYPE_CHECKING:
    from fedmll.deploy.introduction import Introduction

FILE = "labels.csv"
MAX_COLUMNS = 8  # sites in the table on the screen; of more sites it shows the sums

LabelCounts = dict[str, tuple[int, int, int]]  # by class: present, absent, unknown
Introductions = Mapping[str, "Introduction"]  # by site


def count_labels(data: Dataset, annotated: NDArray[np.bool_], min_count: int) -> LabelCounts:
    """Count the labels of a site's training images for the server, for the classes that the site annotates."""
    counts = np.stack([(data.labels == value).sum(axis=0) for value in (PRESENT, ABSENT, UNKNOWN)], axis=1)
    released = release_label_counts(counts, len(data), min_count)
    rows = {name: (int(row[0]), int(row[1]), int(row[2])) for name, row in zip(data.classes, released, strict=True)}
    return {name: rows[name] for name, is_own in zip(data.classes, annotated, strict=True) if is_own}


def withheld_counts(classes: Sequence[str]) -> LabelCounts:
    """The counts of a site that releases none."""
    return dict.fromkeys(classes, (WITHHELD, WITHHELD, WITHHELD))


def parse_counts(values: Any, classes: Sequence[str], samples: int) -> LabelCounts | None:
    """Validate the counts that a site sent for its classes; None if no images can have such counts."""
    if not isinstance(values, dict) or list(values) != list(classes):
        return None
    for row in values.values():
        if not isinstance(row, list | tuple) or len(row) != 3 or not all(type(count) is int for count in row):
            return None
        released = [count for count in row if count >= 0]
        total = int(round_counts(np.int64(samples)))
        if min(row) < WITHHELD or any(count % ROUNDED_TO for count in released):
            return None
        if sum(released) >= samples + ROUNDED_TO or (len(released) == 3 and sum(released) != total):
            return None
    return {name: (row[0], row[1], row[2]) for name, row in values.items()}


def confirm_label_counts(
    out: Path,
    classes: Sequence[str],
    names: Sequence[str],
    introductions: Introductions,
    *,
    notify: Callable[[str], None],
    confirm: Confirm,
) -> None:
    """Show the counts before round 1, let the operator confirm what is doubtful, and write labels.csv to `out`.

    A resumed run, which has the file, is not shown again. `names` are the clients that take part.
    """
    joined = {name: introductions[name] for name in names if name in introductions}
    if not (out / FILE).exists():
        for line in format_table(classes, joined):
            notify(line)
        doubts = find_doubts(classes if len(joined) == len(names) else (), joined)  # a late client may annotate them
        for doubt in doubts:
            notify(doubt)
        if doubts and not confirm("Start all the same?"):
            raise FederationError(
                f"Nobody confirmed that the run starts although {'; '.join(doubts)}. Correct the labels at the sites, "
                "or continue with `fedmll resume FOLDER --yes`."
            )
    write_label_counts(out, classes, names, joined)


def find_doubts(classes: Sequence[str], introductions: Introductions) -> list[str]:
    """What the operator should know before hours of training. A withheld count is taken for more than 0."""
    sites = introductions.values()
    known = {label: [site.labels[label] for site in sites if label in site.labels] for label in classes}
    nowhere = [label for label, rows in known.items() if not any(row[0] or row[1] for row in rows)]
    never = [label for label, rows in known.items() if label not in nowhere and not any(row[0] for row in rows)]
    doubts = []
    if nowhere:
        doubts.append(f"no site has a training image with a known label of {', '.join(nowhere)}")
    if never:
        doubts.append(f"no site has a training image with {', '.join(never)}")
    for name, site in introductions.items():
        rows = site.labels.values()
        if not any(row[0] or row[1] for row in rows):
            doubts.append(f"{name} knows no label of any of its {site.samples} training images")
        elif not any(row[0] for row in rows):
            doubts.append(f"{name} has no training image with any of its classes")
    return doubts


def write_label_counts(out: Path, classes: Sequence[str], names: Sequence[str], introductions: Introductions) -> None:
    """Write labels.csv: one line per class of each site that has joined, in the order of `names`."""
    rows: list[tuple[str, ...]] = []
    for name, site in ((name, introductions[name]) for name in names if name in introductions):
        for label in classes:
            row = site.labels.get(label, (0, 0, site.samples))
            rows.append((name, label, str(site.samples), *(_format_count(count, site.min_count) for count in row)))
    header = ("site", "class", "images", "present", "absent", "unknown")
    write_csv(out / FILE, {key: np.array([row[place] for row in rows]) for place, key in enumerate(header)})


def format_table(classes: Sequence[str], introductions: Introductions) -> list[str]:
    """The table for the operator: one line per class, with present / absent / unknown of each site.

    With more than MAX_COLUMNS sites it has the sums over the sites.
    """
    header = [f"training images, rounded to {ROUNDED_TO}: present / absent / unknown"]
    if len(introductions) <= MAX_COLUMNS:
        header += [f"{name} ({site.samples})" for name, site in introductions.items()]
        lines = [[label, *(_format_counts(site, label) for site in introductions.values())] for label in classes]
    else:
        header += ["sites that annotate it", "all sites, at least"]
        lines = [[label, *_format_sums(introductions, label)] for label in classes]
    return [" | ".join(line) for line in [header, *lines]]


def _format_count(count: int, min_count: int) -> str:
    return {FEW: f"< {min_released_count(min_count)}", WITHHELD: "withheld"}.get(count, str(count))


def _format_counts(site: Introduction, label: str) -> str:
    row = site.labels.get(label)
    return "–" if row is None else " / ".join(_format_count(count, site.min_count) for count in row)


def _format_sums(introductions: Introductions, label: str) -> tuple[str, str]:
    rows = [(site.samples, site.labels.get(label, (0, 0, site.samples))) for site in introductions.values()]
    annotating = sum(bool(row[0] or row[1]) for _, row in rows)
    return str(annotating), " / ".join(str(sum(max(row[place], 0) for _, row in rows)) for place in range(3))
