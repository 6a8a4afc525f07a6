"""Surgical Aggregation — Kulkarni, Kanhere, Yi and Parekh, "Surgical Aggregation: Federated Class-Heterogeneous
Learning", 2023.

Clients annotate different classes. Each trains all of the model on the targets that it knows; the server averages the
representation over all clients, and the row of class c over its owners O_c = {k : k annotates c} alone:

    w_c ← Σ_{k ∈ O_c} N_k w_c^k / Σ_{k ∈ O_c} N_k,

so a row with one owner is that owner's, and a row without an owner in a round stays as it was. What a client's
optimiser did to the row of a class that it does not annotate (weight decay) is cut off. Where everybody annotates
everything it is fedavg-pl, bit for bit. Everybody receives all rows; for labels that must stay private see
private-fedavg.
"""

from fedmll.methods.method import Method
from fedmll.methods.parts.per_label_average import PerLabelAverage
from fedmll.methods.parts.target_losses import MaskedLoss


class SurgicalAverage(PerLabelAverage):
    """The representation is averaged over all, the row of a class over the clients that annotate it."""

    name = "surgical"


class Surgical(Method):
    name = "surgical"
    summary = "BCE over the known targets; a class's row is averaged over the clients that annotate it"
    paper = "Kulkarni et al., 2023"
    setting = ("partial annotation",)
    up = ""
    down = ""
    remembers = ""
    parts = (MaskedLoss,)
    average = SurgicalAverage
