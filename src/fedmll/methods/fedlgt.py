"""FedLGT — Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024.

FedC-Tran and two components, each with its switch; without both it is FedC-Tran.

Universal label embeddings (`ule`): l_c is a frozen text encoder's embedding of "The photo contains {class}.", the
states are its "positive" and "negative"; the same at every client, so label relations do not drift apart. `encoder`
names the encoder (models/label_embeddings.py), `fine_names` a file of finer names for abstract classes (Table A3).
Client-aware masked label embedding (`ca_mle`, Eq. 4): where the round-start global model is uncertain about a label,
τ − ε ≤ p_c ≤ τ + ε with all states unknown, its state becomes unknown, so that it is learned. The global model is fixed
in a round: it predicts once a round.

Released code: compat = "first-sample" does CA-MLE only for the first sample of each batch.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from torch import Tensor

from fedmll.methods.base import Part, PartOptions, option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.fedctran import FedCTran, LabelMask
from fedmll.methods.heads import TextQueryHead
from fedmll.methods.method import Method, switch


class ClientAwareMask(Part):
    """CA-MLE (Eq. 4): the state of a label about which the global model is uncertain is not told."""

    name = "client-aware-mask"
    requires = frozenset({"label-states"})
    depends_on = (LabelMask,)

    class Options(PartOptions):
        tau: float = option(0.5, "τ: the middle of what counts as uncertain (Eq. 4)", gt=0, lt=1)
        eps: float = option(0.02, "ε: how far from τ is still uncertain (Eq. 4)", ge=0, le=1)
        compat: Literal["none", "first-sample"] = option("none", "first-sample: as the released code does")

    def on_round_start(self, client_round: ClientRound) -> Tensor:
        """(N, C), by the round-start global model with all states unknown."""
        return uncertain(client_round.outputs().probabilities, self.options.tau, self.options.eps)

    def transform_batch(self, step: TrainStep, uncertain: Tensor) -> None:
        assert step.states is not None
        hidden = uncertain[step.rows]
        if self.options.compat == "first-sample":
            hidden[1:] = False
        step.states = step.states.masked_fill(hidden, -1)


class FedLGT(Method):
    name = "fedlgt"
    summary = "FedC-Tran with frozen text embeddings of the labels; learns most where the global model is uncertain"
    paper = "Liu et al., AAAI 2024"
    head = TextQueryHead
    parts = (LabelMask, switch("ca_mle", ClientAwareMask, "client-aware masked label embedding (Eq. 4)"))
    published: ClassVar[dict[str, Any]] = FedCTran.published
    unpublished: ClassVar[dict[str, str]] = FedCTran.unpublished | {
        "method.encoder": "CLIP's text encoder: a folder with its files, or hub:openai/clip-vit-base-patch32",
    }


def uncertain(p: Tensor, tau: float, eps: float) -> Tensor:
    """τ − ε ≤ p ≤ τ + ε, compared as the probabilities' own type has it."""
    low, high = p.new_tensor(tau - eps), p.new_tensor(tau + eps)
    return (p >= low) & (p <= high)
