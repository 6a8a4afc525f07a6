"""Standardised features and prior biases: one exchange before round 1, the same for every method with a frozen backbone
(`model.standardise`, `model.bias`).

Each client sends the number of its samples n, Σ f and Σ f² of its features f, and for each class how many labels are
known and how many are positive. From the sums over all clients the server sets

    mean and scale of the features      f ← (f − mean) · scale, scale = 1 / standard deviation (models/standardise.py)
    bias of class c                     log(π / (1 − π)), π = (positive_c + ½) / (known_c + 1)

Both are part of the model: all clients receive them, and prediction and export use them. A client cannot change mean
and scale. A class whose labels nobody knows gets the bias of the mean rate, Σ positive / Σ known. A head whose features
are means of tokens gets the statistics of these means, any other head those of the tokens.

- Private labels: a count per class would tell which classes a client has, and how often. Clients then send one count
  for all their classes together, and all classes start with the bias of the mean rate.
- Local models (local-only): each client computes its own statistics and sends nothing.
- Small groups (core/small_groups.py): a count of fewer than k labels is sent as 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedmll.core import small_groups
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Aggregator, Part, Records, TensorSpec
from fedmll.methods.framework.client_round import ClientInfo, ClientRound
from fedmll.methods.framework.task import Task
from fedmll.methods.parts.sum_checks import refuse_statistics
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.frozen_features import backbone_outputs
from fedmll.models.network import Network
from fedmll.models.standardise import mean_and_scale

MEAN, SCALE = "backbone.standardise.mean", "backbone.standardise.scale"  # names of the buffers
MOMENTS, LABELS = "moments", "labels"
LARGEST_BIAS = 7.0  # the log-odds of 0.1 % and of 99.9 %


class Standardisation(Part):
    """Sets mean and scale of frozen features and the initial bias of each class, from sums of all clients."""

    name = "standardise"
    exchanges = frozenset({"opening"})

    def __init__(self, task: Task, options: Any, other_parts: Mapping[str, type[Part]]) -> None:
        super().__init__(task, options, other_parts)
        self.private = any("private-labels" in part.provides for part in other_parts.values())

    def bind(self, model: Network, weights: FlatWeights) -> None:
        super().bind(model, weights)
        self.sets_bias = self.task.experiment.model.bias == "prior" and model.class_bias is not None

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        found: Tensors = {}
        if self.model.backbone.standardise is not None:
            found[MOMENTS] = feature_moments(client_round)
        if self.sets_bias:
            found[LABELS] = label_counts(client_round.client.targets, self.task.min_group_size, total=self.private)
        return found

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        if round:
            return {}
        specs: dict[str, TensorSpec] = {}
        classes = 1 if self.private else len(self.task.classes)
        if self.model.backbone.standardise is not None:
            width = self.model.backbone.standardise.width
            specs[MOMENTS] = TensorSpec((3, width), torch.float64, check_together=refuse_statistics)
        if self.sets_bias:
            by_class = None if self.private else 1
            specs[LABELS] = TensorSpec(
                (2, classes), torch.float64, low=0, by_class=by_class, check_together=refuse_statistics
            )
        return specs

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return StandardisationAggregator(self) if round == 0 else None

    def apply(self, weights: Tensor, layout: FlatWeights, sums: Tensors) -> None:
        """Write mean, scale and bias into weights of this layout."""
        if MOMENTS in sums and float(sums[MOMENTS][0, 0]) > 0:
            for name, values in zip((MEAN, SCALE), mean_and_scale(sums[MOMENTS]), strict=True):
                weights[layout.layout[name].where] = values.to(weights.dtype)
        if LABELS in sums and float(sums[LABELS][0].sum()) > 0:
            assert self.model.class_bias is not None
            weights[layout.layout[self.model.class_bias].where] = prior_bias(sums[LABELS]).to(weights.dtype)


class LocalStandardisation(Standardisation):
    """For methods in which each client has its own model: its statistics are its own, and nothing is sent."""

    exchanges = frozenset()

    def on_round_start(self, client_round: ClientRound) -> None:
        """In the first round of a client. Its model has the statistics from then on."""
        state = self.client_state(client_round)
        if not state:
            self.apply(client_round.weights.vector, client_round.weights, self.collect_statistics(client_round))
            state["done"] = torch.ones(1, dtype=torch.bool)


class StandardisationAggregator(Aggregator):
    def __init__(self, part: Standardisation) -> None:
        self.part, self.sums = part, Tensors()

    def add(self, client: ClientInfo, reply: Message) -> None:
        for name, tensor in reply.tensors.items():
            self.sums[name] = tensor + self.sums[name] if name in self.sums else tensor.clone()

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        weights = merged["weights"].clone()
        self.part.apply(weights, self.part.weights, self.sums)
        merged["weights"] = weights
        return {}, {}


@torch.no_grad()
def feature_moments(client_round: ClientRound) -> Tensor:
    """(3, width): n, Σ f and Σ f². Of tokens, each sample has the means over its positions."""
    model = client_round.model.eval()
    layer = model.backbone.standardise
    assert layer is not None
    sums = torch.zeros(2, layer.width, dtype=torch.float64, device=client_round.client.task.device)
    for batch in client_round.client.evaluation_batches():
        outputs = backbone_outputs(model.backbone, client_round.transform_images(batch.images))
        features = layer.inputs(outputs).double()
        features = features[..., None] if features.dim() == 2 else features.flatten(2)  # (batch, width, positions)
        sums += torch.stack([features.mean(2).sum(0), features.square().mean(2).sum(0)])
    count = torch.full_like(sums[:1], len(client_round.client.data))
    return torch.cat([count, sums]).cpu()


def label_counts(targets: Tensor, min_size: int, *, total: bool = False) -> Tensor:
    """(2, classes): how many labels are known, and how many are positive; with `total`, of all classes together."""
    known = small_groups.censor_small_counts((targets >= 0).sum(0), len(targets), min_size)
    positive = small_groups.censor_small_counts((targets == 1).sum(0), known, min_size)
    counts = torch.stack([known, positive]).double().cpu()
    return counts.sum(1, keepdim=True) if total else counts


def prior_bias(counts: Tensor) -> Tensor:
    """(classes,): the log-odds of the rate of each class, smoothed by half a positive and half a negative label."""
    known, positive = torch.where(counts[0] > 0, counts, counts.sum(1, keepdim=True))
    return torch.logit((positive + 0.5) / (known + 1)).clamp(-LARGEST_BIAS, LARGEST_BIAS)
