"""fed-ridge: the exact linear head on frozen features, in one exchange and for any partition (parts/ridge_head.py).

No round of training follows. With a frozen pretrained backbone (model.freeze = "backbone", model.weights) it is the
baseline for iterative methods; `method.start = "ridge"` starts another method from it. `lift` adds fixed functions of
the features (models/network.py). `calibrate = "platt"` turns its scores into probabilities, in ten rounds with
a few sums per class (parts/platt_calibration.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmll.core.errors import ConfigError
from fedmll.methods.heads import LiftedLinearHead
from fedmll.methods.method import Method, PartChoice
from fedmll.methods.parts.platt_calibration import ROUNDS, PlattCalibration
from fedmll.methods.parts.ridge_head import RidgeHead
from fedmll.methods.parts.target_losses import MaskedLoss

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment


class FedRidge(Method):
    name = "fed-ridge"
    summary = "the exact ridge head from the clients' sums: one exchange, the same for every partition"
    paper = "ridge regression from sums"
    setting = ("skew", "partial annotation")
    up = "once, instead of weights: Σ f fᵀ and Σ f y"
    head = LiftedLinearHead
    parts = (
        RidgeHead,
        MaskedLoss,
        PartChoice(
            "calibrate", {"none": None, "platt": PlattCalibration}, "probabilities: σ(a z + b) a class, by Newton steps"
        ),
    )

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
