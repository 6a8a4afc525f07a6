"""FedIRM — Liu, Yang, Dou and Heng, "Federated Semi-supervised Medical Image Classification via Inter-client Relation
Matching", MICCAI 2021; adapted to missing classes as in the comparison of FedMLP (Sun et al., 2024).

all rounds      BCE over the known entries of two views of every image, summed over the views
from round 20   a client sends its class relations R: row i = σ(mean logits of the samples in which class i is known to
                be present / T), T = 2, over the first views of the round's training batches. The server averages row i
                by size over the clients that sent it: P.
from round 21   + w(t) [ the mean over the batch of Σ_c (p_c − p'_c)² + KL(P, Q) ], w(t) = exp(−5 (1 − min(t, 30)/30)²)
                p   the model's prediction for the first view
                p'  that of the client's own EMA teacher for the second view. The decay after the teacher's t-th step,
                    counted from 0, is min(1 − 1/(t+1), 0.99).
                Q   the relations of the batch, with the model's own labels (p > ½) for all classes, known or not. Only
                    confident samples count: every p > 0.7 or < 0.3, and a mean entropy of the classes < 0.25 nats (a
                    sum of 2 for the 8 classes of the comparison). A class without such a sample has ½ in its row.
                KL  1/C Σ_ij ½ [P_ij log(P_ij/Q_ij) + Q_ij log(Q_ij/P_ij)] over all C rows

The paper's 20 and 30 of 500 rounds are 4 % and 6 % of the rounds, unless they are given. With `relations`,
`consistency` and `both_views` off it is FedAvg-PL. Where this file differs from the comparison's code: R is the mean of
the round's logits, as in the paper, and not a mean over batches, in which a batch without the class has ½; a row that
no client may send (few positives) is left out of KL, because a row of ½ would be learned; the teacher predicts in
evaluation mode, with averaged batch statistics. The paper itself has the weight 15 w(t), softmax outputs, uncertainty
by dropout, and labels of all classes at some clients and of none at the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core import small_groups
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import AUTO, Aggregator, Records, Resolved, TensorSpec, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import MaskedLoss
from fedmll.methods.parts.semi_supervised import (
    EmaTeacher,
    Rounds,
    SecondView,
    TwoStagePart,
    check_view,
    published_share,
    ramp_up,
)

NEARLY = 1e-6  # the smallest relation in a logarithm


class BothViewsLoss(SecondView, MaskedLoss):
    """`training.loss` over the known entries of two views of every image: the sum of the means of the two views."""

    name = "both-views"
    provides = frozenset({"target-loss", "views"})

    class Options(SecondView.Options):
        pass

    def transform_batch(self, step: TrainStep, positive_weights: Tensor | None) -> None:
        step.set_views([step.batch.images, step.batch.view(self.options.view)])

    def loss(self, step: TrainStep, positive_weights: Tensor | None) -> Tensor:
        return 2 * super().loss(step, positive_weights)


@dataclass
class RelationState:
    """What a client collects in a round."""

    sums: Tensor  # sums of logits (C, C): row i over the samples with class i
    counts: Tensor  # number of these samples (C,)
    teacher: EmaTeacher | None = None
    steps: int = 0  # number of updates of the teacher


class RelationMatching(TwoStagePart, SecondView):
    """In the second stage: consistency with the client's EMA teacher, and class relations similar to all clients'."""

    name = "relation-matching"
    provides = frozenset({"unknown-targets"})
    conflicts = frozenset({"private-labels"})
    acts_later = True
    sums = ("relations", "sizes")
    first_share = 20 / 500

    class Options(TwoStagePart.Options, SecondView.Options):
        relations: bool = option(True, "match class relations between clients")
        consistency: bool = option(True, "consistency with the EMA teacher, for all entries")
        temperature: float = option(2.0, "T: temperature of the class relations", gt=0)
        confidence: float = option(0.7, "p above it (or below 1 − confidence) is a confident label", ge=0.5, lt=1)
        entropy: float = option(0.25, "largest mean entropy over the classes of a confident sample, in nats", gt=0)
        decay: float = option(0.99, "largest decay of the EMA teacher", ge=0, lt=1)
        ramp: Rounds = option("auto", "number of rounds until w is 1; auto: 6 % of the rounds")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        found = super().resolve(options, experiment)
        return found | ({"ramp": published_share(experiment, 30 / 500)} if options.ramp == AUTO else {})

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_view(options.view, prefix)
        if options.relations or options.consistency:
            super().check(options, experiment, prefix)

    # ---- the server

    def sends_relations(self, round: int) -> bool:
        """From the last round of the first stage on."""
        return bool(self.options.relations and round >= self.options.first_stage)

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        return dict(state) if self.second_stage(round) else {}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        classes = len(self.task.classes)
        relations = TensorSpec((classes, classes), low=0, high=1)
        votes = TensorSpec((classes,), torch.bool, by_class=0)
        return {"relations": relations, "votes": votes} if self.sends_relations(round) else {}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return super().aggregator(state, round, earlier) if self.sends_relations(round) else None

    def summands(self, client: ClientInfo, reply: Message) -> Tensors:
        sizes = reply["votes"] * reply.numbers["samples"]
        return {"relations": (reply["relations"] * sizes[:, None]).double(), "sizes": sizes.double()}

    def update_state(self, state: Tensors, sums: Tensors, round: int) -> tuple[Tensors, Records]:
        """Row i is averaged by size over the clients that sent it; a row that no client sent does not change."""
        sent = sums["sizes"] > 0
        old = state.get("relations", torch.full(sums["relations"].shape, 0.5))
        rows = torch.where(sent[:, None], (sums["relations"] / sums["sizes"].clamp(min=1)[:, None]).float(), old)
        votes = sent | state.get("votes", torch.zeros_like(sent))
        return {"relations": rows, "votes": votes}, {"relations": rows}

    # ---- the client

    def on_round_start(self, client_round: ClientRound) -> RelationState:
        classes, device, options = len(self.task.classes), self.task.device, self.options
        round_state = RelationState(torch.zeros(classes, classes, device=device), torch.zeros(classes, device=device))
        second = self.second_stage(client_round.number)
        if second and options.consistency:
            kept = self.client_state(client_round)
            round_state.teacher = EmaTeacher(client_round.client, kept.get("teacher"))
            round_state.steps = int(kept.get("steps", 0))
        client_round.unknown_targets_taught = second and (options.relations or options.consistency)
        return round_state

    def loss(self, step: TrainStep, round_state: RelationState) -> Tensor | None:
        count, terms = len(step.batch), list[Tensor]()
        logits, positives = step.logits[:count], step.present[:count]  # of the first view
        round_state.sums += positives.T @ logits.detach()
        round_state.counts += positives.sum(0)
        if round_state.teacher is not None:
            second = step.images[count : 2 * count]
            images = second if len(second) else step.batch.view(self.options.view)
            distance = torch.sigmoid(logits) - round_state.teacher.probabilities(images)
            terms.append(distance.square().sum(1).mean())
        received = self.received(step.client_round)
        if self.options.relations and received:
            terms.append(self.mismatch(logits, received))
        return ramp_up(step.client_round.number, self.options.ramp) * torch.stack(terms).sum() if terms else None

    def mismatch(self, logits: Tensor, received: Tensors) -> Tensor:
        """KL(P, Q) of a batch. Rows that no client sent do not count."""
        p = torch.sigmoid(logits.detach())
        labels = (p > 0.5) & self.confident(p)[:, None]
        rows = relations(labels.float().T @ logits, labels.sum(0), self.options.temperature)
        distance = symmetric_divergence(rows, received["relations"]).sum(1)
        return (distance * received["votes"]).mean()

    def confident(self, p: Tensor) -> Tensor:
        """The samples with confident predictions: bool (batch,)."""
        clear = ((p > self.options.confidence) | (p < 1 - self.options.confidence)).all(1)
        entropy = -(torch.xlogy(p, p) + torch.xlogy(1 - p, 1 - p)).mean(1)
        return clear & (entropy < self.options.entropy)

    def on_step_end(self, client_round: ClientRound, round_state: RelationState) -> None:
        if round_state.teacher is not None:
            round_state.teacher.follow(min(1 - 1 / (round_state.steps + 1), self.options.decay))
            round_state.steps += 1

    def on_round_end(self, client_round: ClientRound, round_state: RelationState) -> Tensors:
        if round_state.teacher is not None:
            kept, steps = self.client_state(client_round), torch.tensor(round_state.steps)
            kept.update(teacher=round_state.teacher.vector, steps=steps)
        if not self.sends_relations(client_round.number):
            return {}
        smallest = self.task.min_group_size
        released = small_groups.releasable_classes(client_round.targets, smallest)
        if smallest > 1:
            # another part may have changed the targets of a step
            released &= (client_round.targets == 1).sum(0) >= smallest
        counts = round_state.counts * released
        return {
            "relations": relations(round_state.sums * released[:, None], counts, self.options.temperature),
            "votes": counts > 0,
        }


def relations(sums: Tensor, counts: Tensor, temperature: float) -> Tensor:
    """σ(mean logits / T), one row per class; ½ for a class without a sample."""
    return torch.sigmoid(sums / counts.clamp(min=1)[:, None] / temperature)


def symmetric_divergence(p: Tensor, q: Tensor) -> Tensor:
    """½ [p log(p/q) + q log(q/p)] per entry: ½ (p − q) (log p − log q)."""
    return 0.5 * (p - q) * (torch.log(p.clamp(min=NEARLY)) - torch.log(q.clamp(min=NEARLY)))


class FedIRM(Method):
    name = "fedirm"
    summary = "consistency with an EMA teacher, and class relations that are matched between clients"
    paper = "Liu, Yang, Dou and Heng, MICCAI 2021"
    setting = ("partial annotation",)
    up = "class relations (classes × classes)"
    down = "average class relations (classes × classes)"
    remembers = "an EMA teacher (as large as the model)"
    parts = (
        switch("both_views", BothViewsLoss, "teach the known targets of two views; off: of one", otherwise=MaskedLoss),
        RelationMatching,
    )
