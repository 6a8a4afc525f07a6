"""Central tuning of a classifier (Breitholtz et al., 2025, Section 4.2): the server fits the global classifier h to the
predictions of the round's client models h_k on unlabelled images, each client speaking for its own labels Y_k only.

  MSE        Σ_k Σ_{y ∈ Y_k}        E (h_k(y|x) − h(y|x))²
  pairwise   Σ_k Σ_{y ≠ y' ∈ Y_k}   E (h_k(y|x) h(y'|x) − h_k(y'|x) h(y|x))²     (ordered pairs)

h is normalised over all classes (scope `global`, the paper) or over Y_k (`restricted`). Labels that no client of the
round has spoil the pairwise loss (Appendix B), so by default (`absent = omit`) h is over the other labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F


@contextmanager
def one_thread() -> Iterator[None]:
    """For small work in the server's process: the cores belong to the clients' workers, and threads that wait for a
    busy core made it ten times slower. It also makes the result the same on every number of cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Opinions:
    """What the clients think of the tuning images, gathered once a round."""

    p: Tensor  # (clients, images, classes), 0 outside Y_k
    own: Tensor  # bool (clients, 1, classes): Y_k

    @classmethod
    def gather(cls, predictions: list[Tensor], rows: list[Tensor], classes: int) -> Opinions:
        """From each client's (images, |Y_k|) predictions and the classes these are of."""
        p = predictions[0].new_zeros(len(predictions), len(predictions[0]), classes)
        own = torch.zeros(len(predictions), 1, classes, dtype=torch.bool, device=p.device)
        for client, (values, places) in enumerate(zip(predictions, rows, strict=True)):
            p[client][:, places] = values
            own[client, 0, places] = True
        return cls(p, own)

    @property
    def absent(self) -> Tensor:
        """bool (classes,): the labels that none of them has."""
        return ~self.own.any(0).squeeze(0)


def mse(p: Tensor, h: Tensor, own: Tensor) -> Tensor:
    """`p` and `h` broadcast to (clients, images, classes)."""
    return ((p - h) * own).square().sum((0, 2)).mean()


def pairwise(p: Tensor, h: Tensor, own: Tensor) -> Tensor:
    """No pairs are formed: by Lagrange's identity Σ_{y,y'} (a_y b_y' − a_y' b_y)² = 2 (‖a‖²‖b‖² − (a·b)²), which is
    2 ‖a‖²‖b − t a‖² with t = a·b / ‖a‖²; this form does not cancel where a and b nearly agree."""
    a, b = p * own, h * own
    size = a.square().sum(2, keepdim=True)
    t = (a * b).sum(2, keepdim=True) / size.clamp(min=1e-30)
    return 2 * (size.squeeze(2) * (b - t * a).square().sum(2)).sum(0).mean()


@dataclass(frozen=True)
class Tuning:
    loss: Literal["mse", "pairwise"]
    softmax: bool
    scope: Literal["global", "restricted"]
    absent: Literal["omit", "naive", "penalise"]
    steps: int
    batch: int
    lr: float

    def objective(self, opinions: Opinions) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of (logits, places): of the classifier's logits (B, C) for the tuning images at `places`."""
        support, counted = opinions.own, opinions.own
        if self.loss == "pairwise" and self.absent == "penalise":
            support = counted = opinions.own | opinions.absent  # pairs with an absent label, where h_k is 0
        if self.scope == "global":
            omitted = self.loss == "pairwise" and self.absent == "omit"
            support = (~opinions.absent if omitted else torch.ones_like(opinions.absent))[None, None]
        function = mse if self.loss == "mse" else pairwise

        def loss(logits: Tensor, places: Tensor) -> Tensor:
            return function(opinions.p[:, places], self._h(logits, support), counted)

        return loss

    def _h(self, logits: Tensor, support: Tensor) -> Tensor:
        """Probabilities of softmax over `support`; sigmoids need no normalisation."""
        if not self.softmax:
            return torch.sigmoid(logits)[None]
        return torch.softmax(logits[None].masked_fill(~support, -torch.inf), 2)

    def fit(self, rows: Tensor, features: Tensor, opinions: Opinions, generator: torch.Generator) -> Tensor:
        """The classifier's rows (C, width and bias) after `steps` of Adam on batches of the tuning images' features."""
        tuned = rows.to(features.device).clone().requires_grad_()
        optimizer = torch.optim.Adam([tuned], self.lr)
        loss = self.objective(opinions)
        size = min(self.batch, len(features))
        left = torch.empty(0, dtype=torch.int64)
        for _ in range(self.steps):
            if len(left) < size:
                left = torch.randperm(len(features), generator=generator)
            places, left = left[:size].to(features.device), left[size:]
            optimizer.zero_grad()
            loss(F.linear(features[places], tuned[:, :-1], tuned[:, -1]), places).backward()
            optimizer.step()
        return tuned.detach().cpu()
