"""Thresholds and calibration of a model by what they are wanted for, from histograms of validation data: the same for a
run on one machine (tuned.py) and between sites (federated.py). What is chosen is described as a model's file has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from fedmll.errors import ConfigError
from fedmll.evaluation import calibration, cuts
from fedmll.evaluation.metrics import Floats, Ints
from fedmll.running.model import recalibrated

GOALS: dict[str, Callable[[Ints, float], Floats]] = {
    "recall": cuts.wanted_recall,
    "precision": cuts.wanted_precision,
    "find": cuts.controlled_recall,
}
GUARANTEE = (
    "Of new samples' positives at least the wanted share is found in each class, on average over validation data and "
    "new samples, as long as these are like each other. A threshold of -0.5 (always predicted) means too few "
    "positives to promise it otherwise."
)
Calibration = Literal["none", "platt", "temperature"]


@dataclass(frozen=True)
class Choice:
    """cuts (C,) are of the network's own probabilities, thresholds (C,) the same of the calibrated ones; by (C, 2):
    a and b of the calibration σ(a z + b), None without one."""

    goal: str
    cuts: Floats
    thresholds: Floats
    by: Floats | None

    @property
    def described(self) -> dict[str, Any]:
        return {
            "thresholds": self.thresholds.tolist(),
            "thresholds_for": self.goal,
            "calibration": None if self.by is None else self.by.tolist(),
        }

    def where(self, own: np.ndarray, other: Choice) -> Choice:
        """With the other's for the classes that are not `own`; both are calibrated, or neither is."""
        by = None if self.by is None or other.by is None else np.where(own[:, None], self.by, other.by)
        cut, threshold = np.where(own, self.cuts, other.cuts), np.where(own, self.thresholds, other.thresholds)
        return Choice(self.goal, cut, threshold, by)


def choose(counts: Ints, goal: str, calibrate: str) -> Choice:
    """From the (2, C, BINS) counts of validation data."""
    found = thresholds_for(goal)(counts)
    if checked_calibration(calibrate) == "none":
        return Choice(goal, found, found, None)
    by = calibration.fitted(counts, calibrate)  # type: ignore[arg-type]
    by[by[:, 0] <= 0] = (1, 0)  # the model ranks such a class the wrong way round: no probability says that
    moved = np.where((found > 0) & (found < 1), recalibrated(found[None], by)[0], found)
    return Choice(goal, found, moved, by)


def checked_calibration(name: str) -> str:
    if name not in get_args(Calibration):
        raise ConfigError(f"--calibrate takes platt, temperature or none; it got '{name}'.")
    return name


def thresholds_for(goal: str) -> Callable[[Ints], Floats]:
    """`f1`, `recall=0.9`, `precision=0.8` or `find=0.9`."""
    name, equals, share = goal.partition("=")
    if goal == "f1":
        return cuts.best_f1
    try:
        if not equals:
            raise ValueError
        chosen, value = GOALS[name], float(share)
        return lambda counts: chosen(counts, value)
    except (KeyError, ValueError):
        raise ConfigError(
            f"Thresholds are chosen for f1, recall=0.9, precision=0.8 or find=0.9 (shares of your own); not '{goal}'."
        ) from None
