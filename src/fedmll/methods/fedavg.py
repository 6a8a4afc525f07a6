"""FedAvg — McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", 2017.

Each client minimises the mean binary cross-entropy over all classes. An unknown target counts as absent. The server
averages the weights: w ← Σ_k (N_k/ΣN) w_k (`weighting = "equal"`: 1/K each). These are the defaults of a method. Other
values of `average` tolerate a faulty client (parts/averaging.py).
"""

from fedmll.methods.framework.method import Method


class FedAvg(Method):
    name = "fedavg"
    summary = "BCE over all classes, unknown targets count as absent; average weighted by number of samples"
    paper = "McMahan et al., AISTATS 2017"
