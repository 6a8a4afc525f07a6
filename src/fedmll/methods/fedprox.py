"""FedProx — Li et al., "Federated Optimization in Heterogeneous Networks", 2020.

FedAvg's loss + μ/2 ‖w − w_g‖² over the parameters (Eq. 2), w_g the round-start global weights.
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Absent
from fedmll.methods.parts.proximal import Proximal
from fedmll.methods.parts.robust import AVERAGES


class FedProx(Method):
    name = "fedprox"
    summary = "FedAvg + μ/2‖w − w_g‖²"
    paper = "Li et al., MLSys 2020"
    parts = (Absent, Proximal)
    average = AVERAGES
