"""FedHarmony — Kou et al., CVPR 2026, arXiv 2604.28024.

Eq. 1–2  R_k: φ-style correlation of the labels that client k's trained model predicts on its own data. It is sent with
         the weights. In the loss, R is the same for a mini-batch.
Eq. 3    R*_k: consensus of the last round's R_j, j ≠ k. A client without an R_j in it gets the consensus of all.
Eq. 4, 8 loss = BCE + λ Σ_g Ψ(R[S_g], R*_k[S_g]). Ψ is the squared difference, averaged over all pairs of labels in the
         same block. The blocks S_g are spectral clusters of R*_k (Alg. 1).
Eq. 9    D_k = Σ_g Ψ(R_k[S_g], R*_k[S_g]), q_k ∝ exp(−γ D_k).
Eq. 10   w ← Σ_k (a n̄_k + (1−a) q_k) w_k, n̄_k ∝ N_k, a(t) = max(0, 1 − t/T0).

γ = "median" is 1/median(D) of the previous round, because the median of this round is known only after the last reply.
So both sums of Eq. 10 need only two models in memory for any number of clients. The first round with a D (by default
the second round) averages by size alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import AUTO, Aggregator, Part, PartOptions, Records, Resolved, option
from fedmll.methods.framework.client_round import ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import UnknownAsNegative
from fedmll.methods.parts.averaging import SoftmaxMean, WeightedAverage, WeightedMean
from fedmll.methods.parts.correlation_consensus import CorrelationAggregator, CorrelationConsensus, doubles
from fedmll.methods.parts.label_correlation import BlockAlignmentLoss


class CorrelationAlignment(Part):
    """λ Σ_g Ψ(R[S_g], R*_k[S_g]) (Eq. 4, 8): pulls the correlations of a mini-batch's predictions to the consensus."""

    name = "alignment"
    depends_on = (CorrelationConsensus,)

    class Options(PartOptions):
        strength: float = option(3.0, "λ: weight of the alignment (Eq. 4)", ge=0)

    def on_round_start(self, client_round: ClientRound) -> BlockAlignmentLoss | None:
        found = client_round.round_states[CorrelationConsensus.name]
        if "consensus" not in found:
            return None
        alignment = BlockAlignmentLoss(found["consensus"], found["given"] if "given" in found else found["blocks"])
        return alignment if alignment.pairs else None

    def loss(self, step: TrainStep, round_state: BlockAlignmentLoss | None) -> Tensor | None:
        return None if round_state is None else self.options.strength * round_state(step.probabilities)


class AgreementAverage(WeightedAverage):
    """w ← Σ_k (a n̄_k + (1−a) q_k) w_k, q_k ∝ exp(−γ D_k) (Eq. 9–10): first by size, later by agreement."""

    name = "by-agreement"
    depends_on = (CorrelationConsensus,)

    class Options(WeightedAverage.Options):
        gamma: Annotated[float, Field(gt=0)] | Literal["median"] = option("median", "γ (Eq. 9); median: 1/median(D)")
        horizon: Annotated[float, Field(gt=0)] | Literal["auto"] = option("auto", "T0 (Eq. 10); auto: half the rounds")
        quality: Literal["pure", "size-scaled"] = option("pure", "q_k of Eq. 9, or q_k ∝ N_k exp(−γ D_k)")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        rule = (experiment.training.rounds / 2, "half of the rounds")
        return {"horizon": rule} if options.horizon == AUTO else {}

    def balance(self, round: int) -> float:
        """a(t) of Eq. 10."""
        return max(0.0, 1 - round / float(self.options.horizon))

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        agreeing = earlier[CorrelationConsensus.name]
        assert isinstance(agreeing, CorrelationAggregator)
        scale = float(agreeing.state.get("scale", 0.0))
        gamma = self.options.gamma if self.options.gamma != "median" else 1 / scale if scale > 0 else 0.0
        balance = self.balance(round) if agreeing.consensus is not None and gamma else 1.0
        return AgreementAggregator(self, agreeing, gamma, balance)


class AgreementAggregator(Aggregator):
    def __init__(self, part: AgreementAverage, agreeing: CorrelationAggregator, gamma: float, balance: float) -> None:
        self.part, self.agreeing, self.gamma, self.balance = part, agreeing, gamma, balance
        self.by_size, self.by_quality = WeightedMean(), SoftmaxMean()
        self.weights: list[float] = []  # n̄_k, not normalised
        self.scores: list[float] = []  # log q_k, up to a constant (Eq. 9)

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.weights.append(self.part.weight(reply))
        if self.balance > 0:
            self.by_size.add(reply.tensors, self.weights[-1])
        if self.balance < 1:
            scaled = self.part.options.quality == "size-scaled"
            size = math.log(reply.numbers["samples"]) if scaled else 0.0
            self.scores.append(size - self.gamma * self.agreeing.discrepancies[-1])
            self.by_quality.add(reply.tensors, self.scores[-1])

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        a, share = self.balance, doubles(self.weights) / doubles(self.weights).sum()
        if a in (0, 1):
            mixed = (self.by_size if a else self.by_quality).result()
        else:
            mixed, other = self.by_size.result(), self.by_quality.result()
            mixed |= {name: a * mixed[name] + (1 - a) * other[name] for name in self.by_size.sums}
        if a < 1:
            share = a * share + (1 - a) * doubles(self.scores).softmax(0)
        gamma = {"gamma": self.gamma} if self.agreeing.discrepancies else {}
        return mixed, {"share": share, "balance": a, **gamma}


class FedHarmony(Method):
    name = "fedharmony"
    summary = "aligns each client's label correlations with the other clients' consensus; average by size and agreement"
    paper = "Kou et al., CVPR 2026"
    up = "label correlations of its predictions (classes × classes), and the blocks of labels"
    down = "the other clients' consensus correlations (classes × classes)"
    parts = (switch("alignment", CorrelationAlignment, "align label correlations (Eq. 4)"), UnknownAsNegative)
    average = switch("aggregation", AgreementAverage, "average by agreement (Eq. 9–10)", otherwise=WeightedAverage)
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "vit", "training.rounds": 50, "training.local_epochs": 5, "training.batch_size": 16,
        "training.optimizer": "adam", "training.lr": 1e-4, "training.weight_decay": 0.0,
        "participation.sampling": "size",
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ViT-B/16: a folder with its files, or google/vit-base-patch16-224-in21k",
        "participation.count": "not published; Figure 5 has 25, 50 and 75 % of the clients",
    }
