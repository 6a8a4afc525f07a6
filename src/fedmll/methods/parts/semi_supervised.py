"""What semi-supervised parts share: a teacher that follows the model, labels made of confident predictions, ramp-ups, a
second stage, prior odds. Two views of a batch: `step.show([step.batch.images, step.batch.view("strong")])` in a part's
`shape`. Of kept tokens a view is one of the kept ones; with one kept view (model.views = 1) both views are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.func import functional_call

from fedmll import registry
from fedmll.client import Client, Peer, Step, Work
from fedmll.errors import ConfigError
from fedmll.methods.contract import AUTO, Found, Part, PartOptions, option

if TYPE_CHECKING:
    from fedmll.experiment import Experiment

Rounds = Annotated[int, Field(ge=1)] | Literal["auto"]


class EmaTeacher:
    """A second set of weights, buffers included, for the worker's only model: w' ← a w' + (1−a) w after a step. What it
    is now is `vector`, which a part may remember for the client's next round."""

    def __init__(self, client: Client, vector: Tensor | None = None) -> None:
        self.client = client
        self.vector = client.weights.vector.clone() if vector is None else vector.to(client.weights.vector, copy=True)
        self.tensors = client.weights.named({"weights": self.vector, "counters": client.weights.counters.clone()})

    def follow(self, decay: float) -> None:
        self.vector.lerp_(self.client.weights.vector, 1 - decay)

    @torch.no_grad()
    def probabilities(self, images: Tensor) -> Tensor:
        """In evaluation mode; the model is in the mode that it was in afterwards."""
        model = self.client.model
        before = model.training
        try:
            logits: Tensor = functional_call(model.eval(), self.tensors, (images,))
        finally:
            model.train(before)
        return torch.sigmoid(logits)


class SecondView(Part):
    """A part that sees another view of every batch."""

    needs_images: ClassVar[bool] = False  # it compares two views: of a feature vector there is only one

    class Options(PartOptions):
        view: str = option("weak", "the augmentation of the second view; the first is training.augment's")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        refuse_unknown_view(options.view, where)

    def begin(self, peers: Sequence[Peer]) -> None:
        if self.needs_images and len(self.task.sample_shape) != 3:
            raise ConfigError(
                f"The part '{self.name}' compares two views of an image, and of these feature vectors there is only "
                "one view. Use images, or a method without views: fedavg-pl, fednoro, cbafed."
            )

    def taught(self, step: Step, teacher: EmaTeacher) -> Tensor:
        """What a teacher says of the second view, for every view that the network sees."""
        p = teacher.probabilities(step.batch.view(self.options.view))
        return p.repeat(len(step.rows) // len(step.batch), 1)


class Later(Part):
    """A part that knows two stages: the first is a share of the rounds."""

    first_share: ClassVar[float]
    acts_later: ClassVar[bool] = False  # only in the second
    shared = ("first_stage",)

    class Options(PartOptions):
        first_stage: Rounds = option("auto", "rounds of the first stage; auto: the published share of the rounds")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Found:
        if options.first_stage != AUTO:
            return {}
        return {"first_stage": published_share(experiment, cls.first_share)}

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        rounds = experiment.training.rounds
        if cls.acts_later and options.first_stage >= rounds:
            raise ConfigError(
                f"{where}first_stage = {options.first_stage} leaves no round for the second stage in a run of "
                f"{rounds}: the part '{cls.name}' would never act. Lower it, raise training.rounds, or leave the part "
                "out."
            )

    def second_stage(self, round: int) -> bool:
        return bool(round > self.options.first_stage)


def published_share(experiment: Experiment, share: float) -> tuple[int, str]:
    """So many rounds of this run, at least one, and the rule in words."""
    return max(1, round(experiment.training.rounds * share)), f"{100 * share:g} % of the rounds, as published"


def refuse_unknown_view(name: str, where: str, key: str = "view") -> None:
    try:
        registry.find("augmentation", name)
    except ConfigError as error:
        raise ConfigError(f"{where}{key}: {error}") from None


def tempered(probabilities: Tensor, temperature: float) -> Tensor:
    """σ(z/T) of σ(z): what a teacher says at a temperature."""
    yes, no = probabilities.pow(1 / temperature), (1 - probabilities).pow(1 / temperature)
    return yes / (yes + no)


def pseudo_targets(probabilities: Tensor, low: float | Tensor, high: float | Tensor) -> Tensor:
    """1 where p ≥ high, 0 where p ≤ low, else -1: unknown."""
    targets = torch.full(probabilities.shape, -1, dtype=torch.int8, device=probabilities.device)
    return targets.masked_fill_(probabilities <= low, 0).masked_fill_(probabilities >= high, 1)


def ramp_up(round: float, length: float) -> float:
    """exp(−5 (1 − t/T)²), t at most T: from nearly 0 to 1 (Laine and Aila, 2017)."""
    return math.exp(-5 * (1 - min(round, length) / length) ** 2)


def local_odds(work: Work) -> Tensor:
    """The log prior odds of every class among what is taught at the client in this round."""
    annotated, labels = (work.client.targets >= 0).any(0), work.targets
    among = torch.where(annotated, (labels >= 0).sum(0), len(labels))  # a class with tags alone: of all samples
    return log_prior_odds((labels == 1).sum(0), among, len(labels))


def log_prior_odds(positives: Tensor, among: Tensor, samples: int) -> Tensor:
    """log π − log(1−π), π = positives / among, kept 1/(2 samples) away from 0 and 1: added to a logit it is Eq. 3 of
    FedMLP (Sun et al., 2024)."""
    prior = (positives / among).clamp(1 / (2 * samples), 1 - 1 / (2 * samples))
    return torch.log(prior) - torch.log1p(-prior)
