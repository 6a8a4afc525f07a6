"""Surgical Aggregation — Kulkarni, Kanhere, Yi and Parekh, "Surgical Aggregation: Federated Class-Heterogeneous
Learning", 2023.

Clients annotate different classes. Each client trains the whole model on its known targets. The server averages the
representation over all clients, and the classifier row of class c only over its owners O_c = {k : k annotates c}:

    w_c ← Σ_{k ∈ O_c} N_k w_c^k / Σ_{k ∈ O_c} N_k.

A row with one owner is that owner's row. A row without an owner in a round does not change. Changes of a row by clients
that do not annotate its class (weight decay) are discarded. If all clients annotate all classes, it is fedavg-pl, bit
for bit. All clients receive all rows; use private-fedavg for labels that must stay private.
"""

from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss
from fedmll.methods.parts.per_label_average import PerLabelAverage


class SurgicalAverage(PerLabelAverage):
    """The representation is averaged over all clients, the row of a class over the clients that annotate it."""

    name = "surgical"


class Surgical(Method):
    name = "surgical"
    summary = "BCE over the known targets; the row of a class is averaged over the clients that annotate it"
    paper = "Kulkarni et al., 2023"
    setting = ("partial annotation",)

    parts = (MaskedLoss,)
    average = SurgicalAverage
