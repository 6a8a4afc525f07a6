"""The learner: one method with one model object, that builds, receives, trains and predicts. The local engine, the
sites of a real federation and whoever loads a finished run use this and nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedmll.client import EVALUATION_BATCH, Client, Peer, Step, Work, under
from fedmll.data.dataset import Dataset
from fedmll.data.federation import Federation
from fedmll.data.images.cache import Progress, silent
from fedmll.engines.optimiser import Optimiser, backward
from fedmll.engines.together import Together
from fedmll.errors import ClientError
from fedmll.message import Message, Tensors
from fedmll.methods import make
from fedmll.methods.contract import Part
from fedmll.models.backbones import pixel_scale
from fedmll.models.flat import FlatWeights, frozen_tensors
from fedmll.models.frozen import WHOLE, kept_tokens
from fedmll.models.network import Network
from fedmll.task import Task

OPTIMIZER = "optimizer"  # its state in a client's memory


class Learner:
    """One method with one model object: it builds, receives, trains and predicts."""

    def __init__(self, task: Task) -> None:
        self.task, self.method = task, make(task)
        self.model = self.method.model().to(task.device)
        self.weights = FlatWeights(self.model)
        self.trained = [module for module in self.model.train().modules() if module.training]
        self.method.bind(self.model, self.weights)
        self.narrowing, self.seeing = map(self.method.overriding, ("narrow", "inputs"))
        self.shaping, self.teaching, self.adjusting, self.stepping = map(
            self.method.overriding, ("shape", "term", "adjust", "stepped")
        )

    @cached_property
    def optimiser(self) -> Optimiser:
        return Optimiser(self.task.experiment.training, self.weights.parameters)

    def federation(self, data: Federation, progress: Progress = silent) -> Federation:
        """With what a frozen backbone makes of its data."""
        parts = {name: getattr(data, name) for name in ("train", "test", "validation", "held_out", "source")}
        return replace(data, **with_tokens(self.task, self.model, parts, progress))

    def peers(self, data: Federation) -> list[Peer]:
        """The clients as the server knows them. A pooled method has one, with everything."""
        if self.method.pooled:
            return [Peer(0, "pooled", torch.ones(len(self.task.classes), dtype=torch.bool))]
        owned = torch.from_numpy(data.allowed & data.annotated)
        return [Peer(index, name, owned[index]) for index, name in enumerate(data.names)]

    def participants(self, data: Federation, round: int) -> list[int]:
        """Who is asked, the largest first: an order that does not depend on who is faster."""
        if self.method.pooled:
            return [0]
        everybody = self.method.exchange(round) is not None
        chosen = (data.there if everybody else data.participants(round)).tolist()
        sizes = data.sizes
        return sorted(chosen, key=lambda client: (-sizes[client], client))

    def client(self, data: Federation, peer: Peer, round: int) -> Client:
        """A client as its method sees it in one round."""
        task, model, weights = self.method.task, self.model, self.weights
        if self.method.pooled:
            return Client(task, peer.name, round, data.pooled, peer.owned, peer.owned, model, weights)
        samples = data.train.subset(data.samples[peer.index])
        annotated = torch.from_numpy(data.annotated[peer.index].copy())
        return Client(task, peer.name, round, samples, annotated, peer.owned, model, weights)

    def receive(self, message: Message) -> None:
        self.method.receive(self.weights, message)

    def named(self, message: Message) -> Tensors:
        """What is needed to predict, for a file: the weights under the model's names, and what parts added."""
        return self.weights.named(message.tensors) | {k: t for k, t in message.tensors.items() if "/" in k}

    def frozen(self) -> Tensors:
        """What was never trained, by name: with `named` all of the model."""
        return {name: t.detach().cpu().clone() for name, t in frozen_tensors(self.model).items()}

    def load(self, named: Tensors) -> None:
        """From such a file; what is frozen too, where it is there."""
        self.weights.put(named)
        for name, tensor in frozen_tensors(self.model).items():
            if name in named:
                tensor.data.copy_(named[name])
        self.method.received = named

    def predict(self, data: Dataset, start: int, stop: int, known: Tensor | None = None) -> Tensor:
        """Probabilities of the samples from `start` to `stop`. `known` (samples, C): what is known of their labels."""
        self.model.eval()
        scores = []
        with torch.inference_mode():
            for first in range(start, stop, EVALUATION_BATCH):
                rows = slice(first, min(first + EVALUATION_BATCH, stop))
                told = None if known is None else known[rows].to(self.task.device)
                scores.append(self.method.predict(self.model, self.task.seen(data, rows), told).cpu())
        return torch.cat(scores) if scores else torch.zeros(0, len(self.task.classes))

    def train(self, client: Client, message: Message, memory: Tensors) -> Message:
        """A client's round: read, learn, reply. `memory` is the client's own between its rounds, changed in place."""
        for part in self.narrowing:
            client = part.narrow(client)
        work = self._begun(client, message, memory)
        if self.method.exchange(client.round) is not None:
            return self._reply(work, memory, {p: p.survey(work) for p in self.method.replying(client.round)})
        return self._finished(work, memory, self._learn(work))

    def train_together(self, clients: list[Client], messages: list[Message], memories: list[Tensors]) -> list[Message]:
        """The same of several clients at once (`training.together`)."""
        given = list(zip(clients, messages, memories, strict=True))
        if len(clients) == 1 or self.method.exchange(clients[0].round) is not None:
            return [self.train(*of) for of in given]
        works, starts = list[Work](), list[Tensor]()
        for client, message, memory in given:
            works.append(self._begun(client, message, memory))
            starts.append(self.weights.vector.clone())
        trained = Together(works, starts, self.loss, self.teaching, self.adjusting)
        trained.learn()
        replies = list[Message]()
        for work, memory, vector, total in zip(works, memories, trained.vectors, trained.losses.tolist(), strict=True):
            self.weights.vector.copy_(vector)
            work.client.seed_torch()
            reply = self._finished(work, memory, total)
            for tensors in (reply.tensors, memory):  # the next client's weights come where this one's are
                tensors |= {name: t.clone() for name, t in tensors.items() if _shared(t, self.weights.vector)}
            replies.append(reply)
        return replies

    def _begun(self, client: Client, message: Message, memory: Tensors) -> Work:
        """The client's round before its first step."""
        method = self.method
        method.receive(client.weights, message)
        client.seed_torch()
        names = [*(part.name for part in method.list), OPTIMIZER]
        here = {name: tensor.to(self.task.device) for name, tensor in memory.items()}
        work = Work(client, message, {name: under(name, here) for name in names}, seeing=self.seeing)
        if method.exchange(client.round) is None:
            for part in method.list:
                work.fixed[part.name] = part.prepare(work)
        return work

    def _finished(self, work: Work, memory: Tensors, loss: float) -> Message:
        """The reply of a trained client; `loss` is the sum over its steps."""
        client, mean = work.client, loss / work.steps
        if not math.isfinite(mean):
            raise ClientError(
                f"The loss of client {client.name} became {mean} in round {client.round}. Lower training.lr "
                f"(now {self.task.experiment.training.lr:g}), or set training.clip = 1.0; also look at its data."
            )
        work.trained()
        replies = {part: part.finish(work, work.fixed[part.name]) for part in self.method.list}
        return self._reply(work, memory, replies, float(work.steps), mean)

    def _reply(
        self, work: Work, memory: Tensors, replies: dict[Part, Tensors], steps: float = 0.0, loss: float = 0.0
    ) -> Message:
        memory.clear()
        memory |= {f"{name}/{key}": tensor.cpu() for name, own in work.memories.items() for key, tensor in own.items()}
        numbers = {"samples": float(len(work.client.data)), "steps": steps, "loss": loss}
        return Message({name: tensor.cpu() for name, tensor in self.method.joined(replies).items()}, numbers)

    def _training_mode(self, model: Network) -> None:
        """Asking its modules is much cheaper than to tell them all, every time."""
        if model is not self.model or not all(module.training for module in self.trained):
            model.train()

    def _learn(self, work: Work) -> float:
        """The local epochs; gives the sum of the losses."""
        client, fixed = work.client, work.fixed
        parameters, clip = client.weights.parameters, self.task.experiment.training.clip
        own = client.weights is self.weights
        optimiser = self.optimiser if own else Optimiser(self.task.experiment.training, parameters)
        optimiser.begin(work.memory(OPTIMIZER))
        losses = list[Tensor]()
        self._training_mode(client.model)
        for batch in client.batches():
            step = Step(work, batch)
            for part in self.shaping:
                part.shape(step, fixed[part.name])
            loss = self.loss(step)
            backward(loss)
            for part in self.adjusting:
                part.adjust(work, fixed[part.name])
            if clip is not None:
                nn.utils.clip_grad_norm_(parameters, clip)
            optimiser.step()
            work.steps += 1
            for part in self.stepping:
                part.stepped(work, fixed[part.name])
            losses.append(loss.detach())
        if self.task.experiment.training.optimizer_state == "kept":
            work.memories[OPTIMIZER] = optimiser.state()
        return float(np.add.accumulate(torch.stack(losses).cpu().numpy())[-1])  # one after the other

    def loss(self, step: Step) -> Tensor:
        """The sum of the parts' terms."""
        terms = [part.term(step, step.work.fixed[part.name]) for part in self.teaching]
        first, *others = [term for term in terms if term is not None]
        for term in others:
            first = first + term
        return first


def _shared(tensor: Tensor, other: Tensor) -> bool:
    return tensor.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def with_tokens(
    task: Task, network: Network, parts: Mapping[str, Dataset | None], progress: Progress
) -> dict[str, Any]:
    """The datasets with what a frozen backbone makes of them, computed once a store; as they are for any other."""
    model, kept, backbone = task.experiment.model, dict[int, Any](), network.backbone
    means = network.pools and backbone.neck is None

    def attached(data: Dataset | None) -> Dataset | None:
        if data is None or not data.is_images or not len(data.store):
            return data
        if id(data.store) not in kept:
            recipe, scale = task.experiment.training.augment, pixel_scale(model, task.sample_shape[0])
            kept[id(data.store)] = kept_tokens(
                backbone, data.store, recipe, model.views, task.seed, task.normalise, scale, progress, means=means
            )
        return replace(data, tokens=kept[id(data.store)])

    if model.freeze != WHOLE:
        return dict(parts)
    found = {id(data): attached(data) for data in parts.values()}
    return {name: found[id(data)] for name, data in parts.items()}  # what was one stays one
