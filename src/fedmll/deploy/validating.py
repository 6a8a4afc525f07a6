"""A model's file on a site's own data: every metric for the site, and a file that may be sent, which has counts and
what follows from them. Of a class with few images nothing is in it."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.data.images.cache import Progress, images_in, silent
from fedmll.deploy import own_folder, site
from fedmll.deploy.site import Site
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import BINS, ENDS, evaluate_counts, few, histograms
from fedmll.evaluation.metrics import Ints
from fedmll.running.folder import to_json
from fedmll.running.model import SavedModel


@dataclass(frozen=True)
class Validated:
    """`report` is exact and stays; `counts` (2, C, BINS), without those of few images, may be sent."""

    model: Path
    classes: tuple[str, ...]
    images: int
    report: metrics.Report
    counts: Ints
    few: tuple[str, ...]
    minimum: int

    def write(self, file: Path) -> None:
        """What may be sent: counts, and the metrics that follow from them."""
        found = evaluate_counts(self.counts, self.classes)
        per_class = {
            name: {metric: _plain(values[column]) for metric, values in found.per_class.items()}
            for column, name in enumerate(self.classes)
            if self.counts[:, column].any()
        }
        told = {
            "model": f"sha256:{files.checksum(self.model)}",
            "minimum": self.minimum,
            "few": self.few,
            "bins": BINS,
            "ends": [round(float(end), 6) for end in ENDS],  # in logits
            "counts": {
                name: {
                    side: {int(place): int(self.counts[row, column, place]) for place in np.flatnonzero(one)}
                    for row, (side, one) in enumerate(zip(("present", "absent"), self.counts[:, column], strict=True))
                }
                for column, name in enumerate(self.classes)
                if self.counts[:, column].any()
            },
            "metrics": found.values,
            "per_class": per_class,
        }
        files.write(file, to_json(told, indent=1) + "\n")


def validate_model(model: SavedModel, where: Site, progress: Progress = silent) -> Validated:
    """On the rows marked test or validation, or all of them where none is. A DataError names every class that the model
    does not know, with the likely spelling."""
    window = model.description["window"]
    own = replace(where, validates=True, window=where.window or (None if window is None else tuple(window)))
    with tempfile.TemporaryDirectory() as cache, own_folder.private(), images_in(Path(cache)):
        data = site.load(own, model.classes, model.sample_shape, 0, 0.0, progress).held_out
        scores: NDArray[np.float32] = model.predict(data)
        report = metrics.evaluate(scores, data.labels, model.classes, model.tuned_thresholds)
    counts = histograms(scores, data.labels)
    small = few(counts, where.limits.min_count)
    counts[:, small] = 0
    names = tuple(np.array(model.classes)[small].tolist())
    return Validated(model.file, model.classes, len(data), report, counts, names, where.limits.min_count)


def _plain(value: Any) -> float | int:
    return int(value) if isinstance(value, np.integer) else float(value)
