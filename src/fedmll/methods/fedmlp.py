"""FedMLP — Sun et al., "FedMLP: Federated Multi-Label Medical Image Classification under Task Heterogeneity", 2024.

Each client annotates some classes (AC) and misses the others (NC). Two stages:

  rounds 1 … t1   WPC loss (Eq. 3–4): BCE over the known entries, logits moved by the client's log prior odds; two views
  later rounds    Missing entries are tagged, for good, where the features are nearest to a class prototype (Eq. 5–9),
                  the more the easier the class (Eq. 10). The loss is WPC over true and tagged entries, and the squared
                  distance to the round-start global model's p over the other missing ones: a mean over batch × classes.

Switches (Table 3), each also under the paper's name: `partial_loss` (wpc; off: plain BCE, missing entries are 0 as in
FedAvg), `tags` (mld), `consistency` (cr), `adaptive` (st; off: the difficulty d is 1). All off is FedAvg. "WPC only" is
tags and consistency off. t1 is a tenth of the rounds (the paper's 50 of 500) unless it is given. Unknown is decided
entry by entry, so blanks in an annotated class are missing entries too, and π is over the entries that are not. Weight
decay must be decoupled (training.optimizer = "adamw"): a class without gradient at a client is otherwise erased there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from torch import Tensor

from fedmll.methods.base import option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.missing_label_detection import FedMLPPart, MissingLabelTags
from fedmll.methods.parts.semi_supervised import check_view, local_odds
from fedmll.methods.parts.target_losses import EntrywiseLoss, UnknownAsNegative

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment


class PriorState(NamedTuple):
    odds: Tensor  # log prior odds (C,)
    views: int
    weights: Tensor | None  # of positives


class PriorAdjusted(FedMLPPart, EntrywiseLoss):
    """WPC, the weighted partial class loss (Eq. 3–4), over what is known or tagged: a mean over batch × classes."""

    name = "prior-adjusted"
    provides = frozenset({"target-loss", "views"})
    accepts = "known-targets"

    class Options(FedMLPPart.Options):
        view: str = option("weak", "the augmentation of its views; two of them in the first stage")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_view(options.view, prefix)

    def on_round_start(self, client_round: ClientRound) -> Any:
        views = 1 if self.second_stage(client_round.number) or not client_round.client.data.is_images else 2
        return PriorState(local_odds(client_round), views, super().on_round_start(client_round))

    def transform_batch(self, step: TrainStep, round_state: PriorState) -> None:
        step.set_views([step.batch.view(self.options.view) for _ in range(round_state.views)])

    def loss(self, step: TrainStep, round_state: PriorState) -> Tensor:
        return (self.entries(step, step.logits + round_state.odds, round_state.weights) * step.known).mean()


class Consistency(FedMLPPart):
    """Where nothing is known: the squared distance to the round-start global model's p."""

    name = "consistency"
    acts_later = True
    provides = frozenset({"unknown-targets"})

    class Options(FedMLPPart.Options):
        warmup_consistency: bool = option(False, "consistency in the first stage too (released code)")

    def on_round_start(self, client_round: ClientRound) -> Tensor | None:
        client_round.unknown_targets_taught = self.second_stage(client_round.number) or self.options.warmup_consistency
        return client_round.outputs(features=True).probabilities if client_round.unknown_targets_taught else None

    def loss(self, step: TrainStep, teacher: Tensor | None) -> Tensor | None:
        if teacher is None:
            return None
        return ((step.probabilities - teacher[step.rows]).square() * (1 - step.known)).mean()


class FedMLP(Method):
    name = "fedmlp"
    summary = "partial annotation: prior-adjusted partial loss, prototype tags, consistency with the global model"
    paper = "Sun et al., 2024"
    setting = ("partial annotation",)
    up = "two prototypes a class, how sure it is, number of tags"
    down = "global prototypes, difficulty of the classes"
    remembers = "its tags (samples × classes)"
    parts = (
        switch("tags", MissingLabelTags, "mld, missing label detection (Eq. 5–9)"),
        switch("partial_loss", PriorAdjusted, "wpc, weighted partial class loss", otherwise=UnknownAsNegative),
        switch("consistency", Consistency, "cr, with the round-start global model, where nothing is known"),
    )
    published: ClassVar[dict[str, Any]] = {
        "model.backbone": "resnet18", "training.rounds": 500, "training.local_epochs": 1, "training.batch_size": 32,
        "training.optimizer": "adamw", "training.lr": 3e-5, "training.weight_decay": 5e-4, "training.keep": "last",
        "partition.kind": "iid", "participation.fraction": 1.0, "annotation.kind": "missing",
    }  # fmt: skip
    unpublished: ClassVar[dict[str, str]] = {
        "model.weights": "ImageNet weights of ResNet-18 in torchvision's format",
        "annotation.missing": "how many classes each client does not annotate, by table; up to all but one",
        "partition.clients": "as many as classes: 5 for ICH, 8 for ChestX-ray14",
    }
    symbols: ClassVar[dict[str, str]] = {
        "mld": "tags", "wpc": "partial_loss", "cr": "consistency", "st": "adaptive", "t1": "first_stage",
        "T0": "negative_share", "T1": "positive_share", "L": "low", "R": "high",
    }  # fmt: skip
