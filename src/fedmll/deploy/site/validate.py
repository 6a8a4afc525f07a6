"""Test a model file on a site's own data: all metrics for the site, and a file that may be sent.

The file contains score histograms and the metrics that follow from them. Classes with few images are left out.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core import files, small_groups
from fedmll.data.images.cache import Progress, image_cache_in, no_progress
from fedmll.deploy.site import site_data, site_folder
from fedmll.deploy.site.site_config import Site
from fedmll.evaluation import metrics
from fedmll.evaluation.histograms import BINS, LOGIT_EDGES, evaluate_histograms, score_histograms
from fedmll.evaluation.ranking import Ints
from fedmll.inference.model_file import SavedModel
from fedmll.runs.formatting import to_json


@dataclass(frozen=True, kw_only=True)
class ModelValidation:
    """The result of a validation."""

    model: Path  # the model file
    classes: tuple[str, ...]  # the classes of the model
    images: int  # the number of test images
    report: metrics.ClassificationReport  # exact metrics, which stay at the site
    counts: Ints  # (2, C, BINS) score histograms without those of `withheld_classes`; they may be sent
    withheld_classes: tuple[str, ...]  # classes with some, but fewer than `min_count`, positive or negative images
    min_count: int  # the site's limit

    def write(self, file: Path) -> None:
        """Write what may be sent: histograms, and the metrics that follow from them."""
        report = evaluate_histograms(self.counts, self.classes)
        columns = {name: column for column, name in enumerate(self.classes) if self.counts[:, column].any()}
        values = {
            "model": f"sha256:{files.checksum(self.model)}",
            "min_count": self.min_count,
            "withheld_classes": self.withheld_classes,
            "bins": BINS,
            "logit_edges": [round(float(edge), 6) for edge in LOGIT_EDGES],
            "counts": {
                name: {
                    label: {int(bin): int(histogram[bin]) for bin in np.flatnonzero(histogram)}
                    for label, histogram in zip(("present", "absent"), self.counts[:, column], strict=True)
                }
                for name, column in columns.items()
            },
            "metrics": report.values,
            "per_class": {
                name: {
                    metric: _json_number(column_values[column]) for metric, column_values in report.per_class.items()
                }
                for name, column in columns.items()
            },
        }
        files.write_atomic(file, to_json(values, indent=1) + "\n")


def validate_model(model: SavedModel, site: Site, progress: Progress = no_progress) -> ModelValidation:
    """Test a model on the rows marked test or validation, or on all rows if none is marked.

    Raises:
        DataError: names every class that the model does not know, with the likely spelling.
    """
    site = replace(site, validation_only=True)
    if site.reading.window is None and model.description["window"] is not None:
        site = replace(site, reading=replace(site.reading, window=tuple(model.description["window"])))
    with tempfile.TemporaryDirectory() as cache, site_folder.private_files(), image_cache_in(Path(cache)):
        data = site_data.load_site_data(site, model.classes, model.sample_shape, 0, 0.0, progress).held_out
        scores: NDArray[np.float32] = model.predict(data)
        report = metrics.evaluate(scores, data.labels, model.classes, model.tuned_thresholds)
    counts = score_histograms(scores, data.labels)
    small = small_groups.find_small_classes(data.labels, site.limits.min_count)
    counts[:, small] = 0
    return ModelValidation(
        model=model.file,
        classes=model.classes,
        images=len(data),
        report=report,
        counts=counts,
        withheld_classes=tuple(np.array(model.classes)[small].tolist()),
        min_count=site.limits.min_count,
    )


def _json_number(value: Any) -> float | int:
    return int(value) if isinstance(value, np.integer) else float(value)
