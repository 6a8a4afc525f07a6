"""What a method sees: the task that everybody knows, and at a client its own samples, batch by batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor, nn

from fedmll.data.dataset import Dataset
from fedmll.data.images.augment import augment
from fedmll.experiment import Experiment
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat import FlatWeights
from fedmll.seeding import derive, numpy_generator, torch_generator

EVALUATION_BATCH = 64  # fits the cache: 4–5 times faster on a CPU than batches of 500


@dataclass(frozen=True)
class Task:
    """What is fixed in a run and known to the server and to every client."""

    experiment: Experiment
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    clients: int
    device: torch.device
    server_data: Dataset | None = None  # what the server itself holds, if anything; its labels are not for use

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def rounds(self) -> int:
        return self.experiment.training.rounds

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """Mean and 1/std of pixels in [0, 1]: ImageNet's where its weights are used."""
        mean, std = pixel_scale(self.experiment.model, self.sample_shape[0])
        shape = (1, -1, 1, 1)
        return torch.tensor(mean, device=self.device).view(shape), 1 / torch.tensor(std, device=self.device).view(shape)

    def tensor(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(samples).to(self.device)

    def unit(self, raw: Tensor) -> Tensor:
        """Pixels in [0, 1]."""
        return raw.to(torch.float32).mul_(1 / 255)

    def normalise(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] → what a model takes. Changes `images` in place."""
        mean, inverse_std = self._scale
        return images.sub_(mean).mul_(inverse_std)

    def inputs(self, raw: Tensor) -> Tensor:
        """Raw samples → what a model takes, without augmentation. Feature vectors pass as they are."""
        return self.normalise(self.unit(raw)) if raw.dtype == torch.uint8 else raw


@dataclass(frozen=True)
class Peer:
    """A client as the server knows it."""

    index: int
    name: str
    owned: Tensor  # bool (C,): the classes that it may show and annotates


@dataclass
class Batch:
    task: Task
    rows: Tensor  # places in the client's data
    raw: Tensor
    targets: Tensor  # int8: 1 present, 0 absent, -1 unknown
    recipe: str
    generator: torch.Generator

    @cached_property
    def images(self) -> Tensor:
        return self.view(self.recipe)

    def view(self, recipe: str) -> Tensor:
        """A fresh augmented view of the batch, ready for the model."""
        if recipe == "none" or self.raw.dtype != torch.uint8:
            return self.task.inputs(self.raw)
        return self.task.normalise(augment(self.task.unit(self.raw), recipe, self.generator))

    @cached_property
    def present(self) -> Tensor:
        """1.0 where a label is present; unknown counts as 0."""
        return (self.targets == 1).float()

    @cached_property
    def known(self) -> Tensor:
        """1.0 where the target is known."""
        return (self.targets >= 0).float()

    def __len__(self) -> int:
        return len(self.rows)


@dataclass
class Client:
    """A client in one round. Its randomness comes from (seed, round, its name, purpose), so it does not matter where
    and after whom it runs. `model` is the worker's only model object; `weights` are its weights as one vector."""

    task: Task
    name: str
    round: int
    data: Dataset
    annotated: Tensor  # bool (C,): the classes that this client annotates
    owned: Tensor  # bool (C,): of these, the ones that it may show (all, unless the partition restricts them)
    model: nn.Module
    weights: FlatWeights

    @cached_property
    def targets(self) -> Tensor:
        return torch.from_numpy(self.data.labels).to(self.task.device)

    def generator(self, *purpose: str | int) -> torch.Generator:
        return torch_generator(self.task.seed, self.round, self.name, *purpose)

    def seed_torch(self) -> None:
        """For what draws from torch's global generator: dropout."""
        torch.manual_seed(derive(self.task.seed, self.round, self.name, "torch"))

    def batches(self) -> Iterator[Batch]:
        """The round's training batches, epoch by epoch. A last batch of one sample joins the one before it
        (batch normalisation cannot train on one)."""
        training = self.task.experiment.training
        shuffle = numpy_generator(self.task.seed, self.round, self.name, "batches")
        views = self.generator("views")
        size, count = training.batch_size, len(self.data)
        cuts = list(range(size, count, size))
        if cuts and count - cuts[-1] == 1:
            cuts.pop()
        for _ in range(training.local_epochs):
            for rows in np.split(shuffle.permutation(count), cuts):
                yield self._batch(rows, training.augment, views)

    def scan(self) -> Iterator[Batch]:
        """All its data in order, without augmentation, in batches made for evaluation."""
        for start in range(0, len(self.data), EVALUATION_BATCH):
            rows = np.arange(start, min(start + EVALUATION_BATCH, len(self.data)))
            yield self._batch(rows, "none", self.generator("scan"))

    def _batch(self, rows: np.ndarray, recipe: str, generator: torch.Generator) -> Batch:
        places = torch.from_numpy(rows)
        raw = self.task.tensor(self.data.samples(rows))
        return Batch(self.task, places, raw, self.targets[places], recipe, generator)
