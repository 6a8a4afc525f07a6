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

from fedmll.client import Step, Work
from fedmll.methods.contract import PartOptions, option
from fedmll.methods.losses import masked_mean
from fedmll.methods.method import Method
from fedmll.methods.parts.basic import Supervision
from fedmll.methods.parts.semi_supervised import local_odds, ramp_up, tempered


class Fixed(NamedTuple):
    odds: Tensor | float  # log prior odds
    teacher: Tensor | None  # what is taught where nothing is known (N, C)
    share: float  # w
    weights: Tensor | None  # of positives


class NoiseRobust(Supervision):
    """What is known by logits moved by the prior odds; what is not by the round-start global model, ever more."""

    name = "noise-robust"
    jobs = frozenset({"targets", "unknown"})

    class Options(PartOptions):
        logit_adjustment: bool = option(True, "logits are moved by the client's log prior odds")
        distillation: bool = option(True, "of the round-start global model, on the missing entries")
        temperature: float = option(0.8, "of the global model's logits", gt=0)
        strength: float = option(0.8, "the largest w", ge=0, le=1)

    def prepare(self, work: Work) -> Any:
        odds = local_odds(work) if self.options.logit_adjustment else 0.0
        teacher, share = None, 0.0
        if self.options.distillation:
            teacher = tempered(work.look().probabilities, self.options.temperature)
            share = self.options.strength * ramp_up(work.round, work.rounds)
        return Fixed(odds, teacher, share, super().prepare(work))

    def term(self, step: Step, mine: Fixed) -> Tensor:
        known = masked_mean(self.entries(step, step.logits + mine.odds, mine.weights), step.known)
        if mine.teacher is None:
            return known
        far = (step.probabilities - mine.teacher[step.rows]).square()
        return (1 - mine.share) * known + mine.share * masked_mean(far, 1 - step.known)


class FedNoRo(Method):
    name = "fednoro"
    summary = "partial annotation: logit-adjusted loss of known classes, distillation on missing ones"
    paper = "Wu, Yu, Jiang and Yan, IJCAI 2023"
    setting = ("partial annotation",)
    parts = (NoiseRobust,)
