"""Thresholds and calibration of a finished run's model, chosen again on its validation data."""

from __future__ import annotations

from dataclasses import dataclass

from fedmll.evaluation.calibration import Reliability, reliability_from_histograms
from fedmll.evaluation.histograms import score_histograms
from fedmll.evaluation.metrics import Confusion
from fedmll.evaluation.ranking import Floats
from fedmll.evaluation.thresholds import choose_thresholds, confusion_at
from fedmll.inference.load import SavedRun
from fedmll.inference.model_file import read_model, write_model


@dataclass(frozen=True, kw_only=True)
class TuningResult:
    """What was chosen, and its effect on the validation data.

    Attributes:
        classes: the C classes.
        goal: what the thresholds are chosen for.
        thresholds: (C,).
        confusion: counts and metrics of each class at these thresholds.
        before, after: the reliability without and with calibration; `after` is None without calibration.
    """

    classes: tuple[str, ...]
    goal: str
    thresholds: Floats
    confusion: Confusion
    before: Reliability
    after: Reliability | None


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
    write_model(run.model.file, model.weights, model.description | choice.description)
    calibrated = choice.calibration is not None
    return TuningResult(
        classes=stored.classes,
        goal=goal,
        thresholds=choice.thresholds,
        confusion=confusion_at(counts, choice.raw_thresholds),
        before=reliability_from_histograms(counts),
        after=reliability_from_histograms(counts, choice.calibration) if calibrated else None,
    )
