"""What semi-supervised parts share: EMA teachers, pseudo labels, ramp-ups, two stages, prior odds.

A part gets two views of a batch with `step.set_views([step.batch.images, step.batch.view("strong")])` in its hook
`transform_batch`. With a frozen backbone, a view is one of the stored ones; with model.views = 1 both are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedmll.config.experiment import Experiment
from fedmll.core import registry
from fedmll.core.errors import ConfigError
from fedmll.methods.framework.base import AUTO, Part, PartOptions, Resolved, option
from fedmll.methods.framework.client_round import Client, ClientInfo, ClientRound, TrainStep

Rounds = Annotated[int, Field(ge=1)] | Literal["auto"]


class EmaTeacher:
    """A second set of weights for the same model, with buffers: w' ← a w' + (1−a) w after each step. A part may keep
    `vector` in the client state for the client's next round."""

    def __init__(self, client: Client, vector: Tensor | None = None) -> None:
        self.client = client
        self.vector = client.weights.vector.clone() if vector is None else vector.to(client.weights.vector, copy=True)
        self.tensors = client.weights.named({"weights": self.vector, "counters": client.weights.counters.clone()})

    def follow(self, decay: float) -> None:
        self.vector.lerp_(self.client.weights.vector, 1 - decay)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """Predict in evaluation mode. Afterwards the model is in the same mode as before."""
        model = self.client.model
        before = model.training
        try:
            logits: Tensor = functional_call(model.eval(), self.tensors, (images,))
        finally:
            model.train(before)
        return torch.sigmoid(logits)


class SecondView(Part):
    """A part that uses a second view of every batch."""

    needs_images: ClassVar[bool] = False  # True: two views of a feature vector would be the same

    class Options(PartOptions):
        view: str = option("weak", "the augmentation of the second view; training.augment is the first")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        check_view(options.view, prefix)

    def validate_clients(self, clients: Sequence[ClientInfo]) -> None:
        if self.needs_images and len(self.task.sample_shape) != 3:
            raise ConfigError(
                f"The part '{self.name}' compares two views of an image, and a feature vector has only one view. Use "
                "images, or a method without views: fedavg-pl, fednoro, cbafed."
            )

    def teacher_probabilities(self, step: TrainStep, teacher: EmaTeacher) -> Tensor:
        """The teacher's probabilities for the second view, repeated for every view of the student."""
        p = teacher.probabilities(step.batch.view(self.options.view))
        return p.repeat(len(step.rows) // len(step.batch), 1)


class TwoStagePart(Part):
    """A part that behaves differently in the two stages of a run. The first stage is a share of the rounds."""

    first_share: ClassVar[float]
    acts_later: ClassVar[bool] = False  # it acts only in the second stage

    class Options(PartOptions):
        first_stage: Rounds = option(
            "auto", "number of rounds of the first stage; auto: the published share", shared=True
        )

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        if options.first_stage != AUTO:
            return {}
        return {"first_stage": published_share(experiment, cls.first_share)}

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        rounds = experiment.training.rounds
        if cls.acts_later and options.first_stage >= rounds:
            raise ConfigError(
                f"{prefix}first_stage = {options.first_stage} leaves no round for the second stage in a run of "
                f"{rounds}: the part '{cls.name}' would never act. Lower it, raise training.rounds, or leave the part "
                "out."
            )

    def second_stage(self, round: int) -> bool:
        return bool(round > self.options.first_stage)


def published_share(experiment: Experiment, share: float) -> tuple[int, str]:
    """This share of the rounds (at least one round), and the rule in words."""
    return max(1, round(experiment.training.rounds * share)), f"{100 * share:g} % of the rounds, as published"


def check_view(name: str, prefix: str, key: str = "view") -> None:
    try:
        registry.find("augmentation", name)
    except ConfigError as error:
        raise ConfigError(f"{prefix}{key}: {error}") from None


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """Probabilities at a temperature: σ(z/T) from σ(z)."""
    yes, no = probabilities.pow(1 / temperature), (1 - probabilities).pow(1 / temperature)
    return yes / (yes + no)


def pseudo_targets(probabilities: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """1 where p ≥ high, 0 where p ≤ low, otherwise -1 (unknown)."""
    targets = torch.full(probabilities.shape, -1, dtype=torch.int8, device=probabilities.device)
    return targets.masked_fill_(probabilities <= low, 0).masked_fill_(probabilities >= high, 1)


def ramp_up(round: float, length: float) -> float:
    """exp(−5 (1 − min(t, T)/T)²), which grows from nearly 0 to 1 (Laine and Aila, 2017)."""
    return math.exp(-5 * (1 - min(round, length) / length) ** 2)


def local_odds(client_round: ClientRound) -> Tensor:
    """The log prior odds of every class among the targets of the client in this round."""
    annotated, labels = (client_round.client.targets >= 0).any(0), client_round.targets
    among = torch.where(annotated, (labels >= 0).sum(0), len(labels))  # a class with tags only: among all samples
    return log_prior_odds((labels == 1).sum(0), among, len(labels))


def log_prior_odds(positives: Tensor, among: Tensor, samples: int) -> Tensor:
    """log π − log(1−π) with π = positives / among, limited to [1/(2 samples), 1 − 1/(2 samples)]. Added to a logit it
    is Eq. 3 of FedMLP (Sun et al., 2024)."""
    prior = (positives / among).clamp(1 / (2 * samples), 1 - 1 / (2 * samples))
    return torch.log(prior) - torch.log1p(-prior)
