"""FedLSR — Jiang, Sun, Wang, Liu and Li, "Towards Federated Learning against Noisy Labels via Local
Self-Regularization", CIKM 2022; adapted to several labels as in the comparison of FedMLP (Sun et al., 2024).

Every class is taught, an unknown target counting as absent, as in FedAvg. With z1, z2 the logits of two views of a
batch and λ ~ Beta(1, 1), drawn anew for every batch:
  p = λ σ(z1) + (1 − λ) σ(z2), sharpened: p* = σ(2 logit p)
  loss = BCE(p*, y) + γ_t JS(σ(3 z1), σ(3 z2)),  γ_t = min(0.4 t / 40, 0.4)
JS is that of one Bernoulli variable an entry; both terms are means over batch × classes. The first view is
training.augment's. 40 is of 500 rounds: 8 %, unless it is given.

`self_regularisation = false` is FedAvg. `double_sigmoid` is the released code's: BCE(σ(p*), y). The paper's own entropy
term (0.6) is not in the comparison and not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.methods import losses
from fedmll.methods.base import AUTO, Resolved, option
from fedmll.methods.client_round import ClientRound, TrainStep
from fedmll.methods.method import Method, switch
from fedmll.methods.parts.semi_supervised import Rounds, SecondView, published_share
from fedmll.methods.parts.target_losses import EntrywiseLoss, UnknownAsNegative

if TYPE_CHECKING:
    from fedmll.config.experiment import Experiment

NEARLY = 1e-6  # as near as a probability comes to 0 and 1 in a logarithm


class FedLSRState(NamedTuple):
    generator: torch.Generator  # of λ
    gamma: float
    weights: Tensor | None  # of positives


class SelfRegularised(SecondView, EntrywiseLoss):
    """The loss of a mixed and sharpened prediction of two views, which are drawn together."""

    name = "self-regularised"
    provides = frozenset({"target-loss", "views"})
    accepts = "known-targets"
    needs_images = True

    class Options(SecondView.Options):
        sharpening: float = option(2.0, "p* = σ(sharpening · logit p)", gt=0)
        strength: float = option(0.4, "the largest γ", ge=0)
        ramp: Rounds = option("auto", "rounds until γ is the largest; auto: 8 % of them")
        scale: float = option(3.0, "of the logits in JS: its temperature is 1/scale", gt=0)
        double_sigmoid: bool = option(False, "the released code's: BCE of σ(p*)")

    @classmethod
    def resolve(cls, options: Any, experiment: Experiment) -> Resolved:
        return {"ramp": published_share(experiment, 40 / 500)} if options.ramp == AUTO else {}

    def gamma(self, round: int) -> float:
        """γ_t."""
        return float(self.options.strength * min(round / self.options.ramp, 1.0))

    def on_round_start(self, client_round: ClientRound) -> Any:
        weights, generator = super().on_round_start(client_round), client_round.client.generator("self-regularised")
        return FedLSRState(generator, self.gamma(client_round.number), weights)

    def transform_batch(self, step: TrainStep, round_state: FedLSRState) -> None:
        step.set_views([step.batch.images, step.batch.view(self.options.view)])

    def loss(self, step: TrainStep, round_state: FedLSRState) -> Tensor:
        count = len(step.batch)
        share = torch.rand((), generator=round_state.generator).item()
        logits = self.options.sharpening * mixed_logits(step.logits[:count], step.logits[count:], share)
        if self.options.double_sigmoid:
            logits = torch.sigmoid(logits)
        loss = self.task.experiment.training.loss
        entries = losses.entrywise(loss, logits, step.present[:count], round_state.weights)
        known = step.known[:count] if step.client_round.unknown_targets_taught else torch.ones_like(entries)
        one, other = torch.sigmoid(self.options.scale * step.logits).split(count)
        return (entries * known).mean() + round_state.gamma * jensen_shannon(one, other).mean()


def mixed_logits(one: Tensor, other: Tensor, share: float) -> Tensor:
    """logit(share σ(one) + (1 − share) σ(other)), exact also where a σ is nearly 0 or 1."""
    parts = torch.tensor([share, 1 - share]).log().tolist()

    def log_mixture(a: Tensor, b: Tensor) -> Tensor:
        return torch.logaddexp(parts[0] + F.logsigmoid(a), parts[1] + F.logsigmoid(b))

    return log_mixture(one, other) - log_mixture(-one, -other)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """Of Bernoulli variables, by entry, in nats: H((p+q)/2) − (H(p) + H(q))/2."""
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def entropy(p: Tensor) -> Tensor:
    p = p.clamp(NEARLY, 1 - NEARLY)
    return -(p * torch.log(p) + (1 - p) * torch.log1p(-p))


class FedLSR(Method):
    name = "fedlsr"
    summary = "noisy labels: a mixed, sharpened prediction of two views, which are drawn together; unknown = 0"
    paper = "Jiang, Sun, Wang, Liu and Li, CIKM 2022"
    setting = ("partial annotation",)
    parts = (switch("self_regularisation", SelfRegularised, "off: FedAvg", otherwise=UnknownAsNegative),)
