"""Metrics of the model of a federation between machines, computed from the sites' histograms, in the run's folder:

site_metrics.json  for all sites together and for each site: every metric of every class with its error bound and
                   interval, the reliability curve, thresholds and calibration, and which classes were not sent
site_metrics.csv   the metrics of each site and class
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll.core.errors import DataError
from fedmll.evaluation.calibration import Reliability, reliability_from_histograms
from fedmll.evaluation.histogram_metrics import (
    FederatedHistograms,
    HistogramMetrics,
    SmallCounts,
    compute_histogram_metrics,
)
from fedmll.evaluation.histograms import BINS, EDGES
from fedmll.evaluation.metrics import mean_of_defined
from fedmll.evaluation.ranking import Floats, Ints
from fedmll.evaluation.thresholds import ThresholdChoice, choose_thresholds, confusion_at, parse_goal
from fedmll.runs.formatting import format_number, write_csv
from fedmll.runs.run_folder import SITE_METRICS_FILE, RunFolder

SITE_METRICS_CSV_FILE = "site_metrics.csv"
ALL_SITES = "(pooled)"  # no site can have this name
SAME_ROWS = "thresholds were chosen on the same rows as the metrics (no site marks both validation and test)"
MARGIN = 1.0  # in logits: 0.5 may become 0.27 or 0.73
MIN_SITES = 3  # with two sites nobody can tell whose thresholds are unusual
METRICS_AT_THRESHOLD = ("f1", "precision", "recall")


def choose_common_thresholds(histograms: FederatedHistograms | None) -> ThresholdChoice | None:
    """Thresholds in [0, 1] for the validation histograms of all sites together; None if no site sent any.

    A class whose threshold one site would decide (`find_deciding_sites`) has the threshold of the other sites.
    """
    if histograms is None or not histograms.for_thresholds.any():
        return None
    common = choose_thresholds(histograms.for_thresholds, histograms.goal, histograms.calibrate)
    deciding = find_deciding_sites(histograms)
    for name in set(deciding.values()):
        others = choose_thresholds(histograms.without(name).for_thresholds, histograms.goal, histograms.calibrate)
        common = others.where(np.array([deciding.get(label) == name for label in histograms.classes]), common)
    return common.within_0_and_1()


def find_deciding_sites(histograms: FederatedHistograms) -> dict[str, str]:
    """By class: the site with which the common threshold lies far outside the range of the other sites' own thresholds.

    By its counts one site can move a threshold as far as it likes. Honest sites differ too, most of all if they are
    few, so the range is widened by MARGIN. At least two other sites must have thresholds of their own for the class.
    """
    choose = parse_goal(histograms.goal)
    common = _logits(choose(histograms.for_thresholds))
    own = {}
    for name, site in histograms.sites.items():
        counts = _as_int64(site.for_thresholds)
        own[name] = np.where(_has_both(counts), _logits(choose(counts)), np.nan)
    found: dict[str, str] = {}
    for place, label in enumerate(histograms.classes):
        thresholds = {name: values[place] for name, values in own.items() if np.isfinite(values[place])}
        furthest = MARGIN
        for name in thresholds if len(thresholds) >= MIN_SITES else ():
            others = [value for other, value in thresholds.items() if other != name]
            distance = max(min(others) - common[place], common[place] - max(others))
            if distance > furthest:
                furthest, found[label] = distance, name
    return found


def write_site_metrics(out: RunFolder, histograms: FederatedHistograms, seed: int) -> None:
    common = choose_common_thresholds(histograms)
    classes = histograms.classes
    all_sites = _SiteMetrics(
        histograms.test, compute_histogram_metrics(histograms.test, seed, ALL_SITES), common, common
    )
    parts = {ALL_SITES: all_sites}
    for name, site in histograms.sites.items():
        test, for_thresholds = _as_int64(site.test), _as_int64(site.for_thresholds)
        own = _choose_site_thresholds(for_thresholds, histograms, common)
        parts[name] = _SiteMetrics(test, compute_histogram_metrics(test, seed, name), common, own)
    described = {name: part.describe(classes) for name, part in parts.items()}
    for name, site in histograms.sites.items():
        sent = _has_both(_as_int64(site.for_thresholds))
        described[name] |= {
            "min_count": site.min_count,
            "not_sent": site.not_sent,
            "same_rows": site.validation is None,
            "chosen_on_own_counts": [label for label, own in zip(classes, sent, strict=True) if own],
        }
    pooled = described.pop(ALL_SITES) | {"curves": _curves(reliability_from_histograms(all_sites.test), classes)}
    content = {
        "classes": classes,
        "bins": BINS,
        "calibrate": histograms.calibrate,
        "chosen_without": find_deciding_sites(histograms),
        "pooled": pooled,
        "sites": described,
    }
    out.write_site_metrics(content)
    columns = [part.columns(name, classes) for name, part in parts.items()]
    table = {key: np.concatenate([each[key] for each in columns]) for key in columns[0]}
    write_csv(out.path / SITE_METRICS_CSV_FILE, table)


def read_site_thresholds(folder: Path) -> dict[str, dict[str, Any]]:
    """The thresholds and calibration of each site, as a model file describes them (thresholds, thresholds_for,
    calibration). They are chosen on the site's own histograms; for classes that it did not send they are the common
    ones. Empty if no thresholds were chosen."""
    content = _read(folder)
    sites = {} if content is None else content["sites"]
    return {name: site["own"] for name, site in sites.items() if site["own"] is not None}


def describe_deciding_sites(folder: Path) -> list[str]:
    """For the operator: which thresholds are chosen without a site's counts."""
    content = _read(folder)
    chosen_without: dict[str, str] = {} if content is None else content["chosen_without"]
    return [
        f"the threshold of {label} is chosen without the counts of {name}: with them it would lie far outside the "
        "range of the other sites' own thresholds"
        for label, name in chosen_without.items()
    ]


