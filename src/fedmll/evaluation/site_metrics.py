"""Metrics by site, for data from several sites that annotate different classes (`[[sites]]`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.evaluation.metrics import evaluate

SHARED = "shared classes"


def evaluate_by_site(
    scores: NDArray[np.floating],
    targets: NDArray[np.int8],
    sites: NDArray[np.str_],
    classes: Sequence[str],
    annotated: dict[str, NDArray[np.bool_]],
) -> list[dict[str, Any]]:
    """The metrics of each site's test data, of the classes that only one site annotates, and of the other classes.

    Args:
        scores: (N, C) probabilities.
        targets: (N, C) 1 present, 0 absent, -1 unknown.
        sites: (N,) the site of each sample.
        classes: the names of the C classes.
        annotated: site → (C,) the classes of which its training data has a label.

    Returns:
        Groups of test targets, as JSON: `site` (None: all sites), `classes` (their names), `only` (whether they are the
        classes that only this site annotates), `samples` and `metrics`.
    """
    counts = np.sum(list(annotated.values()), axis=0)
    groups: list[tuple[str | None, NDArray[np.bool_], bool]] = []
    for site, own in annotated.items():
        groups.append((site, own, False))
        alone = own & (counts == 1)
        if alone.any() and not np.array_equal(alone, own):
            groups.append((site, alone, True))
    if (counts > 1).any() and len(annotated) > 1:
        groups.append((None, counts > 1, False))
    found = []
    for site_name, chosen, only in groups:
        rows = np.arange(len(sites)) if site_name is None else np.flatnonzero(sites == site_name)
        columns = np.flatnonzero(chosen)
        names = [classes[int(column)] for column in columns]
        report = evaluate(scores[np.ix_(rows, columns)], targets[np.ix_(rows, columns)], names)
        found.append(
            {"site": site_name, "only": only, "classes": names, "samples": len(rows), "metrics": report.values}
        )
    return found
