"""FedLGT — Liu et al., "Language-Guided Transformer for Federated Multi-Label Classification", AAAI 2024.

FedC-Tran and two components, each with its switch; without both it is FedC-Tran.

Universal label embeddings (`ule`): l_c is a frozen text encoder's embedding of "The photo contains {class}.", the
states are its "positive" and "negative"; the same at every client, so label relations do not drift apart. `encoder`
names the encoder (fedmll.models.text), `fine_names` a file that describes abstract classes by finer names (Table A3).
Client-aware masked label embedding (`ca_mle`, Eq. 4): where the round-start global model is uncertain about a label,
τ − ε ≤ p_c ≤ τ + ε with all states unknown, its state becomes unknown, so that it is learned. The global model is fixed
in a round: it predicts once a round.

Released code: compat = "first-sample" does CA-MLE only for the first sample of each batch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.base import Local
from fedmll.methods.fedctran import FedCTran
from fedmll.models.ctran import LabelEmbeddings

if TYPE_CHECKING:
    from fedmll.client import Batch, Client
    from fedmll.experiment import Experiment


class FedLGT(FedCTran):
    name = "fedlgt"
    summary = "FedC-Tran with frozen text embeddings of the labels; learns most where the global model is uncertain"

    unpublished: ClassVar[dict[str, str]] = FedCTran.unpublished | {
        "method.encoder": "CLIP's text encoder: a folder with its files, or hub:openai/clip-vit-base-patch32",
    }

    class Options(FedCTran.Options):
        ule: bool = True
        ca_mle: bool = True
        tau: Annotated[float, Field(gt=0, lt=1)] = 0.5
        eps: Annotated[float, Field(ge=0, le=1)] = 0.02
        encoder: str = "wordllama"
        prompt: str = "The photo contains {class}."
        fine_names: str | None = None
        fine: Literal["concat", "average"] = "concat"
        compat: Literal["none", "first-sample"] = "none"

    options: Options

    @classmethod
    def check(cls, experiment: Experiment) -> None:
        option = cls.Options(**experiment.method.options)
        if "{class}" not in option.prompt:
            raise ConfigError(
                f"method.prompt = '{option.prompt}' does not say where the class's name goes: write {{class}} there."
            )

    def embeddings(self, width: int) -> LabelEmbeddings | None:
        from fedmll.models import text

        option = self.options
        if not option.ule or option.encoder == text.LEARNED:
            return None
        fine = {} if option.fine_names is None else text.read_fine_names(option.fine_names)
        return text.label_embeddings(
            option.encoder, self.task.classes, option.prompt, width, self.task.seed, fine, option.fine == "average"
        )

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        local = super().prepare(client, message, memory)
        if self.options.ca_mle:
            local["uncertain"] = uncertain(self.teacher(client), self.options.tau, self.options.eps)
        return local

    def teacher(self, client: Client) -> Tensor:
        """The global model's probabilities (N, C), all states unknown: one pass a round."""
        model: nn.Module = client.model.eval()
        with torch.no_grad():
            return torch.cat([self.predict(model, batch.images) for batch in client.scan()])

    def states(self, batch: Batch, local: Local) -> Tensor:
        """Eq. 4."""
        states = super().states(batch, local)
        if not self.options.ca_mle:
            return states
        hidden = local["uncertain"][batch.rows]
        if self.options.compat == "first-sample":
            hidden[1:] = False
        return states.masked_fill(hidden, -1)


def uncertain(p: Tensor, tau: float, eps: float) -> Tensor:
    """τ − ε ≤ p ≤ τ + ε, compared as the probabilities' own type has it."""
    low, high = p.new_tensor(tau - eps), p.new_tensor(tau + eps)
    return (p >= low) & (p <= high)