def site_metrics_table(folder: Path) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The mean metrics of all sites together and of each site: header, rows and notes. None for other runs."""
    content = _read(folder)
    if content is None:
        return None
    rows = []
    for name, part in ({ALL_SITES: content["pooled"]} | content["sites"]).items():
        mean = part["mean"]
        not_sent = str(len(part["not_sent"]["test"])) if "not_sent" in part else ""
        ranking = [_with_interval(mean, metric) for metric in ("auc", "ap")]
        at_threshold = [format_number(mean[key]) for key in ("f1", "f1_tuned", "f1_own", "ece")]
        rows.append([name, *ranking, *at_threshold, not_sent])
    header = ["", "AUC (95 %)", "AP (95 %)", "F1", "F1, tuned", "F1, own", "ECE", "classes not sent"]
    same_rows = [name for name, site in content["sites"].items() if site["same_rows"]]
    notes = []
    if same_rows and len(same_rows) == len(content["sites"]):
        notes = [SAME_ROWS]
    elif same_rows:
        notes = [f"for {', '.join(same_rows)} the thresholds were chosen on the same rows as the metrics"]
    return header, rows, notes


class _SiteMetrics:
    """Metrics of all sites together, or of one: at 0.5, at the common thresholds and at the site's own thresholds."""

    def __init__(
        self, test: Ints, metrics: HistogramMetrics, common: ThresholdChoice | None, own: ThresholdChoice | None
    ) -> None:
        self.test, self.metrics, self.own = test, metrics, own
        self.by_class: dict[str, NDArray[Any]] = dict(metrics.by_class)
        for name, choice in (("tuned", common), ("own", own)):
            undefined = np.full(test.shape[1], np.nan)
            confusion = None if choice is None else confusion_at(test, choice.raw_thresholds)
            self.by_class[f"threshold_{name}"] = undefined if choice is None else choice.thresholds
            for metric in METRICS_AT_THRESHOLD:
                values = undefined if confusion is None else 100 * getattr(confusion, metric)
                self.by_class[f"{metric}_{name}"] = values
            if choice is not None and choice.calibration is not None:
                self.by_class[f"ece_{name}"] = reliability_from_histograms(test, choice.calibration).error

    def describe(self, classes: tuple[str, ...]) -> dict[str, Any]:
        more = [key for key in self.by_class if key.endswith(("_tuned", "_own")) and not key.startswith("threshold")]
        all_classes = reliability_from_histograms(self.test.sum(axis=1, keepdims=True))
        table = {key: values.tolist() for key, values in self.by_class.items()}
        return {
            "mean": self.metrics.mean | {key: mean_of_defined(self.by_class[key]) for key in more},
            "by_class": {
                label: {key: values[place] for key, values in table.items()} for place, label in enumerate(classes)
            },
            "curve": _curves(all_classes, ("all",))["all"],
            "own": None if self.own is None else self.own.description,
        }

    def columns(self, name: str, classes: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        return {"site": np.array([name] * len(classes)), "class": np.array(classes), **self.by_class}


def _choose_site_thresholds(
    counts: Ints, histograms: FederatedHistograms, common: ThresholdChoice | None
) -> ThresholdChoice | None:
    """A site's own thresholds for the classes that it sent positives and negatives of; the common ones for the rest."""
    if common is None:
        return None
    own = choose_thresholds(counts, histograms.goal, histograms.calibrate).within_0_and_1()
    return own.where(_has_both(counts), common)


def _logits(thresholds: Floats) -> Floats:
    inside = np.clip(thresholds, EDGES[0], EDGES[-1])
    logits: Floats = np.log(inside / (1 - inside))
    return logits


def _as_int64(counts: SmallCounts) -> Ints:
    return counts.astype(np.int64)


def _has_both(counts: Ints) -> NDArray[np.bool_]:
    """(C,): the class has positives and negatives."""
    return (counts.sum(axis=2) > 0).all(axis=0)


def _curves(curves: Reliability, names: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """For each class and each range of probabilities: mean prediction, share of positives, number of samples."""
    arrays = {"predicted": curves.predicted, "observed": curves.observed, "samples": curves.samples}
    return {name: {key: array[place].tolist() for key, array in arrays.items()} for place, name in enumerate(names)}


def _with_interval(mean: dict[str, float | None], metric: str) -> str:
    value, error, low, high = (mean[metric + end] for end in ("", "_error", "_low", "_high"))
    if value is None:
        return "–"
    return f"{format_number(value)} ± {format_number(error)} ({format_number(low, 1)} to {format_number(high, 1)})"


def _read(folder: Path) -> dict[str, Any] | None:
    content = RunFolder(folder).read_site_metrics()
    try:
        _ = content and (content["pooled"]["mean"], content["sites"].items(), content["classes"])
    except (TypeError, KeyError, AttributeError):
        path = folder / SITE_METRICS_FILE
        raise DataError(f"{path}, with the metrics of each site, cannot be read. Restore it from a copy.") from None
    return content
