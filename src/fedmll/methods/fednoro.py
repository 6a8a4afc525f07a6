"""FedNoRo — Wu, Yu, Jiang and Yan, "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and
Label Noise Heterogeneity", IJCAI 2023; its second stage, adapted to missing classes as in the comparison of FedMLP (Sun
et al., 2024): every client is taken for a noisy one, and the average is by size.

loss = (1 − w) · the mean over the known entries of BCE(σ(z + log π − log(1−π)), y), π the client's own class priors
     +      w  · the mean over the missing entries of (σ(z) − σ(z_g / 0.8))²
z_g are the logits of the round-start global model, in evaluation mode; w(t) = 0.8 exp(−5 (1 − t/T)²), T the rounds.

Switches: `logit_adjustment` (off: π = ½), `distillation` (off: w = 0). Both off is FedAvg-PL.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fedmll.methods.base import PartOptions, option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method
from fedmll.methods.parts.semi_supervised import local_odds, ramp_up, tempered
from fedmll.methods.parts.target_losses import EntrywiseLoss


class NoiseRobustState(NamedTuple):
    odds: Tensor | float  # log prior odds
    teacher: Tensor | None  # what is taught where nothing is known (N, C)
    share: float  # w
    weights: Tensor | None  # of positives


class NoiseRobust(EntrywiseLoss):
    """What is known by logits moved by the prior odds; what is not by the round-start global model, ever more."""

    name = "noise-robust"
    provides = frozenset({"target-loss", "unknown-targets"})

    class Options(PartOptions):
        logit_adjustment: bool = option(True, "logits are moved by the client's log prior odds")
        distillation: bool = option(True, "of the round-start global model, on the missing entries")
        temperature: float = option(0.8, "of the global model's logits", gt=0)
        strength: float = option(0.8, "the largest w", ge=0, le=1)

    def on_round_start(self, client_round: ClientRound) -> Any:
        odds = local_odds(client_round) if self.options.logit_adjustment else 0.0
        teacher, share = None, 0.0
        if self.options.distillation:
            teacher = tempered(client_round.outputs().probabilities, self.options.temperature)
            share = self.options.strength * ramp_up(client_round.number, client_round.total_rounds)
        return NoiseRobustState(odds, teacher, share, super().on_round_start(client_round))

    def loss(self, step: TrainStep, round_state: NoiseRobustState) -> Tensor:
        known = masked_mean(self.entries(step, step.logits + round_state.odds, round_state.weights), step.known)
        if round_state.teacher is None:
            return known
        far = (step.probabilities - round_state.teacher[step.rows]).square()
        return (1 - round_state.share) * known + round_state.share * masked_mean(far, 1 - step.known)


class FedNoRo(Method):
    name = "fednoro"
    summary = "partial annotation: logit-adjusted loss of known classes, distillation on missing ones"
    paper = "Wu, Yu, Jiang and Yan, IJCAI 2023"
    setting = ("partial annotation",)
    parts = (NoiseRobust,)
