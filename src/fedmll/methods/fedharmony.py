"""FedHarmony — Kou et al., CVPR 2026, arXiv 2604.28024.

Eq. 1–2  R_k: φ-style correlation of the labels that client k's trained model predicts on its own data; sent with the
         weights. In the loss: the same of the mini-batch.
Eq. 3    R*_k: consolidation of the last round's R_j, j ≠ k. A client that was not among them gets that of all.
Eq. 4, 8 loss = BCE + λ Σ_g Ψ(R[S_g], R*_k[S_g]), Ψ the squared difference, one mean over the in-block pairs; the blocks
         S_g are R*_k's spectral clusters (Alg. 1).
Eq. 9    D_k = Σ_g Ψ(R_k[S_g], R*_k[S_g]), q_k ∝ exp(−γ D_k).
Eq. 10   w ← Σ_k (a n̄_k + (1−a) q_k) w_k, n̄_k ∝ N_k, a(t) = max(0, 1 − t/T0).

γ = "median" is 1/median(D) of the round before, so that both sums of Eq. 10 are streams: two models in memory, however
many clients reply. The median of the round itself is known only when every model has gone by. The first round that has
a D (the second, by default) averages by size alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedmll.message import Message, Tensors
from fedmll.methods.base import AUTO, Like, Local, Method, Reply, WeightedMean
from fedmll.methods.parts.correlation import (
    Alignment,
    Consensus,
    Consolidation,
    StreamedCorrelation,
    default_clusters,
    discrepancy,
    spectral_blocks,
)
from fedmll.seeding import derive

if TYPE_CHECKING:
    from fedmll.client import Batch, Client, Peer
    from fedmll.experiment import Experiment

STATE = "harmony."  # prefix of what the state holds beside the weights
LARGEST = 1 + 1e-4  # |R| ≤ 1 for every set of scores


class FedHarmony(Method):
    name = "fedharmony"
    summary = "align each client's label correlations with the others' consensus; average by size and agreement"
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "vit",
        "training.rounds": 50,
        "training.local_epochs": 5,
        "training.batch_size": 16,
        "training.optimizer": "adam",
        "training.lr": 1e-4,
        "training.weight_decay": 0.0,
        "participation.sampling": "size",
    }
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ViT-B/16: a folder with its files, or google/vit-base-patch16-224-in21k",
        "participation.count": "not said; 25, 50 and 75 % of the clients in its Figure 5",
    }

    class Options(Method.Options):
        alignment: bool = True  # Eq. 4
        aggregation: bool = True  # Eq. 9–10
        blocks: bool = True  # Eq. 8; off: one block of all labels
        strength: Annotated[float, Field(ge=0)] = 3.0  # λ
        consolidation: Consolidation = "mean"
        clusters: Annotated[int, Field(ge=1)] | Literal["sqrt"] = "sqrt"  # G; sqrt: ⌈√C⌉
        clustering: Literal["each", "once"] = "each"  # every R*_k at its client, or a round's common R* at the server
        start_round: Annotated[int, Field(ge=2)] = 2  # the first with a consensus
        gamma: Annotated[float, Field(gt=0)] | Literal["median"] = "median"  # median: 1/median(D) of the round before
        horizon: Annotated[float, Field(gt=0)] | Literal["auto"] = "auto"  # T0; auto: half of the rounds
        quality: Literal["pure", "size-scaled"] = "pure"  # size-scaled: q_k ∝ N_k exp(−γ D_k)

    options: Options

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> dict[str, tuple[Any, str]]:
        if options.horizon != AUTO:
            return {}
        return {"horizon": (experiment.training.rounds / 2, "half of the rounds")}

    @property
    def active(self) -> bool:
        return self.options.alignment or self.options.aggregation

    # ---- the server

    def consensus(self, state: Tensors, round: int) -> Consensus | None:
        """The last round's matrices, where there is a consensus in this round."""
        if round < self.options.start_round or STATE + "clients" not in state:
            return None
        return Consensus.from_tensors(state, STATE, self.options.consolidation)

    def send(self, state: Tensors, client: Peer, round: int) -> Message:
        message = super().send(state, client, round)
        consensus = self.consensus(state, round)
        if consensus is not None:
            message.tensors["consensus"] = self.teacher(state, consensus, client)
            if STATE + "blocks" in state:
                message.tensors["blocks"] = state[STATE + "blocks"]
        return message

    def teacher(self, state: Tensors, consensus: Consensus, client: Peer) -> Tensor:
        """R*_k (Eq. 3)."""
        others = consensus.without(client.index)
        return state[STATE + "everyone"] if others is None else others

    def merge(self, state: Tensors, replies: Iterable[Reply], round: int) -> Tensors:
        if not self.active:
            return super().merge(state, replies, round)
        consensus = self.consensus(state, round)
        gamma = self.gamma(state)
        balance = self.balance(round) if self.options.aggregation and consensus is not None and gamma else 1.0
        by_size, by_quality, seen = WeightedMean(), SoftmaxMean(), Seen()
        for peer, reply in replies:
            model = self.deploy(reply.tensors).tensors
            seen.add(peer, reply, self.weight(reply))
            if consensus is not None:
                blocks = reply.tensors.get("blocks", state.get(STATE + "blocks", self.one_block()))
                seen.blocks.append(blocks)
                seen.discrepancies.append(
                    discrepancy(reply["correlation"], self.teacher(state, consensus, peer), blocks)
                )
            if balance > 0:
                by_size.add(model, seen.weights[-1])
            if balance < 1:
                by_quality.add(model, self.score(seen, gamma))
        merged = blend(by_size, by_quality, balance)
        self.write_down(seen, balance, gamma)
        return {k: t for k, t in state.items() if not k.startswith(STATE)} | merged | self.remember(state, seen)

    def balance(self, round: int) -> float:
        """a(t) of Eq. 10."""
        return max(0.0, 1 - round / float(self.options.horizon))

    def gamma(self, state: Tensors) -> float:
        """0 while it is not known."""
        if self.options.gamma != "median":
            return self.options.gamma
        scale = float(state.get(STATE + "scale", torch.zeros(())))
        return 1 / scale if scale > 0 else 0.0

    def score(self, seen: Seen, gamma: float) -> float:
        """log q_k of the last reply, up to a constant (Eq. 9)."""
        size = math.log(seen.sizes[-1]) if self.options.quality == "size-scaled" else 0.0
        seen.scores.append(size - gamma * seen.discrepancies[-1])
        return seen.scores[-1]

    def remember(self, state: Tensors, seen: Seen) -> Tensors:
        """What the next round's consensus is made of."""
        kept = {STATE + "scale": state[STATE + "scale"]} if STATE + "scale" in state else {}
        if seen.discrepancies:
            kept[STATE + "scale"] = torch.tensor(statistics.median(seen.discrepancies), dtype=torch.float64)
        if len(seen.clients) < 2:
            return kept
        consensus = Consensus.of(self.options.consolidation, seen.clients, seen.matrices, seen.sizes)
        everyone = consensus.everyone()
        self.records["consensus"] = everyone
        kept |= consensus.tensors(STATE) | {STATE + "everyone": everyone}
        if self.options.blocks and self.options.clustering == "once":
            kept[STATE + "blocks"] = self.cluster(everyone)
        return kept

    def write_down(self, seen: Seen, balance: float, gamma: float) -> None:
        """For the report, by client: size, discrepancy, blocks and weight in the average."""
        clients, weights, scores = torch.tensor(seen.clients), doubles(seen.weights), doubles(seen.scores)
        share = weights / weights.sum()
        if balance < 1:
            share = balance * share + (1 - balance) * scores.softmax(0)
        self.records |= {"clients": clients, "sizes": doubles(seen.sizes), "share": share, "balance": balance}
        if seen.discrepancies:
            self.records["discrepancy"] = doubles(seen.discrepancies)
            self.records["median_discrepancy"] = statistics.median(seen.discrepancies)
            self.records["gamma"] = gamma
            common = self.options.clustering == "once" or not self.options.blocks
            self.records["blocks"] = torch.stack(seen.blocks[:1] if common else seen.blocks).to(torch.int16)

    def expects(self, sent: Message, round: int) -> dict[str, Like]:
        """Also the client's correlations, and its blocks if it made them."""
        expected, classes = super().expects(sent, round), len(self.task.classes)
        if self.active:
            expected["correlation"] = Like((classes, classes), low=-LARGEST, high=LARGEST)
            if "consensus" in sent.tensors and self.options.blocks and self.options.clustering == "each":
                expected["blocks"] = Like((classes,), torch.int64, low=0, high=classes - 1)
        return expected

    def refuse(self, sent: Message, reply: Message, round: int) -> str | None:
        reason = super().refuse(sent, reply, round)
        if reason is None and self.active and not torch.equal(reply["correlation"], reply["correlation"].T):
            return "correlation is not symmetric"
        return reason

    # ---- the client

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        local = super().prepare(client, message, memory)
        if "consensus" in message.tensors:
            consensus = message["consensus"].to(self.task.device)
            blocks = message.tensors.get("blocks")
            if blocks is None:
                blocks = self.cluster(consensus) if self.options.blocks else self.one_block()
                local["blocks"] = blocks
            if self.options.alignment:
                alignment = Alignment(consensus, blocks)
                if alignment.pairs:
                    local["alignment"] = alignment
        return local

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        if "alignment" not in local:
            return super().loss(model, batch, local)
        logits = model(batch.images)
        alignment: Tensor = local["alignment"](torch.sigmoid(logits))
        return self.entries(logits, batch, local).mean() + self.options.strength * alignment

    def finish(self, client: Client, local: Local, reply: Message, memory: Tensors) -> None:
        """R_k (Eq. 1–2): one pass of the trained model, in eval mode, over the client's data."""
        if not self.active:
            return
        streamed = StreamedCorrelation(len(self.task.classes))
        client.model.eval()
        with torch.inference_mode():
            for batch in client.scan():
                streamed.add(self.predict(client.model, batch.images))
        reply.tensors["correlation"] = streamed.matrix()
        if self.options.blocks and "blocks" in local:
            reply.tensors["blocks"] = local["blocks"]

    # ---- both

    def cluster(self, consensus: Tensor) -> Tensor:
        clusters = default_clusters(len(consensus)) if self.options.clusters == "sqrt" else self.options.clusters
        return spectral_blocks(consensus, clusters, derive(self.task.seed, "blocks"))

    def one_block(self) -> Tensor:
        return torch.zeros(len(self.task.classes), dtype=torch.int64)


