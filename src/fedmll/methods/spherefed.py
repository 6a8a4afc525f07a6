"""SphereFed — Dong, Zhang, Li and Kung, "SphereFed: Hyperspherical Federated Learning", ECCV 2022.

Features f are unit vectors. The classifier W has orthonormal rows, is the same at all clients and is not trained. The
loss is the mean squared error (s_c − y_c)² of the scores s = W f over the known entries. So only the representations of
the clients can differ. After the last round W is fitted in closed form (calibration) from the clients' sums,

    w_c = (Σ f fᵀ + ε n_c I)⁻¹ Σ f y_c    over the n_c samples with a known target of c (parts/ridge_head.py).

Other parts see the logits z = 4 (s − ½), so a score of ½ is p = ½. Unknown targets are not used. A unit vector cannot
score 1 for several labels; the calibration finds the right scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Tensors
from fedmll.core.processes import single_thread
from fedmll.methods.framework.base import Aggregator, Head, PartOptions, Records, TargetLoss, option, vectorized
from fedmll.methods.framework.client_round import TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import masked_mean
from fedmll.methods.parts.ridge_head import FeatureSumsAggregator, HeadFromSums
from fedmll.models.backbones import Backbone
from fedmll.models.class_attention import orthonormal
from fedmll.models.network import CLASSIFIER_ROWS, Network

CLASSIFIER = "classifier"


class SphereNetwork(Network):
    """Unit features and a classifier that is not trained. The classifier is a buffer and so is sent with the
    weights: a calibrated model needs no special handling."""

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
    """Features of norm 1, and a fixed classifier with orthonormal rows."""

    name = "sphere"
    provides = frozenset({"unit-features"})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if experiment.model.freeze == "backbone" and experiment.model.width is None:
            raise ConfigError(
                "With model.freeze = 'backbone' and a fixed classifier (SphereFed) there is nothing to train. Set "
                "model.width, which adds a trained layer between them, or freeze only the first stages."
            )

    @property
    def pools_tokens(self) -> bool:
        return True

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
    """After the last round the classifier is fitted to the features of all clients."""

    name = "calibration"
    requires = frozenset({"unit-features"})
    exchanges = frozenset({"closing"})
    unit = True

    class Options(PartOptions):
        eps: float = option(1e-4, "ε: ridge penalty of the calibration, relative to n_c", gt=0)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return CalibrationAggregator(self) if self.collects(round) else None


class CalibrationAggregator(FeatureSumsAggregator):
    @single_thread()
    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        place = self.part.weights.layout[CLASSIFIER]
        weights = merged["weights"].clone()
        rows = weights[place.where].view(place.shape)
        for number, gram in enumerate(self.grams):
            count, members = gram[-1, -1], self.of == number
            if float(count) > 0:  # a class without a known target keeps its row
                ridge = self.part.options.eps * count * torch.eye(len(gram) - 1, dtype=gram.dtype)
                rows[members] = torch.linalg.solve(gram[:-1, :-1] + ridge, self.cross[members, :-1].T).T.float()
        merged["weights"] = weights
        return {}, {}


class SphereFed(Method):
    name = "spherefed"
    summary = "unit features, a fixed orthonormal classifier, squared error; the classifier is fitted at the end"
    paper = "Dong et al., ECCV 2022"
    up = "once, at the end: second moments of its features"
    head = SphereHead
    parts = (SquaredError, switch("calibrated", ClassifierCalibration, "fit the classifier after the last round"))
