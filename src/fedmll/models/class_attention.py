"""Attention with one query per class: simplex ETF, 2-D positions, LADM, per-label classifier."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fedmll.core.errors import ConfigError
from fedmll.core.seeding import numpy_generator
from fedmll.models.backbones import Backbone
from fedmll.models.network import CLASSIFIER_ROWS, Network, normal_matrix

MAX_STORED_WEIGHTS = 2**25  # attention weights per batch that are stored for the gradients: 128 MB


def orthonormal(rows: int, columns: int, seed: int, purpose: str) -> np.ndarray:
    """A seeded float64 matrix with orthonormal columns (rows ≥ columns).

    The signs of the QR decomposition are fixed (diag R > 0), so that each machine builds the same matrix.
    """
    q, r = np.linalg.qr(normal_matrix(numpy_generator(seed, purpose), rows, columns))
    return np.asarray(q * np.sign(np.diag(r)))


def simplex_etf(width: int, classes: int, seed: int) -> Tensor:
    """Mᵀ (classes, width), M = √(C/(C−1)) U (I − 11ᵀ/C): row c is m_c, ‖m_c‖ = 1, m_a·m_b = −1/(C−1)."""
    if classes < 2:
        raise ConfigError("A simplex ETF needs at least 2 classes; the data has 1. Use another method, or etf = false.")
    if width < classes:
        raise ConfigError(
            f"A simplex ETF of {classes} classes needs features of width {classes} or more; the backbone's width is "
            f"{width}. Use model.backbone = 'resnet18' (512), or model.channels that end with {classes} or more."
        )
    u = orthonormal(width, classes, seed, "etf")
    m = math.sqrt(classes / (classes - 1)) * (u - u.mean(1, keepdims=True))  # U 11ᵀ/C: the mean of U's columns
    return torch.from_numpy(np.ascontiguousarray(m.T, dtype=np.float32))


@cache
def positional_encoding(width: int, rows: int, columns: int, device: torch.device) -> Tensor:
    """Fixed 2-D sine–cosine encoding (width, rows, columns), as in DETR.

    The first half of the channels encodes the row, the second half the column; sin and cos are interleaved, the
    temperature is 10,000, and coordinates are integers from 0.
    """
    if width % 4:
        raise ConfigError(
            f"The positional encoding needs a feature width divisible by 4; the backbone's width is {width}. Choose "
            "other model.channels, or set method.positional = false."
        )
    half = width // 2

    def axis(length: int) -> np.ndarray:
        angle = np.arange(length) / 10_000 ** (np.arange(0, half, 2)[:, None] / half)
        return np.stack([np.sin(angle), np.cos(angle)], axis=1).reshape(half, length)

    encoding = np.empty((width, rows, columns), dtype=np.float32)
    encoding[:half] = axis(rows)[:, :, None]
    encoding[half:] = axis(columns)[:, None, :]
    with torch.inference_mode(False):  # cached: training may use it after an evaluation created it
        return torch.from_numpy(encoding).to(device)


class Attention(nn.Module):
    """Multi-head attention of queries over tokens (batch, S, width); initialised like torch's.

    Queries are (batch, Q, width), or (Q, width) if they are the same for all samples; they are then projected once.
    """

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(
                f"Attention with {heads} heads needs a feature width divisible by {heads}; the backbone's width is "
                f"{width}. Choose other model.channels or method.heads."
            )
        self.heads, self.dropout = heads, dropout
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(width, 2 * width)
        self.out = nn.Linear(width, width)
        for linear in (self.query, self.key_value):
            nn.init.uniform_(linear.weight, -math.sqrt(1.5 / width), math.sqrt(1.5 / width))  # √(6 / (d + 3d))
        for linear in (self.query, self.key_value, self.out):
            nn.init.zeros_(linear.bias)

    def forward(self, queries: Tensor, tokens: Tensor) -> Tensor:
        key, value = map(self._split, self.key_value(tokens).chunk(2, dim=-1))
        query = self._queries(queries, tokens.shape[0])  # len() would become a constant in an exported model
        if self.training and self.dropout > 0:
            read = _read_with_dropout(query, key, value, self.dropout)
        else:
            read = F.scaled_dot_product_attention(query, key, value)
        mixed: Tensor = self.out(read.transpose(1, 2).flatten(2))
        return mixed

    def weights(self, queries: Tensor, tokens: Tensor) -> Tensor:
        """The attention weights (batch, heads, Q, S); each row sums to 1."""
        key, _ = map(self._split, self.key_value(tokens).chunk(2, dim=-1))
        return _weights(self._queries(queries, tokens.shape[0]), key)

    def _queries(self, queries: Tensor, batch: int) -> Tensor:
        split = self._split(self.query(queries))
        return split.expand(batch, -1, -1, -1)

    def _split(self, x: Tensor) -> Tensor:
        """(…, L, width) → (…, heads, L, width / heads)."""
        return x.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


def _weights(query: Tensor, key: Tensor) -> Tensor:
    """softmax(q kᵀ / √d)."""
    return torch.softmax(query * query.shape[-1] ** -0.5 @ key.transpose(-1, -2), dim=-1)


def _read_with_dropout(query: Tensor, key: Tensor, value: Tensor, p: float) -> Tensor:
    """dropout(softmax(q kᵀ / √d)) v (batch, heads, Q, width / heads).

    Weights that are too large to be stored for the gradients are computed per sample, and again for the gradients, with
    the same random numbers.
    """

    def read(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return dropout(_weights(query, key), p) @ value

    if query.shape[:-1].numel() * key.shape[-2] <= MAX_STORED_WEIGHTS:
        return read(query, key, value)
    samples = zip(query.split(1), key.split(1), value.split(1), strict=True)
    return torch.cat([checkpoint(read, *sample, use_reentrant=False) for sample in samples])


def dropout(x: Tensor, p: float) -> Tensor:
    """Dropout with 16 random bits per element: on a CPU more than twice as fast as torch's; p is exact to 1/65,536."""
    if x.device.type != "cpu":
        return F.dropout(x, p)
    bits = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
    kept = bits[: x.numel()].view(x.shape) >= round(p * 2**16) - 2**15
    return x * kept.to(x.dtype).mul_(1 / (1 - p))


