"""Central tuning of a classifier (Breitholtz et al., 2025, Section 4.2): the server fits the global classifier h to the
predictions of the round's client models h_k on unlabelled images, for each client only over its own labels Y_k.

  MSE        Σ_k Σ_{y ∈ Y_k}        E (h_k(y|x) − h(y|x))²
  pairwise   Σ_k Σ_{y ≠ y' ∈ Y_k}   E (h_k(y|x) h(y'|x) − h_k(y'|x) h(y|x))²     (ordered pairs)

h is normalised over all classes (scope `global`, as in the paper) or over Y_k (`restricted`). Labels that no client of
the round has make the pairwise loss worse (Appendix B). So by default (`absent = omit`) h is normalised over the other
labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.core.processes import single_thread
from fedmll.core.seeding import torch_generator
from fedmll.data.images.decode import read_images
from fedmll.data.images.open_image import find_images
from fedmll.methods.framework.base import AbsolutePath, Aggregator, PartOptions, Records, ServerOnlyPart, option
from fedmll.methods.framework.client_round import EVALUATION_BATCH, ClientInfo
from fedmll.methods.parts.classifier_rows import HeadRows, own_rows


@dataclass(frozen=True)
class ClientPredictions:
    """The predictions of all clients for the tuning images, collected once per round."""

    p: Tensor  # (clients, images, classes), 0 outside Y_k
    own: Tensor  # bool (clients, 1, classes): Y_k

    @classmethod
    def gather(cls, predictions: list[Tensor], rows: list[Tensor], classes: int) -> ClientPredictions:
        """From the predictions (images, |Y_k|) of each client and the indices of its classes."""
        p = predictions[0].new_zeros(len(predictions), len(predictions[0]), classes)
        own = torch.zeros(len(predictions), 1, classes, dtype=torch.bool, device=p.device)
        for client, (values, places) in enumerate(zip(predictions, rows, strict=True)):
            p[client][:, places] = values
            own[client, 0, places] = True
        return cls(p, own)

    @property
    def absent(self) -> Tensor:
        """bool (classes,): the labels that no client of the round has."""
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
class TuningObjective:
    """What the classifier is fitted to, and how."""

    loss: Literal["mse", "pairwise"]
    softmax: bool
    scope: Literal["global", "restricted"]
    absent: Literal["omit", "naive", "penalise"]
    steps: int
    batch: int
    lr: float

    def objective(self, predictions: ClientPredictions) -> Callable[[Tensor, Tensor], Tensor]:
        """The loss as a function of the classifier's logits (B, C) and the indices of their tuning images."""
        support, counted = predictions.own, predictions.own
        if self.loss == "pairwise" and self.absent == "penalise":
            support = counted = predictions.own | predictions.absent  # pairs with an absent label, where h_k is 0
        if self.scope == "global":
            omitted = self.loss == "pairwise" and self.absent == "omit"
            support = (~predictions.absent if omitted else torch.ones_like(predictions.absent))[None, None]
        function = mse if self.loss == "mse" else pairwise

        def loss(logits: Tensor, places: Tensor) -> Tensor:
            return function(predictions.p[:, places], self._h(logits, support), counted)

        return loss

    def _h(self, logits: Tensor, support: Tensor) -> Tensor:
        """Softmax over `support`, or sigmoids, which need no normalisation."""
        if not self.softmax:
            return torch.sigmoid(logits)[None]
        return torch.softmax(logits[None].masked_fill(~support, -torch.inf), 2)

    def fit(self, rows: Tensor, features: Tensor, predictions: ClientPredictions, generator: torch.Generator) -> Tensor:
        """The classifier's rows (C, width + bias) after `steps` of Adam on batches of the tuning images' features."""
        tuned = rows.to(features.device).clone().requires_grad_()
        optimizer = torch.optim.Adam([tuned], self.lr)
        loss = self.objective(predictions)
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


