"""FedProx — Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg's loss + μ/2 ‖w − w_g‖² over the parameters (Eq. 2), w_g the round-start global weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import torch
from pydantic import Field

from fedmll.message import Message, Tensors
from fedmll.methods.base import Local, Method
from fedmll.models.flat import FlatWeights

if TYPE_CHECKING:
    from fedmll.client import Client


class FedProx(Method):
    name = "fedprox"
    summary = "FedAvg + μ/2‖w − w_g‖²"

    class Options(Method.Options):
        mu: Annotated[float, Field(ge=0)] = 0.01

    options: Options

    def prepare(self, client: Client, message: Message, memory: Tensors) -> Local:
        start = [parameter.detach().clone() for parameter in client.weights.parameters]
        return super().prepare(client, message, memory) | {"start": start}

    def adjust(self, weights: FlatWeights, local: Local) -> None:
        """The penalty's gradient, μ (w − w_g)."""
        add_proximal_gradient(weights.parameters, local["start"], self.options.mu)


def add_proximal_gradient(parameters: list[torch.nn.Parameter], start: list[torch.Tensor], mu: float) -> None:
    for parameter, origin in zip(parameters, start, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter.detach() - origin, alpha=mu)
