"""Central tuning of a classifier (Breitholtz et al., 2025, Section 4.2): the server fits the global classifier h to the
predictions of the round's client models h_k on unlabelled images, each client speaking for its own labels Y_k only.

  MSE        Σ_k Σ_{y ∈ Y_k}        E (h_k(y|x) − h(y|x))²
  pairwise   Σ_k Σ_{y ≠ y' ∈ Y_k}   E (h_k(y|x) h(y'|x) − h_k(y'|x) h(y|x))²     (ordered pairs)

h is normalised over all classes (scope `global`, the paper) or over Y_k (`restricted`). Labels that no client of the
round has spoil the pairwise loss (Appendix B), so by default (`absent = omit`) h is over the other labels only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.client import EVALUATION_BATCH, Peer
from fedmll.data.images.unlabelled import image_files, read_images
from fedmll.errors import ConfigError
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Located, Merger, Part, PartOptions, Records, option
from fedmll.methods.parts.rows import HeadRows, own_rows
from fedmll.seeding import torch_generator
from fedmll.threads import one_thread

if TYPE_CHECKING:
    from fedmll.experiment import Experiment


@dataclass(frozen=True)
class Opinions:
    """What the clients think of the tuning images, gathered once a round."""

    p: Tensor  # (clients, images, classes), 0 outside Y_k
    own: Tensor  # bool (clients, 1, classes): Y_k

    @classmethod
    def gather(cls, predictions: list[Tensor], rows: list[Tensor], classes: int) -> Opinions:
        """From each client's (images, |Y_k|) predictions and the classes these are of."""
        p = predictions[0].new_zeros(len(predictions), len(predictions[0]), classes)
        own = torch.zeros(len(predictions), 1, classes, dtype=torch.bool, device=p.device)
        for client, (values, places) in enumerate(zip(predictions, rows, strict=True)):
            p[client][:, places] = values
            own[client, 0, places] = True
        return cls(p, own)

    @property
    def absent(self) -> Tensor:
        """bool (classes,): the labels that none of them has."""
        return ~self.own.any(0).squeeze(0)


def mse(p: Tensor, h: Tensor, own: Tensor) -> Tensor:
    """`p` and `h` broadcast to (clients, images, classes)."""
    return ((p - h) * own).square().sum((0, 2)).mean()


def pairwise(p: Tensor, h: Tensor, own: Tensor) -> Tensor:
    """No pairs are formed: by Lagrange's identity Σ_{y,y'} (a_y b_y' − a_y' b_y)² = 2 (‖a‖²‖b‖² − (a·b)²), which is
    2 ‖a‖²‖b − t a‖² with t = a·b / ‖a‖²; this form does not cancel where a and b nearly agree."""
    a, b = p * own, h * own
    size = a.square().sum(2, keepdim=True)
    t = (a * b).sum(2, keepdim=True) / size.clamp(min=1e-30)
    return 2 * (size.squeeze(2) * (b - t * a).square().sum(2)).sum(0).mean()


@dataclass(frozen=True)
class Objective:
    """What the classifier is fitted to, and how."""

    loss: Literal["mse", "pairwise"]
    softmax: bool
    scope: Literal["global", "restricted"]
    absent: Literal["omit", "naive", "penalise"]
    steps: int
    batch: int
    lr: float

    def objective(self, opinions: Opinions) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss of (logits, places): of the classifier's logits (B, C) for the tuning images at `places`."""
        support, counted = opinions.own, opinions.own
        if self.loss == "pairwise" and self.absent == "penalise":
            support = counted = opinions.own | opinions.absent  # pairs with an absent label, where h_k is 0
        if self.scope == "global":
            omitted = self.loss == "pairwise" and self.absent == "omit"
            support = (~opinions.absent if omitted else torch.ones_like(opinions.absent))[None, None]
        function = mse if self.loss == "mse" else pairwise

        def loss(logits: Tensor, places: Tensor) -> Tensor:
            return function(opinions.p[:, places], self._h(logits, support), counted)

        return loss

    def _h(self, logits: Tensor, support: Tensor) -> Tensor:
        """Probabilities of softmax over `support`; sigmoids need no normalisation."""
        if not self.softmax:
            return torch.sigmoid(logits)[None]
        return torch.softmax(logits[None].masked_fill(~support, -torch.inf), 2)

    def fit(self, rows: Tensor, features: Tensor, opinions: Opinions, generator: torch.Generator) -> Tensor:
        """The classifier's rows (C, width and bias) after `steps` of Adam on batches of the tuning images' features."""
        tuned = rows.to(features.device).clone().requires_grad_()
        optimizer = torch.optim.Adam([tuned], self.lr)
        loss = self.objective(opinions)
        size = min(self.batch, len(features))
        left = torch.empty(0, dtype=torch.int64)
        for _ in range(self.steps):
            if len(left) < size:
                left = torch.randperm(len(features), generator=generator)
            places, left = left[:size].to(features.device), left[size:]
            optimizer.zero_grad()
            loss(F.linear(features[places], tuned[:, :-1], tuned[:, -1]), places).backward()
            optimizer.step()
        return tuned.detach().cpu()