class CentralTuning(ServerOnlyPart):
    """After averaging, the server fits the classifier to the clients' predictions for its unlabelled images."""

    name = "tuning"
    provides = frozenset({"final-classifier"})
    requires = frozenset({"class-rows"})

    class Options(PartOptions):
        tuning: Literal["none", "mse", "pairwise"] = option("mse", "loss of the tuning")
        tuning_images: AbsolutePath | None = option(None, "folder of images; none: the server's share of the data")
        scope: Literal["global", "restricted"] = option("global", "normalise h over all classes, or over Y_k")
        absent: Literal["omit", "naive", "penalise"] = option("omit", "rule of pairwise for labels that no client has")
        feedback: bool = option(True, "start the next round from the tuned classifier")
        tuning_steps: int = option(60, "number of Adam steps", ge=1)
        tuning_batch: int = option(256, "number of images per step", ge=1)
        tuning_lr: float = option(5e-3, "learning rate of the tuning", gt=0)

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        if options.tuning_images is None and not experiment.partition.server:
            raise ConfigError(
                f"{prefix}tuning = '{options.tuning}' needs unlabelled images at the server: let it hold a part of "
                f"the training data (partition.server = 0.05), or name a folder of images ({prefix}tuning_images)."
            )
        if options.tuning_images is not None and not any(find_images(options.tuning_images)):
            raise ConfigError(f"{prefix}tuning_images = '{options.tuning_images}' is not a folder with images.")

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator:
        return TuningAggregator(self, round)

    def finalize_model(self, state: Tensors, message: Message) -> None:
        if "tuned" in state:
            message.tensors["weights"] = state["tuned"]

    @property
    def by_label(self) -> bool:
        return "by-label" in self.other_parts

    @property
    def softmax(self) -> bool:
        return "softmax" in self.other_parts

    @cached_property
    def _images(self) -> Tensor:
        """The server's unlabelled samples, as they are stored."""
        folder, data = self.options.tuning_images, self.task.server_data
        if folder is not None:
            return torch.from_numpy(read_images(folder, self.task.sample_shape))
        assert data is not None  # `check` raises otherwise
        return torch.from_numpy(data.samples(slice(None)))

    @torch.no_grad()
    def features(self, tensors: Tensors) -> Tensor:
        """The features of the tuning images, computed with these weights."""
        self.weights.load(tensors)
        self.model.eval()
        batches = self._images.split(EVALUATION_BATCH)
        return torch.cat([self.model.features(self.task.preprocess(batch.to(self.task.device))) for batch in batches])

    @single_thread()
    def predict(self, reply: Tensors, rows: Tensor) -> Tensor:
        """h_k(y|x) for the tuning images and y ∈ Y_k. Nothing else of a reply is kept."""
        head, count = HeadRows.of(self.weights), len(self.task.classes)
        front, own, back = head.split(reply["weights"], len(rows) if self.by_label else count)
        unused = own.new_zeros(count, own.shape[1])  # the features do not depend on the head
        features = self.features(reply | {"weights": head.join(front, unused, back)})
        own = own.to(features.device)
        logits = F.linear(features, own[:, :-1], own[:, -1])
        if self.by_label:
            return self._probabilities(logits)
        if self.options.scope == "restricted":
            return self._probabilities(logits[:, rows])
        return self._probabilities(logits)[:, rows]

    def _probabilities(self, logits: Tensor) -> Tensor:
        return torch.softmax(logits, 1) if self.softmax else torch.sigmoid(logits)

    @single_thread()
    def tuned(self, merged: Tensors, predictions: ClientPredictions, round: int) -> Tensor:
        """The averaged weights with the tuned classifier."""
        o, head = self.options, HeadRows.of(self.weights)
        objective = TuningObjective(
            o.tuning, self.softmax, o.scope, o.absent, o.tuning_steps, o.tuning_batch, o.tuning_lr
        )
        front, rows, back = head.split(merged["weights"], len(self.task.classes))
        generator = torch_generator(self.task.seed, round, "tuning")
        return head.join(front, objective.fit(rows, self.features(merged), predictions, generator), back)


class TuningAggregator(Aggregator):
    """Collects the predictions of each client's model, then tunes the classifier."""

    def __init__(self, part: CentralTuning, round: int) -> None:
        self.part, self.round = part, round
        self.predictions: list[Tensor] = []
        self.rows: list[Tensor] = []

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.rows.append(own_rows(self.part.task.classes, client.owned))
        self.predictions.append(self.part.predict(reply.tensors, self.rows[-1]))

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        predictions = ClientPredictions.gather(self.predictions, self.rows, len(self.part.task.classes))
        tuned = self.part.tuned(merged, predictions, self.round)
        if not self.part.options.feedback:
            return {"tuned": tuned}, {}
        merged["weights"] = tuned
        return {}, {}
