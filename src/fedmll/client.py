"""What a method sees at a client: its own samples, its round's work, and every step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.data.dataset import Dataset
from fedmll.data.images.augment import augment
from fedmll.message import Message, Tensors
from fedmll.models.flat import FlatWeights
from fedmll.models.network import Network
from fedmll.seeding import numpy_generator, seed_global, torch_generator
from fedmll.task import Task

EVALUATION_BATCH = 64  # fits the cache: 4–5 times faster on a CPU than batches of 500
GATHERED_BYTES = 2**22  # of an epoch's samples at once: more is not in the cache any more when its batch comes


@dataclass(frozen=True)
class Peer:
    """A client as the server knows it."""

    index: int
    name: str
    owned: Tensor  # bool (C,): the classes that it may show and annotates


Reply = tuple[Peer, Message]  # a client and what it sent


@dataclass
class Batch:
    task: Task
    data: Dataset
    rows: Tensor  # places in the client's data
    targets: Tensor  # int8: 1 present, 0 absent, -1 unknown
    recipe: str
    generator: torch.Generator
    gathered: Tensor | None = None  # what `raw` would gather, where it is there already

    @cached_property
    def images(self) -> Tensor:
        return self.view(self.recipe)

    @cached_property
    def raw(self) -> Tensor:
        """As they are stored: tokens where they are kept, of what is not augmented."""
        return self.task.raw(self.data, self.rows.numpy()) if self.gathered is None else self.gathered

    def view(self, recipe: str) -> Tensor:
        """A fresh augmented view of the batch, ready for the model; of kept tokens one of the kept views, drawn for
        each sample."""
        tokens = self.data.tokens
        if tokens is not None and len(tokens) > 1 and recipe != "none":
            drawn = torch.randint(len(tokens), (len(self),), generator=self.generator)
            return self.task.tensor(self.data.kept(self.rows.numpy(), drawn.numpy()))
        if recipe == "none" or self.raw.dtype != torch.uint8:
            return self.task.inputs(self.raw)
        return self.task.normalise(augment(self.task.unit(self.raw), recipe, self.generator))

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
    model: Network
    weights: FlatWeights

    @cached_property
    def targets(self) -> Tensor:
        return torch.from_numpy(self.data.labels).to(self.task.device)

    def generator(self, *purpose: str | int) -> torch.Generator:
        return torch_generator(self.task.seed, self.round, self.name, *purpose)

    def seed_torch(self) -> None:
        """For what draws from torch's global generator: dropout."""
        seed_global(self.task.device, self.task.seed, self.round, self.name, "torch")

    def batches(self) -> Iterator[Batch]:
        """The round's training batches, epoch by epoch."""
        training = self.task.experiment.training
        shuffle = numpy_generator(self.task.seed, self.round, self.name, "batches")
        views = self.generator("views")
        size, count = training.batch_size, len(self.data)
        cuts = [size * number for number in range(1, training.batches(count))]
        for _ in range(training.local_epochs):
            order = shuffle.permutation(count)
            rows = torch.from_numpy(order)
            targets, raw = self.targets.index_select(0, rows.to(self.task.device)), self._raw(order)
            parts = [None] * (len(cuts) + 1) if raw is None else _cut(raw, cuts)
            for places, known, part in zip(_cut(rows, cuts), _cut(targets, cuts), parts, strict=True):
                yield Batch(self.task, self.data, places, known, training.augment, views, part)

    def _raw(self, order: NDArray[np.int64]) -> Tensor | None:
        """An epoch's samples, gathered by one call where they are few; batches are then parts of it."""
        data = self.data
        if data.tokens is not None and len(data.tokens) > 1:  # which view of a sample is drawn batch by batch
            return None
        kept = data.store if data.tokens is None else data.tokens[0]
        few = len(data) * math.prod(kept.shape[1:]) * kept.dtype.itemsize <= GATHERED_BYTES
        return self.task.raw(data, order) if few else None

    def scan(self) -> Iterator[Batch]:
        """All its data in order, without augmentation, in batches made for evaluation."""
        for start in range(0, len(self.data), EVALUATION_BATCH):
            places = torch.arange(start, min(start + EVALUATION_BATCH, len(self.data)))
            yield self._batch(places, "none", self.generator("scan"))

    def _batch(self, places: Tensor, recipe: str, generator: torch.Generator) -> Batch:
        targets = self.targets.index_select(0, places.to(self.task.device))  # six times faster than targets[places]
        return Batch(self.task, self.data, places, targets, recipe, generator)


