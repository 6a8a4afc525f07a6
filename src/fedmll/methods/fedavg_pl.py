"""FedAvg-PL: FedAvg with partial labels, a baseline of FedMLP. Only known targets are part of the loss."""

from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss


class FedAvgPL(Method):
    name = "fedavg-pl"
    summary = "BCE over the known targets only; average weighted by number of samples"
    paper = "baseline of Sun et al., 2024"
    setting = ("partial annotation",)
    parts = (MaskedLoss,)
