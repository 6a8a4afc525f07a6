"""FedIRM — Liu, Yang, Dou and Heng, "Federated Semi-supervised Medical Image Classification via Inter-client Relation
Matching", MICCAI 2021; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

Rounds 1 … 20   BCE over the known entries. In the last of them, and in all later ones, a client sends its class
                relations R: row i = σ(mean logits of the samples in which class i is known to be present / T), T = 2,
                over the round's training batches. The server averages row i by size over the clients that sent it.
later rounds    + w(t) [ the mean over the batch of Σ_c (p_c − p'_c)² + KL(R', R) ], w(t) = exp(−5 (1 − min(t, 30)/30)²)
                p'  what the client's own EMA teacher says of a second view. After the teacher's t-th step, from 0 on,
                    its decay is min(1 − 1/(t+1), 0.99).
                R'  the relations of the batch, with the teacher's labels (p' > ½) where nothing is known, over the
                    samples that it is sure of: every p' > 0.7 or < 0.3, and the classes' mean entropy < 0.25 nats
                    (2 for the 8 classes of the comparison).
                KL  symmetric, of one Bernoulli variable an entry: the mean over the rows that both have.

20 and 30 are of 500 rounds: 4 % and 6 %, unless they are given. Switches: `relations`, `consistency`; both off is
FedAvg-PL. The paper weighs by 15 w(t), for softmax outputs, and estimates uncertainty by dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedmll.client import Peer, Step, Work
from fedmll.message import Message, Tensors
from fedmll.methods.contract import AUTO, Found, Like, Merger, Records, option
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Known
from fedmll.methods.parts.semi_supervised import (
    EmaTeacher,
    Later,
    Rounds,
    SecondView,
    published_share,
    ramp_up,
    refuse_unknown_view,
)

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

NEARLY = 1e-6  # as near as a relation comes to 0 and 1 in a logarithm


@dataclass
class Round:
    """Of a client."""

    sums: Tensor  # of logits (C, C): row i over the samples with class i
    counts: Tensor  # of these samples (C,)
    teacher: EmaTeacher | None = None
    steps: int = 0  # that the teacher has followed


class RelationMatching(Later, SecondView):
    """In the second stage: consistency with the client's EMA teacher, and relations of classes like everybody's."""

    name = "relation-matching"
    jobs = frozenset({"unknown"})
    every_class = True
    acts_later = True
    first_share = 20 / 500

    class Options(Later.Options, SecondView.Options):
        relations: bool = option(True, "match the relations of classes between clients")
        consistency: bool = option(True, "with the EMA teacher, on all entries")
        temperature: float = option(2.0, "T of the relations", gt=0)
        confidence: float = option(0.7, "a label of the teacher is sure above it, or below 1 − it", ge=0.5, lt=1)
        entropy: float = option(0.25, "the largest mean entropy of a sure sample's classes, in nats", gt=0)
        decay: float = option(0.99, "the largest of the EMA teacher", ge=0, lt=1)
        ramp: Rounds = option("auto", "rounds until w is 1; auto: 6 % of them")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        found = super().resolve(options, experiment)
        return found | ({"ramp": published_share(experiment, 30 / 500)} if options.ramp == AUTO else {})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        refuse_unknown_view(options.view, where)
        if options.relations or options.consistency:
            super().check(options, experiment, where)

    # ---- the server

    def speaks(self, round: int) -> bool:
        """From the last round of the first stage on."""
        return bool(self.options.relations and round >= self.options.first_stage)

    def send(self, state: Tensors, peer: Peer, round: int) -> Tensors:
        return dict(state) if self.second_stage(round) else {}

    def expects(self, sent: Tensors, round: int) -> dict[str, Like]:
        classes = len(self.task.classes)
        told = {"relations": Like((classes, classes), low=0, high=1), "votes": Like((classes,), torch.bool, by_class=0)}
        return told if self.speaks(round) else {}

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger | None:
        return Relating(state, len(self.task.classes)) if self.speaks(round) else None

    # ---- the client

    def prepare(self, work: Work) -> Round:
        classes, device = len(self.task.classes), self.task.device
        mine = Round(torch.zeros(classes, classes, device=device), torch.zeros(classes, device=device))
        if self.second_stage(work.round) and (self.options.relations or self.options.consistency):
            memory = work.memory(self.name)
            mine.teacher = EmaTeacher(work.client, memory.get("teacher"))
            mine.steps = int(memory.get("steps", 0))
        work.claimed = mine.teacher is not None
        return mine

    def term(self, step: Step, mine: Round) -> Tensor | None:
        positives = step.present
        mine.sums += positives.T @ step.logits.detach()
        mine.counts += positives.sum(0)
        if mine.teacher is None:
            return None
        p, found = self.taught(step, mine.teacher), step.logits.new_zeros(())
        if self.options.consistency:
            found = found + (step.probabilities - p).square().sum(1).mean()
        received = step.work.received(self.name)
        if self.options.relations and received:
            found = found + self.mismatch(step, p, received)
        return ramp_up(step.work.round, self.options.ramp) * found

    def mismatch(self, step: Step, p: Tensor, received: Tensors) -> Tensor:
        """KL(R', R) of a batch."""
        labels = torch.where(step.targets >= 0, step.targets == 1, p > 0.5) & self.sure(p)[:, None]
        rows = relations(labels.float().T @ step.logits, labels.sum(0), self.options.temperature)
        both = (labels.any(0) & received["votes"]).float()
        distance = symmetric_divergence(rows, received["relations"]).mean(1)
        return (distance * both).sum() / both.sum().clamp(min=1)

    def sure(self, p: Tensor) -> Tensor:
        """Which samples the teacher is sure of."""
        clear = ((p > self.options.confidence) | (p < 1 - self.options.confidence)).all(1)
        entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).mean(1)
        return clear & (entropy < self.options.entropy)

    def stepped(self, work: Work, mine: Round) -> None:
        if mine.teacher is not None:
            mine.teacher.follow(min(1 - 1 / (mine.steps + 1), self.options.decay))
            mine.steps += 1

    def finish(self, work: Work, mine: Round) -> Tensors:
        if mine.teacher is not None:
            work.memory(self.name).update(teacher=mine.teacher.vector, steps=torch.tensor(mine.steps))
        if not self.speaks(work.round):
            return {}
        return {
            "relations": relations(mine.sums, mine.counts, self.options.temperature),
            "votes": mine.counts > 0,
        }


