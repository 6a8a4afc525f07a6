"""FedLGT — Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024.

FedC-Tran with two more components. Each has a switch; with both off it is FedC-Tran.

Universal label embeddings (`ule`): l_c is a frozen text encoder's embedding of "The photo contains {class}."; the
states are its embeddings of "positive" and "negative". They are the same at every client, so the label embeddings do
not drift apart. `encoder` is the text encoder (models/label_embeddings.py). `fine_names` is a file with more specific
names of abstract classes (Table A3).
Client-aware masked label embedding (`ca_mle`, Eq. 4): where the global model at the start of the round is uncertain
about a label (τ − ε ≤ p_c ≤ τ + ε with all states unknown), the label's state is hidden, so it is part of the loss.

The released code hides states only for the first sample of each batch: compat = "first-sample".
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmll.methods.fedctran import FedCTran, LabelMask
from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.heads import TextQueryHead


class ClientAwareMask(Part):
    """CA-MLE (Eq. 4): the state of a label is hidden if the global model is uncertain about it."""

    name = "client-aware-mask"
    requires = frozenset({"label-states"})
    depends_on = (LabelMask,)

    class Options(PartOptions):
        tau: float = option(0.5, "τ: uncertain are the p in [τ − ε, τ + ε] (Eq. 4)", gt=0, lt=1)
        eps: float = option(0.02, "ε: half the width of that range (Eq. 4)", ge=0, le=1)
        compat: Literal["none", "first-sample"] = option("none", "first-sample: as in the released code")

    def on_round_start(self, client_round: ClientRound) -> Tensor:
        """bool (N, C): where the received global model is uncertain, with all states unknown."""
        return uncertain(client_round.outputs().probabilities, self.options.tau, self.options.eps)

    def transform_batch(self, step: TrainStep, uncertain: Tensor) -> None:
        assert step.states is not None
        hidden = uncertain[step.rows]
        if self.options.compat == "first-sample":
            hidden[1:] = False
        step.states = step.states.masked_fill(hidden, -1)


class FedLGT(Method):
    name = "fedlgt"
    summary = "FedC-Tran with frozen text embeddings of the labels; focus on labels with an uncertain global model"
    paper = "Liu et al., AAAI 2024"
    head = TextQueryHead
    parts = (LabelMask, switch("ca_mle", ClientAwareMask, "hide the states of uncertain labels (CA-MLE, Eq. 4)"))
    published: ClassVar[dict[str, Any]] = FedCTran.published
    unpublished: ClassVar[dict[str, str]] = FedCTran.unpublished | {
        "method.encoder": "CLIP's text encoder: a folder with its files, or hub:openai/clip-vit-base-patch32",
    }


def uncertain(p: Tensor, tau: float, eps: float) -> Tensor:
    """τ − ε ≤ p ≤ τ + ε, with bounds of the same type as the probabilities."""
    low, high = p.new_tensor(tau - eps), p.new_tensor(tau + eps)
    return (p >= low) & (p <= high)
