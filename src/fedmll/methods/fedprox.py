"""FedProx — Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg's loss + μ/2 ‖w − w_g‖² over the parameters (Eq. 2), w_g the round-start global weights.
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.proximal_term import ProximalTerm
from fedmll.methods.parts.robust_average import AVERAGES
from fedmll.methods.parts.target_losses import UnknownAsNegative


class FedProx(Method):
    name = "fedprox"
    summary = "FedAvg + μ/2‖w − w_g‖²"
    paper = "Li et al., MLSys 2020"
    parts = (UnknownAsNegative, ProximalTerm)
    average = AVERAGES
