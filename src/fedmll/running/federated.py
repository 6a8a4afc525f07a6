"""What a federation between machines says of its model, from the sites' counts, in the run's folder:

federated.json  of all sites together and of each: every figure by class with its bound and interval, the reliability
                curve, thresholds and calibration, which classes were not sent
federated.csv   the figures by site and class
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedmll import files
from fedmll.errors import DataError
from fedmll.evaluation import cuts
from fedmll.evaluation.calibration import Reliability, reliability
from fedmll.evaluation.counted import Counted, Figures, Small, figures
from fedmll.evaluation.histograms import BINS
from fedmll.evaluation.metrics import Ints, mean_of
from fedmll.running.folder import to_json, write_csv
from fedmll.running.shown import number
from fedmll.running.thresholds import Choice, choose

FILE, TABLE = "federated.json", "federated.csv"
ALL = "(pooled)"  # no site can have this name
SAME_ROWS = "thresholds were chosen on the very rows that the figures are of (no site marks both validation and test)"
CUT = ("f1", "precision", "recall")


def chosen(counted: Counted | None) -> Choice | None:
    """By all sites' validation counts together; None where nobody sent any."""
    if counted is None or not counted.tuning.any():
        return None
    return choose(counted.tuning, counted.goal, counted.calibrate)


def write(out: Path, counted: Counted, seed: int) -> None:
    common = chosen(counted)
    whole = _Part(counted.test, figures(counted.test, seed, ALL), common, common)
    parts = {ALL: whole} | {
        name: _Part(test, figures(test, seed, name), common, _own(tuning, counted, common))
        for name, test, tuning in ((name, _wide(site.test), _wide(site.tuning)) for name, site in counted.sites.items())
    }
    every = {name: part.described(counted.classes) for name, part in parts.items()}
    for name, site in counted.sites.items():
        every[name] |= {
            "min_count": site.min_count,
            "not_sent": site.not_sent,
            "same_rows": site.validation is None,
            "chosen_on_own_counts": [
                label for label, own in zip(counted.classes, _both(_wide(site.tuning)), strict=True) if own
            ],
        }
    pooled = every.pop(ALL) | {"curves": _curves(reliability(whole.test), counted.classes)}
    found = {"classes": counted.classes, "bins": BINS, "calibrate": counted.calibrate, "pooled": pooled, "sites": every}
    files.write(out / FILE, to_json(found, indent=1) + "\n")
    columns = [part.columns(name, counted.classes) for name, part in parts.items()]
    write_csv(out / TABLE, {key: np.concatenate([each[key] for each in columns]) for key in columns[0]})


def by_site(folder: Path) -> dict[str, dict[str, Any]]:
    """Each site's own choice, as a model's file describes one (thresholds, thresholds_for, calibration): chosen on its
    counts; for classes that it sent none of, the common one. Nobody is in it where nothing was chosen."""
    found = _read(folder)
    sites = {} if found is None else found["sites"]
    return {name: site["own"] for name, site in sites.items() if site["own"] is not None}


def overview(folder: Path) -> tuple[list[str], list[list[str]], list[str]] | None:
    """The figures of all sites together and of each as a table, and what must be said beside it."""
    found = _read(folder)
    if found is None:
        return None
    rows = []
    for name, part in ({ALL: found["pooled"]} | found["sites"]).items():
        mean = part["mean"]
        silent = str(len(part["not_sent"]["test"])) if "not_sent" in part else ""
        ranked = [_within(mean, figure) for figure in ("auc", "ap")]
        cut = [number(mean[key]) for key in ("f1", "f1_tuned", "f1_own", "ece")]
        rows.append([name, *ranked, *cut, silent])
    header = ["", "AUC (95 %)", "AP (95 %)", "F1", "F1, tuned", "F1, own", "ECE", "classes not sent"]
    notes = [SAME_ROWS] if found["sites"] and all(site["same_rows"] for site in found["sites"].values()) else []
    mixed = [name for name, site in found["sites"].items() if site["same_rows"]]
    if mixed and not notes:
        notes = [f"of {', '.join(mixed)} the thresholds were chosen on the rows that the figures are of, too"]
    return header, rows, notes


class _Part:
    """All sites together, or one: what its test counts give at 0.5, at the common thresholds and at its own."""

    def __init__(self, test: Ints, found: Figures, common: Choice | None, own: Choice | None) -> None:
        self.test, self.found, self.common, self.own = test, found, common, own
        self.by_class: dict[str, NDArray[Any]] = dict(found.by_class)
        for name, choice in (("tuned", common), ("own", own)):
            undefined = np.full(test.shape[1], np.nan)
            cut = None if choice is None else cuts.cut_by(test, choice.cuts)
            self.by_class[f"threshold_{name}"] = undefined if choice is None else choice.thresholds
            for figure in CUT:
                self.by_class[f"{figure}_{name}"] = undefined if cut is None else 100 * getattr(cut, figure)
            if choice is not None and choice.by is not None:
                self.by_class[f"ece_{name}"] = reliability(test, choice.by).error

    def described(self, classes: tuple[str, ...]) -> dict[str, Any]:
        more = [key for key in self.by_class if key.endswith(("_tuned", "_own")) and not key.startswith("threshold")]
        together = reliability(self.test.sum(axis=1, keepdims=True))
        table = {key: values.tolist() for key, values in self.by_class.items()}
        return {
            "mean": self.found.mean | {key: mean_of(self.by_class[key]) for key in more},
            "by_class": {
                label: {key: values[place] for key, values in table.items()} for place, label in enumerate(classes)
            },
            "curve": _curves(together, ("all",))["all"],
            "own": None if self.own is None else self.own.described,
        }

    def columns(self, name: str, classes: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        return {"site": np.array([name] * len(classes)), "class": np.array(classes), **self.by_class}


def _own(counts: Ints, counted: Counted, common: Choice | None) -> Choice | None:
    """A site's choice for the classes that it sent positives and negatives of; the common one for the others."""
    if common is None:
        return None
    return choose(counts, counted.goal, counted.calibrate).where(_both(counts), common)


def _wide(counts: Small) -> Ints:
    return counts.astype(np.int64)


def _both(counts: Ints) -> NDArray[np.bool_]:
    return (counts.sum(axis=2) > 0).all(axis=0)


def _curves(found: Reliability, names: tuple[str, ...]) -> dict[str, dict[str, list[float]]]:
    """By class, of each range of probabilities: the mean prediction, the share of positives, and how many samples."""
    arrays = {"predicted": found.predicted, "observed": found.observed, "samples": found.samples}
    return {name: {key: array[place].tolist() for key, array in arrays.items()} for place, name in enumerate(names)}


def _within(mean: dict[str, float | None], figure: str) -> str:
    value, error, low, high = (mean[figure + end] for end in ("", "_error", "_low", "_high"))
    return "–" if value is None else f"{number(value)} ± {number(error)} ({number(low, 1)} to {number(high, 1)})"


def _read(folder: Path) -> dict[str, Any] | None:
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _ = found["pooled"]["mean"], found["sites"].items(), found["classes"]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise DataError(f"{path}, with the figures by site, cannot be read. Put it back from a copy.") from None
    return found
