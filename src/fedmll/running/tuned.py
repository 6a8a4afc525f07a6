"""Thresholds and probabilities of a finished run's model, chosen again on its validation data."""

from __future__ import annotations

from dataclasses import dataclass

from fedmll.evaluation import calibration, cuts
from fedmll.evaluation.histograms import histograms
from fedmll.evaluation.metrics import Confusion, Floats
from fedmll.running.folder import PREDICTIONS
from fedmll.running.model import load_model, write_model
from fedmll.running.predictions import read_predictions
from fedmll.running.saved import SavedRun
from fedmll.running.thresholds import choose


@dataclass(frozen=True)
class Tuned:
    """classes × …: thresholds, and what they give on the validation data (shares; NaN where undefined)."""

    classes: tuple[str, ...]
    goal: str
    thresholds: Floats
    cut: Confusion
    before: calibration.Reliability
    after: calibration.Reliability | None  # None: not calibrated


def tune(run: SavedRun, goal: str = "f1", calibrate: str = "none") -> Tuned:
    """Choose the thresholds of a run's model, and write them into it. With `calibrate` its probabilities change too, in
    everything that uses the file: prediction, export.

    f1          the highest F1 of each class, on the validation data
    recall=r    the highest threshold that finds the share r of that data's positives
    precision=r the lowest at which the share r of what is predicted is right
    find=r      at least the share r of the positives of *new* data is found, on average: see cuts.controlled_recall
    """
    kept = read_predictions(run.folder / PREDICTIONS, "validation")  # as they were before any calibration
    counts = histograms(kept.probabilities, kept.targets)
    chosen = choose(counts, goal, calibrate)
    as_it_is = load_model(run.model.file)  # everything else in the file stays
    write_model(run.model.file, as_it_is.weights, as_it_is.description | chosen.described)
    before = calibration.reliability(counts)
    after = None if chosen.by is None else calibration.reliability(counts, chosen.by)
    return Tuned(kept.classes, goal, chosen.thresholds, cuts.cut_by(counts, chosen.cuts), before, after)
