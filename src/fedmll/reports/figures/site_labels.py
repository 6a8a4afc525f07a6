"""The matrix site × class of data from several sites (`[[sites]]`): present, absent and unknown targets."""

from __future__ import annotations

from collections.abc import Iterator

from fedmll.data.dataset import ABSENT, PRESENT, UNKNOWN
from fedmll.data.federation import Federation
from fedmll.runs.formatting import TextTable, dicts_to_csv

NOT_ANNOTATED = "–"


def _counts(federation: Federation) -> Iterator[dict[str, str | int]]:
    for part, data in (("training", federation.source), ("test", federation.test)):
        for site in federation.experiment.sites or ():
            labels = data.labels[data.sites == site.name]
            counts = [(labels == value).sum(0).tolist() for value in (PRESENT, ABSENT, UNKNOWN)]
            for name, present, absent, unknown in zip(data.classes, *counts, strict=True):
                yield {
                    "part": part, "site": site.name, "class": name, "present": present, "absent": absent,
                    "unknown": unknown,
                }  # fmt: skip


def site_label_table(federation: Federation) -> TextTable:
    """One row per class, one column per site: the present, absent and unknown targets of its training data."""
    sites = [site.name for site in federation.experiment.sites or ()]
    cells: dict[str, list[str]] = {name: [] for name in federation.source.classes}
    for row in _counts(federation):
        if row["part"] == "training":
            known = row["present"] or row["absent"]
            text = " / ".join(f"{row[key]:,}" for key in ("present", "absent", "unknown"))
            cells[str(row["class"])].append(text if known else NOT_ANNOTATED)
    return ["class", *sites], [[name, *row] for name, row in cells.items()]


def site_labels_csv(federation: Federation) -> str:
    """All counts, of training and test data: one line per site and class."""
    return dicts_to_csv(list(_counts(federation)))
