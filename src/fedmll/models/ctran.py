"""C-Tran (Lanchantin et al., 2021): image tokens and label tokens in one transformer encoder.

A label token is the label's embedding plus that of its state: unknown (zero), negative or positive. So the model
predicts labels from the image and from whatever other labels are known.

Every token sees all S + C of them: C² of the work is labels that see labels. With m inducing tokens (as in the Set
Transformer, Lee et al., 2019) it grows with C: in each layer they read the labels' tokens, and then everybody sees the
image's and them. They are learned, and tokens of the encoder like all others, with the same weights in its layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.models.backbones import Backbone
from fedmll.models.heads import Attention, dropout, per_label
from fedmll.models.network import CLASSIFIER_ROWS, Network


@dataclass(frozen=True)
class LabelEmbeddings:
    """Frozen embeddings of the labels (classes, width) and of the states negative and positive (2, width); what is None
    is learned."""

    labels: Tensor | None
    states: Tensor | None


class EncoderLayer(nn.Module):
    """torch's TransformerEncoderLayer (post-norm, ReLU), where only the tokens that are asked for are computed."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.hidden, self.out = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """The outputs of the tokens `queries`, which see all `tokens`."""
        x = self.norm1(queries + self._dropped(self.attention(queries, tokens)))
        change = self.out(self._dropped(F.relu(self.hidden(x))))
        out: Tensor = self.norm2(x + self._dropped(change))
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout) if self.training and self.dropout > 0 else x


class CTran(Network):
    """With `embeddings` these are frozen (never sent, never averaged); without, they are learned."""

    labels: Tensor
    states: Tensor
    inducing: Tensor | None

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        embeddings: LabelEmbeddings | None = None,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
        inducing: int | None = None,
    ) -> None:
        super().__init__(backbone)
        width = backbone.width
        self.norm = nn.LayerNorm(width)
        self.layers = nn.ModuleList(EncoderLayer(width, heads, width, dropout) for _ in range(layers))
        self.weight = nn.Parameter(_uniform(width, classes, width))
        self.bias = nn.Parameter(_uniform(width, classes))
        frozen = embeddings or LabelEmbeddings(None, None)
        for name, given, count in (("labels", frozen.labels, classes), ("states", frozen.states, 2)):
            if given is None:
                self.register_parameter(name, nn.Parameter(_uniform(width, count, width)))
            else:
                self.register_buffer(name, given, persistent=False)
        # drawn last, so that everything else starts as without them
        self.inducing = None if inducing is None else nn.Parameter(_uniform(width, inducing, width))

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """The labels' tokens (batch, classes, width) as they come out. `states` None: all unknown."""
        labels, seen = self._last(self.tokens(images), states)
        found: Tensor = self.layers[-1](labels, seen)  # nobody asks for the image's tokens any more
        return found

    def _last(self, image_map: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """What the last layer has to do with: the labels' tokens (batch, classes, width), and what they see: first the
        image's tokens (batch, S, width), then the labels' or the inducing ones."""
        image_tokens = image_map.flatten(2).transpose(1, 2)
        tokens: Tensor = self.norm(torch.cat([image_tokens, self.label_tokens(states, image_map.shape[0])], dim=1))
        inducing = None if self.inducing is None else self.norm(self.inducing)
        for layer in self.layers[:-1]:
            seen, inducing = self._seen(layer, tokens, inducing)
            tokens = layer(tokens, seen)
        seen, _ = self._seen(self.layers[-1], tokens, inducing)
        return tokens[:, -len(self.labels) :], seen

    def _seen(self, layer: nn.Module, tokens: Tensor, inducing: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """What all `tokens` see in a layer: each other; or the image's and the inducing tokens, which read the labels
        first."""
        if inducing is None:
            return tokens, None
        classes = len(self.labels)
        inducing = layer(inducing, tokens[:, -classes:])
        return torch.cat([tokens[:, :-classes], inducing], dim=1), inducing

    def logits(self, features: Tensor) -> Tensor:
        return per_label(features, self.weight, self.bias)

    def label_tokens(self, states: Tensor | None, batch: int) -> Tensor:
        """l_c + s_c (batch, classes, width), Eq. 2; an unknown state is zero."""
        if states is None:
            return self.labels.expand(batch, -1, -1)
        table = F.pad(self.states, (0, 0, 1, 0))
        return self.labels + F.embedding(states.long() + 1, table)

    def class_vectors(self) -> dict[str, Tensor]:
        return {"label embeddings": self.labels, CLASSIFIER_ROWS: self.weight}

    def class_maps(self, images: Tensor) -> Tensor:
        """Where each label's token looks in the image, in the last layer and with nothing known of the labels. What a
        map lacks of 1 goes to the labels' tokens, or to the inducing ones."""
        image_map = self.tokens(images)
        labels, seen = self._last(image_map, None)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        weights = last.attention.weights(labels, seen)
        return weights[..., : image_map.shape[2:].numel()].unflatten(-1, image_map.shape[2:])


def _uniform(width: int, *shape: int) -> Tensor:
    """U(±1/√width), as torch initialises a linear layer."""
    return torch.empty(shape).uniform_(-(width**-0.5), width**-0.5)