def _cut(tensor: Tensor, places: list[int]) -> Sequence[Tensor]:
    return tensor.tensor_split(places) if places else (tensor,)


@dataclass(frozen=True)
class Look:
    """All the client's samples as its model sees them, without augmentation, in evaluation mode."""

    probabilities: Tensor  # (N, C)
    features: Tensor | None = None  # (N, width) or (N, C, width)


@dataclass
class Work:
    """A client's round, as the parts of its method share it. Each part has its own keys of the message and of the
    client's memory, and what it computed once for the round."""

    client: Client
    message: Message
    memories: dict[str, Tensors] = field(default_factory=dict)  # by part, kept between the client's rounds
    fixed: dict[str, Any] = field(default_factory=dict)  # by part: what its `prepare` gave
    seeing: Sequence[Any] = ()  # the parts that change images before the network predicts
    steps: int = 0  # done so far
    claimed: bool = False  # a part teaches the unknown targets itself: nobody else takes them for absent
    _looks: dict[bool, Look] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.targets = self.client.targets  # (N, C): what is taught in this round, 1, 0 or -1

    @property
    def round(self) -> int:
        return self.client.round

    @property
    def rounds(self) -> int:
        return self.client.task.rounds

    def received(self, part: str) -> Tensors:
        """What the server's side of a part sent."""
        device = self.client.task.device
        return {name: tensor.to(device) for name, tensor in under(part, self.message.tensors).items()}

    def memory(self, part: str) -> Tensors:
        """The part's own; change it in place."""
        return self.memories.setdefault(part, {})

    def look(self, *, features: bool = False) -> Look:
        """By the model as it is now: as received before training, as trained after it; one pass, whoever asks. Vectors
        of features are few numbers; a feature a class is kept only if it is asked for."""
        found = self._looks.get(True) or self._looks.get(features)
        if found is None:
            model = self.client.model.eval()
            with torch.no_grad():
                seen = [
                    (model.features if features else model)(self.seen(batch.images)) for batch in self.client.scan()
                ]
                joined = torch.cat(seen)
                logits = model.logits(joined) if features else joined
            found = self._looks[features] = Look(torch.sigmoid(logits), joined if features else None)
        return found

    def seen(self, images: Tensor) -> Tensor:
        """As the network takes them when it predicts."""
        for part in self.seeing:
            images = part.inputs(images, self.received(part.name))
        return images

    def trained(self) -> None:
        """The model has changed."""
        self._looks.clear()


@dataclass
class Step:
    """One batch. Parts first change what the network sees and what is taught; then features and logits are computed,
    once, and every part gives its term of the loss."""

    work: Work
    batch: Batch
    states: Tensor | None = None  # what the network is told of the labels (batch, C): 1, 0, -1 unknown

    def __post_init__(self) -> None:
        self.rows = self.batch.rows
        untouched = self.work.targets is self.work.client.targets
        self.targets = self.batch.targets if untouched else self.work.targets[self.rows]

    def show(self, views: list[Tensor]) -> None:
        """The network sees these views of the batch, one after the other."""
        self.images = torch.cat(views)
        self.rows, self.targets = self.rows.repeat(len(views)), self.targets.repeat(len(views), 1)

    @cached_property
    def images(self) -> Tensor:
        return self.batch.images

    @cached_property
    def features(self) -> Tensor:
        return self.work.client.model.features(self.images, self.states)

    @cached_property
    def logits(self) -> Tensor:
        return self.work.client.model.logits(self.features)

    @cached_property
    def probabilities(self) -> Tensor:
        return torch.sigmoid(self.logits)

    @property
    def prototypes(self) -> Tensor:
        """Of a head that gives them (classes, width)."""
        prototypes = self.work.client.model.prototypes
        assert isinstance(prototypes, Tensor)
        return prototypes

    @property
    def present(self) -> Tensor:
        """1.0 where a label is taught as present; unknown counts as 0."""
        return (self.targets == 1).float()

    @property
    def known(self) -> Tensor:
        """1.0 where a target is taught."""
        return (self.targets >= 0).float()


def under(name: str, tensors: Tensors) -> Tensors:
    """The tensors of one part: those called `name/…`."""
    prefix = f"{name}/"
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
