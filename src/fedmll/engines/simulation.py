"""What every simulation does, wherever its clients are trained: the rounds, the checks of replies, the evaluation.

`JobRunner` does the jobs: it trains clients and predicts. It lives in a worker process, in a Ray actor or in the
calling process. Replies are returned in an order that does not depend on who does the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedmll.core.errors import ReplyRejected
from fedmll.core.message import Message, Tensors
from fedmll.core.tensor_files import DamagedFile
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, no_progress
from fedmll.engines.base import RoundResult
from fedmll.engines.client_state import ClientStateStore
from fedmll.engines.client_trainer import Trainer
from fedmll.engines.vectorized_clients import check_vectorizable
from fedmll.engines.worker_pool import Job
from fedmll.evaluation.evaluate import Evaluation, evaluate_global_model, evaluate_local_models
from fedmll.methods.framework.allowed_replies import ReplyProblem, find_reply_problem
from fedmll.methods.framework.base import Records, TensorSpec, TruthAudit
from fedmll.methods.framework.client_round import EVALUATION_BATCH, Reply, tensors_of
from fedmll.methods.framework.method import Method
from fedmll.methods.framework.task import task_of

CHUNK = 4 * EVALUATION_BATCH  # samples of one prediction job
HAS_STATE = "has client state"  # a number that a worker adds to a reply: whether the client keeps something


class SimulationAudit:
    """Compares the client states with the true targets, which only a simulation knows."""

    def __init__(self, method: Method, data: Federation, store: ClientStateStore) -> None:
        self.method, self.data, self.store = method, data, store
        with_truth = method.pooled  # such a client has the true targets anyway
        self.parts = [part for part in method.active_parts if isinstance(part, TruthAudit) and not with_truth]
        self.counts: dict[int, tuple[int, Tensors]] = {}  # client → the round of its state, and counts by part

    def records(self) -> Records:
        """The records of all parts. Only client states that changed are read again."""
        if not self.parts:
            return {}
        before = self.counts
        self.counts = {
            client: old if (old := before.get(client)) and old[0] == round else (round, self._count(client, round))
            for client, round in self.store.latest.items()
        }
        records: Records = {}
        for part in self.parts:
            counts = [by_part[part.name] for _, by_part in self.counts.values() if part.name in by_part]
            records |= part.audit_records(torch.stack(counts).sum(0)) if counts else {}
        return records

    def _count(self, client: int, round: int) -> Tensors:
        state = self.store.read(self.store.path(client, round))
        targets = torch.from_numpy(self.data.true_labels[self.data.samples[client]])
        counts = {part.name: part.count_correct(tensors_of(part.name, state), targets) for part in self.parts}
        return {name: count for name, count in counts.items() if count is not None}


class JobRunner:
    """Does the jobs of a simulation with one trainer."""

    def __init__(self, trainer: Trainer, federation: Federation) -> None:
        self.trainer, self.federation = trainer, federation
        self.clients = trainer.client_infos(federation)
        self.datasets = federation.evaluation_sets

    def train(self, messages: list[Message], states: list[Tensors], indices: list[int], number: int) -> list[Message]:
        """The replies of clients in a round. Their states are changed in place."""
        clients = [self.trainer.client_in_round(self.federation, self.clients[index], number) for index in indices]
        replies = self.trainer.train_clients(clients, messages, states)
        for state, reply in zip(states, replies, strict=True):
            reply.numbers[HAS_STATE] = float(bool(state))
        return replies

    def predict(self, message: Message, name: str, start: int) -> Message:
        """The probabilities of a chunk of an evaluation dataset."""
        self.trainer.receive(message)
        data: Dataset = self.datasets[name]
        return Message({"scores": self.trainer.predict(data, start, min(start + CHUNK, len(data)))})


class SimulationEngine:
    """A simulation. A subclass does the jobs: `run_jobs`."""

    def __init__(
        self,
        federation: Federation,
        client_state_folder: Path,
        device: torch.device,
        progress: Progress = no_progress,
    ) -> None:
        self.device, self.training = device, federation.experiment.training
        self.trainer = Trainer(task_of(federation, device))
        if self.training.clients_per_batch is not None:
            check_vectorizable(self.trainer.model, self.training.clients_per_batch)
        self.method = self.trainer.method
        self.federation = self.attach_features(federation, progress)
        self.client_states = ClientStateStore(client_state_folder)
        self.audit = SimulationAudit(self.method, self.federation, self.client_states)
        self.runner = JobRunner(self.trainer, self.federation)
        self.clients, self.datasets = self.runner.clients, self.runner.datasets
        self.bytes_down = self.bytes_up = 0
        self.method.validate_clients(self.clients)
        self.on_warning: Callable[[str], None] = lambda text: None  # the loop sets it

    def attach_features(self, federation: Federation, progress: Progress) -> Federation:
        """The federation with the features of a frozen backbone."""
        return self.trainer.with_frozen_features(federation, progress)

    def run_jobs(self, jobs: Iterator[Job], count: int, shared: Tensors) -> Iterator[tuple[Job, list[Message]]]:
        """Each of `count` jobs with its replies, in the order of the jobs; `shared` are tensors of many of them."""
        raise NotImplementedError

    def initial_state(self) -> Tensors:
        return self.method.initial_state()

    def federation_in(self, number: int) -> Federation:
        return self.federation

    def run_round(self, state: Tensors, number: int, on_reply: Callable[[int], None]) -> RoundResult:
        """Train the clients of a round; each reply is aggregated as soon as it is the next one."""
        losses: list[tuple[float, float]] = []
        aggregator = self.method.aggregator(state, number)
        on_reply(0)
        for client, reply in self.collect_replies(state, number):
            losses.append((reply.numbers["loss"], reply.numbers["samples"]))
            aggregator.add(client, reply)
            on_reply(len(losses))
        new_state, records = aggregator.result()
        return RoundResult(
            state=new_state, records=records, losses=losses, bytes_up=self.bytes_up, bytes_down=self.bytes_down
        )

    def collect_replies(self, state: Tensors, number: int) -> Iterator[Reply]:
        """Train the clients of a round and return their replies as a stream, the largest client first."""
        order = self.trainer.participants(self.federation, number)
        self.bytes_down = self.bytes_up = 0
        groups = group_clients(order, self.training.clients_per_batch)

        def jobs() -> Iterator[Job]:
            for clients in groups:
                messages = [self.method.send(state, self.clients[client], number) for client in clients]
                self.bytes_down += sum(message.nbytes for message in messages)
                before = [self.client_states.latest.get(client) for client in clients]
                yield Job("train", (clients, number, before), messages, self._label(clients, number))

        first, specs = Message(), dict[str, TensorSpec]()
        for job, replies in self.run_jobs(jobs(), len(groups), state):
            for client, sent, reply in zip(job.arguments[0], job.messages, replies, strict=True):
                has_state = reply.numbers.pop(HAS_STATE)
                if not specs or not sent.shares_tensors(first):  # computed once for all clients with the same message
                    first, specs = sent, self.method.reply_spec(sent, number)
                self._check(client, number, find_reply_problem(specs, reply))
                self.bytes_up += reply.nbytes
                if has_state:
                    self.client_states.written(client, number)
                yield self.clients[client], reply

    def _label(self, clients: list[int], number: int) -> str:
        names = ", ".join(self.clients[client].name for client in clients)
        return f"client{'s' if len(clients) > 1 else ''} {names} in round {number}"

    def _check(self, client: int, number: int, problem: ReplyProblem | None) -> None:
        if problem is None:
            return
        advice = f" Its training diverged: lower training.lr (now {self.training.lr:g}) or set training.clip = 1.0."
        label = self._label([client], number)
        raise ReplyRejected(f"The reply of {label} was refused: {problem}.{advice if problem.diverged else ''}")

    def predict(self, message: Message, *names: str) -> list[NDArray[np.float32]]:
        """The probabilities of a model on some of the evaluation datasets, computed by all workers."""
        starts = [(name, start) for name in names for start in range(0, len(self.datasets[name]), CHUNK)]
        jobs = (Job("predict", chunk, [message], "the evaluation") for chunk in starts)
        chunks: dict[str, list[NDArray[np.float32]]] = {name: [] for name in names}
        for job, (reply,) in self.run_jobs(jobs, len(starts), message.tensors):
            chunks[job.arguments[0]].append(reply["scores"].numpy())
        empty = np.zeros((0, len(self.trainer.task.classes)), np.float32)
        return [np.concatenate(chunks[name]) if chunks[name] else empty for name in names]

    def evaluate(self, message: Message) -> Evaluation:
        names = list(self.datasets)
        if self.method.has("local-models"):
            scores_by_client = {
                client: dict(zip(names, self.predict(self._local_model(client, round), *names), strict=True))
                for client, round in sorted(self.client_states.latest.items())
            }
            return evaluate_local_models(self.federation, scores_by_client)
        scores = self.predict(message, *names)
        return evaluate_global_model(self.federation, dict(zip(names, scores, strict=True)))

    def _local_model(self, client: int, round: int) -> Message:
        """The weights that a client keeps in its state."""
        state = self.client_states.read(self.client_states.path(client, round))
        return Message(tensors_of(self.method.average_part.name, state))

    def audit_records(self) -> dict[str, float | Tensor]:
        """What the method logs about its client states and the true targets."""
        return self.audit.records()

    def close(self) -> None:
        """Free what the engine holds."""

    def read_client_states(self, job: Job) -> list[Tensors]:
        """The states of the clients of a job. Arguments of such a job: the clients, the round, and for each client the
        round of its state; None: it has none yet."""
        store = self.client_states
        clients, _, before = job.arguments
        versions = zip(clients, before, strict=True)
        try:
            return [{} if round is None else store.read(store.path(index, round)) for index, round in versions]
        except DamagedFile as error:
            raise DamagedFile(f"{error} Continue with `fedmll resume`, which uses the checkpoint before.") from None

    def write_client_states(self, job: Job, states: list[Tensors]) -> None:
        """Write the states of the clients of a job, as the training left them."""
        clients, number, _ = job.arguments
        for index, state in zip(clients, states, strict=True):
            if state:
                self.client_states.write(self.client_states.path(index, number), state, durable=False)


def group_clients(order: list[int], clients_per_batch: int | None) -> list[list[int]]:
    """Groups of at most `clients_per_batch` clients and of about equal size. They do not depend on the workers."""
    count = -(-len(order) // (clients_per_batch or 1))
    bounds = [len(order) * number // count for number in range(count + 1)] if count else []
    return [order[start:stop] for start, stop in pairwise(bounds)]
