"""Class prototypes: the mean feature of the samples with a label present (1) and absent (0)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.core.message import Tensors


def local_prototypes(features: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The mean feature (label, class, width) of the samples with each label, and where there are any: of none it is 0
    and says nothing. Features are (samples, width), or (samples, classes, width) where each class reads its own."""
    members = torch.stack([targets == label for label in (0, 1)]).transpose(1, 2).float()  # (label, class, sample)
    counts = members.sum(2)
    sums = members @ features if features.dim() == 2 else torch.einsum("lcn,ncw->lcw", members, features)
    some = counts > 0
    return torch.where(some[:, :, None], sums / counts.clamp(min=1)[:, :, None], 0.0), some


def nearness(features: Tensor, prototypes: Tensor) -> Tensor:
    """The cosine of each sample with each prototype (label, samples, classes)."""
    features, prototypes = F.normalize(features, dim=-1), F.normalize(prototypes, dim=2)
    if features.dim() == 2:
        return features @ prototypes.transpose(1, 2)
    return torch.einsum("ncw,lcw->lnc", features, prototypes)


class PrototypeMeans:
    """Over a stream of clients: prototypes count alike, where there are any; a class that nobody spoke of keeps its
    old ones."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def add(self, prototypes: Tensor, votes: Tensor) -> None:
        if self.sums is None:
            self.sums = torch.zeros_like(prototypes, dtype=torch.float64)
            self.votes = torch.zeros_like(votes, dtype=torch.int64)
        self.sums += prototypes.double() * votes[:, :, None]
        self.votes += votes

    def result(self, old: Tensors, momentum: float) -> Tensors:
        if self.sums is None:
            return {name: old[name] for name in ("prototypes", "votes") if name in old}
        new, voted = (self.sums / self.votes.clamp(min=1)[:, :, None]).float(), self.votes > 0
        known = voted
        if "prototypes" in old:
            mixed = torch.where(old["votes"][:, :, None], momentum * old["prototypes"] + (1 - momentum) * new, new)
            new, known = torch.where(voted[:, :, None], mixed, old["prototypes"]), voted | old["votes"]
        return {"prototypes": new, "votes": known}
