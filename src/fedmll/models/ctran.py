"""C-Tran (Lanchantin et al., 2021): image tokens and label tokens in one transformer encoder.

A label token is the label's embedding plus that of its state: unknown (zero), negative or positive. So the model
predicts labels from the image and from whatever other labels are known.
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

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        embeddings: LabelEmbeddings | None = None,
        layers: int = 3,
        heads: int = 4,
        dropout: float = 0.1,
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

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """The labels' tokens (batch, classes, width) as they come out. `states` None: all unknown."""
        tokens = self._before_last(self.tokens(images), states)
        labels: Tensor = self.layers[-1](tokens[:, -len(self.labels) :], tokens)  # nobody asks for the image's any more
        return labels

    def _before_last(self, image_map: Tensor, states: Tensor | None) -> Tensor:
        """The image's and the labels' tokens (batch, S + classes, width) as the last layer sees them."""
        image_tokens = image_map.flatten(2).transpose(1, 2)
        tokens: Tensor = self.norm(torch.cat([image_tokens, self.label_tokens(states, image_map.shape[0])], dim=1))
        for layer in self.layers[:-1]:
            tokens = layer(tokens, tokens)
        return tokens

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
        map lacks of 1 goes to the labels' tokens."""
        image_map = self.tokens(images)
        tokens, classes = self._before_last(image_map, None), len(self.labels)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        weights = last.attention.weights(tokens[:, -classes:], tokens)
        return weights[..., :-classes].unflatten(-1, image_map.shape[2:])


def _uniform(width: int, *shape: int) -> Tensor:
    """U(±1/√width), as torch initialises a linear layer."""
    return torch.empty(shape).uniform_(-(width**-0.5), width**-0.5)
