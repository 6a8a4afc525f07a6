"""CBAFed — Li, Li and Wang, "Class Balanced Adaptive Pseudo Labeling for Federated Semi-Supervised Learning", CVPR
2023; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

Rounds 1 … 50   BCE over the known entries.
later rounds    A missing entry of class c is taught as 1 where the network's own p > τ_c, as 0 where p < 1 − τ_c: the
                mean BCE over the labels of a class, and of that the mean over the classes that have any; added.
Thresholds      Clients say which share of their entries of each class they used, known and pseudo labels. With π_c the
                share of class c among all labels used in the last round: τ_c = clip(π_c + 0.45 − std π, 0.55, 0.95).
Average         by the number of labels used.
Residual        Every 5 rounds, w ← a w + (1 − a) w_before, w_before the global model of the last such round; a is 0.2
                in the first stage, 0.5 in the second. The first such round of a stage only keeps its model.

50 is of 500 rounds: 10 %, unless it is given. Switches: `pseudo_labels`, `by_labels` (off: the average by size),
`residual`. All off is FedAvg-PL.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedmll.client import Peer, Step, Work
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods import losses
from fedmll.methods.contract import Like, Merger, Part, PartOptions, Records, option
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.basic import Averaging, Known, Mean
from fedmll.methods.parts.semi_supervised import Later, pseudo_targets

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


@dataclass
class Labels:
    """Of a client's round."""

    known: Tensor  # by class (C,)
    made: Tensor  # pseudo labels by class, in all its steps


class LabelsUsed(Part):
    """Which share of its entries a client used goes up; thresholds for each class come down."""

    name = "labels-used"
    every_class = True
    sends = ("thresholds",)

    class Options(PartOptions):
        base: float = option(0.45, "τ_c = π_c + base − std π", ge=0, le=1)
        lowest: float = option(0.55, "τ_c is at least this", ge=0.5, le=1)
        highest: float = option(0.95, "τ_c is at most this", ge=0.5, le=1)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        if options.lowest > options.highest:
            raise ConfigError(
                f"{where}lowest = {options.lowest} is above {where}highest = {options.highest}; the comparison of "
                "FedMLP has 0.55 and 0.95."
            )

    def start(self) -> Tensors:
        """As if every class had the same labels."""
        return {"thresholds": self.thresholds(torch.ones(len(self.task.classes), dtype=torch.float64))}

    def thresholds(self, used: Tensor) -> Tensor:
        """τ, of the labels used by class (C,)."""
        pi = used / used.sum().clamp(min=1)
        found = pi + self.options.base - pi.std(correction=0)
        return found.clamp(self.options.lowest, self.options.highest).float()

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        return {"used": Like((len(self.task.classes),), low=0, high=1)}

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Counting(self)

    def prepare(self, work: Work) -> Labels:
        known = (work.targets >= 0).sum(0).float()
        return Labels(known, torch.zeros_like(known))

    def finish(self, work: Work, mine: Labels) -> Tensors:
        labels = mine.known + mine.made / self.task.experiment.training.local_epochs
        return {"used": (labels / len(work.client.data)).clamp(max=1)}


class Counting(Merger):
    def __init__(self, part: LabelsUsed) -> None:
        self.part = part
        self.used = torch.zeros(len(part.task.classes), dtype=torch.float64)
        self.last = 0.0  # labels of the last reply

    def add(self, peer: Peer, reply: Message) -> None:
        labels = reply["used"].double() * reply.numbers["samples"]
        self.used += labels
        self.last = float(labels.sum())

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        thresholds = self.part.thresholds(self.used)
        return {"thresholds": thresholds}, {"labels_used": self.used, "thresholds": thresholds}


class AdaptiveLabels(Later):
    """In the second stage: what the network is sure of, by a threshold for each class, is taught to it."""

    name = "adaptive-labels"
    requires = (LabelsUsed,)
    jobs = frozenset({"unknown"})
    acts_later = True
    first_share = 50 / 500

    def prepare(self, work: Work) -> Tensor | None:
        work.claimed = self.second_stage(work.round)
        return work.received(LabelsUsed.name)["thresholds"] if work.claimed else None

    def term(self, step: Step, thresholds: Tensor | None) -> Tensor | None:
        if thresholds is None:
            return None
        labels = pseudo_targets(step.probabilities.detach(), 1 - thresholds, thresholds)
        labels = labels.masked_fill(step.targets >= 0, -1)
        made = (labels >= 0).float()
        counts = made.sum(0)
        step.work.fixed[LabelsUsed.name].made += counts * (len(step.batch) / len(step.rows))
        loss = step.work.client.task.experiment.training.loss
        weights = losses.positive_weights(labels) if loss == "weighted" else None
        entries = losses.entrywise(loss, step.logits, (labels == 1).float(), weights)
        return losses.masked_mean((entries * made).sum(0) / counts.clamp(min=1), (counts > 0).float())


class Residual(Later):
    """Every few rounds the global model is mixed with what it was."""

    name = "residual"
    first_share = AdaptiveLabels.first_share

    class Options(Later.Options):
        every: int = option(5, "rounds between two mixtures", ge=1)
        early: float = option(0.2, "a of the first stage: w ← a w + (1 − a) w_before", ge=0, le=1)
        late: float = option(0.5, "a of the second stage", ge=0, le=1)

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger | None:
        return Mixing(self, state, round) if round % self.options.every == 0 else None


class Mixing(Merger):
    def __init__(self, part: Residual, state: Tensors, round: int) -> None:
        self.part, self.state, self.late = part, state, part.second_stage(round)

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        if self.state and bool(self.state["late"]) == self.late:
            share = self.part.options.late if self.late else self.part.options.early
            merged["weights"] = share * merged["weights"] + (1 - share) * self.state["before"]
        return {"before": merged["weights"].clone(), "late": torch.tensor(self.late)}, {}


class ByLabelsUsed(Mean):
    """The average by the number of labels that a client used, known and pseudo labels."""

    name = "by-labels-used"
    requires = (LabelsUsed,)

    class Options(PartOptions):
        """None: how much a client counts is not a choice."""

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        counting = beside[LabelsUsed.name]
        assert isinstance(counting, Counting)
        return ByCount(self, counting)


class ByCount(Averaging):
    def __init__(self, part: ByLabelsUsed, counting: Counting) -> None:
        super().__init__(part)
        self.counting = counting

    def add(self, peer: Peer, reply: Message) -> None:
        self.mean.add(reply.tensors, max(self.counting.last, 1.0))  # without any it still replied


class CBAFed(Method):
    name = "cbafed"
    summary = "partial annotation: pseudo labels by adaptive thresholds for each class; average by labels used"
    paper = "Li, Li and Wang, CVPR 2023"
    setting = ("partial annotation",)
    up = "the share of labels used, C numbers"
    down = "thresholds, C numbers"
    parts = (
        Known,
        switch("residual", Residual, "every few rounds the global model is mixed with what it was"),
        switch("pseudo_labels", AdaptiveLabels, "by a threshold for each class"),
    )
    average = switch("by_labels", ByLabelsUsed, "the average by labels used", otherwise=Mean)
