"""The task: what is fixed in a run and known to server and clients, and how samples are preprocessed for a model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat_weights import FrozenState


@dataclass(frozen=True)
class Task:
    """What is fixed in a run and known to the server and to every client."""

    experiment: Experiment
    classes: tuple[str, ...]
    sample_shape: tuple[int, ...]
    clients: int
    device: torch.device
    server_data: Dataset | None = None  # samples that the server holds; their labels are not used
    finished: FrozenState | None = None  # the tensors of a finished model, if the task is only to predict
    min_group_size: int = 1  # a mean or sum of fewer samples does not leave a client; set by the site

    @property
    def seed(self) -> int:
        return self.experiment.seed

    @property
    def rounds(self) -> int:
        return self.experiment.training.rounds

    @cached_property
    def _scale(self) -> tuple[Tensor, Tensor]:
        """Mean and 1/std of pixels in [0, 1]: those of ImageNet if its weights are used."""
        mean, std = pixel_scale(self.experiment.model, self.sample_shape[0])
        shape = (1, -1, 1, 1)
        return torch.tensor(mean, device=self.device).view(shape), 1 / torch.tensor(std, device=self.device).view(shape)

    def tensor(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(samples).to(self.device)

    def scale_pixels(self, raw: Tensor) -> Tensor:
        """Pixels of 8 bits → pixels in [0, 1]."""
        return raw.to(torch.float32).mul_(1 / 255)

    def normalise(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] → what a model expects. Changes `images` in place."""
        mean, inverse_std = self._scale
        return images.sub_(mean).mul_(inverse_std)

    def preprocess(self, raw: Tensor) -> Tensor:
        """Raw samples → what a model expects, without augmentation. Feature vectors and tokens do not change."""
        return self.normalise(self.scale_pixels(raw)) if raw.dtype == torch.uint8 else raw

    def raw_samples(self, data: Dataset, positions: np.ndarray | slice) -> Tensor:
        """Samples as they are stored, or the tokens that a frozen backbone made of them."""
        return self.tensor(data.samples(positions) if data.tokens is None else data.frozen_features(positions))

    def model_inputs(self, data: Dataset, positions: np.ndarray | slice) -> Tensor:
        """Samples as a model expects them."""
        return self.preprocess(self.raw_samples(data, positions))


def task_of(data: Federation, device: torch.device | None = None) -> Task:
    """The task of a federation whose data is on this machine."""
    train = data.train
    return Task(
        data.experiment, train.classes, train.sample_shape, len(data.names), device or torch.device("cpu"), data.server
    )
