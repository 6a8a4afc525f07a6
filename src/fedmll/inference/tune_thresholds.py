"""Thresholds and calibration of a finished run's model, chosen again on its validation data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedmll.evaluation.calibration import Reliability, apply_calibration, reliability, reliability_from_histograms
from fedmll.evaluation.histograms import score_histograms
from fedmll.evaluation.metrics import Confusion
from fedmll.evaluation.ranking import Floats
from fedmll.evaluation.thresholds import choose_thresholds, confusion_at
from fedmll.inference.load_run import SavedRun
from fedmll.inference.model_file import read_model, write_model


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What was chosen, and its effect.

    Attributes:
        classes: the C classes.
        goal: what the thresholds are chosen for.
        thresholds: (C,).
        confusion: counts and metrics of each class at these thresholds, on the validation data.
        before, after: the reliability on the validation data without and with calibration; `after` is None without
            calibration.
        test: counts and metrics of each class at these thresholds on the test data; None if there is none.
        test_reliability: the reliability on the test data, with the calibration if there is one.
    """

    classes: tuple[str, ...]
    goal: str
    thresholds: Floats
    confusion: Confusion
    before: Reliability
    after: Reliability | None
    test: Confusion | None
    test_reliability: Reliability | None


def tune(run: SavedRun, goal: str = "f1", calibrate: str = "none") -> TuningResult:
    """Choose the thresholds of a run's model and write them into its file. With `calibrate` the probabilities change
    too, in everything that uses the file: prediction, export.

    Args:
        run: the finished run.
        goal: one of
            "f1": the highest F1 of each class on the validation data;
            "recall=r": the highest threshold that finds the share r of that data's positives;
            "precision=r": the lowest threshold at which the share r of the predicted samples is positive;
            "conformal_recall=r": on average at least the share r of the positives of *new* data is found (see
            `evaluation.thresholds.conformal_recall_thresholds`).
        calibrate: "none", "platt" or "temperature".
    """
    stored = run.folder.read_predictions("validation")  # without an earlier calibration
    counts = score_histograms(stored.probabilities, stored.targets)
    choice = choose_thresholds(counts, goal, calibrate)
    model = read_model(run.model.file)  # everything else in the file stays
    calibrated, test, test_reliability = choice.calibration is not None, None, None
    kept = run.folder.read_predictions("test")
    if len(kept):
        probabilities = kept.probabilities
        if choice.calibration is not None:
            probabilities = apply_calibration(probabilities, choice.calibration).astype(np.float32)
        test = Confusion.at_thresholds(probabilities, kept.targets, choice.thresholds)
        test_reliability = reliability(probabilities, kept.targets)
    results = None if test is None else describe_results(test)
    description = model.description | choice.description | {"threshold_results": results}
    write_model(run.model.file, model.weights, description)
    return TuningResult(
        classes=stored.classes,
        goal=goal,
        thresholds=choice.thresholds,
        confusion=confusion_at(counts, choice.raw_thresholds),
        before=reliability_from_histograms(counts),
        after=reliability_from_histograms(counts, choice.calibration) if calibrated else None,
        test=test,
        test_reliability=test_reliability,
    )


def describe_results(confusion: Confusion) -> dict[str, list[int] | list[float | None]]:
    """What thresholds give, as a model file stores it (`ThresholdResults`)."""
    shares = {"recall": confusion.recall, "precision": confusion.precision, "f1": confusion.f1}
    found = {name: [None if np.isnan(v) else float(v) for v in 100 * share] for name, share in shares.items()}
    return {"positives": confusion.positives.astype(int).tolist(), **found}
