"""FedAvg-PL: FedAvg with partial labels, as in FedMLP: only the known targets enter the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor, nn

from fedmll.methods.base import Local, Method
from fedmll.methods.losses import masked_mean

if TYPE_CHECKING:
    from fedmll.client import Batch


class FedAvgPL(Method):
    name = "fedavg-pl"
    summary = "BCE over the known targets only; average by size"

    def loss(self, model: nn.Module, batch: Batch, local: Local) -> Tensor:
        return masked_mean(self.entries(model(batch.images), batch, local), batch.known)
