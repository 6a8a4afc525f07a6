"""Small builders for tests, benchmarks and authors of plug-ins.

learner = learner_of(experiment(method__name="mine"), classes=("a", "b", "c"))
work = work_of(learner, client_of(learner, labels))
loss = loss_of(learner, work)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.client import Client, Peer, Reply, Step, Work, under
from fedmll.data.dataset import Dataset
from fedmll.engines.learner import Learner
from fedmll.experiment import Experiment
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Records
from fedmll.methods.method import Method
from fedmll.task import Task

CLASSES = ("a", "b", "c")


def experiment(**overrides: Any) -> Experiment:
    """Four clients of composite digits, two rounds, a tiny network: under a second. Keys as section__key."""
    values = {
        "data.limit": 160,
        "partition.clients": 4,
        "model.channels": (4, 8),
        "training.rounds": 2,
        "training.batch_size": 16,
        "engine.workers": 0,
    } | {key.replace("__", "."): value for key, value in overrides.items()}
    return Experiment().changed(values)


def learner_of(
    experiment: Experiment, classes: tuple[str, ...] = CLASSES, shape: tuple[int, ...] = (1, 8, 8), clients: int = 2
) -> Learner:
    return Learner(Task(experiment, classes, shape, clients, torch.device("cpu")))


def client_of(learner: Learner, labels: NDArray[Any], *, round: int = 1, name: str = "a", seed: int = 0) -> Client:
    """A client with random images and these targets (samples, classes): 1, 0, -1 unknown."""
    task = learner.method.task
    images = np.random.default_rng(seed).integers(0, 256, (len(labels), *task.sample_shape), dtype=np.uint8)
    known = torch.from_numpy((labels >= 0).any(0))
    data = Dataset(images, labels.astype(np.int8), task.classes)
    return Client(task, name, round, data, known, known, learner.model, learner.weights)


def work_of(learner: Learner, client: Client, message: Message | None = None, memory: Tensors | None = None) -> Work:
    """The client's round after every part has prepared; the model in training mode. `message` is full of names
    (`part/key`), `memory` too; what parts remember is in `work.memories`."""
    parts = learner.method.list
    work = Work(client, message or Message(), {part.name: under(part.name, memory or {}) for part in parts})
    for part in parts:
        work.fixed[part.name] = part.prepare(work)
    client.model.train()
    return work


def step_of(learner: Learner, work: Work, *, states: Tensor | None = None) -> Step:
    """The round's first batch, shaped by every part; or with these states of the labels."""
    step = Step(work, next(iter(work.client.batches())))
    for part in learner.method.list:
        part.shape(step, work.fixed[part.name])
    if states is not None:
        step.states = states
    return step


def loss_of(learner: Learner, work: Work, step: Step | None = None) -> Tensor:
    """The loss of a step."""
    return learner.loss(step or step_of(learner, work))


def reply_of(learner: Learner, work: Work, *, samples: float | None = None) -> Message:
    """What the parts reply now, without training."""
    replies = {part: part.finish(work, work.fixed[part.name]) for part in learner.method.list}
    count = float(len(work.client.data)) if samples is None else samples
    return Message(learner.method.joined(replies), {"samples": count, "steps": 1.0, "loss": 0.0})


def merge(method: Method, state: Tensors, replies: Iterable[Reply], round: int) -> tuple[Tensors, Records]:
    """A round at the server: the next state and the records."""
    merger = method.merger(state, round)
    for peer, reply in replies:
        merger.add(peer, reply)
    return merger.result()


def peer_of(index: int, classes: int, owned: Iterable[int] | None = None) -> Peer:
    mask = torch.zeros(classes, dtype=torch.bool)
    mask[list(range(classes) if owned is None else owned)] = True
    return Peer(index, f"c{index:03d}", mask)
