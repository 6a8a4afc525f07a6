"""The task: what is fixed in a run and known to everybody, and how samples become what a model takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.experiment import Experiment
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat import Finished


@dataclass(frozen=True)
class Task:
    """What is fixed in a run and known to the server and to every client."""

    experiment: Experiment
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    clients: int
    device: torch.device
    server_data: Dataset | None = None  # what the server itself holds, if anything; its labels are not for use
    finished: Finished | None = None  # where it only predicts
    smallest_group: int = 1  # samples that a mean or sum must be of before it leaves a client; a site's own limit

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
        """Raw samples → what a model takes, without augmentation. Feature vectors and tokens pass as they are."""
        return self.normalise(self.unit(raw)) if raw.dtype == torch.uint8 else raw

    def raw(self, data: Dataset, positions: np.ndarray | slice) -> Tensor:
        """Samples as they are stored: kept tokens where there are any."""
        return self.tensor(data.samples(positions) if data.tokens is None else data.kept(positions))

    def seen(self, data: Dataset, positions: np.ndarray | slice) -> Tensor:
        """Samples as a model takes them."""
        return self.inputs(self.raw(data, positions))


def task_of(data: Federation, device: torch.device | None = None) -> Task:
    """The task of a federation whose data is here."""
    train = data.train
    return Task(
        data.experiment, train.classes, train.sample_shape, len(data.names), device or torch.device("cpu"), data.server
    )
