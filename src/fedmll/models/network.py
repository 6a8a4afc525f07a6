"""What a method trains: a backbone and a head. Features and logits are two steps, so that both are computed once."""

from __future__ import annotations

from torch import Tensor, nn

from fedmll.errors import ConfigError
from fedmll.models.backbones import Backbone
from fedmll.models.frozen import as_map, pooled, tokens_of

CLASSIFIER_ROWS = "classifier rows"  # among a network's class vectors


class Network(nn.Module):
    """`features` are (batch, width), or (batch, classes, width) where every class reads its own."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    @property
    def width(self) -> int:
        return self.backbone.width

    def tokens(self, images: Tensor) -> Tensor:
        """(batch, width, rows, columns) of images, or of tokens that were kept."""
        if self.backbone.means_kept and images.dim() == 2:
            raise ConfigError(
                "Of a frozen backbone only the means of the tokens are kept where the head pools them, and something "
                "asks for the tokens: give the head a features() of its own, or leave model.freeze out."
            )
        tokens = tokens_of(self.backbone, images)
        return tokens if tokens.dim() == 4 else as_map(tokens)

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """`states` (batch, classes) are what is known of the labels (1, 0, -1 unknown), for heads that can use it."""
        return pooled(tokens_of(self.backbone, images))

    @property
    def pools(self) -> bool:
        """Whether its features need nothing of the tokens but their mean: a class that has its own says so itself."""
        return type(self).features is Network.features

    def logits(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        return self.logits(self.features(images, states))

    # ---- for pictures

    def class_vectors(self) -> dict[str, Tensor]:
        """What the head itself has of every class, by what it is: (classes, width)."""
        return {}

    def class_maps(self, images: Tensor) -> Tensor | None:
        """Where each class looks, for heads that attend: (batch, heads, classes, rows, columns), shares of 1."""
        return None


class Classifier(Network):
    """Mean over the tokens, linear head: what FedAvg and its family train."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.width, classes)

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def class_vectors(self) -> dict[str, Tensor]:
        return {CLASSIFIER_ROWS: self.head.weight}