@dataclass
class Seen:
    """What a round's replies said beside their weights: K × C² numbers at most."""

    clients: list[int] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)  # N_k
    weights: list[float] = field(default_factory=list)  # n̄_k, not normalised
    matrices: list[Tensor] = field(default_factory=list)
    blocks: list[Tensor] = field(default_factory=list)
    discrepancies: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)  # log q_k, up to a constant

    def add(self, peer: Peer, reply: Message, weight: float) -> None:
        self.clients.append(peer.index)
        self.sizes.append(reply.numbers["samples"])
        self.weights.append(weight)
        self.matrices.append(reply["correlation"])


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class SoftmaxMean(WeightedMean):
    """Streamed Σ exp(s)·x / Σ exp(s). The sums are kept relative to the largest score so far: no score is too small."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = -math.inf

    def add(self, tensors: Tensors, score: float) -> None:
        if score > self.largest:
            shrink = math.exp(self.largest - score)
            self.total *= shrink
            for running in self.sums.values():
                running.mul_(shrink)
            self.largest = score
        super().add(tensors, math.exp(score - self.largest))


def blend(by_size: WeightedMean, by_quality: WeightedMean, balance: float) -> Tensors:
    """Eq. 10: a · (mean by size) + (1−a) · (mean by quality)."""
    if balance in (0, 1):
        return (by_size if balance else by_quality).result()
    first, second = by_size.result(), by_quality.result()
    mixed = {name: balance * first[name] + (1 - balance) * second[name] for name in by_size.sums}
    return first | mixed
