"""fed-ridge: the exact linear head on frozen features, in one exchange and for any partition (parts/ridge.py).

No round of training follows. With a frozen pretrained backbone (model.freeze = "backbone", model.weights) it is what an
iterative method has to beat; `method.start = "ridge"` starts another method from it. `lift` adds fixed functions of the
features (models/lift.py); `calibrate = "platt"` makes probabilities of its scores, in ten rounds of a few sums a class
(parts/platt.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedmll.errors import ConfigError
from fedmll.methods.heads import LinearLifted
from fedmll.methods.method import Choice, Method
from fedmll.methods.parts.basic import Known
from fedmll.methods.parts.platt import ROUNDS, Platt
from fedmll.methods.parts.ridge import Ridge

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


class FedRidge(Method):
    name = "fed-ridge"
    summary = "the exact ridge head from the clients' sums: one exchange, the same for every partition"
    paper = "ridge regression from sums"
    setting = ("skew", "partial annotation")
    up = "once, instead of weights: Σ f fᵀ and Σ f y"
    head = LinearLifted
    parts = (
        Ridge,
        Known,
        Choice("calibrate", {"none": None, "platt": Platt}, "probabilities: σ(a z + b) a class, by Newton steps"),
    )

    @classmethod
    def rounds(cls, options: Any) -> int:
        return ROUNDS if options.calibrate == "platt" else 0

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        """Nobody trains in its rounds: the features stay what they are."""
        still = experiment.training.model_copy(update={"rounds": 0})
        super().check(experiment.model_copy(update={"training": still}))
        if experiment.training.loss != "bce":
            raise ConfigError(
                f"training.loss = '{experiment.training.loss}' would change nothing: fed-ridge solves for its head and "
                "trains nothing. Leave it out."
            )
