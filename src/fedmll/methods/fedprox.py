"""FedProx — Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg's loss + μ/2 ‖w − w_g‖² over the parameters (Eq. 2), where w_g are the global weights at the start of the round.
The penalty is part of the reported loss.
"""

from fedmll.methods.framework.method import Method
from fedmll.methods.losses import UnknownAsNegative
from fedmll.methods.parts.proximal_term import ProximalTerm


class FedProx(Method):
    name = "fedprox"
    summary = "FedAvg with the penalty μ/2 ‖w − w_g‖² on the distance to the global weights"
    paper = "Li et al., MLSys 2020"
    parts = (UnknownAsNegative, ProximalTerm)
