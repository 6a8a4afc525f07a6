"""FedNoRo — Wu, Yu, Jiang and Yan, "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and
Label Noise Heterogeneity", IJCAI 2023; its second stage, adapted to missing classes as in the comparison of FedMLP (Sun
et al., 2024): all clients are treated as noisy, and the average is weighted by size.

loss = (1 − w) · the mean over the known entries of BCE(σ(z + log π − log(1−π)), y), π the client's own class priors
     +      w  · the mean over the missing entries of (σ(z) − σ(z_g / 0.8))²
z_g are the logits of the global model at the start of the round, in evaluation mode. w(t) = 0.8 exp(−5 (1 − t/T)²),
where T is the number of rounds. With `logit_adjustment` (off: π = ½) and `distillation` (off: w = 0) off it is
FedAvg-PL.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedmll.methods.framework.base import PartOptions, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import EntrywiseLoss, masked_mean
from fedmll.methods.parts.semi_supervised import local_odds, ramp_up, tempered

# log prior odds (C,), the global model's probabilities (N, C), the weights of the positives
RoundState = tuple[Tensor | float, Tensor | None, Tensor | None]


class NoiseRobust(EntrywiseLoss):
    """Known targets: BCE of logits with prior odds added. Unknown targets: distance to the received global model."""

    name = "noise-robust"
    provides = frozenset({"target-loss", "unknown-targets"})

    class Options(PartOptions):
        logit_adjustment: bool = option(True, "add the client's log prior odds to the logits")
        distillation: bool = option(True, "learn unknown targets from the received global model")
        temperature: float = option(0.8, "temperature of the global model's logits", gt=0)
        strength: float = option(0.8, "the largest w: weight of the distillation", ge=0, le=1)

    def weight(self, round: int) -> float:
        """w(t)."""
        return float(self.options.strength * ramp_up(round, self.task.rounds))

    def on_round_start(self, client_round: ClientRound) -> Any:
        odds = local_odds(client_round) if self.options.logit_adjustment else 0.0
        options, teacher = self.options, None
        if options.distillation:
            teacher = tempered(client_round.outputs().probabilities, options.temperature)
        return odds, teacher, super().on_round_start(client_round)

    def loss(self, step: TrainStep, round_state: RoundState) -> Tensor:
        odds, teacher, weights = round_state
        known = masked_mean(self.entries(step, step.logits + odds, weights), step.known)
        if teacher is None:
            return known
        w = self.weight(step.client_round.number)
        distance = (step.probabilities - teacher[step.rows]).square()
        return (1 - w) * known + w * masked_mean(distance, 1 - step.known)


class FedNoRo(Method):
    name = "fednoro"
    summary = "logit-adjusted loss for known targets, distillation from the global model for unknown ones"
    paper = "Wu, Yu, Jiang and Yan, IJCAI 2023"
    setting = ("partial annotation",)
    parts = (NoiseRobust,)
