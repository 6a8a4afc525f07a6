"""FedLSR — Jiang, Sun, Wang, Liu and Li, "Towards Federated Learning against Noisy Labels via Local
Self-Regularization", CIKM 2022; adapted to several labels as in the comparison of FedMLP (Sun et al., 2024).

Every class is taught, and an unknown target counts as absent, as in FedAvg. z1 and z2 are the logits of two views of a
batch; λ ~ Beta(1, 1) is drawn for every batch:
  p = λ σ(z1) + (1 − λ) σ(z2), sharpened: p* = σ(2 logit p)
  loss = BCE(p*, y) + γ_t JS(σ(3 z1), σ(3 z2)),  γ_t = min(0.4 t / 40, 0.4)
  JS(p, q) = ½ [p log(p/m) + q log(q/m)], m = (p + q)/2
Both terms are means over batch × classes. training.augment is the first view. The paper's 40 of 500 rounds are 8 % of
the rounds, unless `ramp` is given.

The paper's JS is over a softmax, where Σ_c p_c log(p_c/m_c) is the whole divergence. The comparison keeps these terms
for sigmoids, and so does the default. They are 0 only if p = q, but they hardly notice a difference where both are near
1. `divergence = "bernoulli"` adds the terms of 1 − p and 1 − q, which makes it the JS of Bernoulli variables.
`self_regularisation = false` is FedAvg. `double_sigmoid` is BCE(σ(p*), y), as in the released code. The comparison
leaves out the paper's entropy term (0.6), and so does this file.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.methods import losses
from fedmll.methods.framework.base import AUTO, Resolved, option
from fedmll.methods.framework.client_round import ClientRound, TrainStep
from fedmll.methods.framework.method import Method, switch
from fedmll.methods.losses import EntrywiseLoss, UnknownAsNegative
from fedmll.methods.parts.semi_supervised import Rounds, SecondView, published_share

NEARLY = 1e-6  # the smallest probability in JS
RoundState = tuple[torch.Generator, Tensor | None]  # the generator of λ, the weights of the positives


class SelfRegularised(SecondView, EntrywiseLoss):
    """BCE of the mixed and sharpened predictions for two views, and a penalty on their difference."""

    name = "self-regularised"
    provides = frozenset({"target-loss", "views"})
    accepts = "known-targets"
    needs_images = True

    class Options(SecondView.Options):
        sharpening: float = option(2.0, "the factor in p* = σ(sharpening · logit p)", gt=0)
        strength: float = option(0.4, "the largest γ: weight of JS", ge=0)
        ramp: Rounds = option("auto", "number of rounds until γ is largest; auto: 8 % of the rounds")
        scale: float = option(3.0, "factor of the logits in JS (1/temperature)", gt=0)
        divergence: Literal["positive", "bernoulli"] = option(
            "positive", "JS of p alone, as in the released code, or of p and 1 − p"
        )
        double_sigmoid: bool = option(False, "BCE of σ(p*), as in the released code")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        return {"ramp": published_share(experiment, 40 / 500)} if options.ramp == AUTO else {}

    def gamma(self, round: int) -> float:
        """γ_t."""
        return float(self.options.strength * min(round / self.options.ramp, 1.0))

    def on_round_start(self, client_round: ClientRound) -> Any:
        return client_round.client.generator("self-regularised"), super().on_round_start(client_round)

    def transform_batch(self, step: TrainStep, round_state: RoundState) -> None:
        step.set_views([step.batch.images, step.batch.view(self.options.view)])

    def loss(self, step: TrainStep, round_state: RoundState) -> Tensor:
        count, (generator, weights) = len(step.batch), round_state
        share = torch.rand((), generator=generator).item()
        logits = self.options.sharpening * mixed_logits(step.logits[:count], step.logits[count:], share)
        if self.options.double_sigmoid:
            logits = torch.sigmoid(logits)
        loss = self.task.experiment.training.loss
        entries = losses.entrywise(loss, logits, step.present[:count], weights)
        known = step.known[:count] if step.client_round.unknown_targets_taught else torch.ones_like(entries)
        divergence = jensen_shannon(*torch.sigmoid(self.options.scale * step.logits).split(count))
        if self.options.divergence == "bernoulli":
            divergence = divergence + jensen_shannon(*torch.sigmoid(-self.options.scale * step.logits).split(count))
        return (entries * known).mean() + self.gamma(step.client_round.number) * divergence.mean()


def mixed_logits(one: Tensor, other: Tensor, share: float) -> Tensor:
    """logit(share σ(one) + (1 − share) σ(other)), exact also if a σ is close to 0 or 1."""
    parts = torch.tensor([share, 1 - share]).log().tolist()

    def log_mixture(a: Tensor, b: Tensor) -> Tensor:
        return torch.logaddexp(parts[0] + F.logsigmoid(a), parts[1] + F.logsigmoid(b))

    return log_mixture(one, other) - log_mixture(-one, -other)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """½ [p log(p/m) + q log(q/m)] per entry, in nats."""
    p, q = p.clamp(min=NEARLY), q.clamp(min=NEARLY)
    middle = torch.log((p + q) / 2)
    return (p * (torch.log(p) - middle) + q * (torch.log(q) - middle)) / 2


class FedLSR(Method):
    name = "fedlsr"
    summary = "for noisy labels: consistent predictions for two views of an image; unknown targets count as absent"
    paper = "Jiang, Sun, Wang, Liu and Li, CIKM 2022"
    setting = ("partial annotation",)
    parts = (
        switch(
            "self_regularisation", SelfRegularised, "train with two views; off: FedAvg", otherwise=UnknownAsNegative
        ),
    )
