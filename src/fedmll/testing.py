"""Small builders for tests, benchmarks and authors of plug-ins.

trainer = make_trainer(experiment(method__name="mine"), classes=("a", "b", "c"))
client_round = start_round(trainer, make_client(trainer, labels))
loss = compute_loss(trainer, client_round)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.config.experiment import Experiment
from fedmll.core.message import Message, Tensors
from fedmll.data.dataset import Dataset
from fedmll.engines.client_trainer import Trainer
from fedmll.methods.framework.base import Records
from fedmll.methods.framework.client_round import Client, ClientInfo, ClientRound, Reply, TrainStep, tensors_of
from fedmll.methods.framework.method import Method
from fedmll.methods.framework.task import Task

CLASSES = ("a", "b", "c")


def experiment(**overrides: Any) -> Experiment:
    """Four clients of composite digits, two rounds, a tiny network: it runs in less than a second. Settings are written
    as section__key."""
    values = {
        "data.limit": 160,
        "partition.clients": 4,
        "model.channels": (4, 8),
        "training.rounds": 2,
        "training.batch_size": 16,
        "engine.workers": 0,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return Experiment().changed(values)


def make_trainer(
    experiment: Experiment, classes: tuple[str, ...] = CLASSES, shape: tuple[int, ...] = (1, 8, 8), clients: int = 2
) -> Trainer:
    """A trainer for images of this shape."""
    return Trainer(Task(experiment, classes, shape, clients, torch.device("cpu")))


def make_client(trainer: Trainer, labels: NDArray[Any], *, round: int = 1, name: str = "a", seed: int = 0) -> Client:
    """A client with random images and these targets (samples, classes): 1, 0, -1 unknown."""
    task = trainer.method.task
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), *task.sample_shape), dtype=np.uint8)
    data = Dataset(images, labels.astype(np.int8), task.classes)
    return client_with(trainer, data, round=round, name=name)


def client_with(trainer: Trainer, data: Dataset, *, round: int = 1, name: str = "a") -> Client:
    """A client with this data. It annotates every class of which it knows a target."""
    known = torch.from_numpy((data.labels >= 0).any(0))
    return Client(
        task=trainer.method.task,
        name=name,
        round=round,
        data=data,
        annotated=known,
        owned=known,
        model=trainer.model,
        weights=trainer.weights,
    )


def start_round(
    trainer: Trainer, client: Client, message: Message | None = None, client_state: Tensors | None = None
) -> ClientRound:
    """The round of a client after `on_round_start` of every part, with the model in training mode. The tensors of
    `message` and `client_state` have their full names (`part/name`)."""
    parts = trainer.method.active_parts
    states = {part.name: tensors_of(part.name, client_state or {}) for part in parts}
    client_round = ClientRound(client, message or Message(), states)
    client_round.batch_loss = partial(trainer.batch_loss, client_round)
    for part in parts:
        client_round.round_states[part.name] = part.on_round_start(client_round)
    client.model.train()
    return client_round


def first_step(trainer: Trainer, client_round: ClientRound, *, states: Tensor | None = None) -> TrainStep:
    """The first step of a round, after `transform_batch` of every part; with these label states if they are given."""
    step = TrainStep(client_round, next(iter(client_round.client.batches())))
    for part in trainer.method.active_parts:
        part.transform_batch(step, client_round.round_states[part.name])
    if states is not None:
        step.states = states
    return step


def compute_loss(trainer: Trainer, client_round: ClientRound, step: TrainStep | None = None) -> Tensor:
    """The loss of a step, by default of the first one."""
    return trainer.loss(step or first_step(trainer, client_round))


def make_reply(trainer: Trainer, client_round: ClientRound, *, samples: float | None = None) -> Message:
    """The reply of a client as it is now, without training."""
    states = client_round.round_states
    replies = {part: part.on_round_end(client_round, states[part.name]) for part in trainer.method.active_parts}
    count = float(len(client_round.client.data)) if samples is None else samples
    return Message(trainer.method.join(replies), {"samples": count, "steps": 1.0, "loss": 0.0})


def aggregate(method: Method, state: Tensors, replies: Iterable[Reply], round: int) -> tuple[Tensors, Records]:
    """One round on the server: the next state and the records."""
    aggregator = method.aggregator(state, round)
    for client, reply in replies:
        aggregator.add(client, reply)
    return aggregator.result()


def make_client_info(index: int, classes: int, owned: Iterable[int] | None = None) -> ClientInfo:
    """A client as the server knows it, which owns all classes or these."""
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[list(range(classes) if owned is None else owned)] = True
    return ClientInfo(index, f"c{index:03d}", mask)
