"""SphereFed — Dong, Zhang, Li and Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022.

Features f on the unit sphere, a classifier W with orthonormal rows that is the same everywhere and never trained, and
the squared error of the scores s = W f, mean over the known entries: (s_c − y_c)². What clients disagree about is then
only the representation. After the last round W is fitted in closed form (calibration) from the clients' sums,

    w_c = (Σ f fᵀ + ε n_c I)⁻¹ Σ f y_c    over the n_c samples whose target of c is known (parts/ridge.py).

A score of ½ is p = ½, with the slope of the line: logits are z = 4 (s − ½), for every other part too. Unknown targets
count nowhere. With several labels a unit vector cannot score 1 on each, and calibration finds the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.core.processes import single_thread
from fedmll.methods.base import Aggregator, Head, PartOptions, Records, TargetLoss, option, vectorized
from fedmll.methods.client_round import TrainStep
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.ridge_head import FeatureSumsAggregator, HeadFromSums
from fedmll.models.backbones import Backbone
from fedmll.models.class_attention import orthonormal
from fedmll.models.network import CLASSIFIER_ROWS, Network

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment

CLASSIFIER = "classifier"


class SphereNetwork(Network):
    """Unit features, scored by rows that no gradient reaches. The rows are a buffer among the weights: they travel with
    them, so that a calibrated model is a model like any other."""

    classifier: Tensor

    def __init__(self, backbone: Backbone, rows: Tensor) -> None:
        super().__init__(backbone)
        self.register_buffer(CLASSIFIER, rows)

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        return F.normalize(super().features(images), dim=1)

    def logits(self, features: Tensor) -> Tensor:
        return 4 * (F.linear(features, self.classifier) - 0.5)

    def class_vectors(self) -> dict[str, Tensor]:
        return {CLASSIFIER_ROWS: self.classifier}


class SphereHead(Head):
    """Features on the unit sphere, a fixed classifier with orthonormal rows."""

    name = "sphere"
    provides = frozenset({"unit-features"})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if experiment.model.freeze == "backbone" and experiment.model.width is None:
            raise ConfigError(
                "With model.freeze = 'backbone' and a fixed classifier (SphereFed) nothing is left to train. Set "
                "model.width, a trained neck between them, or freeze only the first stages."
            )

    def build(self, backbone: Backbone) -> SphereNetwork:
        classes = len(self.task.classes)
        if backbone.width < classes:
            raise ConfigError(
                f"{classes} orthonormal rows need features at least {classes} wide, and the backbone gives "
                f"{backbone.width}. Use model.backbone = 'resnet18' (512), or model.channels (or model.width) of "
                f"{classes} or more."
            )
        rows = orthonormal(backbone.width, classes, self.task.seed, "sphere").T
        return SphereNetwork(backbone, torch.from_numpy(rows.copy()).float())


class SquaredError(TargetLoss):
    """(s − y)² of the scores s = z/4 + ½, the mean over the entries whose target is known."""

    name = "squared-error"

    @vectorized
    def loss(self, step: TrainStep, round_state: None) -> Tensor:
        scores = step.logits / 4 + 0.5
        return masked_mean((scores - step.present).square(), step.known)


class ClassifierCalibration(HeadFromSums):
    """The classifier is fitted to all clients' features, after the last round."""

    name = "calibration"
    requires = frozenset({"unit-features"})
    exchanges = frozenset({"closing"})
    unit = True

    class Options(PartOptions):
        eps: float = option(1e-4, "ε of the calibration, relative to n", gt=0)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return CalibrationAggregator(self) if self.asked(round) else None


class CalibrationAggregator(FeatureSumsAggregator):
    @single_thread()
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        place = self.part.weights.layout[CLASSIFIER]
        weights = merged["weights"].clone()
        rows = weights[place.where].view(place.shape)
        for number, gram in enumerate(self.grams):
            count, round_state = gram[-1, -1], self.of == number
            if float(count) > 0:  # a class of which nobody knows anything keeps its row
                ridge = self.part.options.eps * count * torch.eye(len(gram) - 1, dtype=gram.dtype)
                rows[round_state] = torch.linalg.solve(gram[:-1, :-1] + ridge, self.cross[round_state, :-1].T).T.float()
        merged["weights"] = weights
        return {}, {}


class SphereFed(Method):
    name = "spherefed"
    summary = "unit features, a fixed orthonormal classifier, squared error; the classifier is fitted in the end"
    paper = "Dong et al., ECCV 2022"
    setting = ("skew",)
    up = "once, in the end: second moments of its features"
    down = ""
    remembers = ""
    head = SphereHead
    parts = (SquaredError, switch("calibrated", ClassifierCalibration, "closed-form classifier at the end"))
