"""CBAFed — Li, Li and Wang, "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning", CVPR
2023; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

Rounds 1 … 50   BCE over the known entries. An entry is a pair of a sample and a class.
later rounds    + BCE over pseudo labels. A missing entry of class c is taught as 1 where the network's own p > τ_c, and
                as 0 where p < 1 − τ_c. The BCE is averaged per class and summed over the classes.
Thresholds      A client reports which share of its entries of each class it used (known and pseudo labels). π_c is the
                share of class c among all labels used in the last round: τ_c = clip(π_c + 0.45 − std π, 0.55, 0.95),
                std with C − 1. 0.45 is the released code's; the comparison's table of settings has 0.6.
Average         by size in the first stage, by the number of labels used in the second.
Residual        Every 5 rounds of a stage, w ← a w + (1 − a) w_before. w_before is the global model of the last such
                round; a is 0.2 in the first stage and 0.5 in the second. The first round of a stage only stores its
                model, so rounds 6, 11, … are mixed, and in the second stage 56, 61, …

The paper's 50 of 500 rounds are 10 % of the rounds, unless `first_stage` is given. The sum over classes grows with the
number of missing classes, which is at most 7 in the comparison; with many more, `over_classes = "mean"` keeps known
and pseudo labels in balance. CBAFed itself has one label per image: the pseudo label is the most probable class, with
the constant 0.84 for 0.45. With `pseudo_labels`, `by_labels` (off: average by size) and `residual` off it is FedAvg-PL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import small_groups
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods import losses
from fedmll.methods.framework.base import Aggregator, Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import MaskedLoss
from fedmll.methods.parts.averaging import WeightedAverage, WeightedAverageAggregator
from fedmll.methods.parts.semi_supervised import TwoStagePart, pseudo_targets


@dataclass
class LabelCounts:
    """How many labels a client uses in a round, per class (C,)."""

    known: Tensor
    made: Tensor  # pseudo labels, over all steps


class LabelsUsed(Part):
    """A client sends which share of its entries it used; the server sends one threshold per class."""

    name = "labels-used"
    conflicts = frozenset({"private-labels"})
    sends = ("thresholds",)

    class Options(PartOptions):
        base: float = option(0.45, "the constant in τ_c = π_c + base − std π (0.6: the comparison's text)", ge=0, le=1)
        lowest: float = option(0.55, "the smallest threshold τ_c", ge=0.5, le=1)
        highest: float = option(0.95, "the largest threshold τ_c", ge=0.5, le=1)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if options.lowest > options.highest:
            raise ConfigError(
                f"{prefix}lowest = {options.lowest} is above {prefix}highest = {options.highest}; the comparison of "
                "FedMLP has 0.55 and 0.95."
            )

    def initial_state(self) -> Tensors:
        """As if every class had the same number of labels."""
        return {"thresholds": self.thresholds(torch.ones(len(self.task.classes), dtype=torch.float64))}

    def thresholds(self, used: Tensor) -> Tensor:
        """τ (C,), from the number of labels used per class."""
        pi = used / used.sum().clamp(min=1)
        found = pi + self.options.base - (pi.std() if len(pi) > 1 else 0.0)
        return found.clamp(self.options.lowest, self.options.highest).float()

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"used": TensorSpec((len(self.task.classes),), low=0, high=1)}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return LabelsUsedAggregator(self)

    def on_round_start(self, client_round: ClientRound) -> LabelCounts:
        known = (client_round.targets >= 0).sum(0).float()
        return LabelCounts(known, torch.zeros_like(known))

    def on_round_end(self, client_round: ClientRound, round_state: LabelCounts) -> Tensors:
        labels = round_state.known + round_state.made / self.task.experiment.training.local_epochs
        samples = len(client_round.client.data)
        counts = small_groups.censor_small_counts(labels, samples, self.task.min_group_size)
        return {"used": (counts / samples).clamp(max=1)}


class LabelsUsedAggregator(Aggregator):
    def __init__(self, part: LabelsUsed) -> None:
        self.part = part
        self.used = torch.zeros(len(part.task.classes), dtype=torch.float64)
        self.last = 0.0  # labels of the last reply

    def add(self, client: ClientInfo, reply: Message) -> None:
        labels = reply["used"].double() * reply.numbers["samples"]
        self.used += labels
        self.last = float(labels.sum())

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        thresholds = self.part.thresholds(self.used)
        return {"thresholds": thresholds}, {"labels_used": self.used, "thresholds": thresholds}


class AdaptivePseudoLabels(TwoStagePart):
    """In the second stage the network's confident predictions become pseudo labels, with one threshold per class."""

    name = "adaptive-labels"
    depends_on = (LabelsUsed,)
    provides = frozenset({"unknown-targets"})
    acts_later = True
    first_share = 50 / 500

    class Options(TwoStagePart.Options):
        over_classes: Literal["sum", "mean"] = option("sum", "the sum or the mean of the losses of the classes")

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        client_round.unknown_targets_taught = self.second_stage(client_round.number)
        return client_round.received(LabelsUsed.name)["thresholds"] if client_round.unknown_targets_taught else None

    def loss(self, step: TrainStep, thresholds: Tensor | None) -> Tensor | None:
        if thresholds is None:
            return None
        labels = pseudo_targets(step.probabilities.detach(), 1 - thresholds, thresholds)
        labels = labels.masked_fill(step.targets >= 0, -1)
        made = (labels >= 0).float()
        counts = made.sum(0)
        step.client_round.round_states[LabelsUsed.name].made += counts * (len(step.batch) / len(step.rows))
        loss = step.client_round.client.task.experiment.training.loss
        weights = losses.positive_weights(labels) if loss == "weighted" else None
        entries = losses.entrywise(loss, step.logits, (labels == 1).float(), weights)
        by_class = (entries * made).sum(0) / counts.clamp(min=1)
        if self.options.over_classes == "mean":
            return losses.masked_mean(by_class, (counts > 0).float())
        return by_class.sum()


