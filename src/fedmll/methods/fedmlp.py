"""FedMLP — Sun et al., "FedMLP: Federated Multi-Label Medical Image Classification under Task Heterogeneity", 2024.

Each client annotates some classes (AC) and not the others (NC). An entry is a pair of a sample and a class. Two stages:

  rounds 1 … t1   WPC loss (Eq. 3–4): BCE over the known entries of two views, with the client's log prior odds added
                  to the logits.
  later rounds    Missing entries whose features are nearest to a class prototype get a permanent tag, 1 or 0 (Eq. 5–9);
                  easier classes get more tags (Eq. 10). The loss is WPC over known and tagged entries + the squared
                  distance to the p of the received global model over the other entries; means over batch × classes.

Switches (Table 3), also accepted under the paper's names: `partial_loss` (wpc; off: BCE with missing entries as 0, as
in FedAvg), `tags` (mld), `consistency` (cr), `adaptive` (st; off: the difficulty d is 1). All off is FedAvg. t1 is a
tenth of the rounds (the paper's 50 of 500) unless it is given. A blank in an annotated class is a missing entry too; π
is computed over the known entries. Use training.optimizer = "adamw": weight decay of other optimizers erases a class
that has no gradient at a client.
"""

from __future__ import annotations

from typing import Any, ClassVar

from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.methods.framework.base import option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import EntrywiseLoss, UnknownAsNegative
from fedmll.methods.parts.missing_label_detection import FedMLPPart, MissingLabelTags
from fedmll.methods.parts.semi_supervised import check_view, local_odds

RoundState = tuple[Tensor, int, Tensor | None]  # log prior odds (C,), number of views, weights of the positives


class PriorAdjusted(FedMLPPart, EntrywiseLoss):
    """WPC, the weighted partial class loss (Eq. 3–4), over known and tagged entries; a mean over batch × classes."""

    name = "prior-adjusted"
    provides = frozenset({"target-loss", "views"})
    accepts = "known-targets"

    class Options(FedMLPPart.Options):
        view: str = option("weak", "the augmentation of its views; the first stage has two views")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_view(options.view, prefix)

    def on_round_start(self, client_round: ClientRound) -> Any:
        views = 1 if self.second_stage(client_round.number) or not client_round.client.data.is_images else 2
        return local_odds(client_round), views, super().on_round_start(client_round)

    def transform_batch(self, step: TrainStep, round_state: RoundState) -> None:
        step.set_views([step.batch.view(self.options.view) for _ in range(round_state[1])])

    def loss(self, step: TrainStep, round_state: RoundState) -> Tensor:
        odds, _, weights = round_state
        return (self.entries(step, step.logits + odds, weights) * step.known).mean()


class Consistency(FedMLPPart):
    """For unknown targets: the squared distance to the predictions of the received global model."""

    name = "consistency"
    acts_later = True
    provides = frozenset({"unknown-targets"})

    class Options(FedMLPPart.Options):
        warmup_consistency: bool = option(False, "also in the first stage, as in the released code")

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        client_round.unknown_targets_taught = self.second_stage(client_round.number) or self.options.warmup_consistency
        return client_round.outputs(features=True).probabilities if client_round.unknown_targets_taught else None

    def loss(self, step: TrainStep, teacher: Tensor | None) -> Tensor | None:
        if teacher is None:
            return None
        return ((step.probabilities - teacher[step.rows]).square() * (1 - step.known)).mean()


class FedMLP(Method):
    name = "fedmlp"
    summary = "loss of known targets with prior odds, tags from prototypes, consistency with the global model"
    paper = "Sun et al., 2024"
    setting = ("partial annotation",)
    up = "two prototypes per class, the share of confident predictions per class, the number of tags"
    down = "global prototypes, the difficulty of each class"
    remembers = "its tags (samples × classes)"
    parts = (
        switch("tags", MissingLabelTags, "mld: missing label detection (Eq. 5–9)"),
        switch("partial_loss", PriorAdjusted, "wpc: weighted partial class loss", otherwise=UnknownAsNegative),
        switch("consistency", Consistency, "cr: consistency with the received global model for unknown targets"),
    )
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18", "training.rounds": 500, "training.local_epochs": 1, "training.batch_size": 32,
        "training.optimizer": "adamw", "training.lr": 3e-5, "training.weight_decay": 5e-4, "training.keep": "last",
        "partition.kind": "iid", "participation.fraction": 1.0, "annotation.kind": "missing",
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format",
        "annotation.missing": "number of classes that a client does not annotate; differs by table, up to all but one",
        "partition.clients": "one client per class: 5 for ICH, 8 for ChestX-ray14",
    }
    symbols: ClassVar[dict[str, str]] = {
        "mld": "tags", "wpc": "partial_loss", "cr": "consistency", "st": "adaptive", "t1": "first_stage",
        "T0": "negative_share", "T1": "positive_share", "L": "low", "R": "high",
    }  # fmt: skip
