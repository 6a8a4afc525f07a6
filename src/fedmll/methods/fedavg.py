"""FedAvg — McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each client minimises the mean binary cross-entropy over all classes, an unknown target counting as absent; the server
averages: w ← Σ_k (N_k/ΣN) w_k (`weights = "equal"`: 1/K each). All of it is the default of a method. `average` chooses
one that bears a bad client instead: `clipped-mean`, `trimmed-mean` (parts/robust.py).
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.robust import AVERAGES


class FedAvg(Method):
    name = "fedavg"
    summary = "BCE over all classes, unknown = 0; average by size"
    paper = "McMahan et al., AISTATS 2017"
    average = AVERAGES
