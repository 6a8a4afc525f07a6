"""The local engine: a federation on one machine. W worker processes with one torch thread and one model object each;
longest client first; replies in an order that does not depend on W. `workers = 0`: all in the calling process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.client import EVALUATION_BATCH, Peer, Reply, under
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, silent
from fedmll.engines.audits import Audits
from fedmll.engines.learner import Learner
from fedmll.engines.memory import MemoryStore
from fedmll.engines.pool import Job, Pool
from fedmll.engines.together import refuse_unsuited
from fedmll.errors import ConfigError, ReplyRefused
from fedmll.evaluation.pooled import Evaluation, evaluate_alone, evaluate_pooled
from fedmll.message import Message, Tensors
from fedmll.methods.contract import Like, refuse_unlike
from fedmll.task import task_of

CHUNK = 4 * EVALUATION_BATCH  # samples of one prediction job
REMEMBERS = "remembers"  # a worker's word to the engine, beside a reply's numbers: the client has a memory now


class LocalEngine:
    tries = 1

    def __init__(self, federation: Federation, memory_folder: Path, progress: Progress = silent) -> None:
        setting = federation.experiment.engine
        self.device = choose_device(setting.device)
        self.training = federation.experiment.training
        self.learner = Learner(task_of(federation, self.device))
        if self.training.together is not None:
            refuse_unsuited(self.learner.model, self.training.together)
        self.method = self.learner.method
        self.federation = federation = self.learner.federation(federation, progress)
        self.memory = MemoryStore(memory_folder)
        self.audits = Audits(self.method, federation, self.memory)
        self.datasets = federation.evaluated
        self.bytes_down = self.bytes_up = 0
        self.peers = self.learner.peers(federation)
        self.method.begin(self.peers)
        workers = setting.workers
        if workers == "auto":
            workers = 0 if self.device.type == "cuda" else len(os.sched_getaffinity(0))
        self.threads = torch.get_num_threads()
        if not workers and self.device.type == "cpu":
            torch.set_num_threads(1)  # as in a worker: sums over several threads have other last bits
        self.pool = Pool(self._work, workers) if workers else None

    def start(self) -> Tensors:
        return self.method.start()

    def gathered(self, number: int) -> Federation:
        return self.federation

    def round(self, state: Tensors, number: int) -> Iterator[Reply]:
        """Train the round's clients; their replies as a stream, the largest client first."""
        order = self.learner.participants(self.federation, number)
        self.bytes_down = self.bytes_up = 0

        groups = grouped(order, self.training.together)

        def jobs() -> Iterator[Job]:
            for clients in groups:
                messages = [self.method.send(state, self.peers[client], number) for client in clients]
                self.bytes_down += sum(message.nbytes for message in messages)
                before = [self.memory.latest.get(client) for client in clients]
                yield Job("train", (clients, number, before), messages, self._called(clients, number))

        first, expected = Message(), dict[str, Like]()
        for job, replies in self._run(jobs(), len(groups), state):
            for client, sent, reply in zip(job.arguments[0], job.messages, replies, strict=True):
                remembers = reply.numbers.pop(REMEMBERS)
                if not expected or not sent.same(first):  # worked out once for all who are sent the same
                    first, expected = sent, self.method.expects(sent, number)
                self._refuse(client, number, refuse_unlike(expected, reply))
                self.bytes_up += reply.nbytes
                if remembers:
                    self.memory.written(client, number)
                yield self.peers[client], reply

    def _called(self, clients: list[int], number: int) -> str:
        names = ", ".join(self.peers[client].name for client in clients)
        return f"client{'s' if len(clients) > 1 else ''} {names} in round {number}"

    def _refuse(self, client: int, number: int, reason: str | None) -> None:
        if reason is not None:
            advice = f" Its training diverged: lower training.lr (now {self.training.lr:g}) or set training.clip = 1.0."
            diverged = "NaN" in reason or "norm" in reason
            called = self._called([client], number)
            raise ReplyRefused(f"The reply of {called} was refused: {reason}.{advice if diverged else ''}")

    def fault(self, error: Exception, peer: Peer | None) -> None:
        raise error

    def predict(self, message: Message, *names: str) -> list[NDArray[np.float32]]:
        """The deployed model's probabilities on some of the evaluated datasets, by all workers."""
        starts = [(name, start) for name in names for start in range(0, len(self.datasets[name]), CHUNK)]
        jobs = (Job("predict", chunk, [message], "the evaluation") for chunk in starts)
        parts: dict[str, list[NDArray[np.float32]]] = {name: [] for name in names}
        for job, (reply,) in self._run(jobs, len(starts), message.tensors):
            parts[job.arguments[0]].append(reply["scores"].numpy())
        empty = np.zeros((0, len(self.learner.task.classes)), np.float32)
        return [np.concatenate(parts[name]) if parts[name] else empty for name in names]

    def evaluate(self, message: Message) -> Evaluation:
        if self.method.mean.alone:
            names, memory = list(self.datasets), self.memory
            found = {
                client: dict(
                    zip(names, self.predict(Message(self._own(memory.path(client, round))), *names), strict=True)
                )
                for client, round in sorted(memory.latest.items())
            }
            return evaluate_alone(self.federation, found)
        scores = self.predict(message, *self.datasets)
        return evaluate_pooled(self.federation, dict(zip(self.datasets, scores, strict=True)))

    def _own(self, path: Path) -> Tensors:
        """The weights that a client keeps to itself."""
        return under(self.method.mean.name, self.memory.read(path))

    def audit(self) -> dict[str, float | Tensor]:
        """What the method says of its clients' memories beside the truth, which only a simulation has."""
        return self.audits.records()

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()
        torch.set_num_threads(self.threads)

    def _run(self, jobs: Iterator[Job], count: int, shared: Tensors) -> Iterator[tuple[Job, list[Message]]]:
        if self.pool is not None:
            self.pool.share(shared.values())
            yield from self.pool.run(jobs, count)
            return
        for job in jobs:
            yield job, self._work(job.kind, job.arguments, job.messages)

    # ---- in a worker

    def _work(self, kind: str, arguments: tuple, messages: list[Message]) -> list[Message]:
        return self._train(messages, *arguments) if kind == "train" else [self._predict(messages[0], *arguments)]

    def _train(
        self, messages: list[Message], indices: list[int], number: int, before: list[int | None]
    ) -> list[Message]:
        """`before`: the rounds that the clients' memories are of."""
        store, versions = self.memory, list(zip(indices, before, strict=True))
        clients = [self.learner.client(self.federation, self.peers[index], number) for index in indices]
        memories = [{} if round is None else store.read(store.path(index, round)) for index, round in versions]
        replies = self.learner.train_together(clients, messages, memories)
        for index, memory, reply in zip(indices, memories, replies, strict=True):
            if memory:
                store.write(store.path(index, number), memory, durable=False)
            reply.numbers[REMEMBERS] = float(bool(memory))
        return replies

    def _predict(self, message: Message, name: str, start: int) -> Message:
        self.learner.receive(message)
        data: Dataset = self.datasets[name]
        return Message({"scores": self.learner.predict(data, start, min(start + CHUNK, len(data)))})


def grouped(order: list[int], together: int | None) -> list[list[int]]:
    """At most `together` clients a group, the groups about equal; it does not depend on the number of workers."""
    count = -(-len(order) // (together or 1))
    bounds = [len(order) * number // count for number in range(count + 1)] if count else []
    return [order[start:stop] for start, stop in pairwise(bounds)]


def choose_device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("engine.device = 'cuda', but torch finds no CUDA device here; use --device cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