class Relating(Merger):
    """Row i by size over the clients that sent it; one that nobody sent stays."""

    def __init__(self, state: Tensors, classes: int) -> None:
        self.state = state
        self.sums = torch.zeros(classes, classes, dtype=torch.float64)
        self.sizes = torch.zeros(classes, dtype=torch.float64)

    def add(self, peer: Peer, reply: Message) -> None:
        size = reply["votes"] * reply.numbers["samples"]
        self.sums += reply["relations"] * size[:, None]
        self.sizes += size

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        spoken = self.sizes > 0
        old = self.state.get("relations", torch.full(self.sums.shape, 0.5))
        rows = torch.where(spoken[:, None], (self.sums / self.sizes.clamp(min=1)[:, None]).float(), old)
        votes = spoken | self.state.get("votes", torch.zeros_like(spoken))
        return {"relations": rows, "votes": votes}, {"relations": rows}


def relations(sums: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """σ(mean logits / T), a row a class; ½ where there is no sample."""
    return torch.sigmoid(sums / counts.clamp(min=1)[:, None] / temperature)


def symmetric_divergence(p: Tensor, q: Tensor) -> Tensor:
    """½ KL(p‖q) + ½ KL(q‖p) of Bernoulli variables = ½ (p − q) (logit p − logit q), by entry."""
    return 0.5 * (p - q) * (torch.logit(p, NEARLY) - torch.logit(q, NEARLY))


class FedIRM(Method):
    name = "fedirm"
    summary = "partial annotation: EMA consistency, and class relations matched between clients"
    paper = "Liu, Yang, Dou and Heng, MICCAI 2021"
    setting = ("partial annotation",)
    up = "class relations, C × C"
    down = "everybody's class relations, C × C"
    remembers = "an EMA teacher: one model"
    parts = (Known, RelationMatching)
