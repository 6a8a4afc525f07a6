"""The proximal term of FedProx (Li et al., 2020, Eq. 2): μ/2 ‖w − w_g‖² over the parameters."""

from __future__ import annotations

from torch import Tensor

from fedmll.methods.framework.base import Part, PartOptions, option, vectorized
from fedmll.methods.framework.client_round import ClientRound


class ProximalTerm(Part):
    """μ/2 ‖w − w_g‖²: keeps the weights near the global weights at the start of the round."""

    name = "proximal"

    class Options(PartOptions):
        mu: float = option(0.01, "μ: strength of the penalty (Eq. 2)", ge=0)

    def on_round_start(self, client_round: ClientRound) -> Tensor:
        """w_g."""
        return client_round.weights.parameter_vector.clone()

    @vectorized
    def on_gradients(self, client_round: ClientRound, start: Tensor) -> Tensor:
        """The term's gradient is μ (w − w_g)."""
        weights = client_round.weights
        moved = weights.parameter_vector - start
        weights.add_gradient(moved, self.options.mu)
        return self.options.mu / 2 * moved.square().sum(-1)
