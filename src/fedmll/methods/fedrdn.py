"""FedRDN — Yan et al., "A Simple Data Augmentation for Feature Distribution Skewed Federated Learning", 2023 (random
distribution normalisation).

Before round 1 each client sends the mean of every channel of its pixels in [0, 1], and the standard deviation of every
channel within an image, averaged over its images. All clients receive the pool of all pairs (μ_j, σ_j). In training,
each batch is normalised with a mean and a deviation that are drawn independently, as in the released code:

    x̂ = (x − μ_j)/σ_j',   j and j' uniform.

Predictions use the mean of the pool. (The paper uses the client's own pair, but a pooled test set has no client.) If
the pool has only the pair of model.pixel_mean and model.pixel_std, it is FedAvg, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.errors import ConfigError
from fedmll.core.message import Message, Tensors
from fedmll.methods.framework.base import Aggregator, ImageTransform, Records, TensorSpec
from fedmll.methods.framework.client_round import Client, ClientInfo, ClientRound, TrainStep
from fedmll.methods.framework.method import Method
from fedmll.models.backbones import pixel_scale

SMALLEST = 1e-3  # smallest deviation; it is smaller only for an image of one colour


class RandomNormalisation(ImageTransform):
    """Each batch is normalised with a pixel mean and deviation of randomly drawn clients."""

    name = "random-normalisation"
    provides = frozenset({"views"})
    exchanges = frozenset({"opening"})
    sends = ("pool", "mean")

    @classmethod
    def check(cls, options: Any, experiment: Experiment, prefix: str) -> None:
        advice = "Use images and a backbone that is trained (model.freeze = 'none'), or another method."
        if experiment.model.backbone == "mlp":
            raise ConfigError(
                f"FedRDN (the part '{cls.name}') normalises the pixels of images, and "
                f"'{experiment.data.label}' has feature vectors. {advice}"
            )
        if experiment.model.freeze == "backbone":
            raise ConfigError(
                f"FedRDN (the part '{cls.name}') normalises the pixels of every batch differently, and with "
                f"model.freeze = 'backbone' features of the images are computed only once. {advice}"
            )

    def scale(self) -> Tensor:
        """Mean and deviation (2, channels) with which the task normalises all images."""
        channels = self.task.sample_shape[0]
        return torch.tensor(pixel_scale(self.task.experiment.model, channels)).expand(2, channels).contiguous()

    def initial_state(self) -> Tensors:
        return {"pool": self.scale()[None], "mean": self.scale()}

    def collect_statistics(self, client_round: ClientRound) -> Tensors:
        return {"statistics": statistics(client_round.client)}

    def reply_spec(self, sent: Tensors, round: int) -> dict[str, TensorSpec]:
        return {"statistics": TensorSpec((2, self.task.sample_shape[0]), low=0, high=1)} if round == 0 else {}

    def aggregator(self, state: Tensors, round: int, earlier: Mapping[str, Aggregator]) -> Aggregator | None:
        return StatisticsPool() if round == 0 else None

    def finalize_model(self, state: Tensors, message: Message) -> None:
        message.tensors[f"{self.name}/mean"] = state["mean"]

    def on_round_start(self, client_round: ClientRound) -> tuple[Tensor, torch.Generator]:
        return self.received(client_round)["pool"], client_round.client.generator("normalisation")

    def transform_batch(self, step: TrainStep, round_state: tuple[Tensor, torch.Generator]) -> None:
        pool, generator = round_state
        mean, deviation = torch.randint(len(pool), (2,), generator=generator).tolist()
        step.images = self.normalised(step.images, pool[mean, 0], pool[deviation, 1])

    def transform_images(self, images: Tensor, tensors: Tensors) -> Tensor:
        mean, deviation = tensors["mean"].to(images.device)
        return self.normalised(images, mean, deviation)

    def normalised(self, images: Tensor, mean: Tensor, deviation: Tensor) -> Tensor:
        """Normalise images again that the task has already normalised."""
        old_mean, old = self.scale().to(images.device)
        deviation = deviation.clamp(min=SMALLEST)
        factor, shift = old / deviation, (old_mean - mean) / deviation
        return images * factor[:, None, None] + shift[:, None, None]


def statistics(client: Client) -> Tensor:
    """(2, channels): the mean over all pixels; the deviation within an image, averaged over the images."""
    sums = torch.zeros(2, client.task.sample_shape[0], dtype=torch.float64, device=client.task.device)
    for batch in client.evaluation_batches():
        pixels = client.task.scale_pixels(batch.raw).double().flatten(2)
        sums += torch.stack([pixels.mean(2), pixels.std(2, correction=0)]).sum(1)
    return (sums / len(client.data)).float()


class StatisticsPool(Aggregator):
    def __init__(self) -> None:
        self.found: dict[int, Tensor] = {}

    def add(self, client: ClientInfo, reply: Message) -> None:
        self.found[client.index] = reply["statistics"]

    def result(self, merged: Tensors) -> tuple[Tensors, Records]:
        pool = torch.stack([self.found[index] for index in sorted(self.found)])
        return {"pool": pool, "mean": pool.double().mean(0).float()}, {}


class FedRdn(Method):
    name = "fedrdn"
    summary = "FedAvg; each batch is normalised with the pixel statistics of randomly drawn clients"
    paper = "Yan et al., 2023"
    up = "once: mean and standard deviation of its pixels"
    down = "means and standard deviations of all clients' pixels"
    parts = (*Method.parts, RandomNormalisation)
    published: ClassVar[dict[str, Any]] = {
        "training.optimizer": "sgd",
        "training.lr": 0.01,
        "training.momentum": 0.9,
        "training.weight_decay": 1e-5,
        "training.batch_size": 32,
        "training.local_epochs": 5,
    }
