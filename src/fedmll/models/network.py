"""`Network`: a backbone and a head. Features and logits are separate steps, so that each is computed once."""

from __future__ import annotations

from torch import Tensor, nn

from fedmll.core.errors import ConfigError
from fedmll.models.backbones import Backbone
from fedmll.models.frozen_features import as_map, compute_tokens, pool_tokens

CLASSIFIER_ROWS = "classifier rows"  # a key of Network.class_vectors


class Network(nn.Module):
    """The base of all models. `features` are (batch, width), or (batch, classes, width) with one feature per class."""

    def __init__(self, backbone: Backbone) -> None:
        super().__init__()
        self.backbone = backbone

    @property
    def width(self) -> int:
        return self.backbone.width

    def tokens(self, images: Tensor) -> Tensor:
        """Tokens (batch, width, rows, columns) from images or from stored tokens."""
        if self.backbone.stores_means and images.dim() == 2:
            raise ConfigError(
                "Only the means of the frozen backbone's tokens were stored, because the head uses means, but the "
                "tokens are "
                "needed: give the network its own features(), or leave model.freeze out."
            )
        tokens = compute_tokens(self.backbone, images)
        return tokens if tokens.dim() == 4 else as_map(tokens)

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        """The features of images.

        `states` (batch, classes) are known labels (1, 0, -1 unknown), for heads that use them.
        """
        return pool_tokens(compute_tokens(self.backbone, images))

    @property
    def uses_mean_features(self) -> bool:
        """Whether the features need only the mean of the tokens. A subclass with its own `features` overrides this."""
        return type(self).features is Network.features

    def logits(self, features: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        return self.logits(self.features(images, states))

    # For figures

    def class_vectors(self) -> dict[str, Tensor]:
        """Vectors of the head, one per class: description → (classes, width)."""
        return {}

    def class_maps(self, images: Tensor) -> Tensor | None:
        """Attention maps per class, for heads with attention: (batch, heads, classes, rows, columns); each sums to
        1."""
        return None


class Classifier(Network):
    """A linear head on the mean of the tokens, as in FedAvg."""

    def __init__(self, backbone: Backbone, classes: int) -> None:
        super().__init__(backbone)
        self.head = nn.Linear(backbone.width, classes)

    def logits(self, features: Tensor) -> Tensor:
        logits: Tensor = self.head(features)
        return logits

    def class_vectors(self) -> dict[str, Tensor]:
        return {CLASSIFIER_ROWS: self.head.weight}