class ResidualMixing(TwoStagePart):
    """Every few rounds the global model is mixed with an earlier one."""

    name = "residual"
    first_share = AdaptivePseudoLabels.first_share

    class Options(TwoStagePart.Options):
        every: int = option(5, "number of rounds from one mixture to the next", ge=1)
        early: float = option(0.2, "a in the first stage: w ← a w + (1 − a) w_before", ge=0, le=1)
        late: float = option(0.5, "a in the second stage", ge=0, le=1)

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        number = round - 1 - (self.options.first_stage if self.second_stage(round) else 0)  # in its stage, from 0 on
        return ResidualAggregator(self, state, round) if number % self.options.every == 0 else None


class ResidualAggregator(Aggregator):
    def __init__(self, part: ResidualMixing, state: Tensors, round: int) -> None:
        self.part, self.state, self.late = part, state, part.second_stage(round)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        if self.state and bool(self.state["late"]) == self.late:
            share = self.part.options.late if self.late else self.part.options.early
            merged["weights"] = share * merged["weights"] + (1 - share) * self.state["before"]
        return {"before": merged["weights"].clone(), "late": torch.tensor(self.late)}, {}


class LabelsUsedAverage(TwoStagePart, WeightedAverage):
    """In the second stage the mean is weighted by the number of labels that a client used, in the first by size."""

    name = "by-labels-used"
    depends_on = (LabelsUsed,)
    first_share = AdaptivePseudoLabels.first_share

    class Options(TwoStagePart.Options):
        """Without those of the mean: the weight of a client is fixed."""

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        if not self.second_stage(round):
            return WeightedAverageAggregator(lambda reply: reply.numbers["samples"])
        counts = earlier[LabelsUsed.name]
        assert isinstance(counts, LabelsUsedAggregator)
        return WeightedAverageAggregator(lambda reply: max(counts.last, 1.0))  # a client without labels still counts


class CBAFed(Method):
    name = "cbafed"
    summary = "pseudo labels with an adaptive threshold per class; average weighted by number of labels used"
    paper = "Li, Li and Wang, CVPR 2023"
    setting = ("partial annotation",)
    up = "the share of labels used (one number per class)"
    down = "thresholds (one number per class)"
    parts = (
        MaskedLoss,
        switch("residual", ResidualMixing, "mix the global model with an earlier one every few rounds"),
        switch("pseudo_labels", AdaptivePseudoLabels, "teach confident predictions as pseudo labels"),
    )
    average = switch("by_labels", LabelsUsedAverage, "average by number of labels used", otherwise=WeightedAverage)
