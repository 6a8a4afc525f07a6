"""fed-ridge: the exact linear head on frozen features, in one exchange and for any partition (parts/ridge.py).

No round of training follows. With a frozen pretrained backbone (model.freeze = "backbone", model.weights) it is what an
iterative method has to beat; `method.start = "ridge"` starts another method from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmll.errors import ConfigError
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Known
from fedmll.methods.parts.ridge import Ridge

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


class FedRidge(Method):
    name = "fed-ridge"
    summary = "the exact ridge head from the clients' sums: one exchange, the same for every partition"
    paper = "ridge regression from sums"
    setting = ("skew", "partial annotation")
    up = "once, instead of weights: Σ f fᵀ and Σ f y"
    rounds = 0
    parts = (Ridge, Known)

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        super().check(experiment)
        if experiment.training.loss != "bce":
            raise ConfigError(
                f"training.loss = '{experiment.training.loss}' would change nothing: fed-ridge solves for its head and "
                "trains nothing. Leave it out."
            )