class Tuning(Part):
    """The classifier is fitted to the clients' opinions of the server's own unlabelled images, after the average."""

    name = "tuning"
    needs = frozenset({"rows"})
    server_only = True

    class Options(PartOptions):
        tuning: Literal["none", "mse", "pairwise"] = option("mse", "the loss that it is fitted with")
        tuning_images: Located | None = option(None, "a folder of images; default: the server's share")
        scope: Literal["global", "restricted"] = option("global", "what h is normalised over: all classes, Y_k")
        absent: Literal["omit", "naive", "penalise"] = option("omit", "pairwise: labels that nobody in the round has")
        feedback: bool = option(True, "the next round starts from the tuned classifier")
        tuning_steps: int = option(60, "steps of Adam", ge=1)
        tuning_batch: int = option(256, "images a step", ge=1)
        tuning_lr: float = option(5e-3, "learning rate", gt=0)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, where: str) -> None:
        if options.tuning_images is None and not experiment.partition.server:
            raise ConfigError(
                f"{where}tuning = '{options.tuning}' needs unlabelled images at the server: let it hold a share of the "
                f"training data (partition.server = 0.05), or name a folder of images ({where}tuning_images)."
            )
        if options.tuning_images is not None and not any(image_files(options.tuning_images)):
            raise ConfigError(f"{where}tuning_images = '{options.tuning_images}' is not a folder with images.")

    def merger(self, state: Tensors, round: int, beside: Mapping[str, Merger]) -> Merger:
        return Listening(self, round)

    def deploy(self, state: Tensors, message: Message) -> None:
        if "tuned" in state:
            message.tensors["weights"] = state["tuned"]

    @property
    def by_label(self) -> bool:
        return "by-label" in self.beside

    @property
    def softmax(self) -> bool:
        return "softmax" in self.beside

    @cached_property
    def _images(self) -> Tensor:
        """The server's unlabelled samples, as they are stored."""
        folder, data = self.options.tuning_images, self.task.server_data
        if folder is not None:
            return torch.from_numpy(read_images(folder, self.task.sample_shape))
        assert data is not None  # `check` has refused it
        return torch.from_numpy(data.samples(slice(None)))

    @torch.no_grad()
    def features(self, tensors: Tensors) -> Tensor:
        """Of the tuning images, by the global network with these weights in it."""
        self.weights.load(tensors)
        self.model.eval()
        batches = self._images.split(EVALUATION_BATCH)
        return torch.cat([self.model.features(self.task.inputs(batch.to(self.task.device))) for batch in batches])

    @one_thread()
    def opinion(self, reply: Tensors, rows: Tensor) -> Tensor:
        """h_k(y|x) of the tuning images for y ∈ Y_k: what is kept of a reply."""
        head, count = HeadRows.of(self.weights), len(self.task.classes)
        front, own, back = head.split(reply["weights"], len(rows) if self.by_label else count)
        anything = own.new_zeros(count, own.shape[1])  # the features do not need the head
        features = self.features(reply | {"weights": head.join(front, anything, back)})
        own = own.to(features.device)
        logits = F.linear(features, own[:, :-1], own[:, -1])
        if self.by_label:
            return self._probabilities(logits)
        if self.options.scope == "restricted":
            return self._probabilities(logits[:, rows])
        return self._probabilities(logits)[:, rows]

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, 1) if self.softmax else torch.sigmoid(logits)

    @one_thread()
    def tuned(self, merged: Tensors, opinions: Opinions, round: int) -> Tensor:
        """The merged weights with the tuned classifier."""
        o, head = self.options, HeadRows.of(self.weights)
        objective = Objective(o.tuning, self.softmax, o.scope, o.absent, o.tuning_steps, o.tuning_batch, o.tuning_lr)
        front, rows, back = head.split(merged["weights"], len(self.task.classes))
        generator = torch_generator(self.task.seed, round, "tuning")
        return head.join(front, objective.fit(rows, self.features(merged), opinions, generator), back)


class Listening(Merger):
    def __init__(self, part: Tuning, round: int) -> None:
        self.part, self.round = part, round
        self.predictions: list[Tensor] = []
        self.rows: list[Tensor] = []

    def add(self, peer: Peer, reply: Message) -> None:
        self.rows.append(own_rows(self.part.task.classes, peer.owned))
        self.predictions.append(self.part.opinion(reply.tensors, self.rows[-1]))

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        opinions = Opinions.gather(self.predictions, self.rows, len(self.part.task.classes))
        tuned = self.part.tuned(merged, opinions, self.round)
        if not self.part.options.feedback:
            return {"tuned": tuned}, {}
        merged["weights"] = tuned
        return {}, {}
