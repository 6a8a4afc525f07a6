"""FedAvg-PL: FedAvg with partial labels, as in FedMLP: only the known targets enter the loss."""

from fedmll.methods.method import Method
from fedmll.methods.parts.robust_average import AVERAGES
from fedmll.methods.parts.target_losses import MaskedLoss


class FedAvgPL(Method):
    name = "fedavg-pl"
    summary = "BCE over the known targets only; average by size"
    paper = "baseline of Sun et al., 2024"
    setting = ("partial annotation",)
    parts = (MaskedLoss,)
    average = AVERAGES
