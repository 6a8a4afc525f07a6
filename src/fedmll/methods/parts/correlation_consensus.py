"""The consensus of label correlations (FedHarmony, Eq. 1–3 and Alg. 1): which labels are correlated in the predictions
of each client's model, and in those of all other clients."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from fedmll.core import small_groups
from fedmll.core.message import Message, Tensors
from fedmll.core.seeding import derive
from fedmll.methods.framework.base import Aggregator, Part, PartOptions, Records, TensorSpec, option
from fedmll.methods.framework.client_round import EVALUATION_BATCH, ClientInfo, ClientRound
from fedmll.methods.parts.label_correlation import (
    Consolidation,
    LeaveOneOutConsensus,
    StreamedCorrelation,
    default_clusters,
    discrepancy,
    spectral_blocks,
)

LARGEST = 1 + 1e-4  # |R| ≤ 1 for any scores, up to rounding


class CorrelationConsensus(Part):
    """Clients send R_k after training. They receive the consensus R*_k of the other clients (Eq. 1–3, Alg. 1)."""

    name = "correlation"
    conflicts = frozenset({"private-labels"})

    class Options(PartOptions):
        blocks: bool = option(True, "blocks of labels by spectral clustering (Eq. 8, Alg. 1); off: one block")
        consolidation: Consolidation = option("mean", "how R*_k is computed from the other clients' R (Eq. 3)")
        clusters: Annotated[int, Field(ge=1)] | Literal["sqrt"] = option("sqrt", "G: number of blocks; sqrt: ⌈√C⌉")
        clustering: Literal["each", "once"] = option(
            "each", "each: every client clusters its R*_k; once: the server clusters the consensus of all"
        )
        start_round: int = option(2, "the first round with a consensus", ge=2)

    def consensus(self, state: Tensors, round: int) -> LeaveOneOutConsensus | None:
        """The last round's matrices, if there is a consensus in this round."""
        if round < self.options.start_round or "clients" not in state:
            return None
        return LeaveOneOutConsensus.from_tensors(state, self.options.consolidation)

    def teacher(self, state: Tensors, consensus: LeaveOneOutConsensus, client: ClientInfo) -> Tensor:
        """R*_k (Eq. 3)."""
        others = consensus.without(client.index)
        return state["everyone"] if others is None else others

    def send(self, state: Tensors, client: ClientInfo, round: int) -> Tensors:
        consensus = self.consensus(state, round)
        if consensus is None:
            return {}
        sent = {"consensus": self.teacher(state, consensus, client)}
        return sent | {"blocks": state["blocks"]} if "blocks" in state else sent

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        """The client's correlations, and its blocks if it clusters."""
        classes = len(self.task.classes)
        expected = {
            "correlation": TensorSpec(
                (classes, classes), low=-LARGEST, high=LARGEST, rule=lambda r: torch.equal(r, r.T),
                broken="is not symmetric",
            )
        }  # fmt: skip
        if "consensus" in sent and self.options.blocks and self.options.clustering == "each":
            expected["blocks"] = TensorSpec((classes,), torch.int64, low=0, high=classes - 1)
        return expected

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return CorrelationAggregator(self, state, self.consensus(state, round))

    def on_round_start(self, client_round: ClientRound) -> dict[str, Tensor]:
        received = self.received(client_round)
        if "consensus" not in received:
            return {}
        consensus = received["consensus"]
        if "blocks" in received:
            return {"consensus": consensus, "given": received["blocks"]}
        return {"consensus": consensus, "blocks": self.cluster(consensus) if self.options.blocks else self.one_block()}

    def on_round_end(self, client_round: ClientRound, round_state: dict[str, Tensor]) -> Tensors:
        """R_k (Eq. 1–2), from the predictions of the trained model in evaluation mode. These are close to the labels,
        so R of a class that only one patient has would show the patient's other labels. Rows and columns of classes
        that may not leave the site are therefore 0."""
        streamed = StreamedCorrelation(len(self.task.classes))
        for scores in client_round.outputs().probabilities.split(EVALUATION_BATCH):
            streamed.add(scores)
        made = {"blocks": round_state["blocks"]} if self.options.blocks and "blocks" in round_state else {}
        released = small_groups.releasable_classes(client_round.targets, self.task.min_group_size).cpu()
        return {"correlation": streamed.matrix().masked_fill(~(released[:, None] & released), 0)} | made

    def cluster(self, consensus: Tensor) -> Tensor:
        clusters = default_clusters(len(consensus)) if self.options.clusters == "sqrt" else self.options.clusters
        return spectral_blocks(consensus, clusters, derive(self.task.seed, "blocks"))

    def one_block(self) -> Tensor:
        return torch.zeros(len(self.task.classes), dtype=torch.int64)


class CorrelationAggregator(Aggregator):
    """The correlations in the replies of a round: at most K × C² numbers."""

    def __init__(self, part: CorrelationConsensus, state: Tensors, consensus: LeaveOneOutConsensus | None) -> None:
        self.part, self.state, self.consensus = part, state, consensus
        self.clients: list[int] = []
        self.sizes: list[float] = []  # N_k
        self.matrices: list[Tensor] = []
        self.blocks: list[Tensor] = []
        self.discrepancies: list[float] = []  # D_k (Eq. 9)

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.clients.append(client.index)
        self.sizes.append(reply.numbers["samples"])
        self.matrices.append(reply["correlation"])
        if self.consensus is not None:
            blocks = reply.tensors.get("blocks", self.state.get("blocks", self.part.one_block()))
            teacher = self.part.teacher(self.state, self.consensus, client)
            self.blocks.append(blocks)
            self.discrepancies.append(discrepancy(reply["correlation"], teacher, blocks))

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        """The matrices for the next round's consensus; and for the report the size, discrepancy and blocks of each
        client."""
        option, kept = self.part.options, {"scale": self.state["scale"]} if "scale" in self.state else {}
        records: Records = {"clients": torch.tensor(self.clients), "sizes": doubles(self.sizes)}
        if self.discrepancies:
            median = statistics.median(self.discrepancies)
            kept["scale"] = torch.tensor(median, dtype=torch.float64)
            common = option.clustering == "once" or not option.blocks
            blocks = torch.stack(self.blocks[:1] if common else self.blocks).to(torch.int16)
            records |= {"discrepancy": doubles(self.discrepancies), "median_discrepancy": median, "blocks": blocks}
        if len(self.clients) < 2:
            return kept, records
        consensus = LeaveOneOutConsensus.of(option.consolidation, self.clients, self.matrices, self.sizes)
        kept |= consensus.tensors() | {"everyone": consensus.everyone()}
        if option.blocks and option.clustering == "once":
            kept["blocks"] = self.part.cluster(kept["everyone"])
        return kept, records | {"consensus": kept["everyone"]}


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
