"""FedNoRo — Wu, Yu, Jiang and Yan, "FedNoRo: Towards Noise-Robust Federated Learning by Addressing Class Imbalance and
Label Noise Heterogeneity", IJCAI 2023; its second stage, adapted to missing classes as in the comparison of FedMLP (Sun
et al., 2024): all clients are treated as noisy, and the average is weighted by size.

loss = (1 − w) · the mean over the known entries of BCE(σ(z + log π − log(1−π)), y), π the client's own class priors
     +      w  · the mean over the missing entries of (σ(z) − σ(z_g / 0.8))²
z_g are the logits of the global model at the start of the round, in evaluation mode, for the same images as z. The
weight w = 0.8 exp(−5 (1 − s)²) grows from round 11 of 500 on: s = (t − 11)/489 in round t, and 0 before. In a run of T
rounds s = (t − 1 − t0)/(T − 1 − t0), where t0 is 2 % of the rounds unless `ramp_start` is given.

The paper is for one label per image: a softmax, KL to z_g over all classes, and a first stage that finds the noisy
clients by their losses. With partial annotation labels are missing everywhere and are not wrong, so there is no such
stage and no distance-aware average. `teacher_view = "plain"` lets the global model predict once per round, without
augmentation, which is cheaper with several local epochs. With `logit_adjustment` (off: π = ½) and `distillation` (off:
w = 0) off it is FedAvg-PL.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.base import AUTO, PartOptions, Resolved, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.methods.losses import EntrywiseLoss, masked_mean
from fedmll.methods.parts.semi_supervised import EmaTeacher, local_odds, published_share, ramp_up, tempered

# log prior odds (C,), the global model or its probabilities (N, C), the weights of the positives
RoundState = tuple[Tensor | float, EmaTeacher | Tensor | None, Tensor | None]


class NoiseRobust(EntrywiseLoss):
    """Known targets: BCE of logits with prior odds added. Unknown targets: distance to the received global model."""

    name = "noise-robust"
    provides = frozenset({"target-loss", "unknown-targets"})

    class Options(PartOptions):
        logit_adjustment: bool = option(True, "add the client's log prior odds to the logits")
        distillation: bool = option(True, "learn unknown targets from the received global model")
        temperature: float = option(0.8, "temperature of the global model's logits", gt=0)
        strength: float = option(0.8, "the largest w: weight of the distillation", ge=0, le=1)
        ramp_start: Annotated[int, Field(ge=0)] | Literal["auto"] = option(
            "auto", "t0: number of rounds before w grows; auto: 2 % of the rounds"
        )
        teacher_view: Literal["same", "plain"] = option(
            "same", "images that the global model sees: the same as the client's model, or without augmentation"
        )

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        return {"ramp_start": published_share(experiment, 10 / 500)} if options.ramp_start == AUTO else {}

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        rounds = experiment.training.rounds
        if options.distillation and options.ramp_start >= max(rounds, 2):
            raise ConfigError(
                f"{prefix}ramp_start = {options.ramp_start} leaves no round of {rounds} in which the weight of the "
                "distillation grows. Lower it, or raise training.rounds."
            )

    def weight(self, round: int) -> float:
        """w(t)."""
        start = self.options.ramp_start
        return float(self.options.strength * ramp_up(max(round - 1 - start, 0), max(self.task.rounds - 1 - start, 1)))

    def on_round_start(self, client_round: ClientRound) -> Any:
        odds = local_odds(client_round) if self.options.logit_adjustment else 0.0
        teacher: EmaTeacher | Tensor | None = None
        if self.options.distillation:
            once = self.options.teacher_view == "plain"
            teacher = client_round.outputs().probabilities if once else EmaTeacher(client_round.client)
        return odds, teacher, super().on_round_start(client_round)

    def loss(self, step: TrainStep, round_state: RoundState) -> Tensor:
        odds, teacher, weights = round_state
        known = masked_mean(self.entries(step, step.logits + odds, weights), step.known)
        if teacher is None:
            return known
        w = self.weight(step.client_round.number)
        p = teacher.probabilities(step.images) if isinstance(teacher, EmaTeacher) else teacher[step.rows]
        distance = (step.probabilities - tempered(p, self.options.temperature)).square()
        return (1 - w) * known + w * masked_mean(distance, 1 - step.known)


class FedNoRo(Method):
    name = "fednoro"
    summary = "logit-adjusted loss for known targets, distillation from the global model for unknown ones"
    paper = "Wu, Yu, Jiang and Yan, IJCAI 2023"
    setting = ("partial annotation",)
    parts = (NoiseRobust,)
