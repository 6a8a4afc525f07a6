"""C-Tran (Lanchantin et al., 2021): image tokens and label tokens in one transformer encoder.

A label token is the embedding of the label plus the embedding of its state: unknown (zero), negative or positive. The
model thus predicts labels from the image and from all labels that are known.

Each token attends to all S + C tokens, so the cost grows with C². With m inducing tokens (as in the Set Transformer,
Lee et al., 2019) it grows with C: in each layer the inducing tokens attend to the label tokens, and then all tokens
attend to the image tokens and the inducing tokens. Inducing tokens are learned and use the same layers as all other
tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedmll.models.backbones import Backbone
from fedmll.models.class_attention import Attention, dropout, per_label
from fedmll.models.network import CLASSIFIER_ROWS, Network


@dataclass(frozen=True)
class LabelEmbeddings:
    """Frozen embeddings of the labels (classes, width) and of the states negative and positive (2, width).

    None: the embeddings are learned.
    """

    labels: Tensor | None
    states: Tensor | None


class EncoderLayer(nn.Module):
    """torch's TransformerEncoderLayer (post-norm, ReLU), which computes only the requested tokens."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention = Attention(width, heads, dropout)
        self.hidden, self.out = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.dropout = dropout

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """The outputs for `queries`, which attend to all `tokens`."""
        x = self.norm1(queries + self._dropped(self.attention(queries, tokens)))
        change = self.out(self._dropped(F.relu(self.hidden(x))))
        out: Tensor = self.norm2(x + self._dropped(change))
        return out

    def _dropped(self, x: Tensor) -> Tensor:
        return dropout(x, self.dropout) if self.training and self.dropout > 0 else x


class CTran(Network):
    """C-Tran. Given `embeddings` are frozen (never sent, never averaged); without them, embeddings are learned."""

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
        # drawn last, so that all other initial values are the same as without them
        self.inducing = None if inducing is None else nn.Parameter(_uniform(width, inducing, width))

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """The output label tokens (batch, classes, width). Without `states`, all labels are unknown."""
        labels, seen = self._last_layer_input(self.tokens(images), states)
        found: Tensor = self.layers[-1](labels, seen)  # the image tokens are not needed any more
        return found

    def _last_layer_input(self, image_map: Tensor, states: Tensor | None) -> tuple[Tensor, Tensor]:
        """The input of the last layer: the label tokens (batch, classes, width), and the tokens they attend to.

        The latter are first the image tokens (batch, S, width), then the label tokens or the inducing tokens.
        """
        image_tokens = image_map.flatten(2).transpose(1, 2)
        tokens: Tensor = self.norm(torch.cat([image_tokens, self.label_tokens(states, image_map.shape[0])], dim=1))
        inducing = None if self.inducing is None else self.norm(self.inducing)
        for layer in self.layers[:-1]:
            seen, inducing = self._attended_tokens(layer, tokens, inducing)
            tokens = layer(tokens, seen)
        seen, _ = self._attended_tokens(self.layers[-1], tokens, inducing)
        return tokens[:, -len(self.labels) :], seen

    def _attended_tokens(
        self, layer: nn.Module, tokens: Tensor, inducing: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The tokens that all `tokens` attend to in a layer.

        These are the tokens themselves, or the image tokens and the inducing tokens, which attend to the labels first.
        """
        if inducing is None:
            return tokens, None
        classes = len(self.labels)
        inducing = layer(inducing, tokens[:, -classes:])
        return torch.cat([tokens[:, :-classes], inducing], dim=1), inducing

    @property
    def class_bias(self) -> str | None:
        return "bias"

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
        """The attention of each label token to the image in the last layer, with all labels unknown.

        A map sums to less than 1; the rest is attention to the label tokens or the inducing tokens.
        """
        image_map = self.tokens(images)
        labels, seen = self._last_layer_input(image_map, None)
        last = self.layers[-1]
        assert isinstance(last, EncoderLayer)
        weights = last.attention.weights(labels, seen)
        return weights[..., : image_map.shape[2:].numel()].unflatten(-1, image_map.shape[2:])


def _uniform(width: int, *shape: int) -> Tensor:
    """U(±1/√width), as torch initialises a linear layer."""
    return torch.empty(shape).uniform_(-(width**-0.5), width**-0.5)
