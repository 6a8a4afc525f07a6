"""fed-ridge: the exact linear head on frozen features. It needs one exchange, and the result does not depend on how the
data is divided among the clients (parts/ridge_head.py).

There are no rounds of training. With a frozen pretrained backbone (model.freeze = "backbone", model.weights) it is a
baseline for iterative methods. `method.start = "ridge"` starts another method from it. `lift` adds fixed functions of
the features (models/network.py). `calibrate = "platt"` turns its scores into probabilities, in ten rounds in
which clients send a few sums per class (parts/platt_calibration.py).
"""

from __future__ import annotations

from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.method import Method, PartChoice
from fedmll.methods.heads import LiftedLinearHead
from fedmll.methods.losses import MaskedLoss
from fedmll.methods.parts.averaging import WeightedAverage
from fedmll.methods.parts.platt_calibration import ROUNDS, PlattCalibration
from fedmll.methods.parts.ridge_head import RidgeHead


class FedRidge(Method):
    name = "fed-ridge"
    summary = "the exact ridge regression head from the clients' sums: one exchange, the same for every partition"
    paper = "ridge regression from sums"
    setting = ("skew", "partial annotation")
    up = "once, instead of weights: the sums Σ f fᵀ and Σ f y of its features f and targets y"
    head = LiftedLinearHead
    parts = (
        RidgeHead,
        MaskedLoss,
        PartChoice("calibrate", {"none": None, "platt": PlattCalibration}, "probabilities by Platt calibration"),
    )
    average = WeightedAverage  # of weights that nobody trains: clients send sums

    @classmethod
    def fixed_rounds(cls, options: Any) -> int:
        return ROUNDS if options.calibrate == "platt" else 0

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        if experiment.training.loss != "bce":
            raise ConfigError(
                f"training.loss = '{experiment.training.loss}' would change nothing: fed-ridge solves for its head and "
                "trains nothing. Leave it out."
            )