class Ladm(nn.Module):
    """Label-aware disentanglement (FedNCA-ML, Eq. 3–8): one query per class attends to a map of tokens, giving h_c."""

    queries: Tensor

    def __init__(self, queries: Tensor, heads: int = 4, *, learnable: bool = False, positional: bool = True) -> None:
        super().__init__()
        self.attention = Attention(queries.shape[1], heads)
        self.positional = positional
        if learnable:
            self.queries = nn.Parameter(queries.clone())
        else:
            self.register_buffer("queries", queries, persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(batch, width, rows, columns) → h (batch, classes, width)."""
        features: Tensor = self.attention(self.queries, self._sequence(tokens))
        return features

    def maps(self, tokens: Tensor) -> Tensor:
        """Attention maps (batch, heads, classes, rows, columns); each map sums to 1."""
        return self.attention.weights(self.queries, self._sequence(tokens)).unflatten(-1, tokens.shape[2:])

    def _sequence(self, tokens: Tensor) -> Tensor:
        """Z̃ = Z + P (batch, S, width)."""
        if self.positional:
            tokens = tokens + positional_encoding(*map(int, tokens.shape[1:]), tokens.device)
        return tokens.flatten(2).transpose(1, 2)


def per_label(features: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """z_c = h_c·w_c + b_c (batch, classes): the diagonal of a full linear layer."""
    logits = (features * weight).sum(-1)
    return logits if bias is None else logits + bias


class PrototypeClassifier(Network):
    """FedNCA-ML's network.

    Features are h_c (batch, classes, width) from the LADM, or without it the mean h (batch, width) as in FedAvg. A
    logit is the product with the prototype of the class: m_c of the ETF (Eq. 9), a buffer that is never trained, or, if
    `etf` is None, a row of a linear layer.
    """

    prototypes: Tensor
    bias: Tensor | None

    def __init__(
        self,
        backbone: Backbone,
        classes: int,
        etf: Tensor | None = None,
        ladm: Ladm | None = None,
        logit_scale: float | None = None,
    ) -> None:
        super().__init__(backbone)
        self.ladm = ladm
        if etf is None:
            linear = nn.Linear(backbone.width, classes)
            self.prototypes, self.bias = linear.weight, linear.bias
        else:
            self.register_buffer("prototypes", etf, persistent=False)
            self.bias = None
        self.scale = None if logit_scale is None else nn.Parameter(torch.tensor([float(logit_scale)]))

    @property
    def uses_mean_features(self) -> bool:
        return self.ladm is None and type(self).features is PrototypeClassifier.features

    def features(self, images: Tensor, states: Tensor | None = None) -> Tensor:
        if self.ladm is None:
            return super().features(images)
        features: Tensor = self.ladm(self.tokens(images))
        return features

    @property
    def class_bias(self) -> str | None:
        return None if self.bias is None or self.scale is not None else "bias"

    def logits(self, features: Tensor) -> Tensor:
        score = per_label if features.dim() == 3 else F.linear
        logits = score(features, self.prototypes, self.bias)
        return logits if self.scale is None else logits * self.scale

    def class_vectors(self) -> dict[str, Tensor]:
        found = {CLASSIFIER_ROWS: self.prototypes}
        if self.ladm is None or torch.equal(self.ladm.queries, self.prototypes):
            return found
        return found | {"queries": self.ladm.queries}

    def class_maps(self, images: Tensor) -> Tensor | None:
        return None if self.ladm is None else self.attention(images)

    def attention(self, images: Tensor) -> Tensor:
        """The LADM's attention maps (batch, heads, classes, rows, columns), for figures."""
        if self.ladm is None:
            raise ConfigError("There are no attention maps without the LADM (method.ladm = false).")
        return self.ladm.maps(self.tokens(images))
