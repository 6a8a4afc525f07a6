"""What a method sees on a client: its samples (`Client`), its round (`ClientRound`) and every step (`TrainStep`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.core.message import Message, Tensors
from fedmll.core.seeding import numpy_generator, seed_global, torch_generator
from fedmll.data.dataset import Dataset
from fedmll.data.images.augmentation import augment
from fedmll.methods.framework.task import Task
from fedmll.models.flat_weights import FlatWeights
from fedmll.models.network import Network

EVALUATION_BATCH = 64  # fits the cache: 4–5 times faster on a CPU than batches of 500
GATHERED_BYTES = 2**22  # the samples of an epoch are gathered at once up to this size; more does not stay in the cache


@dataclass(frozen=True)
class ClientInfo:
    """A client as the server knows it."""

    index: int
    name: str
    owned: Tensor  # bool (C,): the classes that it may have and annotates


Reply = tuple[ClientInfo, Message]  # a client and what it sent
# the number of samples that a client trained on, in a real federation, where "samples" may be limited (--max-share)
TRAINED_SAMPLES = "trained_samples"


@dataclass(kw_only=True)
class Batch:
    """Some samples of a client, with the augmentation of the experiment."""

    task: Task
    data: Dataset
    rows: Tensor  # rows of the client's data
    targets: Tensor  # int8: 1 present, 0 absent, -1 unknown
    augmentation: str
    generator: torch.Generator
    gathered: Tensor | None = None  # the samples, if they have been gathered before

    @cached_property
    def images(self) -> Tensor:
        """The augmented samples, ready for the model."""
        return self.view(self.augmentation)

    @cached_property
    def raw(self) -> Tensor:
        """The samples as they are stored, or the tokens that a frozen backbone made of them."""
        return self.task.raw_samples(self.data, self.rows.numpy()) if self.gathered is None else self.gathered

    def view(self, augmentation: str) -> Tensor:
        """A new augmented view of the batch, ready for the model. If several views of each sample are stored as tokens,
        one of them is drawn per sample."""
        tokens = self.data.tokens
        if tokens is not None and len(tokens) > 1 and augmentation != "none":
            drawn = torch.randint(len(tokens), (len(self),), generator=self.generator)
            return self.task.tensor(self.data.frozen_features(self.rows.numpy(), drawn.numpy()))
        if augmentation == "none" or self.raw.dtype != torch.uint8:
            return self.task.preprocess(self.raw)
        return self.task.normalise(augment(self.task.scale_pixels(self.raw), augmentation, self.generator))

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(kw_only=True)
class Client:
    """A client in one round. Its random numbers follow from (seed, round, name, purpose), so they do not depend on
    where and after which client it runs. `model` is the only model object of the process; `weights` are its weights as
    one vector."""

    task: Task
    name: str
    round: int
    data: Dataset
    annotated: Tensor  # bool (C,): the classes that this client annotates
    owned: Tensor  # bool (C,): those of them that the partition allows at this client
    model: Network
    weights: FlatWeights

    @cached_property
    def targets(self) -> Tensor:
        """(samples, C): 1 present, 0 absent, -1 unknown."""
        return torch.from_numpy(self.data.labels).to(self.task.device)

    def generator(self, *purpose: str | int) -> torch.Generator:
        """A generator for one purpose in this round."""
        return torch_generator(self.task.seed, self.round, self.name, *purpose)

    def seed_torch(self) -> None:
        """Seed torch's global generator, which dropout uses."""
        seed_global(self.task.device, self.task.seed, self.round, self.name, "torch")

    def batches(self) -> Iterator[Batch]:
        """The training batches of the round, epoch by epoch."""
        training = self.task.experiment.training
        shuffle = numpy_generator(self.task.seed, self.round, self.name, "batches")
        views = self.generator("views")
        size, count = training.batch_size, len(self.data)
        bounds = [size * number for number in range(1, training.batches(count))]
        for _ in range(training.local_epochs):
            order = shuffle.permutation(count)
            rows = torch.from_numpy(order)
            targets, raw = self.targets.index_select(0, rows.to(self.task.device)), self._gather(order)
            samples = [None] * (len(bounds) + 1) if raw is None else _split(raw, bounds)
            for own, known, gathered in zip(_split(rows, bounds), _split(targets, bounds), samples, strict=True):
                yield self._batch(own, known, training.augment, views, gathered)

    def _gather(self, order: NDArray[np.int64]) -> Tensor | None:
        """The samples of an epoch, gathered by one call if they are small; batches are then slices of it."""
        data = self.data
        if data.tokens is not None and len(data.tokens) > 1:  # the view of a sample is drawn batch by batch
            return None
        kept = data.store if data.tokens is None else data.tokens[0]
        small = len(data) * math.prod(kept.shape[1:]) * kept.dtype.itemsize <= GATHERED_BYTES
        return self.task.raw_samples(data, order) if small else None

    def evaluation_batches(self) -> Iterator[Batch]:
        """All its data in order, without augmentation, in batches of a size for evaluation."""
        for start in range(0, len(self.data), EVALUATION_BATCH):
            rows = torch.arange(start, min(start + EVALUATION_BATCH, len(self.data)))
            targets = self.targets.index_select(0, rows.to(self.task.device))  # six times faster than targets[rows]
            yield self._batch(rows, targets, "none", self.generator("scan"))

    def _batch(
        self, rows: Tensor, targets: Tensor, augmentation: str, generator: torch.Generator, raw: Tensor | None = None
    ) -> Batch:
        return Batch(
            task=self.task,
            data=self.data,
            rows=rows,
            targets=targets,
            augmentation=augmentation,
            generator=generator,
            gathered=raw,
        )


