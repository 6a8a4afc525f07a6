"""fed-logistic: the exact logistic regression head on frozen features. The result does not depend on how the data is
divided among the clients (parts/logistic_head.py).

There are no rounds of training. In each round clients send sums, from which the server takes one more step of L-BFGS
for all classes (parts/logistic_solver.py). `fed-ridge` needs one exchange; this head minimises the log-loss instead of
the squared error, and its outputs are probabilities. `products` adds products of a few directions of the features
(models/products.py).
"""

from __future__ import annotations

from typing import Any

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.method import Method
from fedmll.methods.heads import ProductsHead
from fedmll.methods.losses import MaskedLoss
from fedmll.methods.parts.averaging import WeightedAverage
from fedmll.methods.parts.logistic_head import LogisticHead


class FedLogistic(Method):
    name = "fed-logistic"
    summary = "the exact logistic regression head from the clients' sums: the same for every partition"
    paper = "logistic regression from sums"
    setting = ("skew", "partial annotation")
    up = "instead of weights: once Σ f fᵀ and Σ f y of its features f and targets y, then sums of losses and gradients"
    down = "in every round: rows of the head that are tried"
    head = ProductsHead
    parts = (LogisticHead, MaskedLoss)
    average = WeightedAverage  # of weights that nobody trains: clients send sums

    @classmethod
    def fixed_rounds(cls, options: Any) -> int:
        return LogisticHead.rounds(options)

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        if experiment.training.loss != "bce":
            raise ConfigError(
                f"training.loss = '{experiment.training.loss}' would change nothing: fed-logistic solves for its head "
                "and trains nothing. Leave it out."
            )
