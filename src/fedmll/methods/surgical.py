"""Surgical Aggregation — Kulkarni, Kanhere, Yi and Parekh, "Surgical Aggregation: Federated Class-Heterogeneous
Learning", 2023.

Clients annotate different classes. Each client trains the whole model on its known targets. The server averages the
representation over all clients, and the classifier row of class c only over its owners O_c = {k : k annotates c}:

    w_c ← 1/|O_c| Σ_{k ∈ O_c} w_c^k.

Every client counts alike, as in the released code (`weighting = "size"`: by N_k). A row with one owner is that owner's
row. A row without an owner in a round does not change. Changes of a row by clients that do not annotate its class
(weight decay) are discarded. If all clients annotate all classes and there is no warm-up, it is fedavg-pl, bit for bit.
All clients receive all rows; use private-fedavg for labels that must stay private.

Warm-up, also of the released code: before its first steps of round 1, a client trains its head alone on the features of
the received backbone (Adam, 15 epochs, rate 1e-3), so that a random head does not spoil a pretrained backbone. Features
are computed once, in evaluation mode and without augmentation. The released code also keeps the best of these epochs
and never trains BatchNorm; here the last epoch counts, and BatchNorm is averaged as in every other method.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch.nn import functional as F

from fedmll.methods.framework.base import Part, PartOptions, option
from fedmll.methods.framework.client_round import ClientRound
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import MaskedLoss, masked_mean
from fedmll.methods.parts.per_label_average import PerLabelAverage


class HeadWarmup(Part):
    """At the start of round 1 a client trains the head alone, on the features of the received backbone."""

    name = "head-warmup"
    requires = frozenset({"class-rows"})

    class Options(PartOptions):
        warmup_epochs: int = option(15, "epochs in which the head is trained alone before round 1; 0: none", ge=0)
        warmup_lr: float = option(1e-3, "learning rate of the warm-up", gt=0)

    def on_round_start(self, client_round: ClientRound) -> None:
        if client_round.number > 1 or not self.options.warmup_epochs:
            return
        client, model, size = client_round.client, client_round.model, self.task.experiment.training.batch_size
        features = client_round.outputs(features=True).features
        assert features is not None
        generator = client.generator(self.name)
        optimizer = torch.optim.Adam(model.get_submodule("head").parameters(), self.options.warmup_lr)
        for _ in range(self.options.warmup_epochs):
            for rows in torch.randperm(len(features), generator=generator).to(features.device).split(size):
                targets = client.targets[rows]
                present, known = (targets == 1).float(), (targets >= 0).float()
                entries = F.binary_cross_entropy_with_logits(model.logits(features[rows]), present, reduction="none")
                masked_mean(entries, known).backward()
                optimizer.step()
                optimizer.zero_grad()
        client_round.model_changed()


class SurgicalAverage(PerLabelAverage):
    """The representation is averaged over all clients, the row of a class over the clients that annotate it."""

    name = "surgical"


class Surgical(Method):
    name = "surgical"
    summary = "BCE over the known targets; the row of a class is averaged over the clients that annotate it"
    paper = "Kulkarni et al., 2023"
    setting = ("partial annotation",)
    parts = (HeadWarmup, MaskedLoss)
    average = SurgicalAverage

    class Options(PartOptions):
        weighting: Literal["size", "equal"] = option("equal", "weight of a client: its number of samples, or 1")
