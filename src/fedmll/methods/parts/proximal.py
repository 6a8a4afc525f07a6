"""The proximal term of FedProx (Li et al., 2020, Eq. 2): μ/2 ‖w − w_g‖² over the parameters."""

from __future__ import annotations

from torch import Tensor

from fedmll.client import Work
from fedmll.methods.contract import Part, PartOptions, option, together


class Proximal(Part):
    name = "proximal"

    class Options(PartOptions):
        mu: float = option(0.01, "μ: how strongly weights are held at the round's start (Eq. 2)", ge=0)

    def prepare(self, work: Work) -> Tensor:
        """w_g."""
        return work.client.weights.parameter_vector.clone()

    @together
    def adjust(self, work: Work, start: Tensor) -> None:
        """The term's gradient, μ (w − w_g)."""
        weights = work.client.weights
        weights.add_gradient(weights.parameter_vector - start, self.options.mu)