def _split(tensor: Tensor, bounds: list[int]) -> Sequence[Tensor]:
    return tensor.tensor_split(bounds) if bounds else (tensor,)


@dataclass(frozen=True)
class ModelOutputs:
    """The outputs of the model for all samples of a client, in evaluation mode and without augmentation."""

    probabilities: Tensor  # (N, C)
    features: Tensor | None = None  # (N, width) or (N, C, width)


def _no_loss(batch: Batch) -> Tensor:
    raise RuntimeError("This round has no trainer, so that nothing computes a loss.")


@dataclass
class ClientRound:
    """One round of one client, shared by the parts of its method. Each part has its own tensors of the message, its
    own client state and its own round state, all under its name."""

    client: Client
    message: Message
    client_states: dict[str, Tensors] = field(default_factory=dict)  # by part; kept between the client's rounds
    round_states: dict[str, Any] = field(default_factory=dict)  # by part: what `on_round_start` returned
    image_transforms: Sequence[Any] = ()  # the parts that change images before the network sees them
    steps: int = 0  # optimizer steps so far
    batch_loss: Callable[[Batch], Tensor] = _no_loss  # the method's loss of a batch, with the model's current weights
    unknown_targets_taught: bool = False  # a part teaches the unknown targets: no other part takes them for negative
    _outputs: dict[bool, ModelOutputs] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.targets = self.client.targets  # (N, C): what is taught in this round: 1, 0 or -1 unknown

    @property
    def number(self) -> int:
        """The number of the round, from 1 on."""
        return self.client.round

    @property
    def total_rounds(self) -> int:
        return self.client.task.rounds

    @property
    def model(self) -> Network:
        return self.client.model

    @property
    def weights(self) -> FlatWeights:
        """The weights of the model as one vector."""
        return self.client.weights

    def received(self, part: str) -> Tensors:
        """What the server side of a part sent."""
        device = self.client.task.device
        return {name: tensor.to(device) for name, tensor in tensors_of(part, self.message.tensors).items()}

    def client_state(self, part: str) -> Tensors:
        """What a part keeps between the client's rounds. Change it in place."""
        return self.client_states.setdefault(part, {})

    def outputs(self, *, features: bool = False) -> ModelOutputs:
        """The outputs of the model as it is now: as received before the first step, as trained after the last one.

        All parts share one pass over the data. Features are kept only if a part asks for them, as class-wise features
        are large.
        """
        found = self._outputs.get(True) or self._outputs.get(features)
        if found is None:
            model = self.client.model.eval()
            with torch.no_grad():
                batches = (self.transform_images(batch.images) for batch in self.client.evaluation_batches())
                joined = torch.cat([(model.features if features else model)(images) for images in batches])
                logits = model.logits(joined) if features else joined
            found = self._outputs[features] = ModelOutputs(torch.sigmoid(logits), joined if features else None)
        return found

    def transform_images(self, images: Tensor) -> Tensor:
        """The images as the network expects them in prediction."""
        for part in self.image_transforms:
            images = part.transform_images(images, self.received(part.name))
        return images

    def model_changed(self) -> None:
        """Forget the outputs of the model, because it has been trained."""
        self._outputs.clear()


@dataclass
class TrainStep:
    """One training batch. Parts first change what the network sees and what is taught. Then features and logits are
    computed once, and every part adds its term of the loss."""

    client_round: ClientRound
    batch: Batch
    states: Tensor | None = None  # the label states that the network is told (batch, C): 1, 0, -1 unknown

    def __post_init__(self) -> None:
        self.rows = self.batch.rows
        unchanged = self.client_round.targets is self.client_round.client.targets
        self.targets = self.batch.targets if unchanged else self.client_round.targets[self.rows]

    def set_views(self, views: list[Tensor]) -> None:
        """Show the network these views of the batch, one after the other."""
        self.images = torch.cat(views)
        self.rows, self.targets = self.rows.repeat(len(views)), self.targets.repeat(len(views), 1)

    @cached_property
    def images(self) -> Tensor:
        return self.batch.images

    @cached_property
    def features(self) -> Tensor:
        return self.client_round.model.features(self.images, self.states)

    @cached_property
    def logits(self) -> Tensor:
        return self.client_round.model.logits(self.features)

    @cached_property
    def probabilities(self) -> Tensor:
        return torch.sigmoid(self.logits)

    @property
    def prototypes(self) -> Tensor:
        """The prototypes (classes, width) of a head that has them."""
        prototypes = self.client_round.model.prototypes
        assert isinstance(prototypes, Tensor)
        return prototypes

    @property
    def present(self) -> Tensor:
        """1.0 where a label is taught as present, else 0.0, also where it is unknown."""
        return (self.targets == 1).float()

    @property
    def known(self) -> Tensor:
        """1.0 where a target is taught, 0.0 where it is unknown."""
        return (self.targets >= 0).float()


def tensors_of(part: str, tensors: Tensors) -> Tensors:
    """The tensors of one part: those called `part/…`, without the prefix."""
    prefix = f"{part}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
