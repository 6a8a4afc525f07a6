"""FedAvg — McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each client minimises the mean binary cross-entropy over all classes, an unknown target counting as absent; the server
averages: w ← Σ_k (N_k/ΣN) w_k (`weighting = "equal"`: 1/K each). These are the defaults of a method. `average` selects
an average that tolerates a faulty client: `clipped-mean`, `trimmed-mean` (parts/robust_average.py).
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.robust_average import AVERAGES


class FedAvg(Method):
    name = "fedavg"
    summary = "BCE over all classes, unknown = 0; average by size"
    paper = "McMahan et al., AISTATS 2017"
    average = AVERAGES
